"""The Hadamard transform of 64 elements in Triton, with `kernels.tah`'s order of additions."""

import triton
import triton.language as tl


@triton.jit
def hadamard(y, LANES: tl.constexpr):
    """Transform every tile of a block (`kernels.triton_common`) and divide by 8."""
    T: tl.constexpr = y.shape[1]
    v = tl.reshape(tl.permute(y, (1, 0, 2, 3)), (T, 2, 2, 2, 2, 2, 2))
    for _ in tl.static_range(6):
        a, b = tl.split(v)
        # The next bit of an element's index comes last; after six, all are back in their places.
        v = tl.permute(tl.join(a + b, a - b), (0, 6, 1, 2, 3, 4, 5))
    v = tl.permute(tl.reshape(v, (T, 8 // LANES, LANES, 8)), (1, 0, 2, 3))
    return v * 0.125
