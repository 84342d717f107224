"""e4m3 numbers in Triton, the bits of `kernels.fp8.reference`."""

import triton
import triton.language as tl

from kernels.common.triton.numbers import MAGIC, MAGIC_BITS


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
