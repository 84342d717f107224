"""`kernels.trellis.loops.dither` in Triton, the same bits."""

import triton
import triton.language as tl

from kernels.common.triton.numbers import random_16


@triton.jit
def dither(place, salt):
    """The dither of the elements at `place` in steps, fp32; salt int32."""
    # All exact: odd numbers of 17 bits times a power of two.
    return (random_16(place, salt).to(tl.float32) * 2.0 + 1.0) * 0.0000152587890625 - 1.0
