"""`kernels.trellis.dither` in Triton, the same bits."""

import triton
import triton.language as tl


@triton.jit
def dither(place, salt):
    """The dither of the elements at `place` in steps, fp32; salt int32."""
    x = place.to(tl.uint32) ^ salt.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) & 0xFFFF
    # All exact: odd numbers of 17 bits times a power of two.
    return (x.to(tl.float32) * 2.0 + 1.0) * 0.0000152587890625 - 1.0
