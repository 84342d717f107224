"""Products in e4m3 by device: cuBLAS on GPUs that have them, the reference elsewhere.

Shape legend: T tokens, N outputs, K inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common import dispatch
from kernels.fp8 import rows
from kernels.fp8.layout import MULTIPLE
from kernels.fp8.rows import Coded


def code_rows(x: Tensor, into: Coded | None = None) -> Coded:
    """x [rows, columns] in e4m3 (`kernels.fp8.rows.code_rows`)."""
    if into is None:
        into = Coded.empty(x.shape[0], x.shape[1], x.device)
    if dispatch.has_kernels(x.device, "fp8"):
        from kernels.fp8 import triton

        triton.code_rows(x, into)
    else:
        rows.code_rows(x, into)
    return into


def code_columns(x: Tensor) -> Coded:
    """The columns of x [T, columns] in e4m3: codes [columns, T rounded up to a multiple of 16].

    See `kernels.fp8.rows.code_columns`.
    """
    tokens, columns = x.shape
    into = Coded.empty(columns, -(-tokens // MULTIPLE) * MULTIPLE, x.device)
    if dispatch.has_kernels(x.device, "fp8"):
        from kernels.fp8 import triton

        triton.code_columns(x, into)
    else:
        rows.code_columns(x, into)
    return into


def product(a: Coded, b: Coded, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a @ b.T in `dtype`, of a [T, K] and b [N, K] (`kernels.fp8.rows.product`).

    Args:
        fast: Let the tensor cores sum with fewer digits, which is faster on Hopper.
    """
    if a.codes.device.type != "cuda" or not dispatch.kind_of(a.codes.device).fp8_products:
        return rows.product(a, b, dtype)
    return torch._scaled_mm(
        a.codes, b.codes.t(), a.scales, b.scales.t(), out_dtype=dtype, use_fast_accum=fast
    )


def weight_gradient(grads: Tensor | Coded, rows: Tensor | Coded, dtype: torch.dtype) -> Tensor:
    """grads.t() @ rows, [N, K] in `dtype`.

    Args:
        grads, rows: [T, N] and [T, K], or both as the codes of their columns (`code_columns`).
    """
    if isinstance(grads, Coded):
        assert isinstance(rows, Coded)
        return product(grads, rows, dtype)
    assert isinstance(rows, Tensor)
    return grads.t() @ rows


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [N, K] for both passes: the codes of its rows and of its transpose's rows, each with their
    scales."""

    forward: Coded
    back: Coded

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> "CodedWeight":
        return cls(Coded.empty(outputs, inputs, device), Coded.empty(inputs, outputs, device))

    def write(self, weight: Tensor) -> None:
        """Encode `weight` again, in place."""
        code_rows(weight, self.forward)
        code_rows(weight.t().contiguous(), self.back)
