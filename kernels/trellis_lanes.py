"""The inner loops of the `trellis` codec for a CPU: the search for a path, and range coding (rANS).

Compiled by numba when they are first used, and kept in its cache. `kernels.triton_trellis` does the same on a
GPU; every number is an integer or comes of one rounding an operation, so the words are the same.

**The path** (trellis-coded quantization with four states). Values are multiples n of a step. Even n belong to
quantizer 0, with index n / 2, odd ones to quantizer 1, with index (n - 1) / 2. Each quantizer is as coarse as
two steps, but which of them an element uses follows from the indices before it: s(t + 1) = parity(t) xor
s(t - 1), both 0 at a lane's start. So an encoder that looks ahead finds values about as near as with one
finer quantizer, at the coarse one's price: 1.0 dB less noise than rounding at the same bits, of the 1.53 dB
that there are to be had. (Ungerboeck's code with parity checks 5 and 2; Marcellin and Fischer, 1990; as in
JPEG 2000, part 2, and VVC's dependent quantization.) The search (Viterbi's) is in 64ths of a step: squared
distances are at most 2**14 each, and a lane's sum of 2**12 of them fits 32 bits.

**The code.** A group's lanes share one stream of 16-bit words; each has a state of its own in [2**15, 2**31).
A decoder's step: every lane takes its symbol, then the lanes whose state fell below 2**15 take one word each,
in the order of the lanes. An index is cut in two by its class's shift: what is above is the symbol, what is
below follows as it is, in up to two pieces of at most 10 bits; behind an escape follow n's 26 bits in two
pieces of 13, and nothing else. Pieces are taken as symbols are, first all lanes' first ones, then the second
ones. The encoder goes backwards and starts every lane at 2**15, which is where the decoder must end: that and
a stream used up show that nothing was made up.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.trellis_grid import Grid
from kernels.trellis_tables import CLASSES, ESCAPE, MIDDLE, PRECISION, ROW, TOTAL, tables

Int32Array = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
_Result = TypeVar("_Result")

LOW = 1 << 15
STATE_BITS = 31
# Of a step.
FRACTION_BITS = 6
# n of an escaped element, counted from -2**25.
ESCAPE_PIECE = 13
ESCAPE_BIAS = 1 << (2 * ESCAPE_PIECE - 1)
# The widest first piece of what is below a symbol.
PIECE = 10


@dataclass(frozen=True, slots=True)
class Coded:
    """What the lanes of a tensor were coded into."""

    states: torch.Tensor  # int32 [groups, lanes]
    counts: torch.Tensor  # int32 [groups], of words
    words: torch.Tensor  # int16 [groups, capacity]: every group's lie at the end


_STEP = 1 << FRACTION_BITS
_PERIOD = 4 * _STEP
_FAR = 1 << 29
_SHIFTED = CLASSES - 4


@numba.njit(nogil=True, cache=True, inline="always")
def _value(x, gain):
    return np.int32(np.floor(x * gain + np.float32(0.5)))


@numba.njit(nogil=True, cache=True, inline="always")
def _pieces(n, odd, number):
    """Of an element's n and its class: the place of its symbol, what is below it, and the shift."""
    shift = max((number - _SHIFTED) >> 2, 0)
    index = n >> 1
    top = index >> shift
    symbol = top + MIDDLE
    row = (2 * (number - 4 * shift) + odd) * ROW
    return row, symbol, index & ((1 << shift) - 1), shift


@numba.njit(nogil=True, cache=True)
def _search(residual, gain, start, stop, lanes, after, best, other, last):
    """Fill `after` with the decisions of the best paths, four bits an element; leave the costs in `best`.

    best[2 s + b]: the cost of the best path to quantizer s after quantizer b.
    after, bit 2 s + s': whether the best path that leaves s for s' came to s after quantizer 1.
    """
    best[:] = _FAR
    best[0, :] = 0
    for first in range(start, stop, lanes):
        width = min(lanes, stop - first)
        for lane in range(width):
            last[lane] = _value(residual[first + lane], gain) & (_PERIOD - 1)
        for lane in range(width):
            v = last[lane]
            d0 = abs(((v + _PERIOD // 2) & (_PERIOD - 1)) - _PERIOD // 2)
            d1 = abs(((v + _STEP) & (_PERIOD - 1)) - _PERIOD // 2)
            e0, e1 = _PERIOD // 2 - d0, _PERIOD // 2 - d1
            d0, d1, e0, e1 = d0 * d0, d1 * d1, e0 * e0, e1 * e1
            b00, b01, b10, b11 = best[0, lane], best[1, lane], best[2, lane], best[3, lane]
            # The next quantizer is parity xor the one before.
            x00, y00 = b00 + d0, b01 + e0
            x01, y01 = b00 + e0, b01 + d0
            x10, y10 = b10 + d1, b11 + e1
            x11, y11 = b10 + e1, b11 + d1
            other[0, lane], other[1, lane] = min(x00, y00), min(x10, y10)
            other[2, lane], other[3, lane] = min(x01, y01), min(x11, y11)
            after[first - start + lane] = (
                np.uint8(y00 < x00)
                | np.uint8(y01 < x01) << 1
                | np.uint8(y10 < x10) << 2
                | np.uint8(y11 < x11) << 3
            )
        for lane in range(width):
            for s in range(4):
                best[s, lane] = other[s, lane]


@numba.njit(nogil=True, cache=True, inline="always")
def _put(state, full, words, used):
    """Make room in a state that must stay below `full`: a word more, if there must be one."""
    if state >= full:
        words[words.size - 1 - used] = state & 0xFFFF
        return state >> 16, used + 1
    return state, used


@numba.njit(nogil=True, cache=True)
def _encode(residual, numbers, gain, start, stop, lanes, codes, states, words):
    """Code elements `start` to `stop`; fill `states`, and `words` from their end. How many words."""
    steps = (stop - start + lanes - 1) // lanes
    after = np.empty(stop - start, dtype=np.uint8)
    best = np.empty((4, lanes), dtype=np.int32)
    other = np.empty((4, lanes), dtype=np.int32)
    current = np.empty(lanes, dtype=np.int32)
    following = np.empty(lanes, dtype=np.int32)
    chosen = np.empty(lanes, dtype=np.int32)
    _search(residual, gain, start, stop, lanes, after, best, other, current)
    for lane in range(lanes):
        states[lane] = LOW
        end = 0
        for s in range(1, 4):
            if best[s, lane] < best[end, lane]:
                end = s
        following[lane], current[lane] = end >> 1, end & 1
    used = 0
    for t in range(steps - 1, -1, -1):
        first = start + t * lanes
        width = min(lanes, stop - first)
        more = False
        for lane in range(width):
            quantizer = current[lane]
            before = np.int32(after[first - start + lane]) >> (2 * quantizer + following[lane]) & 1
            residue = 2 * (before ^ following[lane]) + quantizer
            v = _value(residual[first + lane], gain) - residue * _STEP
            n = (((v + _PERIOD // 2) >> (FRACTION_BITS + 2)) << 2) + residue
            chosen[lane] = n
            following[lane], current[lane] = quantizer, before
            row, symbol, _, shift = _pieces(n, n & 1, np.int32(numbers[first + lane]))
            more |= shift > 0 or symbol < 0 or symbol >= ESCAPE or codes[row + symbol] == 0
        if more:
            for second in (1, 0):
                for lane in range(width - 1, -1, -1):
                    n = chosen[lane]
                    row, symbol, low, shift = _pieces(n, n & 1, np.int32(numbers[first + lane]))
                    if symbol < 0 or symbol >= ESCAPE or codes[row + symbol] == 0:
                        shift, low = ESCAPE_PIECE, n + ESCAPE_BIAS
                        low = low >> ESCAPE_PIECE if second else low & ((1 << ESCAPE_PIECE) - 1)
                    elif second:
                        shift, low = shift - PIECE, low >> PIECE
                    else:
                        shift, low = min(shift, PIECE), low & ((1 << PIECE) - 1)
                    if shift > 0:
                        state, used = _put(states[lane], np.int32(1 << (STATE_BITS - shift)), words, used)
                        states[lane] = state << shift | low
        for lane in range(width - 1, -1, -1):
            n = chosen[lane]
            row, symbol, _, _ = _pieces(n, n & 1, np.int32(numbers[first + lane]))
            if symbol < 0 or symbol >= ESCAPE or codes[row + symbol] == 0:
                symbol = ESCAPE
            code = np.uint32(codes[row + symbol])
            frequency = code >> PRECISION
            state, used = _put(
                np.uint32(states[lane]), np.uint32(frequency << (STATE_BITS - PRECISION)), words, used
            )
            state = np.uint32(state)
            quotient = np.uint32(state // frequency)
            states[lane] = np.int32(
                state + (code & np.uint32(TOTAL - 1)) + quotient * (np.uint32(TOTAL) - frequency)
            )
    return used


@numba.njit(nogil=True, cache=True)
def _decode(numbers, start, stop, lanes, slots, states, words, out):
    """Fill `out` from `start` to `stop` with n; whether the words are exactly what an encoder writes."""
    current = np.zeros(lanes, dtype=np.int32)
    before = np.zeros(lanes, dtype=np.int32)
    symbols = np.empty(lanes, dtype=np.int32)
    position, size = 0, words.size
    for first in range(start, stop, lanes):
        width = min(lanes, stop - first)
        more = False
        for lane in range(width):
            number = np.int32(numbers[first + lane])
            shift = max((number - _SHIFTED) >> 2, 0)
            state = states[lane]
            entry = slots[(2 * (number - 4 * shift) + current[lane]) * TOTAL + (state & (TOTAL - 1))]
            state = ((entry >> PRECISION & (TOTAL - 1)) + 1) * (state >> PRECISION) + (entry & (TOTAL - 1))
            if state < LOW:
                if position >= size:
                    return False
                state = state << 16 | np.int32(words[position])
                position += 1
            states[lane] = state
            symbol = entry >> (2 * PRECISION)
            more |= shift > 0 or symbol == ESCAPE
            symbols[lane] = symbol
            n = 2 * (symbol - MIDDLE) + current[lane]
            out[first + lane] = n
            following = (symbol & 1) ^ before[lane]
            before[lane] = current[lane]
            current[lane] = following
        if more:
            for lane in range(width):
                # Until all pieces are there: what is left of the bits, and of the index.
                out[first + lane] = 0
            for second in (0, 1):
                for lane in range(width):
                    number = np.int32(numbers[first + lane])
                    shift = max((number - _SHIFTED) >> 2, 0)
                    if symbols[lane] == ESCAPE:
                        wide, place = ESCAPE_PIECE, ESCAPE_PIECE * second
                    elif second:
                        wide, place = shift - PIECE, PIECE
                    else:
                        wide, place = min(shift, PIECE), 0
                    if wide > 0:
                        state = states[lane]
                        out[first + lane] |= (state & ((1 << wide) - 1)) << place
                        state >>= wide
                        if state < LOW:
                            if position >= size:
                                return False
                            state = state << 16 | np.int32(words[position])
                            position += 1
                        states[lane] = state
            for lane in range(width):
                shift = max((np.int32(numbers[first + lane]) - _SHIFTED) >> 2, 0)
                quantizer = before[lane]
                low = out[first + lane]
                if symbols[lane] == ESCAPE:
                    n = low - ESCAPE_BIAS
                else:
                    n = 2 * (((symbols[lane] - MIDDLE) << shift) + low) + quantizer
                out[first + lane] = n
                # The symbol's parity is not the index's.
                current[lane] ^= (symbols[lane] ^ (n >> 1)) & 1
    for lane in range(lanes):
        if states[lane] != LOW:
            return False
    return position == size


def encode(residual: torch.Tensor, classes: torch.Tensor, gain: float, where: Grid, family: int) -> Coded:
    """Code fp32 `[E]` with the classes uint8 `[E]`; `gain` is 64 over the step, an fp32 number."""
    states = np.empty((where.groups, where.lanes), dtype=np.int32)
    words = np.empty((where.groups, where.capacity), dtype=np.uint16)
    values, numbers, codes = residual.numpy(), classes.numpy(), tables(family).codes

    def one(group: int) -> int:
        start, stop = where.bounds(group)
        return int(
            _encode(
                values,
                numbers,
                np.float32(gain),
                start,
                stop,
                where.lanes,
                codes,
                states[group],
                words[group],
            )
        )

    counts = torch.tensor(_each(one, where.groups), dtype=torch.int32)
    return Coded(torch.from_numpy(states), counts, torch.from_numpy(words.view(np.int16)))


def decode(
    states: torch.Tensor,
    counts: torch.Tensor,
    words: torch.Tensor,
    classes: torch.Tensor,
    where: Grid,
    family: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n, int32 `[E]`, and whether the code is whole, bool `[]`; n is of no use where it is not.

    states int32 `[groups, lanes]` in [2**15, 2**31), word counts int64 `[groups]` that add up to no more than
    the words, int16 `[W]`, of all groups one after the other.
    """
    out = np.empty(classes.numel(), dtype=np.int32)
    numbers, slots = classes.numpy(), tables(family).slots
    stream = words.numpy().view(np.uint16)
    ends = counts.cumsum(0).tolist()
    state = states.numpy().copy()

    def one(group: int) -> bool:
        start, stop = where.bounds(group)
        own = stream[ends[group - 1] if group else 0 : ends[group]]
        return bool(_decode(numbers, start, stop, where.lanes, slots, state[group], own, out))

    whole = all(_each(one, where.groups))
    return torch.from_numpy(out), torch.tensor(whole)


def _each(one: Callable[[int], _Result], groups: int) -> list[_Result]:
    """What `one` gives for every group, by as many threads as torch may use here."""
    threads = min(torch.get_num_threads(), groups)
    if threads == 1:
        return [one(group) for group in range(groups)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(groups)))
