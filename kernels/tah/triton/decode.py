"""`kernels.tah.reference`'s decoder in Triton: a small kernel that counts 4-bit tiles, and one that
decodes."""

import math

import torch
import triton
import triton.language as tl

from kernels.common.dispatch import TAH_DECODE, Launch, most_warps
from kernels.common.tiles import TILE, tiles_per_row
from kernels.common.triton.numbers import (
    as_bits,
    denormalised,
    half_value,
    sized_jit,
)
from kernels.common.triton.planes import load_plane, planes_to_words, spread_nibbles, transpose_nibbles
from kernels.common.triton.tiles import first_of, hadamard, spread, store_block, store_tile, swapped

# Words of the bit-map (32 tiles) of a program of `_positions`, and how many it counts at once before its own.
_WORDS = 256
_BEFORE = 16384


@triton.jit
def _set_bits(word):
    """Bits set in each int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@sized_jit
def _positions(bit_map, positions, n, WORDS: tl.constexpr, BEFORE: tl.constexpr):
    """The number of 4-bit tiles before every 32nd tile. Each program counts all before its own again."""
    first = tl.program_id(0) * WORDS
    words = bit_map.to(tl.pointer_type(tl.int32), bitcast=True)
    index = tl.arange(0, BEFORE)
    before = tl.zeros((BEFORE,), tl.int32)
    start = 0
    while start < first:
        # Read 16 bytes at once, because the compiler does not merge the reads of a loop.
        place = tl.multiple_of(start, 128) + index
        before += _set_bits(tl.load(words + place, mask=place < first, other=0))
        start += BEFORE
    mine = first + tl.arange(0, WORDS)
    word = tl.load(words + mine, mask=mine * 32 < n, other=0)
    left = tl.minimum(tl.maximum(n - mine * 32, 0), 32)
    word = tl.where(left < 32, word & ((1 << left) - 1), word)
    count = _set_bits(word)
    inclusive = tl.sum(before, 0) + tl.cumsum(count, 0)
    tl.store(positions + mine, inclusive - count, mask=mine * 32 < n)


@triton.jit
def _before(words, positions, tile, inside):
    """The word of the bit-map with each tile's bit, and the number of 4-bit tiles before the tile."""
    word = tl.load(words + (tile >> 5), mask=inside, other=0)
    position = tl.load(positions + (tile >> 5), mask=inside, other=0)
    return word, position + _set_bits(word & ((1 << (tile & 31)) - 1))


@triton.jit
def _restore_rotated(
    scales,
    zero_points,
    pivots,
    low_planes,
    fourth_planes,
    out,
    tile,
    position,
    exponent,
    n,
    width,
    per_row,
    LARGEST: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
):
    """Decode one rotated tile (int64) and rotate it back. `position` is that of its fourth plane, or -1."""
    i = tl.arange(0, 64)
    word = tile * 2 + (i >> 5)
    code = (tl.load(low_planes + word) >> (i & 31)) & 1
    code |= ((tl.load(low_planes + n.to(tl.int64) * 2 + word) >> (i & 31)) & 1) << 1
    code |= ((tl.load(low_planes + n.to(tl.int64) * 4 + word) >> (i & 31)) & 1) << 2
    if position >= 0:
        code |= ((tl.load(fourth_planes + position * 2 + (i >> 5)) >> (i & 31)) & 1) << 3
    scale = half_value(tl.load(scales + tile).to(tl.int32) & 0x7FFF)
    y = tl.fma(code.to(tl.float32), scale, half_value(tl.load(zero_points + tile).to(tl.int32)))
    sextet = tile * 6
    shift = (sextet & 7).to(tl.int32)
    pivot = tl.load(pivots + (sextet >> 3)).to(tl.int32) >> shift
    if shift > 2:
        pivot |= tl.load(pivots + (sextet >> 3) + 1).to(tl.int32) << (8 - shift)
    y = swapped(hadamard(y), pivot & 63)
    store_tile(out, denormalised(y, exponent, LARGEST, LARGEST_EXPONENT), tile, width, per_row)


@sized_jit
def _restore(
    scales,
    zero_points,
    bit_map,
    pivots,
    low_planes,
    fourth_planes,
    positions,
    exponent,
    out,
    status,
    n,
    tiles,
    four_bit,
    fourths,
    width,
    per_row,
    LARGEST: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    FLAT: tl.constexpr,
    T: tl.constexpr,
):
    """Decode T tiles; write their fault, or 0, to `status[program]`."""
    program = tl.program_id(0)
    first = program * T
    base = first.to(tl.int64)
    tile = first + tl.arange(0, T)
    inside = tile < n
    scale = tl.load(scales + tile, mask=inside, other=0x3C00).to(tl.int32)
    zero_point = tl.load(zero_points + tile, mask=inside, other=0).to(tl.int32)
    plane0 = load_plane(low_planes, 0, base, n, T)
    plane1 = load_plane(low_planes, 1, base, n, T)
    plane2 = load_plane(low_planes, 2, base, n, T)
    words = bit_map.to(tl.pointer_type(tl.int32), bitcast=True)
    word, position = _before(words, positions, tile, inside)
    # Clamped to the section, because the bit-map may be wrong.
    four = inside & (((word >> (tile & 31)) & 1) != 0) & (position < fourths)
    at = tl.where(four, position * 2, -2)
    at = tl.reshape(tl.join(at, at + 1), (T * 2,))
    plane3 = tl.load(fourth_planes + at, mask=at >= 0, other=0)
    code = spread_nibbles(transpose_nibbles(planes_to_words(plane0, plane1, plane2, plane3, T)))
    # 2**23 + code, exactly; the product is exact too.
    y = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    y = tl.fma(y, spread(half_value(scale & 0x7FFF)), spread(half_value(zero_point)))

    wrong = 0
    sample = (first + tiles - 1) // tiles
    while sample * tiles < tl.minimum(first + T, n):
        _, found = _before(words, positions, sample * tiles, True)
        wrong |= (found != sample * four_bit).to(tl.int32)
        sample += 1
    if first + T >= n:
        last, found = _before(words, positions, n - 1, True)
        wrong |= (found + ((last >> ((n - 1) & 31)) & 1) != fourths).to(tl.int32)
    infinite = ((scale & 0x7C00) == 0x7C00) | ((zero_point & 0x7C00) == 0x7C00)
    fault = tl.max(tl.where(infinite, 4, tl.where((scale & 0x7FFF) == 0, 2, 0)), 0)
    tl.store(status + program, tl.maximum(wrong, fault))

    power = tl.load(exponent)
    y = denormalised(y, power, LARGEST, LARGEST_EXPONENT)
    store_block(out, y, base, n, width, per_row, T, FLAT)
    rotated = (scale & 0x8000) != 0
    index = tl.arange(0, T)
    one = first_of(rotated, T)
    if one < T:
        # Must follow the stores above, which wrote these tiles without rotating them back.
        tl.debug_barrier()
        while one < T:
            its_position = tl.sum(tl.where((index == one) & four, position + 1, 0), 0) - 1
            _restore_rotated(
                scales,
                zero_points,
                pivots,
                low_planes,
                fourth_planes,
                out,
                base + one,
                its_position,
                power,
                n,
                width,
                per_row,
                LARGEST,
                LARGEST_EXPONENT,
            )
            rotated = rotated & (index > one)
            one = first_of(rotated, T)


def decode(
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    bit_map: torch.Tensor,
    pivots: torch.Tensor,
    low_planes: torch.Tensor,
    fourth_planes: torch.Tensor,
    out: torch.Tensor,
    exponent: torch.Tensor,
    *,
    samples: int,
    four_bit: int,
    launch: Launch = TAH_DECODE,
) -> torch.Tensor:
    """`kernels.tah.reference.decode`, with the exponent on the device.

    `bit_map` is read by words: it must start, and its buffer must end, at a multiple of 4 bytes.

    Returns int32 `[k]`: the largest is the fault (`kernels.common.dispatch`), or 0. With a fault `out` is
    meaningless; nothing outside it is written.
    """
    width = out.shape[-1]
    n = scales.numel()
    device = out.device
    words = triton.cdiv(n, 32)
    positions = torch.empty(words, dtype=torch.int32, device=device)
    status = torch.empty(triton.cdiv(n, launch.tiles), dtype=torch.int32, device=device)
    _positions[(triton.cdiv(words, _WORDS),)](
        bit_map,
        positions,
        n,
        WORDS=_WORDS,
        BEFORE=_BEFORE,
        num_warps=most_warps(device),
        enable_fp_fusion=True,
    )
    _restore[(status.numel(),)](
        scales.view(torch.int16),
        zero_points.view(torch.int16),
        bit_map,
        pivots,
        low_planes.view(torch.int32),
        fourth_planes.view(torch.int32),
        positions,
        exponent,
        as_bits(out),
        status,
        n,
        n // samples,
        four_bit,
        samples * four_bit,
        width,
        tiles_per_row(width),
        LARGEST=torch.finfo(out.dtype).max,
        LARGEST_EXPONENT=math.frexp(torch.finfo(out.dtype).max)[1],
        FLAT=width % TILE == 0,
        T=launch.tiles,
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )
    return status
