"""Gradients, moments and AdamW in e4m3 against the reference, for kernels on a GPU and under the interpreter.

Kernels are given as `kernels.fp8` and `kernels.adamw` have them, with tensors on `device`. The reference is
on the CPU, but for moments, whose logarithms are the device's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import fp8
from kernels.adamw import AdamWStep, reference_step
from kernels.fp8 import Fp8Gradient, Moment, pack_gradient, unpack_moment
from kernels.fp8_layout import blocks

Accumulate = Callable[[Fp8Gradient, Tensor], None]
Sum = Callable[[Tensor, Tensor, Fp8Gradient], None]
Step = Callable[[Tensor, Tensor | Fp8Gradient, Moment, Moment, AdamWStep], None]

CPU = torch.device("cpu")
GUARD = 4096


def values(count: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-2, 3, (count,), generator=generator)
    made = torch.randn(count, generator=generator) * spread * scale
    made[::7] = 0
    return made


def guarded(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A buffer amid poison, and the whole."""
    whole = torch.full((count + 2 * GUARD,), 77, dtype=dtype, device=device)
    return whole[GUARD : GUARD + count], whole


def untouched(whole: Tensor) -> bool:
    return bool((whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all())


def assert_same(found: Fp8Gradient, expected: Fp8Gradient) -> None:
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.exponents.cpu(), expected.exponents)


def check_accumulation(
    accumulate: Accumulate, device: torch.device, count: int, scale: float, dtype: torch.dtype
) -> None:
    expected = Fp8Gradient.zeros(count, CPU)
    (codes, all_codes), (exponents, all_exponents) = (
        guarded(count, torch.uint8, device),
        guarded(blocks(count), torch.int8, device),
    )
    found = Fp8Gradient(codes, exponents)
    found.clear()
    for seed in range(3):
        addend = values(count, seed, scale).to(dtype)
        fp8.reference_accumulate(expected, addend)
        accumulate(found, addend.to(device))
        assert_same(found, expected)
    assert untouched(all_codes) and untouched(all_exponents)


def check_not_finite(accumulate: Accumulate, device: torch.device, bad: float) -> None:
    addend = values(1000, 0)
    addend[300] = bad
    expected, found = (Fp8Gradient.zeros(1000, where) for where in (CPU, device))
    for _ in range(2):
        fp8.reference_accumulate(expected, addend)
        accumulate(found, addend.to(device))
        assert_same(found, expected)
    assert (expected.exponents == fp8.NON_FINITE).sum() == 1


def check_sums(sum_gradients: Sum, device: torch.device, count: int, many: int) -> None:
    packed = [Fp8Gradient.zeros(count, CPU) for _ in range(many)]
    for seed, gradient in enumerate(packed):
        pack_gradient(values(count, seed), gradient)
    codes = torch.stack([gradient.codes for gradient in packed])
    exponents = torch.stack([gradient.exponents for gradient in packed])
    expected, found = (Fp8Gradient.zeros(count, where) for where in (CPU, device))
    fp8.reference_sum(codes, exponents, expected)
    sum_gradients(codes.to(device), exponents.to(device), found)
    assert_same(found, expected)


def check_adamw(step: Step, device: torch.device, count: int, weights: torch.dtype, *, packed: bool) -> None:
    """The reference's but for the last bits of logarithms."""
    expected = values(count, 9).to(weights).to(device)
    found, whole = guarded(count, weights, device)
    pairs = [[Moment.zeros(count, device) for _ in range(2)] for _ in range(2)]
    for number in range(1, 6):
        gradient: Tensor | Fp8Gradient = values(count, number, 1e-3).to(device)
        if packed:
            kept = Fp8Gradient.zeros(count, device)
            assert isinstance(gradient, Tensor)
            pack_gradient(gradient, kept)
            gradient = kept
        how = AdamWStep(
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            step=number,
            clip_coefficient=0.7,
            salt=0xFEDCBA98 + number,
        )
        # From the same state each time, so that single differences do not grow.
        for mine, reference in zip(pairs[0], pairs[1], strict=True):
            mine.codes.copy_(reference.codes)
            mine.scales.copy_(reference.scales)
            mine.powers.copy_(reference.powers)
        found.copy_(expected)
        step(found, gradient, *pairs[0], how)
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
