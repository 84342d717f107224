"""Orthogonal matrices by device: Triton's kernels in bfloat16 on a GPU, torch in float32 elsewhere."""

from collections.abc import Sequence

from torch import Tensor

from kernels.common import dispatch
from kernels.orthogonal import reference
from kernels.orthogonal.reference import ITERATIONS


def orthogonal(matrices: Sequence[Tensor], iterations: int = ITERATIONS) -> Tensor:
    """`kernels.orthogonal.reference.orthogonal`, in bfloat16 on a GPU.

    A matrix's result has the same bits whichever other matrices are passed with it.
    """
    if dispatch.has_kernels(matrices[0].device, "orthogonal"):
        from kernels.orthogonal import triton

        return triton.orthogonal(matrices, iterations)
    return reference.orthogonal(matrices, iterations)
