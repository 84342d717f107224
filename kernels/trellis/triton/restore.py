"""The parts of decoding a `trellis` tensor on a GPU before and after the lanes: classes, and values.

A program handles `ROWS` x `BLOCK` elements and reads and writes each once; with torch's operators a tensor
would cross memory some twenty times. The same bits as `kernels.trellis.reference.classes`, and as
`reconstruct` and `restore` together.
"""

import torch
import triton
import triton.language as tl

from kernels.blockfloat.triton.store import store_rounded
from kernels.common import tiles
from kernels.common.random_bits import signed
from kernels.common.triton.numbers import as_bits, powers_of_two, product
from kernels.trellis import reference as trellis
from kernels.trellis.factors import Factors, prediction
from kernels.trellis.tables import MAX_CLASS
from kernels.trellis.triton.dither import dither

_MAX_CLASS = tl.constexpr(MAX_CLASS)
# The highest rank; a product needs 16.
_RANK = tl.constexpr(32)
# Elements per program; no bit depends on them.
_ROWS, _COLUMNS = 16, 64
_CLASS_ROWS, _CLASS_COLUMNS = 16, 256


@triton.jit(do_not_specialize=("rows",))
def _classes(row_classes, column_classes, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_rows = tl.load(row_classes + row, mask=row < rows, other=0)
    of_columns = tl.load(column_classes + column, mask=column < columns, other=0)
    number = tl.minimum(tl.maximum(of_rows[:, None] + of_columns[None, :], 0), _MAX_CLASS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], number.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=("step", "near", "far", "limit", "rows", "rank", "salt"))
def _restore(
    n,
    u,
    multiplier,
    v,
    row_powers,
    column_powers,
    out,
    step,
    near,
    far,
    limit,
    rows,
    columns,
    rank,
    salt,
    PREDICTS: tl.constexpr,
    DITHERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows, in_columns = row < rows, column < columns
    inside = in_rows[:, None] & in_columns[None, :]
    place = row[:, None] * columns + column[None, :]
    y = tl.load(n + place, mask=inside, other=0).to(tl.float32) * step
    if PREDICTS:
        dimension = tl.arange(0, _RANK)
        known = dimension < rank
        factor = tl.load(
            u + row[:, None] * rank + dimension[None, :],
            mask=in_rows[:, None] & known[None, :],
            other=0,
        )
        times = tl.load(multiplier + dimension, mask=known, other=0)
        weight = (factor.to(tl.int32) * times[None, :]).to(tl.float32)
        direction = tl.load(
            v + column.to(tl.int64)[None, :] * rank + dimension[:, None],
            mask=in_columns[None, :] & known[:, None],
            other=0,
        )
        predicted = product(weight, direction.to(tl.float32))
        predicted = predicted * tl.load(row_powers + row, mask=in_rows, other=0.0)[:, None]
        y += predicted * tl.load(column_powers + column, mask=in_columns, other=0.0)[None, :]
    if DITHERED:
        y -= dither(place, salt) * step
    y = tl.minimum(tl.maximum(y * near * far, -limit), limit)
    store_rounded(out + place, y, inside)


@triton.jit(do_not_specialize=("salt",))
def restore_rows(
    n,
    told,
    out,
    columns,
    salt,
    TOLD: tl.constexpr,
    LIMIT: tl.constexpr,
    DITHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The values of rows n, int32 `[rows, columns]`; `told` is the `numbers` of `decode_many`."""
    number = tl.program_id(1).to(tl.int64)
    told += number * TOLD
    code, exponent = tl.load(told + 2).to(tl.int32), tl.load(told + 3).to(tl.int32)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    step = (1024 + (code & 1023)).to(tl.float32) * (((code >> 10) - 19 + 127) << 23).to(
        tl.float32, bitcast=True
    )
    near, far = powers_of_two(exponent)
    y = tl.load(n + number * columns + place, mask=inside, other=0).to(tl.float32) * step
    if DITHERED:
        y -= dither(place, salt) * step
    y = tl.minimum(tl.maximum(y * near * far, -LIMIT), LIMIT)
    tl.store(out + number * columns + place, y, mask=inside)


def classes(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """`kernels.trellis.reference.classes` of int32 `[R]` and `[C]`."""
    rows, columns = row.numel(), column.numel()
    out = torch.empty(rows * columns, dtype=torch.uint8, device=row.device)
    _classes[(triton.cdiv(rows, _CLASS_ROWS), triton.cdiv(columns, _CLASS_COLUMNS))](
        row,
        column,
        out,
        rows,
        columns,
        ROWS=_CLASS_ROWS,
        BLOCK=_CLASS_COLUMNS,
        enable_fp_fusion=True,
    )
    return out


def restore(
    n: torch.Tensor,
    code: int,
    factors: Factors | None,
    exponent: int,
    out: torch.Tensor,
    salt: int | None = None,
) -> None:
    """See `kernels.trellis.ops.restore`."""
    columns = out.shape[-1]
    rows = out.numel() // columns
    powers = [factor.item() for factor in tiles.powers_of_two(torch.tensor(exponent, dtype=torch.int32))]
    near, far = [1.0, *powers][-2:]
    # Without a prediction, the kernel never reads these arguments.
    u, multiplier, v, row_powers, column_powers = (n,) * 5 if factors is None else prediction(factors)
    _restore[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        n,
        u,
        multiplier,
        v,
        row_powers,
        column_powers,
        as_bits(out),
        trellis.step_of(code),
        near,
        far,
        torch.finfo(out.dtype).max,
        rows,
        columns,
        0 if factors is None else factors.rank,
        signed(salt or 0),
        PREDICTS=factors is not None,
        DITHERED=salt is not None,
        ROWS=_ROWS,
        BLOCK=_COLUMNS,
        enable_fp_fusion=False,
    )
