"""Gradients, moments and AdamW in e4m3 against the reference, for kernels on a GPU and under the interpreter.

Kernels have the signatures of `kernels.fp8.reference`, with tensors on `device`. The reference is on the CPU,
except for moments, whose logarithms are the device's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.fp8 import reference as fp8
from kernels.fp8.layout import blocks
from kernels.fp8.reference import AdamWStep, Draw, Fp8Gradient, Moment, pack_gradient, unpack_moment

Accumulate = Callable[[Fp8Gradient, Tensor, Draw | None], None]
Sum = Callable[[Tensor, Tensor, Fp8Gradient], None]
Step = Callable[[Tensor, Tensor | Fp8Gradient, Moment, Moment, AdamWStep], None]

CPU = torch.device("cpu")
GUARD = 4096
GRADIENT_SIZES = (1, 127, 128, 129, 5000, 64 * 128)


def values(count: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** torch.randint(-2, 3, (count,), generator=generator)
    made = torch.randn(count, generator=generator) * spread * scale
    made[::7] = 0
    return made


def a_gradient(count: int, seed: int, device: torch.device, *, packed: bool) -> Tensor | Fp8Gradient:
    gradient = values(count, seed, 1e-3).to(device)
    if not packed:
        return gradient
    kept = Fp8Gradient.zeros(count, device)
    pack_gradient(gradient, kept)
    return kept


def gradients(rank: int) -> list[Fp8Gradient]:
    """What a rank has, of each of `GRADIENT_SIZES`."""
    made = []
    for index, size in enumerate(GRADIENT_SIZES):
        generator = torch.Generator().manual_seed(100 * rank + index)
        gradient = Fp8Gradient.zeros(size, CPU)
        pack_gradient(torch.randn(size, generator=generator) * 10.0**-index, gradient)
        made.append(gradient)
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


def draws(salt: int, parameter: int, devices: tuple[torch.device, ...]) -> list[Draw]:
    """The same on each device."""
    return [Draw(torch.tensor([salt], device=device), parameter) for device in devices]


def check_accumulation(
    accumulate: Accumulate,
    device: torch.device,
    count: int,
    scale: float,
    dtype: torch.dtype,
    *,
    stochastic: bool = False,
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
        # Salts on both sides of 2**31, where their sign is.
        own, theirs = draws(0x7FFFFFFF + seed, 0xFEDCBA98, (CPU, device)) if stochastic else (None, None)
        fp8.accumulate_gradient(expected, addend, own)
        accumulate(found, addend.to(device), theirs)
        assert_same(found, expected)
    assert untouched(all_codes) and untouched(all_exponents)


def check_extremes(accumulate: Accumulate, device: torch.device) -> None:
    """Sums at the ends of fp32 and of a block's range, rounded stochastically."""
    largest = torch.finfo(torch.float32).max
    rows = [
        torch.zeros(128),
        torch.full((128,), largest),
        torch.full((128,), -0.0),
        torch.tensor([2.0**-149, -(2.0**-149)] * 64),
        # 448 of the largest code and what lies a little below and above it; code steps of all sizes.
        torch.tensor([448.0, 447.99997, 448.00003, -464.0] * 32),
        448 * 2.0 ** -torch.arange(128.0).remainder(40),
        torch.logspace(-38, 38, 128),
        torch.tensor([largest, 1.0] * 64),
        # A last block that is not full.
        torch.tensor([1.0, -(2.0**-6), 2.0**-15, 3.0e-5, -240.00002]),
    ]
    addend = torch.cat(rows)
    own, theirs = draws(123, 456, (CPU, device))
    expected, found = (Fp8Gradient.zeros(addend.numel(), where) for where in (CPU, device))
    for factor in (1.0, 0.0, -0.5, 1.0 / 3, 1.0):
        fp8.accumulate_gradient(expected, addend * factor, own)
        accumulate(found, (addend * factor).to(device), theirs)
        assert_same(found, expected)
    # Twice the largest number is infinite, and stays so.
    assert expected.exponents.tolist()[1] == fp8.NON_FINITE


def check_replays(accumulate: Accumulate, device: torch.device) -> None:
    """The microbatch's salt is what the device holds when it adds, not what it held at some call before."""
    microbatch = torch.zeros(1, dtype=torch.int64, device=device)
    draw = Draw(microbatch, 77)
    expected, found = (Fp8Gradient.zeros(1000, where) for where in (CPU, device))
    for salt in (1, 0xFFFFFFFF, 5):
        microbatch.fill_(salt)
        addend = values(1000, salt & 7)
        fp8.accumulate_gradient(expected, addend, Draw(torch.tensor([salt]), 77))
        accumulate(found, addend.to(device), draw)
        assert_same(found, expected)


def check_not_finite(
    accumulate: Accumulate, device: torch.device, bad: float, *, stochastic: bool = False
) -> None:
    addend = values(1000, 0)
    addend[300] = bad
    expected, found = (Fp8Gradient.zeros(1000, where) for where in (CPU, device))
    own, theirs = draws(3, 4, (CPU, device)) if stochastic else (None, None)
    for _ in range(2):
        fp8.accumulate_gradient(expected, addend, own)
        accumulate(found, addend.to(device), theirs)
        assert_same(found, expected)
    assert (expected.exponents == fp8.NON_FINITE).sum() == 1
    assert bool((expected.codes[256:384] == 0).all())


def check_sums(sum_gradients: Sum, device: torch.device, count: int, many: int) -> None:
    packed = [Fp8Gradient.zeros(count, CPU) for _ in range(many)]
    for seed, gradient in enumerate(packed):
        pack_gradient(values(count, seed), gradient)
    codes = torch.stack([gradient.codes for gradient in packed])
    exponents = torch.stack([gradient.exponents for gradient in packed])
    expected, found = (Fp8Gradient.zeros(count, where) for where in (CPU, device))
    fp8.sum_gradients(codes, exponents, expected)
    sum_gradients(codes.to(device), exponents.to(device), found)
    assert_same(found, expected)


def check_momentum(
    step: Callable[[Tensor | Fp8Gradient, Moment, float, float], Tensor],
    device: torch.device,
    count: int,
    *,
    packed: bool,
) -> None:
    """The reference's but for the last bits of logarithms."""
    mine, reference = (Moment.zeros(count, device) for _ in range(2))
    for number in range(1, 4):
        gradient = a_gradient(count, number, device, packed=packed)
        expected = fp8.momentum_step(gradient, reference, 0.95, 0.7)
        found = step(gradient, mine, 0.95, 0.7)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert (mine.codes != reference.codes).float().mean() < 0.02 + 2 / count
        # Go on from the same state, so that single differences do not grow.
        for one, other in zip(parts(mine), parts(reference), strict=True):
            one.copy_(other)


def parts(moment: Moment) -> tuple[Tensor, Tensor, Tensor]:
    return moment.codes, moment.scales, moment.powers


def check_adamw(step: Step, device: torch.device, count: int, weights: torch.dtype, *, packed: bool) -> None:
    """The reference's but for the last bits of logarithms."""
    expected = values(count, 9).to(weights).to(device)
    found, whole = guarded(count, weights, device)
    pairs = [[Moment.zeros(count, device) for _ in range(2)] for _ in range(2)]
    for number in range(1, 6):
        gradient = a_gradient(count, number, device, packed=packed)
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
            for one, other in zip(parts(mine), parts(reference), strict=True):
                one.copy_(other)
        found.copy_(expected)
        step(found, gradient, *pairs[0], how)
        fp8.adamw_step(expected, gradient, *pairs[1], how)
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
