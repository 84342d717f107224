"""The inner loops of the `trellis` codec on a GPU: `kernels.trellis_lanes` in Triton, the same words.

A group of lanes is a program of one warp, a lane a thread: states, costs and the places in a trellis stay in
registers, decisions are kept as four bits an element, and which lane takes which word of a step follows from
a sum over the warp. Nothing waits for another group, and nothing for the host.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import triton_trellis_state as at
from kernels.trellis_code import (
    ESCAPE_BIAS,
    ESCAPE_PIECE,
    FRACTION_BITS,
    LOW,
    PIECE,
    STATE_BITS,
    Coded,
)
from kernels.trellis_grid import Grid
from kernels.trellis_tables import CLASSES, ESCAPE, MIDDLE, PRECISION, ROW, TOTAL, all_codes_on, slots_on

_LANES = tl.constexpr(32)
# Elements of a lane whose decisions share a word.
_AT_ONCE = tl.constexpr(8)
_ONCE = 8
_LOW = tl.constexpr(LOW)
_STATE_BITS = tl.constexpr(STATE_BITS)
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
_JOIN = 1024
_CODES = tl.constexpr(2 * CLASSES * ROW)
_ACTIVE = tl.constexpr(at.ACTIVE)
_OF_FAMILY = tl.constexpr(at.OF_FAMILY)
_TO_SLOT = tl.constexpr(at.TO_SLOT)
_OFFSET = tl.constexpr(at.OFFSET)
_CONTROLS = tl.constexpr(at.CONTROLS)


@triton.jit
def _value(x, gain):
    return tl.floor(x * gain + 0.5).to(tl.int32)


@triton.jit
def _full(wide):
    """What a state must stay below to take `wide` bits more; of no use for 0."""
    one = tl.zeros_like(wide) + 1
    return one << (31 - tl.maximum(wide, 1))


@triton.jit
def _put(state, full, some, words, used, capacity):
    """Make room in the states of `some` lanes that must stay below `full`: a word more, if there must be one.

    Words fill their room from its end, so those of earlier lanes come to lie before those of later ones.
    """
    spill = some & (state >= full)
    count = spill.to(tl.int32)
    # Of a lane and those after it.
    after = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    tl.store(words + (capacity - used - after), (state & 0xFFFF).to(tl.int16), mask=spill)
    return tl.where(spill, state >> 16, state), used + tl.sum(count, 0)


@triton.jit(do_not_specialize=("elements", "groups", "group_elements", "lanes", "chunks", "capacity"))
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
):
    """A group of the elements that `control` (of the second program number) says, if there are any."""
    group = tl.program_id(0).to(tl.int64)
    control += tl.program_id(1) * _CONTROLS
    if tl.load(control + _ACTIVE) == 0:
        return
    gain = tl.load(gains).to(tl.float32)
    slot = tl.load(control + _TO_SLOT) * groups + group
    lane = tl.arange(0, _LANES)
    start = group * group_elements
    size = tl.minimum(elements - start, group_elements).to(tl.int32)
    residual += tl.load(control + _OFFSET) + start
    numbers += start
    codes += tl.load(control + _OF_FAMILY) * _CODES
    decisions += (tl.program_id(1) * groups.to(tl.int64) + group) * chunks * _LANES
    states += slot * lanes
    counts += slot
    words += slot * capacity
    # Costs of the best paths to a quantizer after another (the second digit).
    b00 = tl.zeros((_LANES,), tl.int32)
    b01 = b00 + _FAR
    b10 = b00 + _FAR
    b11 = b00 + _FAR
    # Triton's interpreter knows no `range` of an argument.
    chunk = 0
    while chunk < chunks:
        made = tl.zeros((_LANES,), tl.int32)
        for j in tl.static_range(_AT_ONCE):
            place = (chunk * _AT_ONCE + j) * lanes + lane
            real = (lane < lanes) & (place < size)
            v = _value(tl.load(residual + place, mask=real, other=0.0), gain)
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
        tl.store(decisions + chunk * _LANES + lane, made)
        chunk += 1
    least = b00
    end = tl.zeros((_LANES,), tl.int32)
    end = tl.where(b01 < least, 1, end)
    least = tl.minimum(least, b01)
    end = tl.where(b10 < least, 2, end)
    least = tl.minimum(least, b10)
    end = tl.where(b11 < least, 3, end)
    following = end >> 1
    current = end & 1
    state = tl.zeros((_LANES,), tl.int32) + _LOW
    used = 0
    while chunk > 0:
        chunk -= 1
        made = tl.load(decisions + chunk * _LANES + lane)
        for i in tl.static_range(_AT_ONCE):
            j = _AT_ONCE - 1 - i
            place = (chunk * _AT_ONCE + j) * lanes + lane
            real = (lane < lanes) & (place < size)
            v = _value(tl.load(residual + place, mask=real, other=0.0), gain)
            number = tl.load(numbers + place, mask=real, other=0).to(tl.int32)
            before = (made >> (4 * j + 2 * current + following)) & 1
            residue = 2 * (before ^ following) + current
            n = (((v - residue * _STEP + _PERIOD // 2) >> (_FRACTION_BITS + 2)) << 2) + residue
            following = tl.where(real, current, following)
            current = tl.where(real, before, current)
            shift = tl.maximum((number - _SHIFTED) >> 2, 0)
            index = n >> 1
            symbol = (index >> shift) + _MIDDLE
            row = (2 * (number - 4 * shift) + (n & 1)) * _ROW
            known = (symbol >= 0) & (symbol < _ESCAPE)
            code = tl.load(codes + row + symbol, mask=real & known, other=0)
            escaped = code == 0
            if tl.max((real & (escaped | (shift > 0))).to(tl.int32), 0) > 0:
                code = tl.where(escaped, tl.load(codes + row + _ESCAPE), code)
                low = index - ((index >> shift) << shift)
                raw = n + _ESCAPE_BIAS
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.maximum(shift - _PIECE, 0))
                low_piece = tl.where(escaped, raw >> _ESCAPE_PIECE, low >> _PIECE)
                has = real & (wide > 0)
                state, used = _put(state, _full(wide), has, words, used, capacity)
                state = tl.where(has, (state << wide) | low_piece, state)
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.minimum(shift, _PIECE))
                low_piece = tl.where(escaped, raw & (_ESCAPE_SPAN - 1), low & (_SPAN - 1))
                has = real & (wide > 0)
                state, used = _put(state, _full(wide), has, words, used, capacity)
                state = tl.where(has, (state << wide) | low_piece, state)
            frequency = tl.maximum(code >> _PRECISION, 1)
            state, used = _put(state, frequency << (_STATE_BITS - _PRECISION), real, words, used, capacity)
            grown = state + (code & (_TOTAL - 1)) + (state // frequency) * (_TOTAL - frequency)
            state = tl.where(real, grown, state)
    tl.store(states + lane, state, mask=lane < lanes)
    tl.store(counts, used)


@triton.jit
def _take(state, some, words, position, end):
    """A word for every one of `some` lanes whose state is below 2**15; none beyond `end`."""
    taking = some & (state < _LOW)
    count = taking.to(tl.int32)
    place = position + tl.cumsum(count, 0) - count
    word = tl.load(words + place, mask=taking & (place < end), other=0).to(tl.int32) & 0xFFFF
    return tl.where(taking, (state << 16) | word, state), position + tl.sum(count, 0)


@triton.jit(do_not_specialize=("elements", "group_elements", "lanes", "chunks", "total"))
def _decode(
    numbers,
    slots,
    states,
    counts,
    starts,
    words,
    out,
    whole,
    elements,
    group_elements,
    lanes,
    chunks,
    total,
):
    group = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _LANES)
    start = group * group_elements
    size = tl.minimum(elements - start, group_elements).to(tl.int32)
    numbers += start
    out += start
    # Whatever the counts say, nothing beyond the words is read.
    first = tl.minimum(tl.maximum(tl.load(starts + group), 0), total)
    end = tl.minimum(tl.load(counts + group), total - first).to(tl.int32)
    words += first
    state = tl.load(states + group * lanes + lane, mask=lane < lanes, other=_LOW)
    current = tl.zeros((_LANES,), tl.int32)
    before = tl.zeros((_LANES,), tl.int32)
    position = 0
    chunk = 0
    while chunk < chunks:
        for j in tl.static_range(_AT_ONCE):
            place = (chunk * _AT_ONCE + j) * lanes + lane
            real = (lane < lanes) & (place < size)
            number = tl.load(numbers + place, mask=real, other=0).to(tl.int32)
            shift = tl.maximum((number - _SHIFTED) >> 2, 0)
            row = 2 * (number - 4 * shift) + current
            entry = tl.load(slots + row * _TOTAL + (state & (_TOTAL - 1)))
            frequency = ((entry >> _PRECISION) & (_TOTAL - 1)) + 1
            shrunk = frequency * (state >> _PRECISION) + (entry & (_TOTAL - 1))
            state = tl.where(real, shrunk, state)
            state, position = _take(state, real, words, position, end)
            symbol = entry >> (2 * _PRECISION)
            index = symbol - _MIDDLE
            escaped = symbol == _ESCAPE
            if tl.max((real & (escaped | (shift > 0))).to(tl.int32), 0) > 0:
                wide = tl.where(escaped, _ESCAPE_PIECE, tl.minimum(shift, _PIECE))
                has = real & (wide > 0)
                low = state - ((state >> wide) << wide)
                state = tl.where(has, state >> wide, state)
                state, position = _take(state, has, words, position, end)
                more = tl.where(escaped, _ESCAPE_PIECE, tl.maximum(shift - _PIECE, 0))
                has = real & (more > 0)
                high = state - ((state >> more) << more)
                state = tl.where(has, state >> more, state)
                state, position = _take(state, has, words, position, end)
                low |= high << tl.where(escaped, _ESCAPE_PIECE, _PIECE)
                # An escaped n is of its quantizer, but a forged one need not be.
                index = tl.where(escaped, (low - _ESCAPE_BIAS) >> 1, (index << shift) + low)
                n = tl.where(escaped, low - _ESCAPE_BIAS, 2 * index + current)
            else:
                n = 2 * index + current
            tl.store(out + place, n, mask=real)
            following = (index & 1) ^ before
            before = tl.where(real, current, before)
            current = tl.where(real, following, current)
        chunk += 1
    wrong = tl.sum((state != _LOW).to(tl.int32), 0) + (position != end).to(tl.int32)
    tl.store(whole + group, wrong)


@triton.jit(do_not_specialize=("capacity",))
def _join(words, counts, starts, out, capacity, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + group)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    found = tl.load(words + group * capacity + capacity - count + place, mask=inside, other=0)
    tl.store(out + tl.load(starts + group) + place, found, mask=inside)


def _chunks(where: Grid) -> int:
    return -(-where.steps // _ONCE)


def encode(residual: torch.Tensor, classes: torch.Tensor, gain: float, where: Grid, family: int) -> Coded:
    """`kernels.trellis_lanes.encode` on the device of `residual`."""
    control = torch.tensor([1, family, 0, 0], device=residual.device)
    gains = torch.tensor([gain], dtype=torch.float64, device=residual.device)
    lanes = Lanes.empty(where, residual.device, slots=1, at_once=1)
    lanes.encode(residual, classes, control, gains)
    return Coded(lanes.states[0], lanes.counts[0], lanes.words[0])


@dataclass(frozen=True, slots=True)
class Lanes:
    """Room for `slots` encodings of a grid, of which `at_once` are made together."""

    where: Grid
    at_once: int
    decisions: torch.Tensor  # int32
    states: torch.Tensor  # int32 [slots, groups, lanes]
    counts: torch.Tensor  # int32 [slots, groups]
    words: torch.Tensor  # int16 [slots, groups, capacity]

    @staticmethod
    def empty(where: Grid, device: torch.device, *, slots: int, at_once: int) -> "Lanes":
        groups = where.groups
        decisions = at_once * groups * _chunks(where) * _LANES.value
        return Lanes(
            where,
            at_once,
            torch.empty(decisions, dtype=torch.int32, device=device),
            torch.empty(slots, groups, where.lanes, dtype=torch.int32, device=device),
            torch.empty(slots, groups, dtype=torch.int32, device=device),
            torch.empty(slots, groups, where.capacity, dtype=torch.int16, device=device),
        )

    def encode(
        self, residual: torch.Tensor, classes: torch.Tensor, control: torch.Tensor, gains: torch.Tensor
    ) -> None:
        """Code `residual` as `control` says (`kernels.triton_trellis_state`, int64 `[at_once * CONTROLS]`),
        elements times `gains` (fp64 of an fp32 number)."""
        of = self.where
        sizes = of.elements, of.groups, of.group_elements, of.lanes, _chunks(of), of.capacity
        _encode[(of.groups, self.at_once)](
            residual,
            classes,
            all_codes_on(residual.device),
            self.decisions,
            self.states,
            self.counts,
            self.words,
            control,
            gains,
            *sizes,
            num_warps=1,
            enable_fp_fusion=False,
        )


def decode(
    states: torch.Tensor,
    counts: torch.Tensor,
    words: torch.Tensor,
    classes: torch.Tensor,
    where: Grid,
    family: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.trellis_lanes.decode` on the device of `classes`, for any states and counts."""
    device = classes.device
    out = torch.empty(classes.numel(), dtype=torch.int32, device=device)
    wrong = torch.empty(where.groups, dtype=torch.int32, device=device)
    _decode[(where.groups,)](
        classes,
        slots_on(device, family),
        states,
        counts,
        counts.cumsum(0) - counts,
        words,
        out,
        wrong,
        where.elements,
        where.group_elements,
        where.lanes,
        _chunks(where),
        words.numel(),
        num_warps=1,
    )
    return out, ~wrong.any()


def join(coded: Coded, out: torch.Tensor) -> None:
    """The words of all groups one after the other into int16 `out`, which has room for just them."""
    groups, capacity = coded.words.shape
    starts = coded.counts.cumsum(0) - coded.counts
    _join[(groups, triton.cdiv(capacity, _JOIN))](
        coded.words, coded.counts, starts, out, capacity, BLOCK=_JOIN, num_warps=4
    )
