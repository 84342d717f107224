"""`kernels.trellis.reference.Scales` in Triton: the cost of elements for every step, from histograms of their
scales.

All numbers are integers, except costs between two 16ths of an octave: fp64 with one rounding per operation.
"""

import triton
import triton.language as tl

from kernels.common.triton.numbers import in_record
from kernels.trellis.tables import COST_BITS, MAX_CLASS
from kernels.trellis.triton import state as at
from kernels.trellis.triton.scales import BINS, ORIGIN

CLASS_OF_MEAN = tl.constexpr(4 * 12 + 5 - 16)
_MAX_SCALE_STEP = tl.constexpr(4 * 63)
_COST_UNIT = tl.constexpr(2.0**-COST_BITS)
_SIXTEENTH = tl.constexpr(COST_BITS - 4)
_MAX_CLASS = tl.constexpr(MAX_CLASS)
_PREFIX_BYTES = tl.constexpr(32)
_FIRST_STEP = tl.constexpr(at.FIRST_STEP)
COSTS = tl.constexpr(at.COSTS)
_SUMS = tl.constexpr(at.CLASS_SUMS)
_SIDE = tl.constexpr(at.CLASSES_A_SIDE)
_ROW_TOP = tl.constexpr(at.ROW_TOP)
_COLUMN_TOP = tl.constexpr(at.COLUMN_TOP)
_USED = tl.constexpr(at.USED)
_KIND = tl.constexpr(at.KIND)


@triton.jit
def bounds(bins):
    """Lowest and highest scale of a histogram, the lowest raised as `Scales.of` does."""
    bin = tl.arange(0, BINS)
    counts = tl.load(bins + bin)
    low = tl.min(tl.where(counts > 0, bin, BINS - 1), 0) - ORIGIN
    high = tl.max(tl.where(counts > 0, bin, 0), 0) - ORIGIN
    return tl.maximum(low, high - _MAX_SCALE_STEP), high


@triton.jit
def _class_counts(bins, low, high, phase):
    """The number of a histogram's scales in each class, counted down from the highest: int64 `[_SIDE]`."""
    bin = tl.arange(0, BINS)
    below = tl.sum(tl.where(bin - ORIGIN <= low, tl.load(bins + bin), 0), 0)
    number = ((high + phase + 2) >> 2) - tl.arange(0, _SIDE)
    found = tl.where(number == (low + phase + 2) >> 2, below, 0)
    for part in tl.static_range(4):
        scale = 4 * number - phase - 2 + part
        inside = (scale > low) & (scale <= high)
        found += tl.load(bins + scale + ORIGIN, mask=inside, other=0)
    return found


@triton.jit(do_not_specialize=("row_first", "column_first", "out_first", "each", "slots", "record"))
def convolve(
    row_bins,
    column_bins,
    row_counts,
    sums,
    row_first,
    column_first,
    out_first,
    each,
    slots,
    record,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """Count the elements with each sum of classes, for each part of a class that a step may add.

    Program (i, phase, part) handles the rows' histogram `row_first` + i and `BLOCK` sums. If not `each`, all
    share the columns' histogram and the bounds of the first, which are those of all rows.
    """
    slot = tl.program_id(0)
    if MANY:
        number = (slot // slots).to(tl.int64)
        slot = slot % slots
        row_bins = in_record(row_bins, number, record)
        column_bins = in_record(column_bins, number, record)
        row_counts = in_record(row_counts, number, record)
        sums = in_record(sums, number, record)
    phase = tl.program_id(1)
    rows = row_bins + (row_first + slot) * BINS
    low, high = bounds(row_bins + (row_first + slot * each) * BINS)
    columns = column_bins + (column_first + slot * each) * BINS
    left, right = bounds(columns)
    place = (out_first + slot) * 4 + phase
    row_counts += (place * tl.num_programs(2) + tl.program_id(2)) * _SIDE
    tl.store(row_counts + tl.arange(0, _SIDE), _class_counts(rows, low, high, phase))
    # The code below reads what this program's other threads have just written.
    tl.debug_barrier()
    of_columns = _class_counts(columns, left, right, 0)
    total = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    other = total[:, None] - tl.arange(0, _SIDE)[None, :]
    of_rows = tl.load(row_counts + other, mask=(other >= 0) & (other < _SIDE), other=0)
    tl.store(sums + place * _SUMS + total, tl.sum(of_rows * of_columns[None, :], 1))


@triton.jit(do_not_specialize=("row_first", "column_first", "out_first", "each", "slots", "record"))
def costs(
    row_bins,
    column_bins,
    sums,
    mean_costs,
    out,
    row_first,
    column_first,
    out_first,
    each,
    slots,
    record,
    STEPS: tl.constexpr,
    FAMILIES: tl.constexpr,
    MANY: tl.constexpr,
):
    """`Scales._cost` in 2**-16 bits, int64 `[slots, families, COSTS]`, for steps from the smallest on."""
    slot = tl.program_id(0)
    if MANY:
        number = (slot // slots).to(tl.int64)
        slot = slot % slots
        row_bins = in_record(row_bins, number, record)
        column_bins = in_record(column_bins, number, record)
        sums = in_record(sums, number, record)
        out = in_record(out, number, record)
    family = tl.program_id(2)
    _, high = bounds(row_bins + (row_first + slot * each) * BINS)
    _, right = bounds(column_bins + (column_first + slot * each) * BINS)
    place = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    beyond = CLASS_OF_MEAN - (place + _FIRST_STEP)
    whole, phase = beyond >> 2, beyond & 3
    largest = ((high + phase + 2) >> 2) + ((right + 2) >> 2) + whole
    down = tl.arange(0, _SUMS)
    number = tl.minimum(tl.maximum(largest[:, None] - down[None, :], 0), _MAX_CLASS)
    counts = tl.load(sums + ((out_first + slot) * 4 + phase)[:, None] * _SUMS + down[None, :])
    each_costs = tl.load(mean_costs + family * (_MAX_CLASS + 1) + number)
    found = tl.sum(counts * each_costs, 1)
    tl.store(out + ((out_first + slot) * FAMILIES + family) * COSTS + place, found)


@triton.jit
def _logarithm(code, count_bits):
    """`kernels.trellis.reference.step_logarithm`."""
    bits = tl.load(count_bits + (code & 1023))
    return (((code >> 10) << 16) + _FIRST_STEP * 4096) + (2 << 16) - bits


@triton.jit
def sixteenths(code, count_bits):
    return (_logarithm(code, count_bits) + 2048) >> _SIXTEENTH


@triton.jit
def cost(code, table, count_bits):
    """`Scales.cost`, fp64; `table` points to one family's costs."""
    exact = _logarithm(code, count_bits)
    below = exact >> _SIXTEENTH
    share = (exact - (below << _SIXTEENTH)).to(tl.float64) * 0.000244140625
    first = tl.load(table + (below - _FIRST_STEP)).to(tl.float64) * _COST_UNIT
    second = tl.load(table + (below + 1 - _FIRST_STEP)).to(tl.float64) * _COST_UNIT
    return first * (1.0 - share) + second * share


@triton.jit
def bit_length(x):
    """The bit length of x, from 0 to 127."""
    bits = (x > 0).to(tl.int32)
    for power in tl.static_range(1, 7):
        bits += (x >= (1 << power)).to(tl.int32)
    return bits


@triton.jit
def class_bits(code, low, high, left, right, count_bits):
    """`Scales.class_bits`."""
    offset = CLASS_OF_MEAN - sixteenths(code, count_bits) + 2
    row = ((high + offset) >> 2) - ((low + offset) >> 2)
    return bit_length(row), bit_length(((right + 2) >> 2) - ((left + 2) >> 2))


@triton.jit
def _section(count, bits):
    return (count.to(tl.int64) * bits + 7) >> 3


@triton.jit
def side_bytes(rows, columns, row_bits, column_bits, rank, factor_bits, row_exponent, column_exponent):
    """`wire.codecs.trellis_payload.Widths.side_bytes`; sections of no bits take no bytes."""
    total = _section(rows, row_bits) + _section(columns, column_bits)
    total += _section(rows, row_exponent) + _section(columns, column_exponent) + rank
    total += _section(rows, rank * factor_bits) + _section(columns, rank * factor_bits)
    return _PREFIX_BYTES + ((total + 3) >> 2) * 4


@triton.jit
def model_widths(state, plans, plain):
    """The model's rank and its bits of factors, row and column exponents; zeros if it does not predict."""
    used = tl.load(state + _USED).to(tl.int32)
    kind = plain + tl.load(state + _KIND).to(tl.int32)
    rank = tl.load(plans + 4 * kind * used).to(tl.int32) * used
    bits = tl.load(plans + 4 * kind * used + 1).to(tl.int32) * used
    row = bit_length(tl.load(state + _ROW_TOP).to(tl.int32)) * used
    column = bit_length(tl.load(state + _COLUMN_TOP).to(tl.int32)) * used
    return rank, bits, row, column
