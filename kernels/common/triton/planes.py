"""Bit-planes in Triton (`kernels.common.bitplanes`): codes of a block to and from words of 32 bits.

The 8 codes of a byte column are transposed in one word: byte p of the word is the column's byte of plane p.
Four neighbouring columns are then half of a tile's word in a plane, as memory holds it.
"""

import triton
import triton.language as tl

# Where element j's code goes in the word of 8 that is transposed, and 1 << that, summed over j.
NIBBLES = 0x11111111
BYTES = 0x01010101


@triton.jit
def transpose_nibbles(w):
    """Transpose each 4 x 4 block of the 8 nibbles' bits: from bytes r = code r + 16 code (r + 4) to bytes p
    that are plane p of the 8 codes. It is its own inverse."""
    swap = (w ^ (w >> 7)) & 0x00AA00AA
    w = w ^ swap ^ (swap << 7)
    swap = (w ^ (w >> 14)) & 0x0000CCCC
    return w ^ swap ^ (swap << 14)


@triton.jit
def gather_nibbles(codes):
    """Pack codes `[T, 8, 8]` into words `[T, 8]` for `transpose_nibbles`; bits above a nibble spill over."""
    j = tl.arange(0, 8)[None, None, :]
    return tl.sum(codes << ((j & 3) * 8 + (j >> 2) * 4), 2)


@triton.jit
def gather_bytes(codes, HIGH: tl.constexpr):
    """Pack codes `[T, 8, 8]` as bytes: elements 0 to 3, or 4 to 7 if HIGH, in one word `[T, 8]`."""
    j = tl.arange(0, 8)[None, None, :]
    return tl.sum(tl.where((j >> 2) == HIGH, codes << ((j & 3) * 8), 0), 2)


@triton.jit
def spread_nibbles(words):
    """Inverse of `gather_nibbles`: codes `[T, 8, 8]`."""
    j = tl.arange(0, 8)[None, None, :]
    return (words[:, :, None] >> ((j & 3) * 8 + (j >> 2) * 4)) & 15


@triton.jit
def spread_bytes(low, high):
    """Inverse of `gather_bytes`: codes `[T, 8, 8]`."""
    j = tl.arange(0, 8)[None, None, :]
    return (tl.where((j >> 2) == 0, low[:, :, None], high[:, :, None]) >> ((j & 3) * 8)) & 255


@triton.jit
def columns(words, T: tl.constexpr):
    """Split words `[T, 8]` into four tensors `[2 T]`: columns 0 to 3 of half tiles, all in one thread."""
    even, odd = tl.split(tl.reshape(words, (T * 2, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def from_columns(first, second, third, fourth, T: tl.constexpr):
    """Inverse of `columns`."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (T, 8))


@triton.jit
def four_bytes(first, second, third, fourth, PLACE: tl.constexpr):
    """Byte PLACE of four words, as one word. PLACE from 0 to 3 gives the transposed 4 x 4 matrix of bytes."""
    low = ((first >> (8 * PLACE)) & 255) | (((second >> (8 * PLACE)) & 255) << 8)
    return low | (((third >> (8 * PLACE)) & 255) << 16) | (((fourth >> (8 * PLACE)) & 255) << 24)


@triton.jit
def store_planes(planes, words, base, n, T: tl.constexpr, COUNT: tl.constexpr):
    """Store byte p of words `[T, 8]` in plane p (int32, n tiles long), from tile base (int64) on."""
    first, second, third, fourth = columns(words, T)
    half = tl.arange(0, T * 2)
    inside = half < (n - base) * 2
    for p in tl.static_range(COUNT):
        place = planes + n.to(tl.int64) * (2 * p) + base * 2 + half
        tl.store(place, four_bytes(first, second, third, fourth, p), mask=inside)


@triton.jit
def load_plane(planes, PLANE: tl.constexpr, base, n, T: tl.constexpr):
    """Load the half words `[2 T]` of a plane from tile base (int64) on."""
    half = tl.arange(0, T * 2)
    place = planes + n.to(tl.int64) * (2 * PLANE) + base * 2 + half
    return tl.load(place, mask=half < (n - base) * 2, other=0)


@triton.jit
def planes_to_words(plane0, plane1, plane2, plane3, T: tl.constexpr):
    """Join half words of four planes to words `[T, 8]` whose byte p is plane p."""
    first = four_bytes(plane0, plane1, plane2, plane3, 0)
    second = four_bytes(plane0, plane1, plane2, plane3, 1)
    third = four_bytes(plane0, plane1, plane2, plane3, 2)
    fourth = four_bytes(plane0, plane1, plane2, plane3, 3)
    return from_columns(first, second, third, fourth, T)


@triton.jit
def load_planes(planes, base, n, T: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT planes, 1 to 4, as `planes_to_words` does; also a word of the bits set in all of them."""
    plane0 = load_plane(planes, 0, base, n, T)
    ones = plane0
    plane1 = tl.zeros((T * 2,), tl.int32)
    plane2 = tl.zeros((T * 2,), tl.int32)
    plane3 = tl.zeros((T * 2,), tl.int32)
    if COUNT > 1:
        plane1 = load_plane(planes, 1, base, n, T)
        ones &= plane1
    if COUNT > 2:
        plane2 = load_plane(planes, 2, base, n, T)
        ones &= plane2
    if COUNT > 3:
        plane3 = load_plane(planes, 3, base, n, T)
        ones &= plane3
    return planes_to_words(plane0, plane1, plane2, plane3, T), ones
