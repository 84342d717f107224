"""Interleaved range coding (rANS) of the `trellis` codec: many lanes, one stream of 16-bit words.

Symbols lie in a grid `[T, N]`, step by lane; lane n codes column n with a state of its own in
[2**15, 2**31). A decoder's step: every lane takes its symbol, then the lanes whose state fell below 2**15
take one word each from the stream, in the order of the lanes. So all lanes of a step work at once, on a CPU's
vector units or as the threads of a GPU's block. The encoder goes backwards and starts every lane at 2**15,
which is where the decoder must end: that and an exhausted stream show that nothing was made up.

Which of a class's two tables codes a symbol follows from the trellis (`kernels.trellis_path`): the quantizer
of a step is the parity of the index before it, xor the quantizer two steps before. The trellis starts afresh
every `chain` steps.
"""

import numpy as np
from numpy.typing import NDArray

from kernels.trellis_tables import PRECISION, SYMBOL_MASK, TOTAL, Tables

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Words = NDArray[np.uint16]

LOW = 1 << 15
STATE_BITS = 31

# Arrays, because numpy takes longer to convert a number than to add a thousand.
_LOW = np.array(LOW)
_WORD = np.array(16, dtype=np.int32)
_PRECISION = np.array(PRECISION)
_SLOT = np.array(TOTAL - 1)
_FREQUENCY = np.array(PRECISION + 7)
_PARITY = np.array(TOTAL)


class StreamError(ValueError):
    """Words that no encoder writes."""


def encode(symbols: Int32Array, rows: Int32Array, tables: Tables) -> tuple[Int32Array, Words]:
    """Code symbols `[T, N]` with the tables' rows `[T, N]`; return the states `[N]` and the words."""
    steps, lanes = symbols.shape
    flat = rows * np.int32(tables.frequency.shape[1]) + symbols
    frequency = tables.frequency.ravel().take(flat)
    start = tables.start.ravel().take(flat)
    full = frequency << np.int32(STATE_BITS - PRECISION)
    rest = TOTAL - frequency
    words = np.empty((steps, lanes), dtype=np.uint16)
    spilled = np.empty((steps, lanes), dtype=np.bool_)
    state = np.full(lanes, LOW, dtype=np.int32)
    scratch = np.empty(lanes, dtype=np.int32)
    for t in range(steps - 1, -1, -1):
        np.greater_equal(state, full[t], out=spilled[t])
        np.copyto(words[t], state, casting="unsafe")
        np.right_shift(state, _WORD, out=scratch)
        np.putmask(state, spilled[t], scratch)
        # quotient * TOTAL + remainder + start
        np.floor_divide(state, frequency[t], out=scratch)
        np.multiply(scratch, rest[t], out=scratch)
        np.add(state, start[t], out=state)
        np.add(state, scratch, out=state)
    return state, words[spilled]


def decode(
    states: Int32Array,
    words: Words,
    classes: Int32Array,
    low_bits: Int32Array | None,
    tables: Tables,
    chain: int,
) -> tuple[Int32Array, Int32Array]:
    """Symbols and quantizers `[T, N]` of states `[N]` (in [2**15, 2**31)) and words.

    `classes`: the tables' numbers, `[T, N]`. `low_bits`: of an element's index the bits below its symbol,
    -1 for elements that have none; None if no element has any. `StreamError` unless the words are exactly
    what this many symbols take.
    """
    steps, lanes = classes.shape
    slots = tables.slots.ravel()
    bases = classes.astype(np.int64)
    bases <<= PRECISION + 1
    entries = np.empty((steps, lanes), dtype=np.int64)
    # 0 or TOTAL: what they add to a place in the tables.
    quantizers = np.empty((steps, lanes), dtype=np.int64)
    state = states.astype(np.int64)
    scratch = np.empty(lanes, dtype=np.int64)
    low = np.empty(lanes, dtype=np.bool_)
    stream = words.astype(np.int64)
    position = 0
    zero = np.zeros(lanes, dtype=np.int64)
    before = current = zero
    with_low: set[int] = set() if low_bits is None else set(np.flatnonzero(low_bits.max(1) >= 0).tolist())
    for t in range(steps):
        entry = entries[t]
        if t % chain == 0:
            before = zero
            quantizers[t] = 0
        current = quantizers[t]
        np.bitwise_and(state, _SLOT, out=scratch)
        np.add(scratch, bases[t], out=scratch)
        np.add(scratch, current, out=scratch)
        slots.take(scratch, out=entry, mode="clip")
        np.right_shift(state, _PRECISION, out=state)
        np.right_shift(entry, _FREQUENCY, out=scratch)
        np.multiply(state, scratch, out=state)
        np.bitwise_and(entry, _SLOT, out=scratch)
        np.add(state, scratch, out=state)
        np.less(state, _LOW, out=low)
        takers = low.nonzero()[0]
        if takers.size:
            end = position + takers.size
            if end > stream.size:
                raise StreamError("the stream ends before its symbols do")
            state[takers] = (state.take(takers) << 16) | stream[position:end]
            position = end
        if t + 1 < steps:
            parity = _parity(entry, low_bits[t]) if low_bits is not None and t in with_low else entry
            following = quantizers[t + 1]
            np.bitwise_xor(parity, before, out=following)
            np.bitwise_and(following, _PARITY, out=following)
            before = current
    if position != stream.size or (state != LOW).any():
        raise StreamError("the stream does not end where its symbols do")
    entries >>= PRECISION
    entries &= SYMBOL_MASK
    quantizers >>= PRECISION
    return entries.astype(np.int32), quantizers.astype(np.int32)


def _parity(entry: Int64Array, low_bits: Int32Array) -> Int64Array:
    """Entries whose parity is that of the lowest bit of the index."""
    return np.where(low_bits < 0, entry, low_bits.astype(np.int64) << PRECISION)
