"""e4m3 gradients, moments and AdamW on a GPU against the reference."""

import pytest
import torch

from kernels import fp8
from kernels.adamw import AdamWStep, adamw_step, reference_step
from kernels.fp8 import Fp8Gradient, Moment, blocks, pack_gradient, unpack_moment

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GUARD = 4096
SIZES = (1, 127, 129, 5000, 1 << 20)


def values(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-2, 3, (count,), generator=generator)
    made = torch.randn(count, generator=generator) * spread * scale
    made[::7] = 0
    return made


def guarded(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer amid poison, and the whole."""
    whole = torch.full((count + 2 * GUARD,), 77, dtype=dtype, device=CUDA)
    return whole[GUARD : GUARD + count], whole


def untouched(whole: torch.Tensor) -> bool:
    return bool((whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all())


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-5, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_gives_the_references_bits(count: int, scale: float, dtype: torch.dtype) -> None:
    expected = Fp8Gradient.zeros(count, torch.device("cpu"))
    (codes, all_codes), (exponents, all_exponents) = (
        guarded(count, torch.uint8),
        guarded(blocks(count), torch.int8),
    )
    found = Fp8Gradient(codes, exponents)
    found.clear()
    for seed in range(3):
        addend = values(count, seed, scale).to(dtype)
        fp8.accumulate_gradient(expected, addend)
        fp8.accumulate_gradient(found, addend.to(CUDA))
        assert torch.equal(found.codes.cpu(), expected.codes)
        assert torch.equal(found.exponents.cpu(), expected.exponents)
    assert untouched(all_codes) and untouched(all_exponents)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_marked_alike(bad: float) -> None:
    addend = values(1000, 0)
    addend[300] = bad
    expected, found = (Fp8Gradient.zeros(1000, device) for device in (torch.device("cpu"), CUDA))
    for _ in range(2):
        fp8.accumulate_gradient(expected, addend)
        fp8.accumulate_gradient(found, addend.to(CUDA))
        assert torch.equal(found.codes.cpu(), expected.codes)
        assert torch.equal(found.exponents.cpu(), expected.exponents)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("many", [1, 2, 5])
def test_sums_give_the_references_bits(count: int, many: int) -> None:
    packed = [Fp8Gradient.zeros(count, torch.device("cpu")) for _ in range(many)]
    for seed, gradient in enumerate(packed):
        pack_gradient(values(count, seed), gradient)
    codes = torch.stack([gradient.codes for gradient in packed])
    exponents = torch.stack([gradient.exponents for gradient in packed])
    expected, found = (Fp8Gradient.zeros(count, device) for device in (torch.device("cpu"), CUDA))
    fp8.sum_gradients(codes, exponents, expected)
    fp8.sum_gradients(codes.to(CUDA), exponents.to(CUDA), found)
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.exponents.cpu(), expected.exponents)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_adamw_is_the_references_but_for_logarithms(count: int, weights: torch.dtype, packed: bool) -> None:
    expected = values(count, 9).to(weights).to(CUDA)
    found, whole = guarded(count, weights)
    found.copy_(expected)
    pairs = [[Moment.zeros(count, CUDA) for _ in range(2)] for _ in range(2)]
    for step in range(1, 6):
        gradient: torch.Tensor | Fp8Gradient = values(count, step, 1e-3).to(CUDA)
        if packed:
            kept = Fp8Gradient.zeros(count, CUDA)
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
        adamw_step(found, gradient, *pairs[0], how)
        reference_step(expected, gradient, *pairs[1], how)
        differing = (found != expected).float().mean().item()
        if weights == torch.float32:
            assert torch.allclose(found, expected, rtol=1e-5, atol=2e-6)
        else:
            # Noise is the same; a sum near a rounding's edge may fall to either side.
            assert differing < 0.01
        for mine, reference in zip(pairs[0], pairs[1], strict=True):
            assert (mine.codes != reference.codes).float().mean() < 0.02 + 2 / count
            theirs = unpack_moment(reference)
            assert (unpack_moment(mine) - theirs).norm() <= 0.01 * theirs.norm()
    assert untouched(whole)
