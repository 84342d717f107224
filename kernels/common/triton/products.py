"""Products of matrices of whole numbers on a GPU's tensor cores, exact.

In bf16, which holds whole numbers up to 256, with sums in fp32: as long as these stay below 2**24 nothing is
rounded, in whatever order they are added. In fp32 the same product takes no tensor core.
"""

import triton
import triton.language as tl

from kernels.common.triton.numbers import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
# A power of two: what is taken apart by it is put together again without rounding.
_PART = tl.constexpr(128.0)


@triton.jit
def small_product(a, b):
    """fp32 `a @ b` of whole numbers up to 256 in magnitude, in fp32."""
    # The interpreter computes nothing in bf16.
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
