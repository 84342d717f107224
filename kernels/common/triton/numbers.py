"""Exact arithmetic on floats and whole numbers in Triton, and how kernels are compiled.

The arithmetic is that of `kernels.common.tiles`, with one rounding per operation: compile with
`enable_fp_fusion=False`. Outside `quotient` and `reciprocal`, `tl.fma` is used only where its product is
exact, so that the interpreter, which rounds the product, gives the same bits.
"""

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

# Bound when kernels are defined: under the interpreter, tensors are on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# x + MAGIC rounds x to an integer, ties to even, and holds it in its lowest bits, for |x| < 2**22.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
_INTERPRETED = tl.constexpr(INTERPRETED)
_NON_FINITE = tl.constexpr(0x7FFF)
# `product` splits by it: a power of two, so joining the parts again is exact.
_PART = tl.constexpr(128.0)

RECORD = 128
"""The size of a record (`in_record`) is a multiple of this many bytes."""
# Triton specializes kernels for sizes that are 1 or multiples of 16, which gains nothing here.
_SIZES = (
    "n",
    "tiles",
    "four_bit",
    "fourths",
    "chunks",
    "programs",
    "scratch_size",
    "width",
    "row_stride",
    "per_row",
    "record",
)


@constexpr_function
def lacks_functions():
    """Whether a kernel is interpreted, or compiled for an AMD GPU, which lacks most of CUDA's functions."""
    target = None if INTERPRETED else current_target()
    return INTERPRETED or (target is not None and target.backend == "hip")


def sized_jit(function: Callable[..., None]) -> triton.runtime.jit.JITFunction:
    """`triton.jit` for kernels that the host launches: one compilation for all sizes."""
    return triton.jit(function, do_not_specialize=_SIZES)


def wrapped(value: int) -> int:
    """`value` as a signed 32-bit integer."""
    return (value + 2**31) % 2**32 - 2**31


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 viewed as int16 under the interpreter, which truncates when it stores bf16; else the tensor."""
    return tensor.view(torch.int16) if INTERPRETED and tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def widened(values):
    """fp32, fp16 or bf16 numbers in fp32."""
    if values.dtype == tl.bfloat16:
        # The interpreter's own conversion is wrong for subnormal numbers.
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def half_bits(y):
    """The upper half of fp32's bits, rounded to nearest even: bf16, as int32."""
    bits = y.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def rounded(y, dtype: tl.constexpr):
    """fp32 numbers in another dtype. Under the interpreter int16 stands for bf16 (`as_bits`)."""
    if dtype == tl.int16:
        return half_bits(y).to(tl.int16)
    return y.to(dtype)


@triton.jit
def in_record(pointer, number, record):
    """Move `pointer` from the first of many records of `record` times `RECORD` bytes to record `number`
    (int64). The constant factor tells the compiler how addresses are aligned."""
    return pointer + number * record * (1024 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit
def exponent_of(peak):
    """`kernels.common.tiles.tensor_exponent` of the bits of the largest magnitude."""
    normal = (peak >> 23) - 126
    subnormal = (
        (peak.to(tl.float32, bitcast=True) * 18446744073709551616.0).to(tl.int32, bitcast=True) >> 23
    ) - 190
    exponent = tl.where(peak < 0x00800000, subnormal, normal)
    exponent = tl.where(peak == 0, 0, exponent) - 13
    return tl.where(peak >= 0x7F800000, _NON_FINITE, exponent)


@triton.jit
def powers_of_two(exponent):
    """2**exponent as two factors, the one nearer to 1 first (`kernels.common.tiles.powers_of_two`)."""
    far = tl.minimum(tl.maximum(exponent, -126), 126)
    near = exponent - far
    return ((near + 127) << 23).to(tl.float32, bitcast=True), ((far + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def denormalised(y, exponent, LARGEST: tl.constexpr, LARGEST_EXPONENT: tl.constexpr):
    """y times 2**exponent, clamped to -LARGEST .. LARGEST; LARGEST is below 2**LARGEST_EXPONENT."""
    near, far = powers_of_two(exponent)
    if (exponent < -126) | (exponent + 24 >= LARGEST_EXPONENT):
        y = tl.minimum(tl.maximum(y * near * far, -LARGEST), LARGEST)
    else:
        # The near factor is 1, and decoded values lie below 2**24.
        y = y * far
    return y


@triton.jit
def quotient(a, divisor, inverse):
    """a / divisor rounded once, for a whole divisor below 2**11 and its inverse rounded once.

    The remainder of the first guess is exact, and no quotient of 24 digits by so short a divisor is so near
    to the middle of two numbers that the corrected guess could round the other way (Markstein). Unlike
    division, it has no branch. Not valid for |a| below 2**-100, except 0.
    """
    if _INTERPRETED:
        q = tl.div_rn(a, tl.zeros_like(a) + divisor)
    else:
        guess = a * inverse
        q = tl.fma(tl.fma(-guess, divisor, a), inverse, guess)
    return q


@triton.jit
def reciprocal(short):
    """1 / short rounded once, for numbers of 11 digits from 2**-126 to 2**126, by one step of Newton's
    method.

    Its relative error is the square of the guess's, below 2**-40; the nearest midpoint is 2**-36 away."""
    if _INTERPRETED:
        inverse = tl.div_rn(tl.zeros_like(short) + 1.0, short)
    else:
        guess = libdevice.fast_dividef(1.0, short)
        inverse = tl.fma(guess, tl.fma(-short, guess, 1.0), guess)
    return inverse


@triton.jit
def ceil_half(x):
    """The bits, int32, of the smallest fp16 >= x."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(half.to(tl.float32) < x, tl.where(bits < 0, bits - 1, bits + 1), bits)


@triton.jit
def half_value(bits):
    """The fp32 value of fp16's bits in an int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def floor_half(x):
    """The bits of the largest fp16 <= x; below 2**-100 x counts as 0. Never -0."""
    bits = ceil_half(0.0 - tl.where(tl.abs(x) < 7.888609052210118e-31, 0.0, x))
    return tl.where((bits & 0x7FFF) == 0, 0, bits ^ 0x8000)


@triton.jit
def ceil_short(x):
    """x >= 0 rounded up to fp16's 11 digits, in fp32: like `ceil_half`, but at any scale."""
    return ((x.to(tl.int32, bitcast=True) + 0x1FFF) & ~0x1FFF).to(tl.float32, bitcast=True)


@triton.jit
def small_product(a, b):
    """fp32 `a @ b` of whole numbers up to 256 in magnitude, in fp32, on tensor cores.

    bf16 holds these numbers, and sums in fp32 are exact in any order while they stay below 2**24.
    """
    # The interpreter cannot compute in bf16.
    if _INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))


@triton.jit
def product(a, b):
    """fp32 `a @ b` of whole numbers, in fp32, up to 2**15 in magnitude in `a` and up to 256 in `b`."""
    if _INTERPRETED:
        return tl.dot(a, b, input_precision="ieee")
    high = tl.floor(a / _PART + 0.5)
    low = a - high * _PART
    right = b.to(tl.bfloat16)
    return tl.dot(high.to(tl.bfloat16), right) * _PART + tl.dot(low.to(tl.bfloat16), right)


@triton.jit
def mixed(x):
    """`kernels.common.random_bits.mixed`, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_16(place, salt):
    """`kernels.common.random_bits`, 16 bits, int32."""
    return (mixed(place.to(tl.uint32) ^ salt.to(tl.uint32)) & 0xFFFF).to(tl.int32)
