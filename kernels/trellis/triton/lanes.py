"""Encodes the lanes of the `trellis` codec on a GPU: `kernels.trellis.lanes.encode` in Triton, the same
words.

A group of lanes is a warp, and a lane a thread: states, costs and places in the trellis stay in registers,
decisions take four bits per element, and a vote of the warp determines which lane takes which word of a step.
Nothing waits for the host. A lane's steps are a long chain in which each instruction counts. Eight warps per
program confine it to a few of the GPU's multiprocessors and leave the others to the stage's compute.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels.common.random_bits import signed
from kernels.common.triton.numbers import in_record, lacks_functions
from kernels.trellis.code import (
    ESCAPE_BIAS,
    ESCAPE_PIECE,
    FRACTION_BITS,
    LOW,
    PIECE,
    STATE_BITS,
)
from kernels.trellis.grid import Grid
from kernels.trellis.tables import CLASSES, ESCAPE, MIDDLE, PRECISION, ROW, SHIFT_AT, TOTAL, divided_codes
from kernels.trellis.triton import state as at
from kernels.trellis.triton.dither import dither

LANES = tl.constexpr(32)
# Elements of a lane whose decisions share a word.
AT_ONCE = tl.constexpr(8)
_ONCE = 8
_LOW = tl.constexpr(LOW)
_STATE_BITS = tl.constexpr(STATE_BITS)
_FULL = tl.constexpr(1 << STATE_BITS)
_FRACTION_BITS = tl.constexpr(FRACTION_BITS)
_STEP = tl.constexpr(1 << FRACTION_BITS)
_PERIOD = tl.constexpr(4 << FRACTION_BITS)
_FAR = tl.constexpr(1 << 29)
_SHIFTED = tl.constexpr(CLASSES - 4)
_ESCAPE = tl.constexpr(ESCAPE)
_ESCAPE_PIECE = tl.constexpr(ESCAPE_PIECE)
_ESCAPE_BIAS = tl.constexpr(ESCAPE_BIAS)
_MIDDLE = tl.constexpr(MIDDLE)
_PIECE = tl.constexpr(PIECE)
_SPAN = tl.constexpr(1 << PIECE)
_ESCAPE_SPAN = tl.constexpr(1 << ESCAPE_PIECE)
_PRECISION = tl.constexpr(PRECISION)
_ROW = tl.constexpr(ROW)
_TOTAL = tl.constexpr(TOTAL)
_SHIFT_AT = tl.constexpr(SHIFT_AT)
# A code that changes no state: the whole range of a row.
_NOTHING = tl.constexpr(TOTAL << PRECISION)
# Groups per program, one warp each; no bit depends on it.
TOGETHER, FEW_TOGETHER = 8, 2
_CODES = tl.constexpr(2 * CLASSES * ROW)
_ACTIVE = tl.constexpr(at.ACTIVE)
_OF_FAMILY = tl.constexpr(at.OF_FAMILY)
_TO_SLOT = tl.constexpr(at.TO_SLOT)
_OFFSET = tl.constexpr(at.OFFSET)
_CONTROLS = tl.constexpr(at.CONTROLS)


@triton.jit
def _value(x, gain, place, salt, DITHERED: tl.constexpr):
    """x in 64ths of a step, plus the dither of its place."""
    scaled = x * gain
    if DITHERED:
        scaled = scaled + dither(place, salt) * 64.0
    return tl.floor(scaled + 0.5).to(tl.int32)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def ones(bits):
    """The number of set bits of uint32, int32."""
    if lacks_functions():
        bits -= (bits >> 1) & 0x55555555
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        count = ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)
    else:
        count = libdevice.popc(bits.to(tl.int32))
    return count


@triton.jit
def ballot(some, lane):
    """The `some` lanes of each group, one bit each: uint32 `[1, GROUPS]`."""
    bit = tl.full(some.shape, 1, tl.uint32) << lane.to(tl.uint32)
    return tl.reduce(tl.where(some, bit, 0), 0, _either)[None, :]


@triton.jit
def _make_room(state, full, lane, words, used, capacity):
    """Bring states below `full`, uint32, by writing out the lower half of those that are not.

    Words fill their room from its end, so that words of earlier lanes precede those of later ones.
    """
    spill = state >= full
    spilling = ballot(spill, lane)
    # The lane itself and later ones.
    after = ones(spilling >> lane.to(tl.uint32))
    tl.store(words + (capacity - used - after), state.to(tl.int16), mask=spill)
    return tl.where(spill, state >> 16, state), used + ones(spilling)


@triton.jit
def _put_bits(state, wide, bits, lane, words, used, capacity):
    """Push the `wide` bits of `bits` onto the states. Zero bits take no room and change nothing."""
    full = tl.full(wide.shape, _FULL, tl.uint32) >> wide.to(tl.uint32)
    state, used = _make_room(state, full, lane, words, used, capacity)
    return (state << wide.to(tl.uint32)) | bits.to(tl.uint32), used


@triton.jit
def _put_symbol(state, code, inverse, lane, words, used, capacity):
    """Push the symbols whose entries in `trellis_tables.divided_codes` have these halves. `_NOTHING` changes
    nothing."""
    frequency = (code >> _PRECISION) & (2 * _TOTAL - 1)
    full = frequency.to(tl.uint32) << (_STATE_BITS - _PRECISION)
    state, used = _make_room(state, full, lane, words, used, capacity)
    # A division would take longer than the rest of a state's step.
    share = (state.to(tl.uint64) * inverse.to(tl.uint64)) >> (code >> _SHIFT_AT).to(tl.uint64)
    grown = (code & (_TOTAL - 1)) + share.to(tl.int32) * (_TOTAL - frequency)
    return state + grown.to(tl.uint32), used


@triton.jit
def _choose(
    residual,
    numbers,
    place,
    real,
    gain,
    start,
    salt,
    decided,
    following,
    current,
    DITHERED: tl.constexpr,
):
    """The n of the elements at `place`, their classes' shifts and rows, and one step back on their paths by
    `decided`."""
    v = _value(tl.load(residual + place, mask=real, other=0.0), gain, start + place, salt, DITHERED)
    number = tl.load(numbers + place, mask=real, other=0).to(tl.int32)
    before = (decided >> (2 * current + following)) & 1
    residue = 2 * (before ^ following) + current
    n = (((v - residue * _STEP + _PERIOD // 2) >> (_FRACTION_BITS + 2)) << 2) + residue
    following = tl.where(real, current, following)
    current = tl.where(real, before, current)
    shift = tl.maximum((number - _SHIFTED) >> 2, 0)
    row = (2 * (number - 4 * shift) + (n & 1)) * _ROW
    return n, shift, row, following, current


@triton.jit(
    do_not_specialize=(
        "elements",
        "groups",
        "group_elements",
        "lanes",
        "chunks",
        "capacity",
        "salt",
        "record",
    )
)
def _encode(
    residual,
    numbers,
    codes,
    decisions,
    states,
    counts,
    words,
    control,
    gains,
    elements,
    groups,
    group_elements,
    lanes,
    chunks,
    capacity,
    salt,
    record,
    GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
    DITHERED: tl.constexpr,
    MANY: tl.constexpr,
):
    """Encode `GROUPS` groups of the elements that `control` (of the second program number) selects, if any.

    `WIDE` is set if there are 32 lanes. `MANY` is as in `kernels.trellis.triton.scales.largest`.
    """
    if WIDE:
        lanes = 32
    if MANY:
        number = tl.program_id(2).to(tl.int64)
        residual = in_record(residual, number, record)
        numbers = in_record(numbers, number, record)
        decisions = in_record(decisions, number, record)
        states = in_record(states, number, record)
        counts = in_record(counts, number, record)
        words = in_record(words, number, record)
        control = in_record(control, number, record)
        gains = in_record(gains, number, record)
    control += tl.program_id(1) * _CONTROLS
    if tl.load(control + _ACTIVE) == 0:
        return
    gain = tl.load(gains).to(tl.float32)
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)[None, :]
    lane = tl.arange(0, LANES)[:, None]
    known = (group < groups) & (lane < lanes)
    slot = tl.load(control + _TO_SLOT) * groups + group
    start = group * group_elements
    # Negative after the last group.
    size = tl.minimum(elements - start, group_elements).to(tl.int32)
    size = tl.where(lane < lanes, size, 0)
    residual += tl.load(control + _OFFSET) + start
    numbers += start
    codes += tl.load(control + _OF_FAMILY) * _CODES
    decisions += (tl.program_id(1) * groups.to(tl.int64) + group) * chunks * LANES
    states += slot * lanes
    counts += slot
    words += slot * capacity
    # Costs of the best paths to a quantizer after another (the second digit).
    b00 = tl.zeros((LANES, GROUPS), tl.int32)
    b01 = b00 + _FAR
    b10 = b00 + _FAR
    b11 = b00 + _FAR
    # Triton's interpreter knows no `range` of an argument.
    chunk = 0
    while chunk < chunks:
        made = tl.zeros((LANES, GROUPS), tl.int32)
        for j in tl.static_range(AT_ONCE):
            place = (chunk * AT_ONCE + j) * lanes + lane
            real = place < size
            v = _value(tl.load(residual + place, mask=real, other=0.0), gain, start + place, salt, DITHERED)
            d0 = tl.abs(((v + _PERIOD // 2) & (_PERIOD - 1)) - _PERIOD // 2)
            d1 = tl.abs(((v + _STEP) & (_PERIOD - 1)) - _PERIOD // 2)
            e0 = _PERIOD // 2 - d0
            e1 = _PERIOD // 2 - d1
            d0 *= d0
            d1 *= d1
            e0 *= e0
            e1 *= e1
            x00 = b00 + d0
            y00 = b01 + e0
            x01 = b00 + e0
            y01 = b01 + d0
            x10 = b10 + d1
            y10 = b11 + e1
            x11 = b10 + e1
            y11 = b11 + d1
            b00 = tl.where(real, tl.minimum(x00, y00), b00)
            b01 = tl.where(real, tl.minimum(x10, y10), b01)
            b10 = tl.where(real, tl.minimum(x01, y01), b10)
            b11 = tl.where(real, tl.minimum(x11, y11), b11)
            bits = (y00 < x00).to(tl.int32) | ((y01 < x01).to(tl.int32) << 1)
            bits |= ((y10 < x10).to(tl.int32) << 2) | ((y11 < x11).to(tl.int32) << 3)
            made |= bits << (4 * j)
        tl.store(decisions + chunk * LANES + lane, made, mask=known)
        chunk += 1
    least = b00
    end = tl.zeros((LANES, GROUPS), tl.int32)
    end = tl.where(b01 < least, 1, end)
    least = tl.minimum(least, b01)
    end = tl.where(b10 < least, 2, end)
    least = tl.minimum(least, b10)
    end = tl.where(b11 < least, 3, end)
    following = end >> 1
    current = end & 1
    state = tl.full((LANES, GROUPS), _LOW, tl.uint32)
    used = tl.zeros((1, GROUPS), tl.int32)
    while chunk > 0:
        chunk -= 1
        made = tl.load(decisions + chunk * LANES + lane, mask=known, other=0)
        began = following, current
        # The path does not depend on states, so all codes of a chunk are loaded before the first is pushed.
        found: "tuple[Any, ...]" = ()  # noqa: UP037 Triton would look the name up
        rare = tl.zeros((LANES, GROUPS), tl.int1)
        for i in tl.static_range(AT_ONCE):
            j = AT_ONCE - 1 - i
            place = (chunk * AT_ONCE + j) * lanes + lane
            real = place < size
            n, shift, row, following, current = _choose(
                residual,
                numbers,
                place,
                real,
                gain,
                start,
                salt,
                made >> (4 * j),
                following,
                current,
                DITHERED,
            )
            index = n >> 1
            symbol = (index >> shift) + _MIDDLE
            # Values without a symbol map to one that no row has; as unsigned numbers, so do negative ones.
            symbol = tl.where(symbol.to(tl.uint32) < _ESCAPE, symbol, _ROW - 1)
            entry = tl.load(codes + row + symbol)
            code = entry.to(tl.int32)
            rare |= real & ((code == 0) | (shift > _PIECE))
            low = index - ((index >> shift) << shift)
            found += ((tl.where(real, code, _NOTHING), (entry >> 32).to(tl.uint32), shift, low),)
        if tl.max(tl.max(rare.to(tl.int32), 1), 0) > 0:
            following, current = began
            for i in tl.static_range(AT_ONCE):
                j = AT_ONCE - 1 - i
                place = (chunk * AT_ONCE + j) * lanes + lane
                real = place < size
                n, shift, row, following, current = _choose(
                    residual,
                    numbers,
                    place,
                    real,
                    gain,
                    start,
                    salt,
                    made >> (4 * j),
                    following,
                    current,
                    DITHERED,
                )
                code, inverse, _, low = found[i]
                escaped = code == 0
                entry = tl.load(codes + row + _ESCAPE)
                code = tl.where(escaped, entry.to(tl.int32), code)
                inverse = tl.where(escaped, (entry >> 32).to(tl.uint32), inverse)
                raw = n + _ESCAPE_BIAS
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.maximum(shift - _PIECE, 0))
                bits = tl.where(escaped, raw >> _ESCAPE_PIECE, low >> _PIECE)
                state, used = _put_bits(state, wide, bits, lane, words, used, capacity)
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.minimum(shift, _PIECE))
                bits = tl.where(escaped, raw & (_ESCAPE_SPAN - 1), low & (_SPAN - 1))
                state, used = _put_bits(state, wide, bits, lane, words, used, capacity)
                state, used = _put_symbol(state, code, inverse, lane, words, used, capacity)
        else:
            for i in tl.static_range(AT_ONCE):
                code, inverse, shift, low = found[i]
                state, used = _put_bits(state, shift, low, lane, words, used, capacity)
                state, used = _put_symbol(state, code, inverse, lane, words, used, capacity)
    tl.store(states + lane, state.to(tl.int32), mask=known)
    tl.store(counts, used, mask=group < groups)


def chunks(where: Grid) -> int:
    return -(-where.steps // _ONCE)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Buffers for `slots` encodings of a grid. `at_once` encodings are computed together."""

    where: Grid
    at_once: int
    decisions: torch.Tensor  # int32
    states: torch.Tensor  # int32, slots x groups x lanes
    counts: torch.Tensor  # int32, slots x groups
    words: torch.Tensor  # int16, slots x groups x capacity

    @staticmethod
    def sizes(where: Grid, *, slots: int, at_once: int) -> dict[str, tuple[torch.dtype, int]]:
        """The dtype and number of elements of each buffer, by name, in the order of the fields."""
        return {
            "decisions": (torch.int32, at_once * where.groups * chunks(where) * LANES.value),
            "states": (torch.int32, slots * where.groups * where.lanes),
            "counts": (torch.int32, slots * where.groups),
            "words": (torch.int16, slots * where.groups * where.capacity),
        }

    def encode(
        self,
        residual: torch.Tensor,
        classes: torch.Tensor,
        control: torch.Tensor,
        gains: torch.Tensor,
        *,
        salt: int | None = None,
        first_family: int = 0,
        many: tuple[int, int] | None = None,
    ) -> None:
        """Encode `residual` as `control` says (`kernels.trellis.triton.state`, int64 `[at_once * CONTROLS]`),
        elements times `gains` (fp64 of an fp32 number), with the salt's dither if there is one.

        Families in `control` count from `first_family`.

        Args:
            many: the number and size of records, if all of these buffers are in records.
        """
        of = self.where
        # A row of many has few groups, and there are enough programs.
        together = TOGETHER if many is None else FEW_TOGETHER
        sizes = of.elements, of.groups, of.group_elements, of.lanes, chunks(of), of.capacity
        count, record = (1, 0) if many is None else many
        _encode[(triton.cdiv(of.groups, together), self.at_once, count)](
            residual,
            classes,
            divided_codes(residual.device)[first_family * _CODES.value :],
            self.decisions,
            self.states,
            self.counts,
            self.words,
            control,
            gains,
            *sizes,
            signed(salt or 0),
            record,
            GROUPS=together,
            WIDE=of.lanes == LANES.value,
            DITHERED=salt is not None,
            MANY=many is not None,
            num_warps=together,
            enable_fp_fusion=False,
        )
