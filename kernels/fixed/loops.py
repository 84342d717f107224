"""`kernels.fixed.reference` on a CPU, with the same bits, by compiled loops.

A tile is packed or unpacked in the innermost cache. So memory is read and written once, after one pass that
reads the tensor's exponent.
"""

import numpy as np
import torch

from kernels.common.loops import (
    LEAST_STEP,
    ONE,
    ROUND,
    ROUND_BITS,
    bits_of,
    bits_to_fill,
    bits_to_read,
    compiled,
    exponent_of,
    float_of,
    half_beside,
    inlined,
    largest_of,
    load,
    ranges,
    run,
    store,
    two_factors,
    value_of_half,
)
from kernels.common.tiles import NON_FINITE, TILE
from kernels.fixed.reference import FixedSections

# Hacker's Delight 7-3, as in `kernels.common.bitplanes`.
_SHIFT_1, _MASK_1 = np.uint64(7), np.uint64(0x00AA00AA00AA00AA)
_SHIFT_2, _MASK_2 = np.uint64(14), np.uint64(0x0000CCCC0000CCCC)
_SHIFT_4, _MASK_4 = np.uint64(28), np.uint64(0x00000000F0F0F0F0)
# Every other byte, pair of bytes and half of a word.
_MASK_8 = np.uint64(0x00FF00FF00FF00FF)
_MASK_16 = np.uint64(0x0000FFFF0000FFFF)
_MASK_32 = np.uint64(0x00000000FFFFFFFF)


@compiled
def _transpose_bits(words):
    """Each of 8 words as an 8 x 8 bit matrix (byte = row), in place."""
    for i in range(8):
        word = words[i]
        swap = (word >> _SHIFT_1 ^ word) & _MASK_1
        word = word ^ swap ^ swap << _SHIFT_1
        swap = (word >> _SHIFT_2 ^ word) & _MASK_2
        word = word ^ swap ^ swap << _SHIFT_2
        swap = (word >> _SHIFT_4 ^ word) & _MASK_4
        words[i] = word ^ swap ^ swap << _SHIFT_4


@inlined
def _swap(words, i, k, shift, mask):
    """Exchange the bytes of word i that lie `shift` above the mask with those of word k under it."""
    swap = (words[i] >> shift ^ words[k]) & mask
    words[i] ^= swap << shift
    words[k] ^= swap


@compiled
def _transpose_bytes(words):
    """8 words as an 8 x 8 matrix of bytes, in place."""
    for i in range(4):
        _swap(words, i, i + 4, np.uint64(32), _MASK_32)
    for i in range(2):
        _swap(words, i, i + 2, np.uint64(16), _MASK_16)
        _swap(words, i + 4, i + 6, np.uint64(16), _MASK_16)
    for i in range(0, 8, 2):
        _swap(words, i, i + 1, np.uint64(8), _MASK_8)


@inlined
def _write_planes(words, planes, first, last, t):
    """A tile's codes, the bytes of `words` (overwritten), as its words of planes `first` to `last`."""
    _transpose_bits(words)
    _transpose_bytes(words)
    for plane in range(first, last):
        planes[plane, t] = words[plane - first]


@inlined
def _read_planes(planes, first, last, t, words):
    """Inverse of `_write_planes`."""
    words[:] = 0
    for plane in range(first, last):
        words[plane - first] = planes[plane, t]
    _transpose_bytes(words)
    _transpose_bits(words)


@compiled
def _pack(x, width, first, last, near, far, scales, planes):
    """Steps 1 to 3 of the reference's list for tiles `first` to `last`."""
    per_row = (width + TILE - 1) // TILE
    bits = planes.shape[0]
    offset = np.int32((1 << (bits - 1)) - 1)
    limit = np.float32(offset)
    tile = np.empty(TILE, dtype=np.float32)
    tile_bits = tile.view(np.uint32)
    low_words, high_words = np.empty(8, dtype=np.uint64), np.empty(8, dtype=np.uint64)
    low, high = low_words.view(np.uint8), high_words.view(np.uint8)
    for t in range(first, last):
        row, column = t // per_row, t % per_row * TILE
        count = min(TILE, width - column)
        load(x, row * width + column, count, near, far, tile)
        largest = float_of(largest_of(tile_bits))
        scale = half_beside(max(largest / limit, LEAST_STEP), True)
        scales[t] = scale
        inverse = ONE / value_of_half(scale)
        if bits <= 8:
            for k in range(TILE):
                low[k] = np.int32(bits_of(tile[k] * inverse + ROUND) - ROUND_BITS + offset)
        else:
            for k in range(TILE):
                code = np.int32(bits_of(tile[k] * inverse + ROUND) - ROUND_BITS + offset)
                low[k], high[k] = code & 0xFF, code >> 8
        for k in range(count, TILE):
            low[k], high[k] = 0, 0
        _write_planes(low_words, planes, 0, min(bits, 8), t)
        if bits > 8:
            _write_planes(high_words, planes, 8, bits, t)


@compiled
def _unpack(scales, planes, width, first, last, near, far, limit, half, out):
    """Step 4 for tiles `first` to `last`; whether all of their codes are in the range."""
    per_row = (width + TILE - 1) // TILE
    bits = planes.shape[0]
    offset = np.float32((1 << (bits - 1)) - 1)
    tile = np.empty(TILE, dtype=np.float32)
    low_words, high_words = np.empty(8, dtype=np.uint64), np.empty(8, dtype=np.uint64)
    low, high = low_words.view(np.uint8), high_words.view(np.uint8)
    # The only code out of range is all ones.
    beyond = np.int32(0)
    highest = np.int32((1 << bits) - 1)
    for t in range(first, last):
        step = value_of_half(np.int32(scales[t]))
        _read_planes(planes, 0, min(bits, 8), t, low_words)
        if bits <= 8:
            for k in range(TILE):
                code = np.int32(low[k])
                beyond |= np.int32(code == highest)
                tile[k] = (np.float32(code) - offset) * step
        else:
            _read_planes(planes, 8, bits, t, high_words)
            for k in range(TILE):
                code = np.int32(np.int32(low[k]) | np.int32(high[k]) << 8)
                beyond |= np.int32(code == highest)
                tile[k] = (np.float32(code) - offset) * step
        row, column = t // per_row, t % per_row * TILE
        count, start = min(TILE, width - column), row * width + column
        store(tile, count, near, far, limit, half, out, start)
    return beyond == 0


def encode(x: torch.Tensor, out: FixedSections) -> torch.Tensor:
    """`kernels.fixed.reference.encode`. Writes nothing if x is not finite."""
    words, width = bits_to_read(x), x.shape[-1]
    exponent = exponent_of(words)
    if (power := int(exponent)) == NON_FINITE:
        return exponent
    near, far = two_factors(-power)
    scales, planes = out.scales.view(torch.int16).numpy(), out.planes.numpy().view(np.uint64)

    def pack(first: int, last: int) -> None:
        _pack(words, width, first, last, near, far, scales, planes)

    run(pack, ranges(scales.size))
    return exponent


def decode(sections: FixedSections, out: torch.Tensor, exponent: int) -> bool:
    """`kernels.fixed.reference.decode` of scales that the caller has checked."""
    near, far = two_factors(exponent)
    limit, half = np.float32(torch.finfo(out.dtype).max), out.dtype == torch.float16
    width, elements = out.shape[-1], bits_to_fill(out)
    scales, planes = sections.scales.view(torch.int16).numpy(), sections.planes.numpy().view(np.uint64)
    sound: list[bool] = []

    def unpack(first: int, last: int) -> None:
        sound.append(_unpack(scales, planes, width, first, last, near, far, limit, half, elements))

    run(unpack, ranges(scales.size))
    return all(sound)
