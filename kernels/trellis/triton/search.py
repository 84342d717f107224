"""Search in Triton for the smallest step whose code fits the bytes: for each plan, then attempt by attempt.

`wire.codecs.trellis` does the same search with the same numbers, a bisection over step codes in fp64 with one
rounding per operation, so both end at the same step.
"""

import triton
import triton.language as tl

from kernels.common.triton.numbers import in_record
from kernels.trellis.reference import STEP_CODES
from kernels.trellis.triton import state as at
from kernels.trellis.triton.costs import COSTS, bounds, class_bits, cost, model_widths, side_bytes
from kernels.trellis.triton.scales import BINS

_STEP_CODES = tl.constexpr(STEP_CODES)
_ROWS_A_SAMPLE_ROW = tl.constexpr(at.ROWS_A_SAMPLE_ROW)
_BUDGET = tl.constexpr(at.BUDGET)
_LEAST_FREE = tl.constexpr(at.LEAST_FREE)
_PEAK = tl.constexpr(at.PEAK)
_PLAN = tl.constexpr(at.PLAN)
_USED = tl.constexpr(at.USED)
_CODE = tl.constexpr(at.CODE)
_LOW = tl.constexpr(at.LOW)
_HIGH = tl.constexpr(at.HIGH)
_FOUND = tl.constexpr(at.FOUND)
_SLOT = tl.constexpr(at.SLOT)
_BEST = tl.constexpr(at.BEST)
_BEST_CODE = tl.constexpr(at.BEST_CODE)
_BEST_WORDS = tl.constexpr(at.BEST_WORDS)
_FAMILY = tl.constexpr(at.FAMILY)
_ROW_LEAST = tl.constexpr(at.ROW_LEAST)
_COLUMN_LEAST = tl.constexpr(at.COLUMN_LEAST)
_SHARE = tl.constexpr(at.SHARE)
_FREE = tl.constexpr(at.FREE)
_ACTIVE = tl.constexpr(at.ACTIVE)
_OF_FAMILY = tl.constexpr(at.OF_FAMILY)
_TO_SLOT = tl.constexpr(at.TO_SLOT)
_OFFSET = tl.constexpr(at.OFFSET)
_CONTROLS = tl.constexpr(at.CONTROLS)
# The stages of the search that `advance` distinguishes.
START, MEASURED, TRIED, LAST = range(4)
_START = tl.constexpr(START)
_MEASURED = tl.constexpr(MEASURED)
_LAST = tl.constexpr(LAST)


@triton.jit
def _smallest(
    bits,
    share,
    table,
    low,
    high,
    left,
    right,
    rows,
    columns,
    rank,
    factor_bits,
    row_exponent,
    column_exponent,
    group_bits,
    count_bits,
):
    """`wire.codecs.trellis._smallest_step` for several candidates at once: codes, int32."""
    first = tl.zeros_like(rank)
    last = first + (_STEP_CODES - 1)
    # The number of halvings that leave one code.
    for _ in range(16):
        middle = (first + last) >> 1
        row_bits, column_bits = class_bits(middle, low, high, left, right, count_bits)
        side = side_bytes(
            rows, columns, row_bits, column_bits, rank, factor_bits, row_exponent, column_exponent
        )
        fixed = (8 * side + group_bits).to(tl.float64)
        fits = fixed + share * cost(middle, table, count_bits) <= bits
        going = first < last
        last = tl.where(going & fits, middle, last)
        first = tl.where(going & (fits == 0), middle + 1, first)
    return first


@triton.jit(do_not_specialize=("rows", "columns", "plain", "plan_count", "group_bits", "record"))
def best_plan(
    row_bins,
    column_bins,
    table,
    count_bits,
    plans,
    numbers,
    state,
    rows,
    columns,
    plain,
    plan_count,
    group_bits,
    record,
    FAMILIES: tl.constexpr,
    PLANS: tl.constexpr,
    MANY: tl.constexpr,
):
    """The plan that fits with the smallest step; of several, the first."""
    if MANY:
        number = tl.program_id(0).to(tl.int64)
        row_bins = in_record(row_bins, number, record)
        column_bins = in_record(column_bins, number, record)
        table = in_record(table, number, record)
        state = in_record(state, number, record)
    plan = tl.arange(0, PLANS)
    known = plan < plan_count
    low = tl.zeros((PLANS,), tl.int32)
    high, left, right = low, low, low
    for i in tl.static_range(PLANS):
        here = plan == i
        a, b = bounds(row_bins + i * BINS)
        c, d = bounds(column_bins + i * BINS)
        low, high = tl.where(here, a, low), tl.where(here, b, high)
        left, right = tl.where(here, c, left), tl.where(here, d, right)
    rank = tl.load(plans + 4 * plan, mask=known, other=0).to(tl.int32)
    factor_bits = tl.load(plans + 4 * plan + 1, mask=known, other=0).to(tl.int32)
    # Expect exponents to span a few octaves.
    predicts = (rank > 0).to(tl.int32)
    code = _smallest(
        tl.load(numbers + _BUDGET),
        tl.load(numbers + _ROWS_A_SAMPLE_ROW),
        table + tl.where(known, plan, 0) * FAMILIES * COSTS,
        low,
        high,
        left,
        right,
        rows,
        columns,
        rank,
        factor_bits,
        2 * predicts,
        3 * predicts,
        group_bits,
        count_bits,
    )
    code = tl.where(known, code, _STEP_CODES)
    least = tl.min(code, 0)
    tl.store(state + _PLAN, tl.min(tl.where(code == least, plan, PLANS), 0).to(tl.int64))


@triton.jit
def _sum(counts, size, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int64)
    start = 0
    while start < size:
        i = start + tl.arange(0, BLOCK)
        total += tl.load(counts + i, mask=i < size, other=0).to(tl.int64)
        start += BLOCK
    return tl.sum(total, 0)


@triton.jit
def _of(values, place, which):
    """The element of a small vector at index `which`."""
    return tl.sum(tl.where(place == which, values, 0), 0)


@triton.jit
def gain(code):
    """`kernels.trellis.reference.gain`, fp64: an fp32 number."""
    step = (1024 + (code & 1023)).to(tl.float64)
    exponent = ((code >> 10) - 19 + 1023).to(tl.int64) << 52
    step = step * exponent.to(tl.float64, bitcast=True)
    # The operands have so few bits that rounding to fp64 and then to fp32 gives the correctly rounded
    # quotient.
    return (64.0 / step).to(tl.float32).to(tl.float64)


@triton.jit(
    do_not_specialize=(
        "rows",
        "columns",
        "plain",
        "model",
        "row_slot",
        "column_slot",
        "group_bits",
        "groups",
        "lanes",
        "some_groups",
        "some_lanes",
        "size",
        "too_free",
        "attempt",
        "enough",
        "record",
    )
)
def advance(
    row_bins,
    column_bins,
    table,
    count_bits,
    plans,
    numbers,
    state,
    shares,
    control,
    gains,
    some_counts,
    counts,
    rows,
    columns,
    plain,
    model,
    row_slot,
    column_slot,
    group_bits,
    groups,
    lanes,
    some_groups,
    some_lanes,
    size,
    too_free,
    attempt,
    enough,
    record,
    WHAT: tl.constexpr,
    FAMILIES: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """One iteration of `wire.codecs.trellis._measure` and `_fill`: evaluate the last lanes, choose a step.

    `attempt` is the number of the next lanes, from 1 on. `model` is the slot of the model's costs; the next
    slot has those of the measured rows.
    """
    if MANY:
        number = tl.program_id(0).to(tl.int64)
        row_bins = in_record(row_bins, number, record)
        column_bins = in_record(column_bins, number, record)
        table = in_record(table, number, record)
        state = in_record(state, number, record)
        shares = in_record(shares, number, record)
        control = in_record(control, number, record)
        gains = in_record(gains, number, record)
        some_counts = in_record(some_counts, number, record)
        counts = in_record(counts, number, record)
    low, high = bounds(row_bins + row_slot * BINS)
    left, right = bounds(column_bins + column_slot * BINS)
    rank, factor_bits, row_exponent, column_exponent = model_widths(state, plans, plain)
    # When the family is chosen, search each family twice at once: for the choice, and for its first step,
    # which leaves more bytes free.
    lane = tl.arange(0, 2 * FAMILIES if WHAT == _MEASURED else FAMILIES)
    family = lane % FAMILIES
    ranks = lane * 0 + rank
    table += model * FAMILIES * COSTS
    budget = tl.load(numbers + _BUDGET)
    least_free = tl.load(numbers + _LEAST_FREE)
    something = tl.load(state + _PEAK) > 0
    active = something & (tl.load(state + _PEAK) < 0x7F800000)
    if WHAT == _START:
        tl.store(state + _ROW_LEAST, low.to(tl.int64))
        tl.store(state + _COLUMN_LEAST, left.to(tl.int64))
        # Before anything is measured, expect words to take the model's cost.
        free = least_free
        shares_of = lane.to(tl.float64) * 0.0 + 1.0
        tables = table + family * 0
    elif WHAT == _MEASURED:
        code = tl.load(state + _CODE).to(tl.int32)
        words = lane.to(tl.int64) * 0
        for i in tl.static_range(FAMILIES):
            words = tl.where(family == i, _sum(some_counts + i * some_groups, some_groups, BLOCK), words)
        spent = (16 * words + 8 * some_groups * some_lanes).to(tl.float64)
        some = table + (FAMILIES + family) * COSTS
        shares_of = spent / tl.maximum(cost(code + family * 0, some, count_bits), 1.0)
        free = tl.where(lane < FAMILIES, 1.0, 2.0) * least_free
        tables = table + family * COSTS
    else:
        own = tl.load(state + _FAMILY).to(tl.int32)
        shares_of = lane.to(tl.float64) * 0.0 + tl.load(shares + _SHARE)
        free = tl.load(shares + _FREE)
        tables = table + (family * 0 + own) * COSTS
        active = active & (tl.load(control + _ACTIVE) != 0)
        if active:
            code = tl.load(state + _CODE).to(tl.int32)
            slot = tl.load(state + _SLOT)
            words = _sum(counts + slot * groups, groups, BLOCK)
            spent = (16 * words + 8 * groups * lanes).to(tl.float64)
            expected = cost(code, table + own * COSTS, count_bits)
            share = spent / tl.maximum(expected, 1.0)
            row_bits, column_bits = class_bits(code, low, high, left, right, count_bits)
            side = side_bytes(
                rows, columns, row_bits, column_bits, rank, factor_bits, row_exponent, column_exponent
            )
            room = size - side - groups.to(tl.int64) * (4 + 4 * lanes) - 2 * words
            least, most = tl.load(state + _LOW), tl.load(state + _HIGH)
            found = tl.load(state + _FOUND)
            if room >= 0:
                found = found * 0 + 1
                most = code.to(tl.int64)
                free = least_free * 1.5
                tl.store(state + _BEST, slot)
                tl.store(state + _BEST_CODE, most)
                tl.store(state + _BEST_WORDS, words)
                tl.store(state + _SLOT, 1 - slot)
            else:
                # The words' size at a nearby step is known now; leave more free with every attempt.
                least = code.to(tl.int64)
                doubled = ((attempt - 2 + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
                free = least_free * doubled
            tl.store(state + _LOW, least)
            tl.store(state + _HIGH, most)
            tl.store(state + _FOUND, found)
            tl.store(shares + _FREE, free)
            tl.store(shares + _SHARE, share)
            shares_of = lane.to(tl.float64) * 0.0 + share
            well = (room >= 0) & (room <= too_free)
            ended = (found != 0) & (well | (attempt - 1 >= enough))
            active = active & ((ended | (most - least <= 1)) == 0)
        if active == 0:
            tl.store(control + _ACTIVE, 0)
            return
    if WHAT == _LAST:
        return
    codes = _smallest(
        budget * (1.0 - free),
        shares_of,
        tables,
        low,
        high,
        left,
        right,
        rows,
        columns,
        ranks,
        factor_bits,
        row_exponent,
        column_exponent,
        group_bits,
        count_bits,
    )
    offset = tl.load(state + _USED) * rows * columns
    if WHAT == _START:
        for i in tl.static_range(FAMILIES):
            tl.store(control + i * _CONTROLS + _ACTIVE, active.to(tl.int64))
            tl.store(control + i * _CONTROLS + _OF_FAMILY, i)
            tl.store(control + i * _CONTROLS + _TO_SLOT, i)
            tl.store(control + i * _CONTROLS + _OFFSET, 0)
        chosen = _of(codes, lane, 0)
    elif WHAT == _MEASURED:
        fewest = tl.min(tl.where(lane < FAMILIES, codes, _STEP_CODES), 0)
        own = tl.min(tl.where((lane < FAMILIES) & (codes == fewest), family, FAMILIES), 0)
        share = tl.sum(tl.where(lane == own, shares_of, 0.0), 0)
        chosen = tl.minimum(_of(codes, lane, own + FAMILIES), _STEP_CODES - 1)
        tl.store(state + _FAMILY, own.to(tl.int64))
        tl.store(state + _LOW, -1)
        tl.store(state + _HIGH, _STEP_CODES)
        tl.store(state + _FOUND, 0)
        tl.store(state + _SLOT, 0)
        tl.store(shares + _SHARE, share)
        tl.store(shares + _FREE, 2.0 * least_free)
        tl.store(control + _ACTIVE, active.to(tl.int64))
        tl.store(control + _OF_FAMILY, own.to(tl.int64))
        tl.store(control + _TO_SLOT, 0)
        tl.store(control + _OFFSET, offset)
    else:
        chosen = _of(codes, lane, 0)
        low_code, high_code = tl.load(state + _LOW).to(tl.int32), tl.load(state + _HIGH).to(tl.int32)
        chosen = tl.minimum(tl.maximum(chosen, low_code + 1), high_code - 1)
        tl.store(control + _TO_SLOT, tl.load(state + _SLOT))
    tl.store(state + _CODE, chosen.to(tl.int64))
    tl.store(gains, gain(chosen))
