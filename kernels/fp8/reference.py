"""e4m3 numbers in blocks of 128, in plain torch: gradients, optimizer moments, and AdamW on them.

The reference for `kernels.fp8.ops`. `kernels.fp8.cpu` gives the same bits; `kernels.fp8.triton` too, except
that moments may differ in the last bits of logarithms.

Gradients. A block has one exponent e; its values are code * 2**e, with the largest code
from 224 to 448. Scaling by a power of two is exact. So a value that an addition does not change keeps its
code however often the block is packed again, as long as its exponent stays.

Rounding to nearest loses many small addends: beside a sum that is 16 times as large, an addend is less than
half a code's step, every time. `accumulate_gradient` can therefore round stochastically, by a hash
(`kernels.common.random_bits`), so that a sum is right on average however many addends it has.

Moments (papers/coat.txt, section 4.2). A block's magnitudes x up to its largest M are stored as
448 (x / M)**k. k maps the smallest to 448 * 2 / 448**2, near e4m3's own smallest: an optimizer's moments span
far less than e4m3 can, and k divides the error on the way back. k is a multiple of 1/16 from 1/16 to 255/16,
so that a block of equal magnitudes (where COAT's formula gives infinity) works.

AdamW (Loshchilov and Hutter 2019). The update uses the moments before they are packed (papers/coat.txt,
section 3). bf16 weights are rounded stochastically, with 16 bits an element from a hash of (salt, element).
The caller makes the salt from seed, step and parameter, so a step has the same bits however often it runs.

Tensors are flat. A last block shorter than 128 is a block of its own. torch's conversion to e4m3 saturates or
not by version, so values are clamped first.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.random_bits import mixed, random_bits
from kernels.fp8.layout import BLOCK, POWER_UNIT, blocks

LARGEST = 448.0
"""e4m3's largest number."""
NON_FINITE = -128
"""The exponent of a block that holds infinities or NaNs; it decodes to NaNs, so that the step fails."""
SMALLEST_EXPONENT = -126
"""Its power of two and its inverse are normal fp32 numbers."""
_MOMENT_RANGE_LOG2 = 16.614709844115207  # log2(448**2 / 2)
_MOST_POWER = 255
ROUNDED_BITS = 20
"""What fp32's mantissa has beyond e4m3's: so many random bits make rounding exactly right on average."""
_SMALLEST_NORMAL = 2.0**-6
_SMALLEST_NORMAL_BITS = 0x3C800000
_BIAS_BITS = 0x3C000000
"""An fp32 number's bits less these are its e4m3 code and `ROUNDED_BITS` more, if the code is a normal one."""


@dataclass(frozen=True, slots=True)
class Fp8Gradient:
    """A flat gradient: codes uint8 [n] (e4m3) and exponents int8 [blocks]."""

    codes: Tensor
    exponents: Tensor

    @classmethod
    def zeros(cls, elements: int, device: torch.device) -> "Fp8Gradient":
        return cls(
            torch.zeros(elements, dtype=torch.uint8, device=device),
            torch.full((blocks(elements),), SMALLEST_EXPONENT, dtype=torch.int8, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    def clear(self) -> None:
        """Make it zero."""
        self.codes.zero_()
        self.exponents.fill_(SMALLEST_EXPONENT)


@dataclass(frozen=True, slots=True)
class Draw:
    """What random bits are drawn from: a microbatch's salt and a parameter's, 32 bits each.

    The microbatch's is read by the device when it adds, because additions are captured into CUDA graphs: a
    number in the call would be that of the capture at every replay.
    """

    microbatch: Tensor
    """int64 [1], on the gradient's device."""
    parameter: int

    @property
    def salt(self) -> int:
        """Of both. Waits for the device."""
        return mixed(int(self.microbatch.item()) ^ self.parameter)


def pack_gradient(values: Tensor, into: Fp8Gradient, noise: Tensor | None = None) -> None:
    """Write fp32 `values` [n] over `into`, rounded to nearest, ties to even.

    Args:
        noise: int32 [n], `ROUNDED_BITS` random bits each: round stochastically by these instead.
    """
    rows = _rows(values)
    largest = rows.abs().amax(dim=1)
    finite = torch.isfinite(largest)
    all_finite = bool(finite.all())
    mantissa, exponent = torch.frexp(torch.where(finite, largest, 1.0))
    # largest <= 448 * 2**e = 0.875 * 2**(e + 9)
    exponent = exponent - 9 + (mantissa > LARGEST / 512).int()
    exponent = torch.where(largest > 0, exponent, SMALLEST_EXPONENT).clamp(min=SMALLEST_EXPONENT)
    # The exponent keeps what is finite in range.
    scaled = rows * power_of_two(-exponent)[:, None]
    if not all_finite:
        scaled.clamp_(-LARGEST, LARGEST)
    if noise is None:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = _round_stochastically(scaled, _rows(noise))
    if not all_finite:
        codes = torch.where(finite[:, None], codes, 0)
    into.codes.copy_(codes.flatten()[: values.numel()])
    into.exponents.copy_(torch.where(finite, exponent, NON_FINITE).to(torch.int8))


def _round_stochastically(scaled: Tensor, noise: Tensor) -> Tensor:
    """e4m3 codes, uint8, of fp32 up to 448: away from zero as often as what is cut off is long.

    In integers, so that every device gives the same bits: a code and `ROUNDED_BITS` more, which say how far
    the number is on its way to the next code.
    """
    magnitude = scaled.abs()
    # Of the two the right one is the larger: below the smallest normal code, steps no longer shrink with what
    # they are steps of.
    fine = (magnitude + _SMALLEST_NORMAL).view(torch.int32).sub_(_SMALLEST_NORMAL_BITS)
    torch.maximum(fine, magnitude.view(torch.int32).sub_(_BIAS_BITS), out=fine)
    sign = (scaled.view(torch.int32) >> 24).bitwise_and_(0x80)
    return fine.add_(noise).bitwise_right_shift_(ROUNDED_BITS).bitwise_or_(sign).to(torch.uint8)


def unpack_gradient(gradient: Fp8Gradient) -> Tensor:
    """fp32 [n]."""
    values = _decode(_rows(gradient.codes)).mul_(_scales(gradient)[:, None])
    return values.flatten()[: gradient.codes.numel()]


def _scales(gradient: Fp8Gradient) -> Tensor:
    """What each block's codes are multiplied by, fp32 [blocks]; not a number for a block of no values."""
    exponent = gradient.exponents.int()
    powers = power_of_two(exponent.clamp(min=SMALLEST_EXPONENT))
    return torch.where(exponent == NON_FINITE, torch.nan, powers)


def accumulate_gradient(gradient: Fp8Gradient, addend: Tensor, draw: Draw | None = None) -> None:
    """Add `addend` [n], any float dtype: unpack, add in fp32, pack (papers/agoq.txt, section 5).

    Args:
        draw: round stochastically by these bits; to nearest without.
    """
    noise = None
    if draw is not None:
        noise = random_bits(addend.numel(), draw.salt, addend.device, bits=ROUNDED_BITS)
    pack_gradient(unpack_gradient(gradient) + addend.float(), gradient, noise)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """Pack the sum of several gradients: uint8 [k, n] and int8 [k, blocks], summed in fp32 in their order."""
    total: Tensor | None = None
    for row, exponent in zip(codes, exponents, strict=True):
        values = unpack_gradient(Fp8Gradient(row, exponent))
        total = values if total is None else total.add_(values)
    assert total is not None, "a sum of at least one gradient"
    pack_gradient(total, into)


@dataclass(frozen=True, slots=True)
class Moment:
    """A flat moment: codes uint8 [n] (e4m3), scales bf16 [blocks] and powers uint8 [blocks], in 1/16."""

    codes: Tensor
    scales: Tensor
    powers: Tensor

    @classmethod
    def zeros(cls, elements: int, device: torch.device) -> "Moment":
        count = blocks(elements)
        return cls(
            torch.zeros(elements, dtype=torch.uint8, device=device),
            torch.zeros(count, dtype=torch.bfloat16, device=device),
            torch.full((count,), POWER_UNIT, dtype=torch.uint8, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.powers.nbytes


def pack_moment(values: Tensor, into: Moment) -> None:
    """Write fp32 `values` [n] over `into`."""
    rows = _rows(values)
    magnitude = rows.abs()
    # What bf16 rounds down is clamped: an error of 2**-9 of the largest element, at most.
    scale = magnitude.amax(dim=1).to(torch.bfloat16)
    largest = scale.float()[:, None]
    smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(dim=1, keepdim=True)
    # Logarithms are subtracted where a quotient might leave fp32's range.
    top = torch.log2(largest)
    octaves = top - torch.log2(smallest)
    power = torch.floor(POWER_UNIT * _MOMENT_RANGE_LOG2 / octaves.clamp(min=1.0))
    power = torch.where(torch.isfinite(octaves), power, POWER_UNIT).clamp(1, _MOST_POWER)
    expanded = LARGEST * torch.exp2((torch.log2(magnitude) - top) * (power / POWER_UNIT))
    signed = torch.copysign(expanded.clamp(max=LARGEST), rows)
    codes = torch.where(magnitude > 0, signed, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    into.codes.copy_(codes.flatten()[: values.numel()])
    into.scales.copy_(scale)
    into.powers.copy_(power.flatten().to(torch.uint8))


def unpack_moment(moment: Moment) -> Tensor:
    """fp32 [n]."""
    codes = _decode(_rows(moment.codes))
    power = moment.powers.float()[:, None] / POWER_UNIT
    logarithm = torch.log2(codes.abs() / LARGEST) / power + torch.log2(moment.scales.float())[:, None]
    values = torch.copysign(torch.exp2(logarithm), codes)
    return torch.where(codes == 0, 0.0, values).flatten()[: moment.codes.numel()].contiguous()


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """What one step does to a parameter; everything but `salt` is the same for all of a group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counted from 1."""
    clip_coefficient: float
    """Gradients are multiplied by it first."""
    salt: int
    """32 bits, for stochastic rounding."""
    first: int = 0
    """Of a part of a parameter: its first element there, at a block's begin. It decides the random bits."""

    @property
    def keep(self) -> float:
        """What weight decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """What the second moment's root is divided by."""
        return math.sqrt(1 - self.beta2**self.step)


def adamw_step(
    parameter: Tensor, gradient: Tensor | Fp8Gradient, mean: Moment, square: Moment, step: AdamWStep
) -> None:
    """Update `parameter` (contiguous, fp32 or bf16, n elements), `mean` and `square` in place.

    Args:
        gradient: [n] or of the parameter's shape, any float dtype, or e4m3 codes.
    """
    g = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient.flatten().float()
    g = g * step.clip_coefficient
    m = unpack_moment(mean).lerp_(g, 1 - step.beta1)
    v = unpack_moment(square).mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
    flat = parameter.view(-1)
    weight = flat.float() * step.keep
    weight -= step.step_size * m / (v.sqrt() / step.root_correction + step.eps)
    flat.copy_(weight if flat.dtype == torch.float32 else round_stochastically(weight, step.salt, step.first))
    pack_moment(m, mean)
    pack_moment(v, square)


def momentum_step(
    gradient: Tensor | Fp8Gradient, mean: Moment, momentum: float, clip_coefficient: float
) -> Tensor:
    """Nesterov's momentum: add a gradient to its mean, in place; returns the mean that comes next, fp32 [n].

    Args:
        gradient: [n] or of the parameter's shape, fp32, or e4m3 codes; times `clip_coefficient`.
        mean: times `momentum`.
    """
    g = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient.flatten()
    g = g * clip_coefficient
    m = unpack_moment(mean).lerp_(g, 1 - momentum)
    pack_moment(m, mean)
    return g.lerp_(m, momentum)


def round_stochastically(values: Tensor, salt: int, first: int = 0) -> Tensor:
    """bf16 of fp32 `values` [n], which are elements from `first` on: up or down with the odds that make the
    mean right."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    # Adding below the last kept bit and cutting off rounds a magnitude up as often as its rest is long.
    rounded = (bits + random_bits(values.numel(), salt, values.device, first=first)) >> 16
    special = (bits & 0x7F800000) == 0x7F800000
    halves = torch.where(special, bits >> 16, rounded & 0xFFFF)
    return (halves - ((halves & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)


def _rows(values: Tensor) -> Tensor:
    """[blocks, 128], the last one filled up with zeros."""
    count = blocks(values.numel())
    if values.numel() == count * BLOCK:
        return values.reshape(count, BLOCK)
    rows = values.new_zeros(count * BLOCK)
    rows[: values.numel()] = values.flatten()
    return rows.view(count, BLOCK)


def _decode(codes: Tensor) -> Tensor:
    """fp32 of e4m3 codes: their bits in an fp16 number's, times 2**8. Torch's own conversion is slower.

    Not a number comes out as 480: nothing here stores it.
    """
    wide = codes.to(torch.int16)
    # A sign that is shifted out and in again, with the bits between.
    wide = wide.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(-0x4080)
    return wide.view(torch.float16).float().mul_(256.0)


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact fp32 powers of two, from 2**-126 to 2**127."""
    return ((exponent + 127).to(torch.int32) << 23).view(torch.float32)
