"""The `trellis` encoder's loops for a CPU: path search and range coding. `kernels.trellis.code` describes the
code.

Compiled by numba at first use and cached. Lanes are adjacent in memory. Loops over them are written so that
LLVM vectorizes them: no branches, no index that might be negative, and 32-bit constants, because numba
computes with plain numbers in 64 bits. Writing words in order cannot be vectorized; it has no branch either,
because one lane in four writes a word and a branch would be mispredicted.
"""

import numpy as np

from kernels.common.loops import compiled, inlined
from kernels.trellis.code import ESCAPE_BIAS, ESCAPE_PIECE, FRACTION_BITS, LOW, PIECE, STATE_BITS, UNSHIFTED
from kernels.trellis.grid import LANES
from kernels.trellis.tables import ESCAPE, MIDDLE, PRECISION, ROW, TOTAL

i32 = np.int32
_I0, _I1, _I2, _I3, _I4 = (np.int32(n) for n in (0, 1, 2, 3, 4))
_ROW1, _ROW2, _ROW3 = (np.uint64(LANES * n) for n in (1, 2, 3))
_HALF = np.float32(0.5)
_STEP = np.int32(1 << FRACTION_BITS)
_PERIOD = np.int32(4 << FRACTION_BITS)
_MIDWAY = np.int32(2 << FRACTION_BITS)
_TO_PERIODS = np.int32(FRACTION_BITS + 2)
_FAR = np.int32(1 << 29)

_MIDDLE, _ESCAPE, _ROW = np.int32(MIDDLE), np.int32(ESCAPE), np.int32(ROW)
# An entry that no symbol has; it is zero in every row.
_NO_SYMBOL = np.int32(ROW - 1)
_UNSHIFTED = np.int32(UNSHIFTED)
_PIECE, _ESCAPE_PIECE = np.int32(PIECE), np.int32(ESCAPE_PIECE)
_ESCAPE_BIAS = np.int32(ESCAPE_BIAS)

_PRECISION, _TOTAL = np.uint32(PRECISION), np.uint32(TOTAL)
_IN_TOTAL = np.uint32(TOTAL - 1)
_WORD, _NO_WORD = np.uint32(16), np.uint32(0)
_TO_FULL = np.uint32(STATE_BITS - PRECISION)
_FULL = np.uint32(1 << STATE_BITS)

# 1 / n, to divide a state by a frequency: (state + 0.5) / n truncates to the exact quotient, because states
# are below 2**31 and frequencies at most 2**12.
INVERSE = np.concatenate(([0.0], 1.0 / np.arange(1, TOTAL + 1)))


@inlined
def _value(x, gain):
    return np.int32(np.floor(x * gain + _HALF))


@inlined
def _distance(v):
    """Distance of v from the middle of its period of four steps, in 64ths of a step."""
    return abs(i32(i32(v & i32(_PERIOD - _I1)) - _MIDWAY))


@compiled
def _advance(residual, gain, cost, after):
    """Extend the best paths of all lanes by one element; arguments as in `_search`."""
    for lane in range(residual.size):
        place = np.uint64(lane)
        v = _value(residual[place], gain)
        d0, d1 = _distance(i32(v + _MIDWAY)), _distance(i32(v + _STEP))
        e0, e1 = i32(_MIDWAY - d0), i32(_MIDWAY - d1)
        d0, d1, e0, e1 = i32(d0 * d0), i32(d1 * d1), i32(e0 * e0), i32(e1 * e1)
        b00, b01 = cost[place], cost[place + _ROW1]
        b10, b11 = cost[place + _ROW2], cost[place + _ROW3]
        # The next quantizer is parity xor the one before.
        x00, y00 = i32(b00 + d0), i32(b01 + e0)
        x01, y01 = i32(b00 + e0), i32(b01 + d0)
        x10, y10 = i32(b10 + d1), i32(b11 + e1)
        x11, y11 = i32(b10 + e1), i32(b11 + d1)
        cost[place], cost[place + _ROW1] = min(x00, y00), min(x10, y10)
        cost[place + _ROW2], cost[place + _ROW3] = min(x01, y01), min(x11, y11)
        after[place] = np.uint8(
            i32(y00 < x00) | i32(y01 < x01) << _I1 | i32(y10 < x10) << _I2 | i32(y11 < x11) << _I3
        )


@compiled
def _search(residual, gain, start, stop, lanes, after, cost):
    """Fill `after` with the decisions of the best paths, four bits per element, and `cost` with their costs.

    cost, row 2 s + b of `LANES`: cost of the best path to quantizer s after quantizer b.
    after, bit 2 s + s': whether quantizer 1 precedes s on the best path that goes from s to s'.
    """
    cost[:] = _FAR
    cost[:lanes] = 0
    for first in range(start, stop, lanes):
        last = min(first + lanes, stop)
        _advance(residual[first:last], gain, cost, after[first - start : last - start])


@compiled
def _follow(residual, after, gain, following, current, chosen):
    """Every lane's n at this step; moves `following` and `current` one step back along the paths."""
    for lane in range(residual.size):
        quantizer, later = current[lane], following[lane]
        before = i32(i32(after[lane]) >> i32(_I2 * quantizer + later)) & _I1
        residue = i32(_I2 * (before ^ later) + quantizer)
        v = i32(_value(residual[lane], gain) - residue * _STEP)
        chosen[lane] = i32(i32(i32(v + _MIDWAY) >> _TO_PERIODS) << _I2) + residue
        following[lane], current[lane] = quantizer, before


@compiled
def _symbols(chosen, numbers, codes, found, wide, cut, low):
    """For every lane: its symbol's entry in `codes` (`found`), the number of bits that follow (`wide`), how
    many of them fit the first piece (`cut`), and the bits (`low`).

    Returns the bitwise or of all lanes' numbers of bits, and the same of second pieces; 0 means that no lane
    has any.
    """
    first, second = _I0, _I0
    for lane in range(chosen.size):
        n, number = chosen[lane], i32(numbers[lane])
        shift = max(i32(i32(number - _UNSHIFTED) >> _I2), _I0)
        index = i32(n >> _I1)
        symbol = i32(i32(index >> shift) + _MIDDLE)
        row = i32(i32(_I2 * i32(number - _I4 * shift) + (n & _I1)) * _ROW)
        inside = (symbol >= _I0) & (symbol < _ESCAPE)
        code = codes[np.uint32(row + (symbol if inside else _NO_SYMBOL))]
        escaped = code == _I0
        found[lane] = codes[np.uint32(row + _ESCAPE)] if escaped else code
        bits = i32(_I2 * _ESCAPE_PIECE) if escaped else shift
        piece = _ESCAPE_PIECE if escaped else _PIECE
        wide[lane], cut[lane] = bits, piece
        low[lane] = i32(n + _ESCAPE_BIAS) if escaped else i32(index & i32(i32(_I1 << shift) - _I1))
        first |= bits
        second |= max(i32(bits - piece), _I0)
    return first, second


@compiled
def _put_pieces(states, wide, cut, low, second, words, used):
    """Put the first or the second pieces into the states. An empty piece changes nothing. Returns the words
    used so far."""
    top = words.size - 1
    for lane in range(states.size - 1, -1, -1):
        bits = max(wide[lane] - cut[lane], _I0) if second else min(wide[lane], cut[lane])
        piece = low[lane] >> cut[lane] if second else low[lane] & ((_I1 << bits) - _I1)
        state = np.uint32(states[lane])
        words[np.uint64(top - used)] = np.uint16(state)
        full = state >= _FULL >> np.uint32(bits)
        used += np.int64(full)
        state >>= _WORD if full else _NO_WORD
        states[lane] = np.int32(state << np.uint32(bits) | np.uint32(piece))
    return used


@compiled
def _put_symbols(states, found, inverse, words, used):
    top = words.size - 1
    for lane in range(states.size - 1, -1, -1):
        code, state = np.uint32(found[lane]), np.uint32(states[lane])
        frequency = code >> _PRECISION
        # Written for every lane, but kept only for lanes whose state is full.
        words[np.uint64(top - used)] = np.uint16(state)
        full = state >= frequency << _TO_FULL
        used += np.int64(full)
        state >>= _WORD if full else _NO_WORD
        quotient = np.uint32((np.float64(state) + 0.5) * inverse[frequency])
        states[lane] = np.int32(state + (code & _IN_TOTAL) + quotient * (_TOTAL - frequency))
    return used


@compiled
def encode(residual, numbers, gain, start, stop, lanes, codes, inverse, states, words):
    """Code elements `start` to `stop`; fill `states`, and `words` from their end. Returns the words used."""
    after = np.empty(stop - start, dtype=np.uint8)
    cost = np.empty(4 * LANES, dtype=np.int32)
    current = np.empty(lanes, dtype=np.int32)
    following = np.empty(lanes, dtype=np.int32)
    chosen = np.empty(lanes, dtype=np.int32)
    found = np.empty(lanes, dtype=np.int32)
    wide = np.empty(lanes, dtype=np.int32)
    cut = np.empty(lanes, dtype=np.int32)
    low = np.empty(lanes, dtype=np.int32)
    _search(residual, gain, start, stop, lanes, after, cost)
    for lane in range(lanes):
        states[lane] = LOW
        end = 0
        for s in range(1, 4):
            if cost[s * LANES + lane] < cost[end * LANES + lane]:
                end = s
        following[lane], current[lane] = end >> 1, end & 1
    used = 0
    steps = (stop - start + lanes - 1) // lanes
    for step in range(steps - 1, -1, -1):
        first = start + step * lanes
        last = min(first + lanes, stop)
        width = last - first
        _follow(residual[first:last], after[first - start : last - start], gain, following, current, chosen)
        one, two = _symbols(chosen[:width], numbers[first:last], codes, found, wide, cut, low)
        if two:
            used = _put_pieces(states[:width], wide, cut, low, True, words, used)
        if one:
            used = _put_pieces(states[:width], wide, cut, low, False, words, used)
        used = _put_symbols(states[:width], found, inverse, words, used)
    return used
