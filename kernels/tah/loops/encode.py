"""`kernels.tah.reference.encode` on a CPU, the same bits, by compiled loops.

Torch goes over a block of tiles some forty times. Here a tile is read twice: once to measure it and, when the
tiles with 4 bits are chosen, once to pack it. In each read it stays in the innermost cache.

For LLVM to vectorize loops over a tile, sums are over integers, extremes of floats are taken as integers in
the same order, and numbers are rounded by adding `ROUND`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.loops import (
    LEAST_STEP,
    ONE,
    ROUND,
    ROUND_BITS,
    bits_of,
    bits_to_read,
    compiled,
    exponent_of,
    float_of,
    hadamard,
    half_beside,
    inlined,
    load,
    ranges,
    run,
    two_factors,
    value_of_half,
)
from kernels.common.tile_layout import OUTLIER_RATIO
from kernels.common.tiles import NON_FINITE, TILE
from kernels.tah import reference as tah

# fp32 constants: numba computes in fp64 with a plain number.
_EPSILON = np.float32(tah.EPSILON)
_RATIO = np.float32(OUTLIER_RATIO)
_C0, _C1, _C2, _C3 = (np.float32(c) for c in tah._LOG2)
_LOG_UNIT = np.float32(2.0**-23)
_LOG_BIAS = np.float32(127.0)
_RANK_UNIT = np.float32(tah._RANK_UNIT)
_COUNTS_AS_ZERO = np.float32(2.0**-100)

# The lowest bit of every byte of a word.
_LOWEST_BITS = np.uint64(0x0101010101010101)

# Ranks are below 2**23: an entropy is at most 6 bits, in units of 2**-20.
_BUCKETS = 1 << 12
_BUCKET_BITS = 11


@compiled
def _extremes(tile, count):
    """The smallest and the largest of the first `count`; which of two zeros is open."""
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for k in range(count):
        bits = bits_of(tile[k])
        # Negative floats grow as their bits shrink.
        ordered = np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        low, high = min(low, ordered), max(high, ordered)
    low = np.int32(low ^ ((low >> 31) & 0x7FFFFFFF))
    high = np.int32(high ^ ((high >> 31) & 0x7FFFFFFF))
    return float_of(low), float_of(high)


@inlined
def _log2(n):
    log = np.float32(bits_of(n)) * _LOG_UNIT - _LOG_BIAS
    f = log - np.floor(log)
    p = ((f * _C3 + _C2) * f + _C1) * f + _C0
    return log + p * ((ONE - f) * f)


@compiled
def _near_and_sums(tile, factor, threshold):
    """How many magnitudes reach the threshold; S and T of the entropy."""
    near, total, weighted = np.int32(0), np.int32(0), np.int32(0)
    for k in range(TILE):
        magnitude = np.abs(tile[k] * factor)
        near = np.int32(near + np.int32(magnitude >= threshold))
        shifted = magnitude + ROUND
        n = shifted - ROUND
        total = np.int32(total + np.int32(bits_of(shifted) - ROUND_BITS))
        term = _log2(n) * n + ROUND
        weighted = np.int32(weighted + np.int32(bits_of(term) - ROUND_BITS))
    return near, total, weighted


@compiled
def _measure(x, width, first, last, near, far, low, high, outlier, rank):
    """Steps 1 and 3 of the reference's list for tiles `first` to `last`."""
    per_row = (width + TILE - 1) // TILE
    tile = np.empty(TILE, dtype=np.float32)
    for t in range(first, last):
        row, column = t // per_row, t % per_row * TILE
        count = min(TILE, width - column)
        load(x, row * width + column, count, near, far, tile)
        low[t], high[t] = _extremes(tile, count)
        largest = max(-low[t], high[t])
        exponent_bits = max(np.int32(bits_of(largest) >> 23), np.int32(64))
        factor = float_of((267 - exponent_bits) << 23)
        threshold = (largest / _RATIO - _EPSILON) * factor
        reach, total, weighted = _near_and_sums(tile, factor, threshold)
        outlier[t] = reach <= 1
        bits = np.int32(0)
        if total > 0:
            s = np.float32(total)
            entropy = (_log2(s) - np.float32(weighted) / s) * _RANK_UNIT
            bits = np.int32(max(np.rint(entropy), np.float32(0)))
        rank[t] = bits


@compiled
def _choose(rank, count, four):
    """Set the flags of the `count` highest ranks, ties to the lower index."""
    if count == 0:
        four[:] = False
        return
    # From the highest bucket down to the one in which the last chosen lies, then the same within it.
    chosen = 0
    tally = np.zeros(_BUCKETS, dtype=np.int64)
    for t in range(rank.size):
        tally[rank[t] >> _BUCKET_BITS] += 1
    bucket = _BUCKETS - 1
    while chosen + tally[bucket] < count:
        chosen += tally[bucket]
        bucket -= 1
    tally[:] = 0
    for t in range(rank.size):
        if rank[t] >> _BUCKET_BITS == bucket:
            tally[rank[t] & ((1 << _BUCKET_BITS) - 1)] += 1
    value = (1 << _BUCKET_BITS) - 1
    while chosen + tally[value] < count:
        chosen += tally[value]
        value -= 1
    last = (bucket << _BUCKET_BITS) + value
    ties = count - chosen
    for t in range(rank.size):
        tie = rank[t] == last and ties > 0
        ties -= tie
        four[t] = rank[t] > last or tie


@compiled
def _rotate(tile):
    """Step 4; returns the pivot."""
    pivot = 0
    for k in range(TILE):
        if abs(tile[k]) > abs(tile[pivot]):
            pivot = k
    tile[0], tile[pivot] = tile[pivot], tile[0]
    hadamard(tile)
    return pivot


@compiled
def _planes(tile, base, inverse, words):
    """Step 6: a tile's codes as four bit-planes. Overwrites the tile; `words` is scratch, uint64 `[8]`."""
    codes = tile.view(np.uint32)
    for k in range(TILE):
        codes[k] = np.uint32(bits_of((tile[k] - base) * inverse + ROUND) & 15)
    # Byte i of word k is element 8 i + k, so that bit b of all bytes, moved up by k, belongs to plane b.
    for k in range(8):
        word = np.uint64(codes[k])
        for i in range(1, 8):
            word |= np.uint64(codes[8 * i + k]) << np.uint64(8 * i)
        words[k] = word
    p0, p1, p2, p3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    for k in range(8):
        word, place = words[k], np.uint64(k)
        p0 |= (word & _LOWEST_BITS) << place
        p1 |= (word >> np.uint64(1) & _LOWEST_BITS) << place
        p2 |= (word >> np.uint64(2) & _LOWEST_BITS) << place
        p3 |= (word >> np.uint64(3) & _LOWEST_BITS) << place
    return p0, p1, p2, p3


@compiled
def _pack(
    x,
    width,
    first,
    last,
    near,
    far,
    low,
    high,
    outlier,
    four,
    before,
    scales,
    zero_points,
    bit_map,
    pivots,
    low_planes,
    fourth_planes,
):
    """Steps 4 to 6 for tiles `first` to `last`; `before`: how many 4-bit tiles there are before `first`."""
    per_row = (width + TILE - 1) // TILE
    tile = np.empty(TILE, dtype=np.float32)
    words = np.empty(8, dtype=np.uint64)
    flags, sextets = 0, 0
    for t in range(first, last):
        row, column = t // per_row, t % per_row * TILE
        count = min(TILE, width - column)
        load(x, row * width + column, count, near, far, tile)
        smallest, largest = low[t], high[t]
        pivot = 0
        if outlier[t]:
            pivot = _rotate(tile)
            smallest, largest = _extremes(tile, TILE)
            count = TILE
        zero_point, base = np.int32(0), np.float32(0)
        if smallest >= _COUNTS_AS_ZERO:
            zero_point = half_beside(smallest, False)
            base = value_of_half(zero_point)
        elif smallest <= -_COUNTS_AS_ZERO:
            zero_point = half_beside(-smallest, True)
            base = -value_of_half(zero_point)
            zero_point |= 0x8000
        steps = np.float32(15) if four[t] else np.float32(7)
        scale = half_beside(max((largest - base) / steps, LEAST_STEP), True)
        p0, p1, p2, p3 = _planes(tile, base, ONE / value_of_half(scale), words)
        if count < TILE:
            real = (np.uint64(1) << np.uint64(count)) - np.uint64(1)
            p0, p1, p2, p3 = p0 & real, p1 & real, p2 & real, p3 & real
        zero_points[t] = zero_point
        scales[t] = scale | 0x8000 if outlier[t] else scale
        low_planes[0, t], low_planes[1, t], low_planes[2, t] = p0, p1, p2
        if four[t]:
            fourth_planes[before] = p3
            before += 1
        flags |= np.int64(four[t]) << (t & 7)
        sextets |= pivot << 6 * (t & 3)
        if t & 7 == 7 or t == last - 1:
            bit_map[t >> 3] = flags
            flags = 0
        if t & 3 == 3 or t == last - 1:
            for i in range(((t & 3) * 6 + 13) >> 3):
                pivots[(t >> 2) * 3 + i] = sextets >> 8 * i & 0xFF
            sextets = 0


def encode(x: torch.Tensor, sections: Sequence[NDArray[Any]], *, samples: int, four_bit: int) -> torch.Tensor:
    """`kernels.tah.reference.encode` into the sections as arrays, those of fp16 as int16.

    Writes nothing if x is not finite.
    """
    n, width, words = sections[0].size, x.shape[-1], bits_to_read(x)
    exponent = exponent_of(words)
    if (power := int(exponent)) == NON_FINITE:
        return exponent
    near, far = two_factors(-power)
    low, high = np.empty(n, dtype=np.float32), np.empty(n, dtype=np.float32)
    outlier, four = np.empty(n, dtype=np.bool_), np.empty(n, dtype=np.bool_)
    rank = np.empty(n, dtype=np.int32)

    def measure(first: int, last: int) -> None:
        _measure(words, width, first, last, near, far, low, high, outlier, rank)

    def choose(first: int, last: int) -> None:
        _choose(rank[first:last], four_bit, four[first:last])

    def pack(first: int, last: int) -> None:
        before = np.count_nonzero(four[:first])
        _pack(words, width, first, last, near, far, low, high, outlier, four, before, *sections)

    each = n // samples
    run(measure, ranges(n))
    run(choose, [(start, start + each) for start in range(0, n, each)])
    run(pack, ranges(n))
    return exponent
