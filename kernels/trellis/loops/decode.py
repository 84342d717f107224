"""The `trellis` decoder's loops for a CPU. `kernels.trellis.code` describes the code.

As in `kernels.trellis.loops.encode`, loops over lanes have no branches, so that LLVM vectorizes them; the
loop that reads words one after the other has none either.
"""

import numpy as np

from kernels.common.loops import compiled, inlined
from kernels.trellis.code import ESCAPE_BIAS, ESCAPE_PIECE, LOW, PIECE, UNSHIFTED
from kernels.trellis.tables import ESCAPE, MIDDLE, PRECISION, TOTAL

i32 = np.int32
_I0, _I1, _I2, _I4 = (np.int32(n) for n in (0, 1, 2, 4))
_MIDDLE, _ESCAPE = np.int32(MIDDLE), np.int32(ESCAPE)
_UNSHIFTED = np.int32(UNSHIFTED)
_PIECE, _ESCAPE_PIECE = np.int32(PIECE), np.int32(ESCAPE_PIECE)
_ESCAPE_BIAS = np.int32(ESCAPE_BIAS)
_PRECISION, _TWICE_PRECISION = np.int32(PRECISION), np.int32(2 * PRECISION)
_TOTAL, _IN_TOTAL = np.int32(TOTAL), np.int32(TOTAL - 1)
_LOW, _WORD = np.int32(LOW), np.int32(16)


@inlined
def _shift(number):
    return max(i32(i32(number - _UNSHIFTED) >> _I2), _I0)


@compiled
def _take_symbols(numbers, current, slots, states, symbols):
    """Take every lane's symbol out of its state. Returns more than 0 if bits follow any symbol."""
    more = _I0
    for lane in range(numbers.size):
        number, state = i32(numbers[lane]), states[lane]
        shift = _shift(number)
        row = i32(_I2 * i32(number - _I4 * shift)) + current[lane]
        entry = slots[np.uint32(i32(row * _TOTAL) + (state & _IN_TOTAL))]
        frequency = i32(i32(i32(entry >> _PRECISION) & _IN_TOTAL) + _I1)
        states[lane] = i32(frequency * i32(state >> _PRECISION)) + (entry & _IN_TOTAL)
        symbol = i32(entry >> _TWICE_PRECISION)
        symbols[lane] = symbol
        more |= shift | i32(symbol == _ESCAPE)
    return more


@compiled
def _refill(states, words, position):
    """Append a word to every state below `LOW`. Returns the position after the last word read, or -1 if there
    are too few words."""
    if position + states.size <= words.size:
        for lane in range(states.size):
            state = states[lane]
            few = state < _LOW
            word = i32(words[np.uint64(position)])
            states[lane] = i32(state << _WORD) | word if few else state
            position += np.int64(few)
        return position
    for lane in range(states.size):
        if states[lane] < _LOW:
            if position >= words.size:
                return -1
            states[lane] = i32(states[lane] << _WORD) | i32(words[position])
            position += 1
    return position


@compiled
def _advance(symbols, current, before, out):
    """Every lane's n and next quantizer, correct for lanes without bits after their symbol."""
    for lane in range(symbols.size):
        symbol, quantizer = symbols[lane], current[lane]
        out[lane] = i32(_I2 * i32(symbol - _MIDDLE)) + quantizer
        current[lane] = (symbol & _I1) ^ before[lane]
        before[lane] = quantizer


@compiled
def _take_pieces(numbers, symbols, second, states, low):
    """Take the first or the second pieces out of the states. Returns more than 0 if second pieces follow."""
    more = _I0
    for lane in range(numbers.size):
        escaped = symbols[lane] == _ESCAPE
        cut = _ESCAPE_PIECE if escaped else _PIECE
        bits = i32(_I2 * _ESCAPE_PIECE) if escaped else _shift(i32(numbers[lane]))
        rest = max(i32(bits - cut), _I0)
        piece, place = (rest, cut) if second else (i32(bits - rest), _I0)
        state = states[lane]
        low[lane] |= i32(i32(state & i32(i32(_I1 << piece) - _I1)) << place)
        states[lane] = i32(state >> piece)
        more |= rest
    return more


@compiled
def _correct(numbers, symbols, low, before, current, out):
    """After `_advance`: n and the next quantizers of lanes with bits after their symbols."""
    for lane in range(numbers.size):
        escaped = symbols[lane] == _ESCAPE
        shift = _shift(i32(numbers[lane]))
        index = i32(i32(symbols[lane] - _MIDDLE) << shift) + low[lane]
        n = i32(low[lane] - _ESCAPE_BIAS) if escaped else i32(i32(_I2 * index) + before[lane])
        out[lane] = n
        # Replace the symbol's parity by the index's.
        current[lane] ^= (symbols[lane] ^ i32(n >> _I1)) & _I1


@compiled
def decode(numbers, start, stop, lanes, slots, states, words, out):
    """Fill `out` from `start` to `stop` with n. Returns whether an encoder writes exactly these words."""
    current = np.zeros(lanes, dtype=np.int32)
    before = np.zeros(lanes, dtype=np.int32)
    symbols = np.empty(lanes, dtype=np.int32)
    low = np.empty(lanes, dtype=np.int32)
    position = 0
    for first in range(start, stop, lanes):
        last = min(first + lanes, stop)
        width = last - first
        number, state, values = numbers[first:last], states[:width], out[first:last]
        more = _take_symbols(number, current, slots, state, symbols)
        position = _refill(state, words, position)
        if position < 0:
            return False
        _advance(symbols[:width], current, before, values)
        if more:
            low[:] = 0
            # The first pieces of all lanes, then the second ones if there are any.
            for second in (False, True):
                rest = _take_pieces(number, symbols, second, state, low)
                position = _refill(state, words, position)
                if position < 0:
                    return False
                if not rest:
                    break
            _correct(number, symbols, low, before, current, values)
    for lane in range(lanes):
        if states[lane] != LOW:
            return False
    return position == words.size
