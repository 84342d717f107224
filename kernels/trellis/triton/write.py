"""Writes the payload of a `trellis` tensor on a GPU; `wire.codecs.trellis_payload` defines the layout.

The offsets of sections depend on the tensor, so kernels read them; the number of programs does not. The
payload must hold zeros before.
"""

import triton
import triton.language as tl

from kernels.common.triton.numbers import in_record
from kernels.trellis.triton import state as at
from kernels.trellis.triton.costs import (
    CLASS_OF_MEAN,
    bounds,
    class_bits,
    model_widths,
    side_bytes,
    sixteenths,
)
from kernels.trellis.triton.fit import prediction_exponent
from kernels.trellis.triton.scales import BINS
from kernels.trellis.triton.spaces import RANK, column_exponents, row_exponents

_MAX_CLASS = tl.constexpr(103)
_PREFIX_BYTES = tl.constexpr(32)
_CODED = tl.constexpr(1)
_MULTIPLIER_BITS = tl.constexpr(8)
_SECTIONS = tl.constexpr(at.SECTIONS)
_ROW_CLASSES = tl.constexpr(at.ROW_CLASSES)
_COLUMN_CLASSES = tl.constexpr(at.COLUMN_CLASSES)
_ROW_EXPONENTS = tl.constexpr(at.ROW_EXPONENTS)
_COLUMN_EXPONENTS = tl.constexpr(at.COLUMN_EXPONENTS)
_MULTIPLIERS = tl.constexpr(at.MULTIPLIERS)
_ROW_FACTORS = tl.constexpr(at.ROW_FACTORS)
_USED = tl.constexpr(at.USED)
_BY_ROW = tl.constexpr(at.BY_ROW)
_SHARED_SCALE = tl.constexpr(at.SHARED_SCALE)
_KIND = tl.constexpr(at.KIND)
_CODE = tl.constexpr(at.CODE)
_FOUND = tl.constexpr(at.FOUND)
_BEST = tl.constexpr(at.BEST)
_BEST_CODE = tl.constexpr(at.BEST_CODE)
_BEST_WORDS = tl.constexpr(at.BEST_WORDS)
_FAMILY = tl.constexpr(at.FAMILY)
_ROW_LEAST = tl.constexpr(at.ROW_LEAST)
_COLUMN_LEAST = tl.constexpr(at.COLUMN_LEAST)
_ACTIVE = tl.constexpr(at.ACTIVE)


@triton.jit
def _row_scale(row_scales, row, inside, state, rows, low):
    """Scales of the model's rows, raised to at least `low`."""
    offset = tl.load(state + _USED) * rows
    scale = tl.load(row_scales + offset + row, mask=inside, other=0)
    scale = tl.where(tl.load(state + _BY_ROW) != 0, scale, tl.load(state + _SHARED_SCALE).to(tl.int32))
    return tl.maximum(scale, low)


@triton.jit(do_not_specialize=("count", "rows", "every", "column_slot", "record"))
def classes(
    field,
    row_scales,
    column_scales,
    state,
    control,
    count_bits,
    values,
    numbers,
    count,
    rows,
    columns,
    every,
    column_slot,
    record,
    SOME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """The class of every element, uint8, for the tried step, in `count` rows (every `every`-th row); with
    `SOME`, also copies the elements of these rows. A program has `ROWS` x `BLOCK` elements."""
    if MANY:
        number = tl.program_id(2).to(tl.int64)
        field = in_record(field, number, record)
        row_scales = in_record(row_scales, number, record)
        column_scales = in_record(column_scales, number, record)
        state = in_record(state, number, record)
        control = in_record(control, number, record)
        values = in_record(values, number, record)
        numbers = in_record(numbers, number, record)
    if tl.load(control + _ACTIVE) == 0:
        return
    low = tl.load(state + _ROW_LEAST).to(tl.int32)
    left = tl.load(state + _COLUMN_LEAST).to(tl.int32)
    code = tl.load(state + _CODE).to(tl.int32)
    offset = CLASS_OF_MEAN - sixteenths(code, count_bits) + 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_rows, in_columns = row < count, column < columns
    of_row = (_row_scale(row_scales, row * every, in_rows, state, rows, low) + offset) >> 2
    if not MANY:
        column_scales += column_slot.to(tl.int64) * columns
    scale = tl.load(column_scales + column, mask=in_columns, other=0)
    each = of_row[:, None] + ((tl.maximum(scale, left) + 2) >> 2)[None, :]
    each = tl.minimum(tl.maximum(each, 0), _MAX_CLASS)
    inside = in_rows[:, None] & in_columns[None, :]
    place = row[:, None] * columns + column[None, :]
    tl.store(numbers + place, each.to(tl.uint8), mask=inside)
    if SOME:
        field += tl.load(state + _USED) * rows * columns
        x = tl.load(field + (row * every)[:, None] * columns + column[None, :], mask=inside, other=0.0)
        tl.store(values + place, x, mask=inside)


@triton.jit
def _halfword(payload, place, value):
    tl.store(payload.to(tl.pointer_type(tl.int16)) + place, value.to(tl.int16))


@triton.jit(
    do_not_specialize=(
        "rows",
        "columns",
        "plain",
        "row_slot",
        "column_slot",
        "groups",
        "lanes",
        "record",
        "packed",
    )
)
def finish(
    row_bins,
    column_bins,
    count_bits,
    plans,
    fine,
    state,
    counts,
    payload,
    sections,
    starts,
    rows,
    columns,
    plain,
    row_slot,
    column_slot,
    groups,
    lanes,
    record,
    packed,
    PREDICTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the prefix; compute each section's offset, bits per value and bias (int64 `[SECTIONS + 1, 3]`),
    and the offsets of the groups' words."""
    if MANY:
        number = tl.program_id(0).to(tl.int64)
        row_bins = in_record(row_bins, number, record)
        column_bins = in_record(column_bins, number, record)
        state = in_record(state, number, record)
        counts = in_record(counts, number, record)
        sections = in_record(sections, number, record)
        starts = in_record(starts, number, record)
        payload = in_record(payload, number, packed)
    if tl.load(state + _FOUND) == 0:
        return
    code = tl.load(state + _BEST_CODE).to(tl.int32)
    low, high = bounds(row_bins + row_slot * BINS)
    left, right = bounds(column_bins + column_slot * BINS)
    row_bits, column_bits = class_bits(code, low, high, left, right, count_bits)
    rank, factor_bits, row_exponent, column_exponent = model_widths(state, plans, plain)
    offset = CLASS_OF_MEAN - sixteenths(code, count_bits) + 2
    row_base, column_base = (low + offset) >> 2, (left + 2) >> 2
    limit = (1 << tl.maximum(factor_bits - 1, 0)) - 1
    start = (rows * 0).to(tl.int64) + _PREFIX_BYTES
    for section in tl.static_range(_SECTIONS):
        base = rows * 0
        if section == _ROW_CLASSES:
            bits, count, base = row_bits, rows, row_base
        elif section == _COLUMN_CLASSES:
            bits, count, base = column_bits, columns, column_base
        elif section == _ROW_EXPONENTS:
            bits, count = row_exponent, rows
        elif section == _COLUMN_EXPONENTS:
            bits, count = column_exponent, columns
        elif section == _MULTIPLIERS:
            bits, count = rows * 0 + _MULTIPLIER_BITS, rank
        elif section == _ROW_FACTORS:
            bits, count, base = factor_bits, rows * rank, -limit
        else:
            bits, count, base = factor_bits, columns * rank, -limit
        tl.store(sections + 3 * section, start)
        tl.store(sections + 3 * section + 1, bits.to(tl.int64))
        tl.store(sections + 3 * section + 2, base.to(tl.int64))
        start += (count.to(tl.int64) * bits + 7) >> 3
    side = side_bytes(rows, columns, row_bits, column_bits, rank, factor_bits, row_exponent, column_exponent)
    tl.store(sections + 3 * _SECTIONS, side)
    used = side + groups.to(tl.int64) * (4 + 4 * lanes) + 2 * tl.load(state + _BEST_WORDS)
    _halfword(payload, 0, (tl.load(state + _FAMILY) << 8) + _CODED)
    _halfword(payload, 1, code)
    _halfword(payload, 2, row_base)
    _halfword(payload, 3, column_base)
    _halfword(payload, 4, row_bits + (column_bits << 8))
    _halfword(payload, 5, rank + (factor_bits << 8))
    _halfword(payload, 6, row_exponent + (column_exponent << 8))
    if PREDICTS:
        kind = tl.load(state + _KIND)
        exponent = prediction_exponent(state, fine + kind)
        _halfword(payload, 7, exponent * tl.load(state + _USED).to(tl.int32))
    _halfword(payload, 8, used & 0xFFFF)
    _halfword(payload, 9, used >> 16)
    counts += tl.load(state + _BEST) * groups
    before = (groups * 0).to(tl.int64)
    first = 0
    while first < groups:
        group = first + tl.arange(0, BLOCK)
        words = tl.load(counts + group, mask=group < groups, other=0).to(tl.int64)
        tl.store(starts + group, before + tl.cumsum(words, 0) - words, mask=group < groups)
        before += tl.sum(words, 0)
        first += BLOCK


@triton.jit(do_not_specialize=("rows", "columns", "plain", "row_slot", "column_slot", "record", "packed"))
def write_sections(
    row_scales,
    column_scales,
    row_bins,
    column_bins,
    count_bits,
    plans,
    directions,
    multiplier,
    row_factors,
    state,
    sections,
    payload,
    rows,
    columns,
    plain,
    row_slot,
    column_slot,
    record,
    packed,
    PREDICTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the sections before the groups; a program has eight times `BLOCK` integers of a section."""
    if MANY:
        number = tl.program_id(2).to(tl.int64)
        row_scales = in_record(row_scales, number, record)
        column_scales = in_record(column_scales, number, record)
        row_bins = in_record(row_bins, number, record)
        column_bins = in_record(column_bins, number, record)
        state = in_record(state, number, record)
        sections = in_record(sections, number, record)
        payload = in_record(payload, number, packed)
    if tl.load(state + _FOUND) == 0:
        return
    section = tl.program_id(1)
    octet = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
    bits = tl.load(sections + 3 * section + 1)
    base = tl.load(sections + 3 * section + 2).to(tl.int32)
    rank, _, _, _ = model_widths(state, plans, plain)
    kind = tl.load(state + _KIND)
    value = (i * 0).to(tl.int32)
    if section == _ROW_CLASSES:
        size = rows.to(tl.int64)
        low, _ = bounds(row_bins + row_slot * BINS)
        offset = CLASS_OF_MEAN - sixteenths(tl.load(state + _BEST_CODE).to(tl.int32), count_bits) + 2
        value = (_row_scale(row_scales, i, i < size, state, rows, low) + offset) >> 2
    elif section == _COLUMN_CLASSES:
        size = columns.to(tl.int64)
        left, _ = bounds(column_bins + column_slot * BINS)
        place = i
        if not MANY:
            place += column_slot.to(tl.int64) * columns
        scale = tl.load(column_scales + place, mask=i < size, other=0)
        value = (tl.maximum(scale, left) + 2) >> 2
    elif PREDICTS:
        # A prediction's exponents come from the scales of the matrix, not of the residual.
        size = tl.where(rank > 0, rows, 0).to(tl.int64)
        if section == _ROW_EXPONENTS:
            value = row_exponents(tl.load(row_scales + i, mask=i < size, other=0), state)
        elif section == _COLUMN_EXPONENTS:
            size = tl.where(rank > 0, columns, 0).to(tl.int64)
            value = column_exponents(tl.load(column_scales + i, mask=i < size, other=0), state)
        elif section == _MULTIPLIERS:
            size = rank.to(tl.int64)
            value = tl.load(multiplier + kind * RANK + i, mask=i < size, other=0)
        elif section == _ROW_FACTORS:
            size = rows.to(tl.int64) * rank
            whole = i // tl.maximum(rank, 1)
            place = whole * RANK + (i - whole * rank)
            value = tl.load(row_factors + place, mask=i < size, other=0).to(tl.int32)
        else:
            size = columns.to(tl.int64) * rank
            whole = i // tl.maximum(rank, 1)
            place = (kind * RANK + i - whole * rank) * columns + whole
            value = tl.load(directions + place, mask=i < size, other=0.0).to(tl.int32)
    else:
        size = (rows * 0).to(tl.int64)
    nbytes = (size * bits + 7) >> 3
    value = tl.where(i < size, value - base, 0).to(tl.int64)
    place = tl.arange(0, 8)[None, :]
    word = tl.sum(value << (place * bits), 1)
    at_byte = octet[:, None] * bits + place
    byte = (word[:, None] >> (8 * place)) & 255
    start = tl.load(sections + 3 * section)
    tl.store(payload + start + at_byte, byte.to(tl.uint8), mask=(place < bits) & (at_byte < nbytes))


@triton.jit(do_not_specialize=("groups", "lanes", "capacity", "record", "packed"))
def write_groups(
    counts,
    states,
    words,
    starts,
    state,
    sections,
    payload,
    groups,
    lanes,
    capacity,
    record,
    packed,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write a group's count and states, and its words after those of the earlier groups; several programs per
    group."""
    if MANY:
        number = tl.program_id(2).to(tl.int64)
        counts = in_record(counts, number, record)
        states = in_record(states, number, record)
        words = in_record(words, number, record)
        starts = in_record(starts, number, record)
        state = in_record(state, number, record)
        sections = in_record(sections, number, record)
        payload = in_record(payload, number, packed)
    if tl.load(state + _FOUND) == 0:
        return
    group = tl.program_id(0).to(tl.int64)
    slot = tl.load(state + _BEST) * groups + group
    start = tl.load(sections + 3 * _SECTIONS)
    count = tl.load(counts + slot)
    if tl.program_id(1) == 0:
        words32 = (payload + start).to(tl.pointer_type(tl.int32))
        tl.store(words32 + group, count)
        lane = tl.arange(0, LANES)
        state_of = tl.load(states + slot * lanes + lane, mask=lane < lanes)
        tl.store(words32 + groups + group * lanes + lane, state_of, mask=lane < lanes)
    words += slot * capacity + capacity - count
    out = (payload + start + groups.to(tl.int64) * (4 + 4 * lanes)).to(tl.pointer_type(tl.int16))
    out += tl.load(starts + group)
    first = tl.program_id(1) * BLOCK
    while first < count:
        place = first + tl.arange(0, BLOCK)
        word = tl.load(words + place, mask=place < count, other=0)
        tl.store(out + place, word, mask=place < count)
        first += tl.num_programs(1) * BLOCK
