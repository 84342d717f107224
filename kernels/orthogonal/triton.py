"""`kernels.orthogonal.reference` on GPUs: products of bfloat16, summed in float32, for many matrices at once.

A program computes one tile of one matrix and adds its products in the same order whatever other matrices the
launch has; a library's batched product chooses its order by their number. The product of a matrix and its own
transpose is symmetric, so only tiles on and below the diagonal are computed, and each is stored twice.

Shape legend: N matrices, M rows of the shorter side, K columns of the longer one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.orthogonal.reference import ITERATIONS, LEAST_NORM, POLYNOMIALS


@dataclass(frozen=True)
class Tiles:
    """Rows and columns of a product's tile, and how many summands are added at a time."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3


TILES = Tiles()


def orthogonal(matrices: Sequence[Tensor], iterations: int = ITERATIONS) -> Tensor:
    """See `kernels.orthogonal.reference.orthogonal`; computes in bfloat16."""
    return iterate(normalized(matrices, torch.bfloat16), iterations=iterations)


def normalized(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Each matrix divided by its norm, stacked to [matrices, rows, columns]."""
    norms = torch.stack(torch._foreach_norm(list(matrices))).clamp_(min=LEAST_NORM)
    x = matrices[0].new_empty((len(matrices), *matrices[0].shape), dtype=dtype)
    for matrix, norm, into in zip(matrices, norms.unbind(), x.unbind(), strict=True):
        torch.div(matrix, norm, out=into)
    return x


def iterate(x: Tensor, tiles: Tiles = TILES, iterations: int = ITERATIONS) -> Tensor:
    """Iterate on normalized matrices [N, rows, columns], whose memory may be overwritten."""
    other, is_tall = torch.empty_like(x), x.shape[1] > x.shape[2]
    short = min(x.shape[1:])
    square, polynomial = (x.new_empty((len(x), short, short)) for _ in range(2))
    for first, third, fifth in POLYNOMIALS[iterations]:
        source, target = (x.mT, other.mT) if is_tall else (x, other)
        symmetric(source, square, tiles)
        symmetric(square, polynomial, tiles, beta=third, alpha=fifth)
        product(polynomial, source, target, tiles, beta=first)
        x, other = other, x
    return x


def symmetric(
    x: Tensor, into: Tensor, tiles: Tiles = TILES, *, beta: float = 0.0, alpha: float = 1.0
) -> None:
    """into [N, M, M] = alpha x x^T, for x [N, M, K]; plus beta x if x itself is symmetric."""
    count, rows, inner = x.shape
    # Tiles are square, so that one on the diagonal is whole.
    size = _size(tiles.rows, rows)
    across = triton.cdiv(rows, size)
    _symmetric[(across * across, count)](
        x,
        into,
        rows,
        inner,
        across,
        *x.stride(),
        beta,
        alpha,
        ADDS=beta != 0.0,
        SIZE=size,
        INNER=_size(tiles.inner, inner),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )


def product(polynomial: Tensor, x: Tensor, into: Tensor, tiles: Tiles = TILES, *, beta: float) -> None:
    """into = beta x + polynomial x, for polynomial [N, M, M] and x [N, M, K], with the strides of x."""
    assert x.stride() == into.stride()
    count, rows, columns = x.shape
    height, width = _size(tiles.rows, rows), _size(tiles.columns, columns)
    across = triton.cdiv(columns, width)
    _product[(triton.cdiv(rows, height) * across, count)](
        polynomial,
        x,
        into,
        rows,
        columns,
        across,
        *x.stride(),
        beta,
        ROWS=height,
        COLUMNS=width,
        INNER=_size(tiles.inner, rows),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )


def _size(most: int, length: int) -> int:
    """The size of a tile along a side, a function of its length only. Tensor cores need at least 16."""
    return int(min(most, max(16, triton.next_power_of_2(length))))


@triton.jit
def _symmetric(
    x,
    into,
    rows,
    inner,
    across,
    x_n,
    x_m,
    x_k,
    beta,
    alpha,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
):
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    if right > down:
        return
    matrix = tl.program_id(1).to(tl.int64)
    x += matrix * x_n
    into += matrix * rows * rows
    row, column = down * SIZE + tl.arange(0, SIZE), right * SIZE + tl.arange(0, SIZE)
    is_row, is_column = row < rows, column < rows
    step = tl.arange(0, INNER)
    left = x + row[:, None].to(tl.int64) * x_m + step[None, :] * x_k
    other = x + column[None, :].to(tl.int64) * x_m + step[:, None] * x_k
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, inner, INNER):
        real = step < inner - start
        a = tl.load(left, mask=is_row[:, None] & real[None, :], other=0.0)
        b = tl.load(other, mask=real[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += INNER * x_k
        other += INNER * x_k
    total *= alpha
    real = is_row[:, None] & is_column[None, :]
    if ADDS:
        at = row[:, None].to(tl.int64) * x_m + column[None, :] * x_k
        total += beta * tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    tile = total.to(into.dtype.element_ty)
    tl.store(into + row[:, None].to(tl.int64) * rows + column[None, :], tile, mask=real)
    if right < down:
        mirrored = into + column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(mirrored, tl.trans(tile), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _product(
    polynomial,
    x,
    into,
    rows,
    columns,
    across,
    x_n,
    x_m,
    x_k,
    beta,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    matrix = tl.program_id(1).to(tl.int64)
    polynomial += matrix * rows * rows
    row, column = down * ROWS + tl.arange(0, ROWS), right * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    step = tl.arange(0, INNER)
    left = polynomial + row[:, None].to(tl.int64) * rows + step[None, :]
    other = x + matrix * x_n + step[:, None].to(tl.int64) * x_m + column[None, :].to(tl.int64) * x_k
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, INNER):
        real = step < rows - start
        a = tl.load(left, mask=is_row[:, None] & real[None, :], other=0.0)
        b = tl.load(other, mask=real[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += INNER
        other += INNER * x_m
    at = matrix * x_n + row[:, None].to(tl.int64) * x_m + column[None, :].to(tl.int64) * x_k
    real = is_row[:, None] & is_column[None, :]
    total += beta * tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    tl.store(into + at, total.to(into.dtype.element_ty), mask=real)
