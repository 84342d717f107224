"""`kernels.trellis.scales` in Triton: the normalised matrix, row and column scales, and their histograms,
without the host.

Sums are of integers, with atomic additions where programs share them, so their order does not matter. The
kernels store the scale of every row and column, and histograms with `BINS` counts from scale `-ORIGIN` up;
the search for a step reads only the histograms.
"""

import triton
import triton.language as tl

from kernels.common.triton.numbers import in_record, widened
from kernels.trellis.triton import state as at

_NON_FINITE = tl.constexpr(0x7FFF)
_NORMAL_BITS = tl.constexpr(13)
# Parts per unit, their logarithm in 16ths of an octave, and every row's weighted mean magnitude
# (`kernels.trellis.scales`).
_PARTS = tl.constexpr(512.0)
_PART_SCALE = tl.constexpr(9 * 16)
_WEIGHTED = tl.constexpr(65536.0)
# Every fp32 number from here up is an integer.
_WHOLE = tl.constexpr(8388608.0)
_LEAST = tl.constexpr(2.0**-20)
BINS = tl.constexpr(at.BINS)
ORIGIN = tl.constexpr(at.ORIGIN)
THRESHOLDS = tl.constexpr(at.THRESHOLDS)
ROOTS = tl.constexpr(at.ROOTS)
_USED = tl.constexpr(at.USED)
_BY_ROW = tl.constexpr(at.BY_ROW)
_BY_COLUMN = tl.constexpr(at.BY_COLUMN)
_PEAK = tl.constexpr(at.PEAK)


@triton.jit
def power(exponent):
    """2**exponent in fp32, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def parts(x):
    """round(|x| * 2**9), fp32."""
    return _rounded(tl.abs(x) * _PARTS)


@triton.jit
def _rounded(x):
    """Round to integers, ties to even; x is not negative."""
    return tl.where(x < _WHOLE, (x + _WHOLE) - _WHOLE, x)


@triton.jit
def logarithm(means, numbers):
    """`kernels.trellis.scales.logarithm` of fp64."""
    bits = tl.maximum(means, _LEAST).to(tl.int64, bitcast=True)
    fraction = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    scale = ((bits >> 52) - 1023).to(tl.int32) * 16
    for j in tl.static_range(16):
        scale += (tl.load(numbers + THRESHOLDS + j) < fraction).to(tl.int32)
    return scale


@triton.jit(do_not_specialize=("elements", "record"))
def largest(x, state, elements, record, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """Write the bits of the largest magnitude to the state; as integers, infinities and NaNs are largest.

    With `MANY`, here and in the kernels below, x is `[n, C]`, and each row is a separate matrix with its own
    record of buffers (`kernels.trellis.triton.plan.Records`).
    """
    if MANY:
        number = tl.program_id(1).to(tl.int64)
        x += number * elements
        state = in_record(state, number, record)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = widened(tl.load(x + i, mask=i < elements, other=0.0))
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(state + _PEAK, tl.max(bits, 0).to(tl.int64))


@triton.jit
def _exponent(bits):
    """`kernels.common.tiles.tensor_exponent` of a finite magnitude's bits."""
    # The value of a subnormal number is its bits times 2**-149.
    small = (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126 - 149
    exponent = tl.where(bits >> 23 > 0, (bits >> 23) - 126, small)
    return tl.where(bits > 0, exponent, 0) - _NORMAL_BITS


@triton.jit(do_not_specialize=("rows", "sample_every", "some_every", "whole_slot", "record"))
def normalise(
    x,
    state,
    numbers,
    field,
    row_scales,
    row_bins,
    totals,
    exponent,
    rows,
    columns,
    sample_every,
    some_every,
    whole_slot,
    record,
    SHARED_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write a row of the normalised matrix into `field` (zeros if x is not finite), and its scale, counted in
    the histograms of all rows, of the sample and of the measured rows."""
    if MANY:
        number = tl.program_id(1).to(tl.int64)
        x += number * columns
        state = in_record(state, number, record)
        field = in_record(field, number, record)
        row_scales = in_record(row_scales, number, record)
        row_bins = in_record(row_bins, number, record)
        totals = in_record(totals, number, record)
        exponent += number
    row = tl.program_id(0)
    x += row.to(tl.int64) * columns
    field += row.to(tl.int64) * columns
    bits = tl.load(state + _PEAK).to(tl.int32)
    finite = bits < 0x7F800000
    e = _exponent(tl.where(finite, bits, 0))
    if row == 0:
        tl.store(exponent, tl.where(finite, e, _NON_FINITE))
    far = tl.minimum(tl.maximum(-e, -126), 126)
    first, second = power(-e - far), power(far)
    total = tl.zeros((BLOCK,), tl.int64)
    start = 0
    while start < columns:
        i = start + tl.arange(0, BLOCK)
        y = widened(tl.load(x + i, mask=(i < columns) & finite, other=0.0)) * first * second
        tl.store(field + i, y, mask=i < columns)
        total += parts(y).to(tl.int64)
        start += BLOCK
    whole = tl.sum(total, 0)
    scale = logarithm(whole.to(tl.float64) / tl.cast(columns, tl.float64), numbers) - _PART_SCALE
    tl.store(row_scales + row, scale)
    place = row_bins + scale + ORIGIN
    sampled = row % sample_every == 0
    tl.atomic_add(place, 1, mask=sampled)
    tl.atomic_add(place + whole_slot * BINS, 1)
    tl.atomic_add(place + (whole_slot + 1) * BINS, 1, mask=row % some_every == 0)
    if SHARED_SCALE:
        tl.atomic_add(place + BINS, 1, mask=sampled)
        tl.atomic_add(totals, whole, mask=sampled)
        tl.atomic_add(totals + 1, whole)


@triton.jit
def shared_scale(total, numbers, rows, columns):
    """The scale that all rows share in plans without row scales, before the correction for parts."""
    return logarithm(total.to(tl.float64) / (rows.to(tl.int64) * columns).to(tl.float64), numbers)


@triton.jit
def _row_weights(scale, numbers):
    """Weights of the parts of rows with these logarithms when columns are summed, fp32."""
    part = scale & 15
    down = (scale >> 4) + (part > 0).to(tl.int32)
    root = tl.load(numbers + ROOTS + tl.where(part > 0, 16 - part, 0))
    exact = ((1023 - down).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (root * exact * _WEIGHTED).to(tl.float32)


@triton.jit(do_not_specialize=("rows", "first", "plain", "all_rows", "every"))
def column_sums(
    field,
    row_scales,
    state,
    plans,
    totals,
    numbers,
    sums,
    rows,
    columns,
    first,
    plain,
    all_rows,
    every,
    SAMPLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Sum every column's weighted magnitudes, over the sample for each plan from `first` on, or over the
    model's matrix."""
    plan = first + tl.program_id(2)
    elements = all_rows.to(tl.int64) * columns
    if SAMPLE:
        by_row = tl.load(plans + 4 * plan + 2)
        by_column = tl.load(plans + 4 * plan + 3)
        total = tl.load(totals)
        predicted = plan >= plain
        offset = tl.where(predicted, 2 * elements + (plan - plain).to(tl.int64) * rows * columns, 0)
        row_offset = tl.where(predicted, 2 * all_rows.to(tl.int64) + (plan - plain) * rows, 0)
        stride = tl.where(predicted, 1, every)
    else:
        by_row = tl.load(state + _BY_ROW)
        by_column = tl.load(state + _BY_COLUMN)
        total = tl.load(totals + 1)
        used = tl.load(state + _USED)
        offset = used * elements
        row_offset = used * all_rows
        stride = 1
    if by_column == 0:
        return
    shared = shared_scale(total, numbers, rows, columns)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros((COLUMNS,), tl.int64)
    for turn in range(TURNS):
        row = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        scale = tl.load(row_scales + row_offset + row * stride, mask=row < rows, other=0) + _PART_SCALE
        weight = _row_weights(tl.where(by_row != 0, scale, shared), numbers)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        places = (row.to(tl.int64) * stride * columns)[:, None] + column[None, :]
        x = tl.load(field + offset + places, mask=inside, other=0.0)
        found += tl.sum(_rounded(parts(x) * weight[:, None]).to(tl.int64), 0)
    tl.atomic_add(sums + plan.to(tl.int64) * columns + column, found, mask=column < columns)


@triton.jit(do_not_specialize=("rows", "columns", "first", "slot", "record"))
def column_scales(
    sums,
    field,
    row_scales,
    state,
    plans,
    totals,
    numbers,
    scales,
    column_bins,
    row_bins,
    rows,
    columns,
    first,
    slot,
    record,
    SAMPLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Compute column scales from their sums, and their histogram; also the histogram of a sample's rows in
    plans without row scales.

    With `MANY` a column's sum is its only element's weighted magnitude, and only the model's scales are kept.
    """
    if MANY:
        number = tl.program_id(2).to(tl.int64)
        field = in_record(field, number, record)
        row_scales = in_record(row_scales, number, record)
        state = in_record(state, number, record)
        totals = in_record(totals, number, record)
        scales = in_record(scales, number, record)
        column_bins = in_record(column_bins, number, record)
        row_bins = in_record(row_bins, number, record)
    plan = first + tl.program_id(1)
    slot += plan
    if SAMPLE:
        by_column = tl.load(plans + 4 * plan + 3)
        by_row = tl.load(plans + 4 * plan + 2)
        if (by_row == 0) & (tl.program_id(0) == 0):
            scale = shared_scale(tl.load(totals), numbers, rows, columns) - _PART_SCALE
            tl.store(row_bins + plan * BINS + scale + ORIGIN, rows.to(tl.int64))
    else:
        by_column = tl.load(state + _BY_COLUMN)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    if not MANY:
        scales += slot.to(tl.int64) * columns
    column_bins += slot * BINS
    if by_column == 0:
        # Adding every column to the same count would take a thousand times as long as the rest.
        if tl.program_id(0) == 0:
            tl.store(column_bins + ORIGIN, columns.to(tl.int64))
        if not (MANY and SAMPLE):
            tl.store(scales + column, tl.zeros((COLUMNS,), tl.int32), mask=inside)
        return
    if MANY:
        # The scale of a single row is also the shared one.
        weight = _row_weights(tl.load(row_scales) + _PART_SCALE, numbers)
        x = tl.load(field + column, mask=inside, other=0.0)
        found = _rounded(parts(x) * weight).to(tl.int64).to(tl.float64)
    else:
        found = tl.load(sums + plan.to(tl.int64) * columns + column, mask=inside, other=0).to(tl.float64)
    scale = logarithm(found / (rows.to(tl.float64) * _WEIGHTED), numbers)
    if not (MANY and SAMPLE):
        tl.store(scales + column, scale, mask=inside)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.where(inside, scale + ORIGIN, 0), BINS)
    # Columns after the last were counted as 0.
    counts -= tl.where(bins == 0, tl.sum((inside == 0).to(tl.int32), 0), 0)
    tl.atomic_add(column_bins + bins, counts.to(tl.int64), mask=counts > 0)
