"""The kernels of gradients and moments in e4m3 give the reference's bits under Triton's interpreter, on CPUs;
moments but for the last bits of logarithms.

In a process of their own, which `test_in_a_process_of_their_own` starts (`tests.support.interpreter`).
"""

import pytest
import torch

from kernels import fp8
from kernels.adamw import AdamWStep, reference_step
from kernels.fp8 import Fp8Gradient, Moment, blocks, pack_gradient, unpack_moment
from tests.support.interpreter import Interpreted, inside, needs_triton, outside

pytestmark = [
    needs_triton,
    # What lies beyond a tensor's end overflows or has no logarithm in numpy, as on a GPU; nobody keeps it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
GUARD = 256
SIZES = (1, 127, 129, 1000, 2048)


@outside
def test_in_a_process_of_their_own(interpreted: Interpreted) -> None:
    interpreted.passed(__file__)


def values(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-2, 3, (count,), generator=generator)
    made = torch.randn(count, generator=generator) * spread * scale
    made[::7] = 0
    return made


def guarded(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer amid poison, and the whole."""
    whole = torch.full((count + 2 * GUARD,), 77, dtype=dtype)
    return whole[GUARD : GUARD + count], whole


def untouched(whole: torch.Tensor) -> bool:
    return bool((whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all())


@inside
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("scale", [1e-40, 1e-5, 1e30])
def test_accumulation_gives_the_references_bits(count: int, scale: float, rows: int) -> None:
    from kernels import triton_fp8

    expected = Fp8Gradient.zeros(count, CPU)
    (codes, all_codes), (exponents, all_exponents) = (
        guarded(count, torch.uint8),
        guarded(blocks(count), torch.int8),
    )
    found = Fp8Gradient(codes, exponents)
    found.clear()
    for seed in range(3):
        addend = values(count, seed, scale)
        fp8.reference_accumulate(expected, addend)
        triton_fp8.accumulate_gradient(found, addend, rows=rows)
        assert torch.equal(codes, expected.codes) and torch.equal(exponents, expected.exponents)
    assert untouched(all_codes) and untouched(all_exponents)


@inside
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_marked_alike(bad: float) -> None:
    from kernels import triton_fp8

    addend = values(1000, 0)
    addend[300] = bad
    expected, found = Fp8Gradient.zeros(1000, CPU), Fp8Gradient.zeros(1000, CPU)
    for _ in range(2):
        fp8.reference_accumulate(expected, addend)
        triton_fp8.accumulate_gradient(found, addend)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.exponents, expected.exponents)
    assert (expected.exponents == fp8.NON_FINITE).sum() == 1


@inside
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("many", [1, 2, 5])
def test_sums_give_the_references_bits(count: int, many: int) -> None:
    from kernels import triton_fp8

    packed = [Fp8Gradient.zeros(count, CPU) for _ in range(many)]
    for seed, gradient in enumerate(packed):
        pack_gradient(values(count, seed), gradient)
    codes = torch.stack([gradient.codes for gradient in packed])
    exponents = torch.stack([gradient.exponents for gradient in packed])
    expected, found = Fp8Gradient.zeros(count, CPU), Fp8Gradient.zeros(count, CPU)
    fp8.reference_sum(codes, exponents, expected)
    triton_fp8.sum_gradients(codes, exponents, found)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.exponents, expected.exponents)


@inside
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_adamw_is_the_references_but_for_logarithms(count: int, weights: torch.dtype, packed: bool) -> None:
    from kernels import triton_fp8

    expected = values(count, 9).to(weights)
    found, whole = guarded(count, weights)
    pairs = [[Moment.zeros(count, CPU) for _ in range(2)] for _ in range(2)]
    for step in range(1, 5):
        gradient: torch.Tensor | Fp8Gradient = values(count, step, 1e-3)
        if packed:
            kept = Fp8Gradient.zeros(count, CPU)
            assert isinstance(gradient, torch.Tensor)
            pack_gradient(gradient, kept)
            gradient = kept
        how = AdamWStep(
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            step=step,
            clip_coefficient=0.7,
            salt=0xFEDCBA98 + step,
        )
        # From the same state each time, so that single differences do not grow.
        for mine, reference in zip(pairs[0], pairs[1], strict=True):
            mine.codes.copy_(reference.codes)
            mine.scales.copy_(reference.scales)
            mine.powers.copy_(reference.powers)
        found.copy_(expected)
        triton_fp8.adamw_step(found, gradient, *pairs[0], how)
        reference_step(expected, gradient, *pairs[1], how)
        if weights == torch.float32:
            assert torch.allclose(found, expected, rtol=1e-5, atol=2e-6)
        else:
            # Noise is the same; a sum near a rounding's edge may fall to either side.
            assert (found != expected).float().mean().item() < 0.01
        for mine, reference in zip(pairs[0], pairs[1], strict=True):
            assert (mine.codes != reference.codes).float().mean() < 0.02 + 2 / count
            theirs = unpack_moment(reference)
            assert (unpack_moment(mine) - theirs).norm() <= 0.01 * theirs.norm()
    assert untouched(whole)
