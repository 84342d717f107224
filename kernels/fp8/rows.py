"""Matrices in e4m3 with a scale per row, and their products, in plain torch.

This is the reference for `kernels.fp8.products`. A product multiplies rows with rows, as `torch._scaled_mm`
does: a row of activations [T, K] is a token, a row of weights [N, K] is an output. A row's scale is the
smallest power of two, from 2**-126 on, with which its largest magnitude is at most 448. It depends only on
the row and not on earlier steps, and dividing by it is exact. A row with values that are not finite gets the
scale NaN, and so do its products.

COAT (arXiv 2410.19313, section 5.2) has a scale per tensor, which takes another pass to find. A scale per row
needs no pass, has a smaller error, and cuBLAS multiplies by it as fast (scripts/results/compute_parts.json).

Shape legend: T tokens, N outputs, K inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8.reference import LARGEST, exponents_of


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix: codes e4m3 [rows, columns] and scales float32 [rows, 1]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "Coded":
        return cls(
            torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, 1, dtype=torch.float32, device=device),
        )


def code_rows(x: Tensor, into: Coded) -> None:
    """Write x [rows, columns], of any float dtype, to `into`, rounded to nearest, ties to even."""
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    exponent, finite = exponents_of(largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    coded = torch.where(finite, wide / scale, 0.0).clamp_(-LARGEST, LARGEST)
    into.codes.copy_(coded.to(torch.float8_e4m3fn))
    into.scales.copy_(torch.where(finite, scale, torch.nan))


def code_columns(x: Tensor, into: Coded) -> None:
    """Write the columns of x [T, columns] to `into` [columns, T or more], each with a scale.

    Codes beyond T are 0. In this form gradients and inputs are the operands of a weight's gradient, a sum
    over tokens.
    """
    tokens = len(x)
    into.codes[:, tokens:] = 0
    columns = Coded(into.codes[:, :tokens], into.scales)
    code_rows(x.t().contiguous(), columns)


def decoded(x: Coded) -> Tensor:
    """The values, float32 [rows, columns]."""
    return x.codes.float() * x.scales


def product(a: Coded, b: Coded, dtype: torch.dtype) -> Tensor:
    """a @ b.T in `dtype`, of a [T, K] and b [N, K]: codes are multiplied and summed in float32, then
    scaled."""
    sums = (a.codes.float() @ b.codes.float().t()) * a.scales * b.scales.t()
    return sums.to(dtype)
