"""e4m3 numbers in blocks of 128, in plain torch: gradients, optimizer moments, and AdamW on them.

This is the reference for `kernels.fp8.ops`, which gives the same bits. `kernels.fp8.triton` does too, except
that moments may differ in the last bits of logarithms.

Gradients. A block has one exponent e, its values are code * 2**e, and its largest code is from 224 to 448.
Scaling by a power of two is exact. So a value that an addition does not change keeps its code however often
the block is packed again, as long as its exponent stays.

Rounding to nearest loses many small addends: if a sum is 16 times as large as an addend, the addend is less
than half a code's step every time. `accumulate_gradient` can therefore round stochastically, by a hash
(`kernels.common.random_bits`), so that a sum is right on average however many addends it has.

Moments (COAT, arXiv 2410.19313, section 4.2). A block's magnitudes x up to its largest M are stored as
448 (x / M)**k. k maps the smallest to 448 * 2 / 448**2, near e4m3's own smallest. An optimizer's moments span
a much smaller range than e4m3, so k is above 1 and divides the error when values are decoded. k is a multiple
of 1/16 from 1/16 to 255/16, so that a block of equal magnitudes works, where COAT's formula gives infinity.

AdamW (Loshchilov and Hutter 2019). The update uses the moments before they are packed (COAT, section 3). bf16
weights are rounded stochastically, with 16 bits per element from a hash of (salt, element). The caller makes
the salt from seed, step and parameter, so a step has the same bits however often it runs.

Tensors are flat. A last block shorter than 128 is a block of its own. Whether torch's conversion to e4m3
saturates depends on its version, so values are clamped first.
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
"""The exponent of a block that holds infinities or NaNs. It decodes to NaNs, so that the step fails."""
SMALLEST_EXPONENT = -126
"""The smallest exponent whose power of two and its inverse are normal fp32 numbers."""
_MOMENT_RANGE_LOG2 = 16.614709844115207  # log2(448**2 / 2)
_MOST_POWER = 255
ROUNDED_BITS = 20
"""The mantissa bits that fp32 has and e4m3 lacks. With this many random bits rounding is exact on average."""
_SMALLEST_NORMAL = 2.0**-6
_SMALLEST_NORMAL_BITS = 0x3C800000
_BIAS_BITS = 0x3C000000
"""Subtracted from an fp32 number's bits: the rest is its e4m3 code, if normal, and `ROUNDED_BITS` more
bits."""


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

    def part(self, first: int, end: int) -> "Fp8Gradient":
        """The elements from `first`, the start of a block, to `end`, not copied. `end` is a block's end, or
        the gradient's."""
        return Fp8Gradient(self.codes[first:end], self.exponents[first // BLOCK : blocks(end)])

    def clear(self) -> None:
        """Set it to zero."""
        self.codes.zero_()
        self.exponents.fill_(SMALLEST_EXPONENT)


@dataclass(frozen=True, slots=True)
class Draw:
    """The source of random bits: a microbatch's salt and a parameter's, of 32 bits each.

    The device reads the microbatch's salt when it adds, because CUDA graphs capture the additions. A number
    in the call would stay that of the capture at every replay.
    """

    microbatch: Tensor
    """int64 [1], on the gradient's device."""
    parameter: int

    @property
    def salt(self) -> int:
        """The salt of both. Waits for the device."""
        return mixed(int(self.microbatch.item()) ^ self.parameter)


def exponents_of(largest: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest exponents, from `SMALLEST_EXPONENT` on, of the powers of two that bring these largest
    magnitudes within e4m3's range; and which of the magnitudes are finite."""
    finite = torch.isfinite(largest)
    mantissa, exponent = torch.frexp(torch.where(finite, largest, 1.0))
    # largest <= 448 * 2**e = 0.875 * 2**(e + 9)
    exponent = exponent - 9 + (mantissa > LARGEST / 512).int()
    exponent = torch.where(largest > 0, exponent, SMALLEST_EXPONENT).clamp(min=SMALLEST_EXPONENT)
    return exponent, finite


def pack_gradient(values: Tensor, into: Fp8Gradient, noise: Tensor | None = None) -> None:
    """Write fp32 `values` [n] to `into`, rounded to nearest, ties to even.

    Args:
        noise: int32 [n] with `ROUNDED_BITS` random bits each, to round stochastically instead.
    """
    rows = _rows(values)
    exponent, finite = exponents_of(rows.abs().amax(dim=1))
    all_finite = bool(finite.all())
    # The exponent keeps finite values in range.
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
    """e4m3 codes, uint8, of fp32 values up to 448, rounded stochastically.

    A value is rounded away from zero with a probability that is the share of a step that would be cut off.
    The arithmetic is on integers, so every device gives the same bits: a code with `ROUNDED_BITS` more bits,
    which say how far the value is on its way to the next code.
    """
    magnitude = scaled.abs()
    # Both are computed and the larger one is right: below the smallest normal code, the step no longer
    # shrinks with the value.
    fine = (magnitude + _SMALLEST_NORMAL).view(torch.int32).sub_(_SMALLEST_NORMAL_BITS)
    torch.maximum(fine, magnitude.view(torch.int32).sub_(_BIAS_BITS), out=fine)
    sign = (scaled.view(torch.int32) >> 24).bitwise_and_(0x80)
    return fine.add_(noise).bitwise_right_shift_(ROUNDED_BITS).bitwise_or_(sign).to(torch.uint8)


def unpack_gradient(gradient: Fp8Gradient) -> Tensor:
    """The values, fp32 [n]."""
    values = _decode(_rows(gradient.codes)).mul_(_scales(gradient)[:, None])
    return values.flatten()[: gradient.codes.numel()]


def _scales(gradient: Fp8Gradient) -> Tensor:
    """The factor of each block's codes, fp32 [blocks]. It is NaN for a block that is not finite."""
    exponent = gradient.exponents.int()
    powers = power_of_two(exponent.clamp(min=SMALLEST_EXPONENT))
    return torch.where(exponent == NON_FINITE, torch.nan, powers)


def accumulate_gradient(gradient: Fp8Gradient, addend: Tensor, draw: Draw | None = None) -> None:
    """Add `addend` [n], any float dtype: unpack, add in fp32, pack (AGoQ, arXiv 2605.00539, section 5).

    Args:
        draw: The source of bits to round stochastically. None rounds to nearest.
    """
    noise = None
    if draw is not None:
        noise = random_bits(addend.numel(), draw.salt, addend.device, bits=ROUNDED_BITS)
    pack_gradient(unpack_gradient(gradient) + addend.float(), gradient, noise)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """Pack the sum of k gradients: codes uint8 [k, n] and exponents int8 [k, blocks], summed in fp32 in
    order."""
    total: Tensor | None = None
    for row, exponent in zip(codes, exponents, strict=True):
        values = unpack_gradient(Fp8Gradient(row, exponent))
        total = values if total is None else total.add_(values)
    assert total is not None, "a sum of at least one gradient"
    pack_gradient(total, into)


@dataclass(frozen=True, slots=True)
class Moment:
    """A flat moment: codes uint8 [n] (e4m3), scales bf16 [blocks] and powers uint8 [blocks], in units of
    1/16."""

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
    """Write fp32 `values` [n] to `into`."""
    rows = _rows(values)
    magnitude = rows.abs()
    # If bf16 rounds the scale down, larger values are clamped: an error of at most 2**-9 of the largest
    # element.
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
    """The values, fp32 [n]."""
    codes = _decode(_rows(moment.codes))
    power = moment.powers.float()[:, None] / POWER_UNIT
    logarithm = torch.log2(codes.abs() / LARGEST) / power + torch.log2(moment.scales.float())[:, None]
    values = torch.copysign(torch.exp2(logarithm), codes)
    return torch.where(codes == 0, 0.0, values).flatten()[: moment.codes.numel()].contiguous()


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The numbers of one step for a parameter. All but `salt` and `first` are the same for a whole group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """The step's number, from 1."""
    clip_coefficient: float
    """Gradients are multiplied by it first."""
    salt: int
    """32 bits, for stochastic rounding."""
    first: int = 0
    """For a part of a parameter: its first element in the whole, at a block's start. It selects the random
    bits."""

    @property
    def keep(self) -> float:
        """The factor that weight decay applies to a weight."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """The divisor of the second moment's root."""
        return math.sqrt(1 - self.beta2**self.step)


def adamw_step(
    parameter: Tensor, gradient: Tensor | Fp8Gradient, mean: Moment, square: Moment, step: AdamWStep
) -> None:
    """Update `parameter` (contiguous, fp32 or bf16, n elements), `mean` and `square` in place.

    Args:
        gradient: Any float dtype, [n] or of the parameter's shape, or e4m3 codes.
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
    """Nesterov's momentum: add a gradient to the mean of gradients in place, and return the mean that comes
    next.

    Args:
        gradient: fp32, [n] or of the parameter's shape, or e4m3 codes. It is multiplied by
            `clip_coefficient`.
        mean: The mean of gradients; it is multiplied by `momentum`.

    Returns:
        The update before it is scaled, fp32 [n].
    """
    g = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient.flatten()
    g = g * clip_coefficient
    m = unpack_moment(mean).lerp_(g, 1 - momentum)
    pack_moment(m, mean)
    return g.lerp_(m, momentum)


def round_stochastically(values: Tensor, salt: int, first: int = 0) -> Tensor:
    """fp32 `values` [n] in bf16, rounded up or down with the probabilities that make the mean right.

    Args:
        salt: 32 bits that select the random bits.
        first: The number of the first element of `values`.
    """
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    # Adding random bits below the last kept bit and cutting them off rounds a magnitude up with the right
    # probability.
    rounded = (bits + random_bits(values.numel(), salt, values.device, first=first)) >> 16
    special = (bits & 0x7F800000) == 0x7F800000
    halves = torch.where(special, bits >> 16, rounded & 0xFFFF)
    return (halves - ((halves & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)


def _rows(values: Tensor) -> Tensor:
    """The values as [blocks, 128]; the last block is filled up with zeros."""
    count = blocks(values.numel())
    if values.numel() == count * BLOCK:
        return values.reshape(count, BLOCK)
    rows = values.new_zeros(count * BLOCK)
    rows[: values.numel()] = values.flatten()
    return rows.view(count, BLOCK)


def _decode(codes: Tensor) -> Tensor:
    """e4m3 codes in fp32: their bits are read as an fp16 number's, times 2**8. Torch's own conversion is
    slower.

    The code of NaN decodes to 480; nothing here stores it.
    """
    wide = codes.to(torch.int16)
    # The sign is shifted out, and then in again as two copies, of which the mask removes the lower one.
    wide = wide.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(-0x4080)
    return wide.view(torch.float16).float().mul_(256.0)


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact fp32 powers of two, from 2**-126 to 2**127."""
    return ((exponent + 127).to(torch.int32) << 23).view(torch.float32)
