"""`kernels.trellis.factors.spaces` in Triton: a low-dimensional space near a sample's rows, in integers.

Matrices with one column per dimension are transposed here, `[RANK, n]`, so that a program has one dimension.
Products are of integers: exact in fp32 within a block, and added in fp64.
"""

import triton
import triton.language as tl

from kernels.common.triton.numbers import MAGIC, small_product
from kernels.trellis.triton import state as at
from kernels.trellis.triton.scales import BINS, ORIGIN, power

RANK = tl.constexpr(32)
# Adding and subtracting this rounds an fp64 number below 2**51 in magnitude to an integer, ties to even.
_MAGIC_64 = tl.constexpr(6755399441055744.0)
_ROW_BASE = tl.constexpr(at.ROW_BASE)
_COLUMN_BASE = tl.constexpr(at.COLUMN_BASE)
_MAX_EXPONENT_STEP = tl.constexpr(31)
_MEAN_BITS = tl.constexpr(5)
_LARGEST = tl.constexpr(255.0)
_FACTOR = tl.constexpr(63.0)
_PRECISE = tl.constexpr(131072.0)
_TURN = tl.constexpr(1048576.0)
_LARGEST_TURN = tl.constexpr(536870912.0)
# 2**-20 * _PRECISE**2: a column with a smaller squared norm depends on earlier ones.
_LEAST_PIVOT = tl.constexpr(16384.0)
_MAX_MULTIPLIER = tl.constexpr(255)


@triton.jit
def nearest(x):
    """Round fp64 below 2**51 in magnitude to integers, ties to even."""
    return (x + _MAGIC_64) - _MAGIC_64


@triton.jit
def clipped(x, limit):
    return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit
def row_exponents(scales, state):
    """Octaves of rows above their base, from 0 to 31."""
    octaves = ((scales + 8) >> 4) - tl.load(state + _ROW_BASE).to(tl.int32)
    return tl.minimum(tl.maximum(octaves, 0), _MAX_EXPONENT_STEP)


@triton.jit
def column_exponents(scales, state):
    return tl.maximum(((scales + 8) >> 4) - tl.load(state + _COLUMN_BASE).to(tl.int32), 0)


@triton.jit
def base_exponent(state):
    """Sum of the bases of row and column exponents."""
    base = (tl.load(state + _ROW_BASE) + tl.load(state + _COLUMN_BASE)).to(tl.int32)
    return base - _MEAN_BITS


@triton.jit
def white_block(field, state, rows, row_scales, row_mask, columns, column_scales, column_mask, stride):
    """Whitened elements `[rows, columns]`, integers in fp32; zeros outside. `rows` are int64."""
    inside = row_mask[:, None] & column_mask[None, :]
    x = tl.load(field + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    x = x * power(-base_exponent(state) - row_exponents(row_scales, state))[:, None]
    x = x * power(-column_exponents(column_scales, state))[None, :]
    return (clipped(x, _LARGEST) + MAGIC) - MAGIC


@triton.jit
def coefficients(
    field,
    row_scales,
    column_scales,
    state,
    directions,
    rows,
    columns,
    every,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The program's rows of the sample, int32 `[ROWS]` (row r is row r * `every` of the field); a mask of
    those that exist; their scales; and the products of the whitened rows and `directions` `[RANK, C]`,
    integers in fp64 `[ROWS, RANK]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    row_scale = tl.load(row_scales + row * every, mask=real, other=0)
    stride = every.to(tl.int64) * columns
    dimension = tl.arange(0, RANK)
    found = tl.zeros((ROWS, RANK), tl.float64)
    start = 0
    while start < columns:
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        scale = tl.load(column_scales + column, mask=inside, other=0)
        white = white_block(field, state, row.to(tl.int64), row_scale, real, column, scale, inside, stride)
        direction = tl.load(
            directions + dimension[None, :] * columns + column[:, None], mask=inside[:, None], other=0.0
        )
        found += small_product(white, direction).to(tl.float64)
        start += BLOCK
    return row, real, row_scale, found


@triton.jit
def bases(row_bins, column_bins, state):
    """Bases of the row and column exponents, from the sample's scales."""
    bin = tl.arange(0, BINS)
    for side in tl.static_range(2):
        counts = tl.load((row_bins if side == 0 else column_bins) + bin)
        low = (tl.min(tl.where(counts > 0, bin, BINS - 1), 0) - ORIGIN + 8) >> 4
        high = (tl.max(tl.where(counts > 0, bin, 0), 0) - ORIGIN + 8) >> 4
        base = tl.maximum(low, high - _MAX_EXPONENT_STEP)
        tl.store(state + (_ROW_BASE if side == 0 else _COLUMN_BASE), base.to(tl.int64))


@triton.jit(do_not_specialize=("rows", "every"))
def project(
    field,
    row_scales,
    column_scales,
    state,
    directions,
    out,
    rows,
    columns,
    every,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Products of the sample's whitened rows with some directions, fp64 `[RANK, S]`."""
    row, inside, _, found = coefficients(
        field, row_scales, column_scales, state, directions, rows, columns, every, ROWS, BLOCK
    )
    place = tl.arange(0, RANK)[None, :] * rows + row[:, None]
    tl.store(out + place, found, mask=inside[:, None])


@triton.jit(do_not_specialize=("rows", "every"))
def combine(
    field,
    row_scales,
    column_scales,
    state,
    image,
    out,
    rows,
    columns,
    every,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`image` `[RANK, S]` times the sample's whitened rows, fp64 `[RANK, C]`."""
    dimension = tl.arange(0, RANK)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    scale = tl.load(column_scales + column, mask=inside, other=0)
    stride = every.to(tl.int64) * columns
    found = tl.zeros((RANK, COLUMNS), tl.float64)
    start = 0
    while start < rows:
        row = start + tl.arange(0, BLOCK)
        real = row < rows
        row_scale = tl.load(row_scales + row * every, mask=real, other=0)
        white = white_block(field, state, row.to(tl.int64), row_scale, real, column, scale, inside, stride)
        weight = tl.load(image + dimension[:, None] * rows + row[None, :], mask=real[None, :], other=0.0)
        found += small_product(weight, white).to(tl.float64)
        start += BLOCK
    tl.store(out + dimension[:, None] * columns + column[None, :], found, mask=inside[None, :])


@triton.jit
def _part_factor(x, n, BLOCK: tl.constexpr):
    """The factor that scales a dimension to a largest element of `_PRECISE`."""
    largest = tl.zeros((BLOCK,), tl.float64)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + i, mask=i < n, other=0.0)))
        start += BLOCK
    top = tl.max(largest, 0)
    return tl.where(top > 0, _PRECISE / tl.where(top > 0, top, 1.0), 0.0)


@triton.jit
def _integer_factor(x, factor, of_mean, n, BLOCK: tl.constexpr):
    """The fp64 factor that scales a dimension's parts to a mean magnitude of about `of_mean`."""
    total = tl.zeros((BLOCK,), tl.float64)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        total += tl.abs(nearest(tl.load(x + i, mask=i < n, other=0.0) * factor))
        start += BLOCK
    mean = tl.sum(total, 0) / n.to(tl.float64)
    return tl.where(mean > 0, of_mean / tl.where(mean > 0, mean, 1.0), 0.0)


@triton.jit(do_not_specialize=("n",))
def integers(x, out, n, BLOCK: tl.constexpr):
    """`kernels.trellis.factors._to_integers` of fp64 `[RANK, n]`, in fp32; one program per dimension."""
    x += tl.program_id(0).to(tl.int64) * n
    out += tl.program_id(0).to(tl.int64) * n
    factor = _part_factor(x, n, BLOCK)
    again = _integer_factor(x, factor, factor * 0 + _FACTOR / 4, n, BLOCK)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        part = nearest(tl.load(x + i, mask=i < n, other=0.0) * factor)
        tl.store(out + i, clipped(nearest(part * again), _FACTOR).to(tl.float32), mask=i < n)
        start += BLOCK


@triton.jit(do_not_specialize=("plain",))
def dimensions(x, plans, out, energies, columns, plain, BLOCK: tl.constexpr):
    """Directions of every kind of prediction, fp32 `[kinds, RANK, C]`, zero beyond its rank; energies."""
    k = tl.program_id(0)
    kind = tl.program_id(1)
    rank = tl.load(plans + 4 * (plain + kind))
    limit = ((1 << (tl.load(plans + 4 * (plain + kind) + 1) - 1)) - 1).to(tl.float64)
    x += k.to(tl.int64) * columns
    out += (kind * RANK + k).to(tl.int64) * columns
    factor = _part_factor(x, columns, BLOCK)
    # limit / 3.2, with the same rounding as the reference's division.
    again = _integer_factor(x, factor, limit * 0.3125, columns, BLOCK)
    energy = tl.zeros((BLOCK,), tl.float64)
    start = 0
    while start < columns:
        i = start + tl.arange(0, BLOCK)
        part = nearest(tl.load(x + i, mask=i < columns, other=0.0) * factor)
        found = tl.where(k < rank, clipped(nearest(part * again), limit), 0.0)
        energy += found * found
        tl.store(out + i, found.to(tl.float32), mask=i < columns)
        start += BLOCK
    tl.store(energies + kind * RANK + k, tl.maximum(tl.sum(energy, 0), 1.0))


@triton.jit(do_not_specialize=("n",))
def whole_parts(x, out, n, BLOCK: tl.constexpr):
    """`kernels.trellis.loops.spaces.to_parts` of fp64 `[RANK, n]`; one program per dimension."""
    x += tl.program_id(0).to(tl.int64) * n
    out += tl.program_id(0).to(tl.int64) * n
    factor = _part_factor(x, n, BLOCK)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, nearest(tl.load(x + i, mask=i < n, other=0.0) * factor), mask=i < n)
        start += BLOCK


@triton.jit(do_not_specialize=("n",))
def gram(q, out, n, BLOCK: tl.constexpr):
    """Products of one dimension of fp64 `[RANK, n]` with all of them."""
    k = tl.program_id(0)
    dimension = tl.arange(0, RANK)
    found = tl.zeros((RANK,), tl.float64)
    start = 0
    while start < n:
        i = start + tl.arange(0, BLOCK)
        one = tl.load(q + k.to(tl.int64) * n + i, mask=i < n, other=0.0)
        every = tl.load(
            q + dimension.to(tl.int64)[:, None] * n + i[None, :], mask=(i < n)[None, :], other=0.0
        )
        found += tl.sum(every * one[None, :], 1)
        start += BLOCK
    tl.store(out + k * RANK + dimension, found)


@triton.jit(do_not_specialize=("n",))
def orthogonal(q, products, out, n, BLOCK: tl.constexpr):
    """One dimension of `kernels.trellis.factors._orthogonal`. Every program computes the whole
    transformation: waiting for one program to do it would take as long."""
    i = tl.arange(0, RANK)
    row, column = i[:, None], i[None, :]
    left = tl.load(products + row * RANK + column)
    turn = tl.where(row == column, 1.0, 0.0).to(tl.float64)
    for k in range(RANK):
        of_k = tl.sum(tl.where(row == k, left, 0.0), 0)
        pivot = tl.sum(tl.where(i == k, of_k, 0.0), 0)
        # A dimension that depends on earlier ones becomes zero and leaves later ones unchanged.
        turned = tl.where(pivot > _LEAST_PIVOT, k, RANK)
        gone = tl.where(pivot > _LEAST_PIVOT, RANK, k)
        share = of_k / tl.where(pivot > _LEAST_PIVOT, pivot, 1.0)
        turn_k = tl.sum(tl.where(column == k, turn, 0.0), 1)
        turn = tl.where(column > turned, turn - turn_k[:, None] * share[None, :], turn)
        turn = tl.where(column == gone, 0.0, turn)
        later = (column > turned) & (row > turned)
        left = tl.where(later, left - share[:, None] * of_k[None, :], left)
    own = tl.sum(tl.where(column == tl.program_id(0), turn, 0.0), 1)
    weight = nearest(clipped(own * _TURN, _LARGEST_TURN))
    out += tl.program_id(0).to(tl.int64) * n
    start = 0
    while start < n:
        j = start + tl.arange(0, BLOCK)
        every = tl.load(q + i.to(tl.int64)[:, None] * n + j[None, :], mask=(j < n)[None, :], other=0.0)
        tl.store(out + j, tl.sum(every * weight[:, None], 0), mask=j < n)
        start += BLOCK


@triton.jit(do_not_specialize=("rows", "every"))
def spread(
    field,
    row_scales,
    column_scales,
    state,
    directions,
    energies,
    out,
    rows,
    columns,
    every,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the magnitudes of the sample's coefficients, in units of 2**-16, int64 `[kinds, RANK]`."""
    kind = tl.program_id(1)
    dimension = tl.arange(0, RANK)
    _, _, _, found = coefficients(
        field,
        row_scales,
        column_scales,
        state,
        directions + kind.to(tl.int64) * RANK * columns,
        rows,
        columns,
        every,
        ROWS,
        BLOCK,
    )
    energy = tl.load(energies + kind * RANK + dimension)
    magnitude = nearest(tl.abs(found / energy[None, :]) * 65536.0)
    tl.atomic_add(out + kind * RANK + dimension, tl.sum(magnitude.to(tl.int64), 0))


@triton.jit
def _octave(x):
    """The exponent that `frexp` gives for positive fp64."""
    return (((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022).to(tl.int32)


@triton.jit
def power_64(exponent):
    """2**exponent in fp64."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=("rows", "plain"))
def multipliers(spreads, plans, out, fine_out, rows, plain):
    """`kernels.trellis.factors._multipliers` of a kind: int32 `[RANK]`, zero beyond its rank, and their
    exponent."""
    kind = tl.program_id(0)
    rank = tl.load(plans + 4 * (plain + kind)).to(tl.int32)
    limit = (1 << (tl.load(plans + 4 * (plain + kind) + 1).to(tl.int32) - 1)) - 1
    dimension = tl.arange(0, RANK)
    total = tl.load(spreads + kind * RANK + dimension).to(tl.float64)
    total = tl.where(dimension < rank, total, 0.0)
    unit = total * 0.0000152587890625 / rows.to(tl.float64) * 4.0 / limit.to(tl.float64)
    top = tl.minimum((1 << 24) // (limit * limit * rank) - 1, _MAX_MULTIPLIER)
    largest = tl.max(unit, 0)
    fine = tl.where(largest > 0, _octave(largest / top.to(tl.float64)), 0)
    found = tl.minimum(nearest(unit * power_64(-fine)), top.to(tl.float64)).to(tl.int32)
    tl.store(out + kind * RANK + dimension, found)
    tl.store(fine_out + kind, fine)
