"""Decodes the lanes of the `trellis` codec on a GPU: `kernels.trellis.lanes.decode` in Triton, the inverse of
`kernels.trellis.triton.lanes`.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.random_bits import signed
from kernels.common.triton.numbers import RECORD, in_record
from kernels.trellis.code import ESCAPE_BIAS, ESCAPE_PIECE, LOW, PIECE
from kernels.trellis.grid import Grid
from kernels.trellis.tables import (
    CLASSES,
    ESCAPE,
    FAMILIES,
    MIDDLE,
    PRECISION,
    ROW,
    TOTAL,
    codes_on,
    symbols_on,
)
from kernels.trellis.triton.lanes import AT_ONCE, FEW_TOGETHER, LANES, ballot, chunks, ones
from kernels.trellis.triton.restore import restore_rows

_LOW = tl.constexpr(LOW)
_SHIFTED = tl.constexpr(CLASSES - 4)
_ESCAPE = tl.constexpr(ESCAPE)
_ESCAPE_PIECE = tl.constexpr(ESCAPE_PIECE)
_ESCAPE_BIAS = tl.constexpr(ESCAPE_BIAS)
_MIDDLE = tl.constexpr(MIDDLE)
_PIECE = tl.constexpr(PIECE)
_PRECISION = tl.constexpr(PRECISION)
_ROW = tl.constexpr(ROW)
_TOTAL = tl.constexpr(TOTAL)
_CLASSES = tl.constexpr(CLASSES)
TOLD = 4
"""How many numbers `decode_many` needs for each tensor."""
_TOLD = tl.constexpr(TOLD)
# Groups per program, one warp each; no bit depends on it. Fewer than for encoding, because lanes wait for
# tables.
TOGETHER = 4
_BLOCK = 1024


@triton.jit
def _take(state, some, lane, words, position, end):
    """Take a word for each of the `some` lanes whose state is below 2**15; none after `end`."""
    taking = some & (state < _LOW)
    asking = ballot(taking, lane)
    before = (tl.full(taking.shape, 1, tl.uint32) << lane.to(tl.uint32)) - 1
    place = position + ones(asking & before)
    word = tl.load(words + place, mask=taking & (place < end), other=0).to(tl.int32) & 0xFFFF
    return tl.where(taking, (state << 16) | word, state), position + ones(asking)


@triton.jit
def _take_symbol(state, row, some, symbols, codes, lane, words, position, end):
    # Two small tables, of each slot's symbol and its start, stay nearer in the caches than one of both.
    slot = state & (_TOTAL - 1)
    symbol = tl.load(symbols + row * _TOTAL + slot).to(tl.int32)
    code = tl.load(codes + row * _ROW + symbol)
    shrunk = (code >> _PRECISION) * (state >> _PRECISION) + slot - (code & (_TOTAL - 1))
    state, position = _take(tl.where(some, shrunk, state), some, lane, words, position, end)
    return state, position, symbol


@triton.jit
def _take_bits(state, wide, some, lane, words, position, end):
    """Take the lowest `wide` bits from the states of the `some` lanes."""
    has = some & (wide > 0)
    bits = state - ((state >> wide) << wide)
    state, position = _take(tl.where(has, state >> wide, state), has, lane, words, position, end)
    return state, position, bits


@triton.jit(do_not_specialize=("elements", "groups", "group_elements", "lanes", "chunks", "total", "record"))
def _decode(
    numbers,
    symbols,
    codes,
    states,
    counts,
    starts,
    words,
    out,
    whole,
    elements,
    groups,
    group_elements,
    lanes,
    chunks,
    total,
    record,
    GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
):
    """With `MANY`, of a tensor of one class by itself, number `program_id(1)`: `numbers` has for each its
    class, family, code of the step, and exponent, int64."""
    # Known at compile time.
    if WIDE:
        lanes = 32
    if MANY:
        tensor = tl.program_id(1).to(tl.int64)
        numbers += tensor * _TOLD
        family = tl.load(numbers + 1)
        symbols += family * (2 * _CLASSES * _TOTAL)
        codes += family * (2 * _CLASSES * _ROW)
        states = in_record(states, tensor, record)
        words = in_record(words, tensor, record)
        counts += tensor * groups
        starts += tensor * groups
        whole += tensor * groups
        out += tensor * elements
        only = tl.load(numbers).to(tl.int32)
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)[None, :]
    lane = tl.arange(0, LANES)[:, None]
    is_group = group < groups
    start = group * group_elements
    # Negative after the last group.
    size = tl.minimum(elements - start, group_elements).to(tl.int32)
    size = tl.where(lane < lanes, size, 0)
    if not MANY:
        numbers += start
    out += start
    # No counts can cause reads outside the words.
    first = tl.minimum(tl.maximum(tl.load(starts + group, mask=is_group, other=0), 0), total)
    end = tl.minimum(tl.load(counts + group, mask=is_group, other=0), total - first).to(tl.int32)
    words += first
    state = tl.load(states + group * lanes + lane, mask=is_group & (lane < lanes), other=_LOW)
    current = tl.zeros((LANES, GROUPS), tl.int32)
    before = tl.zeros((LANES, GROUPS), tl.int32)
    position = tl.zeros((1, GROUPS), tl.int32)
    chunk = 0
    while chunk < chunks:
        classes: "tuple[Any, ...]" = ()  # noqa: UP037 Triton would look the name up
        for j in tl.static_range(AT_ONCE):
            place = (chunk * AT_ONCE + j) * lanes + lane
            real = place < size
            if MANY:
                number = tl.zeros((LANES, GROUPS), tl.int32) + only
            else:
                number = tl.load(numbers + place, mask=real, other=0).to(tl.int32)
            classes += ((number, real, place),)
        # Assume no escapes and no wide classes; if that is wrong, which is rare, decode the chunk again.
        began = state, current, before, position
        rare = tl.zeros((LANES, GROUPS), tl.int1)
        for j in tl.static_range(AT_ONCE):
            number, real, place = classes[j]
            shift = tl.maximum((number - _SHIFTED) >> 2, 0)
            row = 2 * (number - 4 * shift) + current
            state, position, symbol = _take_symbol(
                state, row, real, symbols, codes, lane, words, position, end
            )
            rare |= real & ((symbol == _ESCAPE) | (shift > _PIECE))
            state, position, low = _take_bits(
                state, tl.minimum(shift, _PIECE), real, lane, words, position, end
            )
            index = ((symbol - _MIDDLE) << shift) + low
            tl.store(out + place, 2 * index + current, mask=real)
            following = (index & 1) ^ before
            before = tl.where(real, current, before)
            current = tl.where(real, following, current)
        if tl.max(tl.max(rare.to(tl.int32), 1), 0) > 0:
            state, current, before, position = began
            for j in tl.static_range(AT_ONCE):
                number, real, place = classes[j]
                shift = tl.maximum((number - _SHIFTED) >> 2, 0)
                row = 2 * (number - 4 * shift) + current
                state, position, symbol = _take_symbol(
                    state, row, real, symbols, codes, lane, words, position, end
                )
                escaped = symbol == _ESCAPE
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.minimum(shift, _PIECE))
                state, position, low = _take_bits(state, wide, real, lane, words, position, end)
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.maximum(shift - _PIECE, 0))
                state, position, high = _take_bits(state, wide, real, lane, words, position, end)
                low |= high << tl.where(escaped, _ESCAPE_PIECE, _PIECE)
                # An escaped n belongs to its quantizer, unless it is forged.
                whole_index = ((symbol - _MIDDLE) << shift) + low
                index = tl.where(escaped, (low - _ESCAPE_BIAS) >> 1, whole_index)
                n = tl.where(escaped, low - _ESCAPE_BIAS, 2 * index + current)
                tl.store(out + place, n, mask=real)
                following = (index & 1) ^ before
                before = tl.where(real, current, before)
                current = tl.where(real, following, current)
        chunk += 1
    wrong = tl.sum((state != _LOW).to(tl.int32), 0)[None, :] + (position != end).to(tl.int32)
    tl.store(whole + group, wrong, mask=is_group)


def decode(
    states: torch.Tensor,
    counts: torch.Tensor,
    words: torch.Tensor,
    classes: torch.Tensor,
    where: Grid,
    family: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.trellis.lanes.decode` on the device of `classes`, for any states and counts."""
    device = classes.device
    out = torch.empty(classes.numel(), dtype=torch.int32, device=device)
    wrong = torch.empty(where.groups, dtype=torch.int32, device=device)
    _decode[(triton.cdiv(where.groups, TOGETHER),)](
        classes,
        symbols_on(device, family),
        codes_on(device, family),
        states,
        counts,
        counts.cumsum(0) - counts,
        words,
        out,
        wrong,
        where.elements,
        where.groups,
        where.group_elements,
        where.lanes,
        chunks(where),
        words.numel(),
        0,
        GROUPS=TOGETHER,
        WIDE=where.lanes == LANES.value,
        MANY=False,
        num_warps=TOGETHER,
        enable_fp_fusion=True,
    )
    return out, ~wrong.any()


def decode_many(
    numbers: torch.Tensor,
    counts: torch.Tensor,
    states: torch.Tensor,
    words: torch.Tensor,
    out: torch.Tensor,
    where: Grid,
    *,
    first_family: int,
    record: int,
    total: int,
    salt: int | None = None,
) -> torch.Tensor:
    """Decode tensors `[C]`, each of one class, into the rows of fp32 `[n, C]`, contiguous; n is below 2**16.

    Args:
        numbers: int64 `[n, TOLD]`: class, family (from `first_family` on), code of the step, exponent.
        counts: words of each group, int64 `[n, groups]`.
        states: the first tensor's; each further tensor's begin `record` bytes, a multiple of 128, later.
        words: int16, laid out as `states`; `total` words of each tensor may be read.

    Returns whether each tensor is intact, bool `[n]`. Never waits.
    """
    n = torch.empty(out.shape, dtype=torch.int32, device=out.device)
    wrong = torch.empty(counts.shape, dtype=torch.int32, device=out.device)
    symbols, codes = _tables(out.device, first_family)
    _decode[(triton.cdiv(where.groups, FEW_TOGETHER), len(out))](
        numbers,
        symbols,
        codes,
        states,
        counts,
        counts.cumsum(1) - counts,
        words,
        n,
        wrong,
        where.elements,
        where.groups,
        where.group_elements,
        where.lanes,
        chunks(where),
        total,
        record // RECORD,
        GROUPS=FEW_TOGETHER,
        WIDE=where.lanes == LANES.value,
        MANY=True,
        num_warps=FEW_TOGETHER,
        enable_fp_fusion=True,
    )
    restore_rows[(triton.cdiv(out.shape[1], _BLOCK), len(out))](
        n,
        numbers,
        out,
        out.shape[1],
        signed(salt or 0),
        TOLD=TOLD,
        LIMIT=torch.finfo(out.dtype).max,
        DITHERED=salt is not None,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return (wrong == 0).all(1)


@cache
def _tables(device: torch.device, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symbols and codes of the families from the first on, one after the other."""
    families = range(first, first + FAMILIES)
    return (
        torch.cat([symbols_on(device, family) for family in families]),
        torch.cat([codes_on(device, family) for family in families]),
    )
