"""One tile at a time in Triton: outliers, which are rotated. They are few, and so take few registers.

A tile is `[64]`, element i at i. Order of additions and all else as in `kernels.tah.reference`.
"""

import triton
import triton.language as tl


@triton.jit
def hadamard(y):
    """Transform `[64]` and divide by 8."""
    v = tl.reshape(y, (2, 2, 2, 2, 2, 2))
    for _ in tl.static_range(6):
        a, b = tl.split(v)
        # The next bit of an element's index comes last; after six, all are back in their places.
        v = tl.permute(tl.join(a + b, a - b), (5, 0, 1, 2, 3, 4))
    return tl.reshape(v, (64,)) * 0.125


@triton.jit
def swapped(y, pivot):
    """`[64]` with elements 0 and pivot exchanged."""
    i = tl.arange(0, 64)
    bits = y.to(tl.int32, bitcast=True)
    top = tl.sum(tl.where(i == pivot, bits, 0), 0)
    zeroth = tl.sum(tl.where(i == 0, bits, 0), 0)
    bits = tl.where(i == 0, top, tl.where(i == pivot, zeroth, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_of(flags, T: tl.constexpr):
    """The lowest index of a set flag in `[T]`, T if there is none."""
    return tl.min(tl.where(flags, tl.arange(0, T), T), 0)
