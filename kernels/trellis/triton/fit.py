"""`kernels.trellis.factors.fitted` in Triton: the residual of every row, and the model."""

import triton
import triton.language as tl

from kernels.common.triton.numbers import in_record, product
from kernels.trellis.triton import state as at
from kernels.trellis.triton.scales import BINS, ORIGIN, logarithm, parts, power, shared_scale
from kernels.trellis.triton.spaces import (
    RANK,
    base_exponent,
    clipped,
    coefficients,
    column_exponents,
    nearest,
    power_64,
    row_exponents,
)

_PART_SCALE = tl.constexpr(9 * 16)
_PLAN = tl.constexpr(at.PLAN)
_ROW_TOP = tl.constexpr(at.ROW_TOP)
_COLUMN_TOP = tl.constexpr(at.COLUMN_TOP)
_REST = tl.constexpr(at.REST)
_USED = tl.constexpr(at.USED)
_BY_ROW = tl.constexpr(at.BY_ROW)
_BY_COLUMN = tl.constexpr(at.BY_COLUMN)
_SHARED_SCALE = tl.constexpr(at.SHARED_SCALE)
_KIND = tl.constexpr(at.KIND)


@triton.jit
def prediction_exponent(state, fine):
    return base_exponent(state) + tl.load(fine)


@triton.jit(do_not_specialize=("rows", "every", "plain", "some_every", "all_rows", "first_slot"))
def residual(
    field,
    row_scales,
    column_scales,
    state,
    numbers,
    plans,
    directions,
    energies,
    multiplier,
    fine,
    row_factors,
    row_bins,
    rows,
    columns,
    every,
    plain,
    some_every,
    all_rows,
    first_slot,
    SAMPLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sample's residual after each kind of prediction, or that of all rows after the chosen one.

    Also counts the rows' scales; for all rows, also their factors, int8 `[R, RANK]`, and the largest
    exponents.
    """
    elements = all_rows.to(tl.int64) * columns
    if SAMPLE:
        kind = tl.program_id(1)
        target = field + 2 * elements + kind.to(tl.int64) * rows * columns
        scales_out = row_scales + 2 * all_rows.to(tl.int64) + kind * rows
    else:
        kind = (tl.load(state + _PLAN) - plain).to(tl.int32)
        if kind < 0:
            return
        target = field + elements
        scales_out = row_scales + all_rows
    limit = ((1 << (tl.load(plans + 4 * (plain + kind) + 1) - 1)) - 1).to(tl.float64)
    directions += kind.to(tl.int64) * RANK * columns
    dimension = tl.arange(0, RANK)
    stride = every.to(tl.int64) * columns
    row, inside, scale, found = coefficients(
        field, row_scales, column_scales, state, directions, rows, columns, every, ROWS, BLOCK
    )
    times = tl.load(multiplier + kind * RANK + dimension)
    of_kind = tl.load(fine + kind)
    unit = tl.maximum(times, 1).to(tl.float64) * power_64(of_kind)
    energy = tl.load(energies + kind * RANK + dimension)
    # Values over the limit need not be exact.
    share = clipped(found / energy[None, :] / unit[None, :], limit)
    factor = tl.where((times > 0)[None, :], nearest(share), 0.0)
    weight = (factor * times.to(tl.float64)[None, :]).to(tl.float32)
    exponent = row_exponents(scale, state)
    down = power(exponent + prediction_exponent(state, fine + kind))
    if not SAMPLE:
        place = row.to(tl.int64)[:, None] * RANK + dimension[None, :]
        tl.store(row_factors + place, factor.to(tl.int8), mask=inside[:, None])
        tl.atomic_max(state + _ROW_TOP, tl.max(tl.where(inside, exponent, 0), 0).to(tl.int64))
    # Over each thread's own columns; summed across threads once, after the last.
    totals = tl.zeros((ROWS, BLOCK), tl.int64)
    largest = tl.zeros((ROWS, BLOCK), tl.int32)
    columns_top = tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < columns:
        column = start + tl.arange(0, BLOCK)
        real = column < columns
        column_scale = tl.load(column_scales + column, mask=real, other=0)
        across = column_exponents(column_scale, state)
        direction = tl.load(
            directions + dimension[:, None] * columns + column[None, :], mask=real[None, :], other=0.0
        )
        predicted = product(weight, direction)
        predicted = predicted * down[:, None] * power(across)[None, :]
        both = inside[:, None] & real[None, :]
        x = tl.load(field + row.to(tl.int64)[:, None] * stride + column[None, :], mask=both, other=0.0)
        rest = tl.where(both, x - predicted, 0.0)
        tl.store(target + row.to(tl.int64)[:, None] * columns + column[None, :], rest, mask=both)
        totals += parts(rest).to(tl.int64)
        if not SAMPLE:
            largest = tl.maximum(largest, rest.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            columns_top = tl.maximum(columns_top, tl.where(real, across, 0))
        start += BLOCK
    total = tl.sum(totals, 1)
    rest_scale = logarithm(total.to(tl.float64) / tl.cast(columns, tl.float64), numbers) - _PART_SCALE
    tl.store(scales_out + row, rest_scale, mask=inside)
    ones = tl.zeros((ROWS,), tl.int64) + 1
    if SAMPLE:
        tl.atomic_add(row_bins + (plain + kind) * BINS + rest_scale + ORIGIN, ones, mask=inside)
    else:
        place = row_bins + first_slot * BINS + rest_scale + ORIGIN
        tl.atomic_add(place, ones, mask=inside)
        tl.atomic_add(place + BINS, ones, mask=inside & (row % some_every == 0))
        tl.atomic_max(state + _REST, tl.max(tl.max(largest, 1), 0).to(tl.int64))
        if tl.program_id(0) == 0:
            tl.store(state + _COLUMN_TOP, tl.max(columns_top, 0).to(tl.int64))


@triton.jit(do_not_specialize=("rows", "columns", "plain", "some_rows", "whole_slot", "record"))
def settle(
    state,
    plans,
    totals,
    numbers,
    multiplier,
    fine,
    row_bins,
    rows,
    columns,
    plain,
    some_rows,
    whole_slot,
    record,
    PREDICTS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Set the model, which is the best plan's unless its prediction cannot be sent, and count its rows'
    scales.

    `row_bins` has, from `whole_slot` on, histograms of all rows and of the measured rows, for the matrix, the
    residual, and the model.
    """
    if MANY:
        number = tl.program_id(0).to(tl.int64)
        state = in_record(state, number, record)
        totals = in_record(totals, number, record)
        row_bins = in_record(row_bins, number, record)
    plan = tl.load(state + _PLAN).to(tl.int32)
    used = (plan >= plain) & PREDICTS
    if PREDICTS:
        kind = tl.maximum(plan - plain, 0)
        limit = (1 << (tl.load(plans + 4 * (plain + kind) + 1).to(tl.int32) - 1)) - 1
        exponent = prediction_exponent(state, fine + kind)
        tops = (tl.load(state + _ROW_TOP) + tl.load(state + _COLUMN_TOP)).to(tl.int32)
        total = tl.sum(tl.load(multiplier + kind * RANK + tl.arange(0, RANK)), 0)
        rest = tl.load(state + _REST).to(tl.int32).to(tl.float32, bitcast=True)
        used = used & (rest <= 16384.0) & (exponent >= -64) & (exponent <= 64)
        used = used & (tops + exponent + 24 <= 100) & (total <= ((1 << 24) - 1) // (limit * limit))
        tl.store(state + _KIND, kind.to(tl.int64))
    tl.store(state + _USED, used.to(tl.int64))
    # If the prediction is not used, rows and columns still have their own scales.
    predicted = plan >= plain
    by_row = predicted | (tl.load(plans + 4 * plan + 2) != 0)
    tl.store(state + _BY_ROW, by_row.to(tl.int64))
    tl.store(state + _BY_COLUMN, (predicted | (tl.load(plans + 4 * plan + 3) != 0)).to(tl.int64))
    scale = shared_scale(tl.load(totals + 1), numbers, rows, columns) - _PART_SCALE
    tl.store(state + _SHARED_SCALE, scale.to(tl.int64))
    bin = tl.arange(0, BINS)
    place = row_bins + whole_slot * BINS + bin
    for part in tl.static_range(2):
        counts = tl.load(place + (2 * used.to(tl.int32) + part) * BINS)
        only = tl.where(bin == scale + ORIGIN, some_rows if part else rows, 0).to(tl.int64)
        tl.store(place + (4 + part) * BINS, tl.where(by_row, counts, only))
