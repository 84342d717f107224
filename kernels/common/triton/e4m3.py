"""e4m3 numbers in Triton, with the bits of `kernels.fp8.reference` and `kernels.fp8.rows`."""

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from kernels.common import devices
from kernels.common.triton.numbers import INTERPRETED, MAGIC, MAGIC_BITS


def _of_table() -> bool:
    target = None if INTERPRETED else current_target()
    return target is not None and devices.of_target(target.arch).fp8_conversions


# Triton refuses other functions, because it could not tell when they change. The result of this one depends
# only on the target, which Triton knows.
vars(_of_table)["__triton_builtin__"] = True


@constexpr_function
def converts_e4m3():
    """Whether the device that a kernel is compiled for has conversions to and from e4m3."""
    return _of_table()


@triton.jit
def encode(value):
    """The e4m3 codes, int32, of fp32 numbers, clamped; to nearest, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(value), 448.0)
    whole = magnitude.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    subnormal = (magnitude * 512.0 + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return tl.where(magnitude >= 0.015625, normal, subnormal) | ((bits >> 24) & 0x80)


@triton.jit
def exponent_of(largest):
    """The smallest e, from -126 on, for which largest <= 448 * 2**e, from the bits of a magnitude's fp32."""
    # 448 * 2**e = 0.875 * 2**(e + 9)
    exponent = (largest >> 23) - 126 - 9 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(exponent, -126)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(value):
    """The bits of |value|, int32: integers order infinities and NaNs above all numbers."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def store_codes(pointers, value, peak, mask):
    """The codes, as bytes, of fp32 values of a row whose largest magnitude has the bits `peak`."""
    scaled = value * power_of_two(-exponent_of(peak))
    scaled = tl.where(peak < 0x7F800000, scaled, 0.0)
    if converts_e4m3():
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode(scaled).to(tl.uint8)
    tl.store(pointers, code, mask=mask)


@triton.jit
def scale_of(peak):
    """A row's scale; NaN if the row is not finite."""
    return tl.where(peak < 0x7F800000, power_of_two(exponent_of(peak)), float("nan"))
