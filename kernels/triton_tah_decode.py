"""`kernels.tah`'s decoder in Triton: a small kernel that counts 4-bit tiles, one that decodes every tile as
if it were not rotated, and one that decodes the rotated ones again, so that registers for the transform are
taken only there.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.tiles import TILE, tiles_per_row
from kernels.triton_common import (
    as_bits,
    denormalised,
    element,
    half_value,
    load_planes,
    plane_byte,
    sized_jit,
    spread,
    spread_nibbles,
    store_tiles,
    tile_sum,
    transpose_nibbles,
)
from kernels.triton_hadamard import hadamard
from kernels.triton_launch import TAH_DECODE, TAH_TURN_BACK, Launch
from kernels.triton_select import resident_programs

# Words of the bit-map (32 tiles) of a program of `_positions`.
_WORDS = 1024


@triton.jit
def _set_bits(word):
    """Bits set in each int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@sized_jit
def _positions(bit_map, positions, length, n, WORDS: tl.constexpr):
    """How many 4-bit tiles lie before every 32nd tile. A program counts all before its own again."""
    if tl.program_id(0) == 0:
        tl.store(length, 0)
    first = tl.program_id(0) * WORDS
    words = bit_map.to(tl.pointer_type(tl.int32), bitcast=True)
    index = tl.arange(0, WORDS)
    before = tl.zeros((WORDS,), tl.int32)
    start = 0
    while start < first:
        before += _set_bits(tl.load(words + start + index))
        start += WORDS
    word = tl.load(words + first + index, mask=(first + index) * 32 < n, other=0)
    left = tl.minimum(tl.maximum(n - (first + index) * 32, 0), 32)
    word = tl.where(left < 32, word & ((1 << left) - 1), word)
    count = _set_bits(word)
    inclusive = tl.sum(before, 0) + tl.cumsum(count, 0)
    tl.store(positions + first + index, inclusive - count, mask=(first + index) * 32 < n)


@triton.jit
def _before(words, positions, tile, inside):
    """The word of the bit-map that holds each tile, and how many 4-bit tiles lie before the tile."""
    word = tl.load(words + (tile >> 5), mask=inside, other=0)
    position = tl.load(positions + (tile >> 5), mask=inside, other=0)
    return word, position + _set_bits(word & ((1 << (tile & 31)) - 1))


@triton.jit
def _values(
    scale,
    zero_point,
    words,
    positions,
    low_planes,
    fourth_planes,
    base,
    tile,
    inside,
    n,
    fourths,
    LANES: tl.constexpr,
):
    """Tiles base + tile as stored, not rotated back: fp32 block."""
    byte = plane_byte(LANES)
    place = tile[None, :, None] * 8 + byte
    codes = load_planes(low_planes + base * 8, place, inside[None, :, None], n.to(tl.int64) * 8, 3)
    whole = (base + tile).to(tl.int32)
    word, position = _before(words, positions, whole, inside)
    # Within the section, whatever the bit-map says.
    four = inside & (((word >> (whole & 31)) & 1) != 0) & (position < fourths)
    fourth = tl.load(
        fourth_planes + position.to(tl.int64)[None, :, None] * 8 + byte, mask=four[None, :, None], other=0
    )
    code = spread_nibbles(transpose_nibbles(codes | (fourth.to(tl.int32) << 24)))
    # 2**23 + code, exactly; the product is exact too.
    y = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return tl.fma(y, spread(half_value(scale & 0x7FFF)), spread(half_value(zero_point)))


@sized_jit
def _restore(
    scales,
    zero_points,
    bit_map,
    low_planes,
    fourth_planes,
    positions,
    exponent,
    out,
    listed,
    length,
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
    LANES: tl.constexpr,
):
    """Decode T tiles and list the rotated ones; what is wrong with them to `status[program]`."""
    program = tl.program_id(0)
    first = program * T
    base = first.to(tl.int64)
    tile = tl.arange(0, T)
    inside = tile < n - first
    scale = tl.load(scales + base + tile, mask=inside, other=0x3C00).to(tl.int32)
    zero_point = tl.load(zero_points + base + tile, mask=inside, other=0).to(tl.int32)
    words = bit_map.to(tl.pointer_type(tl.int32), bitcast=True)
    y = _values(
        scale, zero_point, words, positions, low_planes, fourth_planes, base, tile, inside, n, fourths, LANES
    )

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

    rotated = ((scale & 0x8000) != 0).to(tl.int32)
    if tl.max(rotated, 0) > 0:
        slot = tl.atomic_add(length, tl.sum(rotated, 0), sem="relaxed") + tl.cumsum(rotated, 0) - rotated
        tl.store(listed + slot, first + tile, mask=rotated > 0)
    y = denormalised(y, tl.load(exponent), LARGEST, LARGEST_EXPONENT)
    store_tiles(out, y, base, tile, inside, width, per_row, LANES, FLAT)


@sized_jit
def _turn_back(
    scales,
    zero_points,
    bit_map,
    pivots,
    low_planes,
    fourth_planes,
    positions,
    exponent,
    out,
    listed,
    length,
    n,
    fourths,
    width,
    per_row,
    LARGEST: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    FLAT: tl.constexpr,
    T: tl.constexpr,
    LANES: tl.constexpr,
):
    """Decode the listed tiles, which are rotated."""
    count = tl.load(length)
    words = bit_map.to(tl.pointer_type(tl.int32), bitcast=True)
    base = tl.zeros((), tl.int64)
    i = element(LANES)
    start = tl.program_id(0) * T
    while start < count:
        entry = start + tl.arange(0, T)
        inside = entry < count
        tile = tl.load(listed + entry, mask=inside, other=0).to(tl.int64)
        scale = tl.load(scales + tile, mask=inside, other=0x3C00).to(tl.int32)
        zero_point = tl.load(zero_points + tile, mask=inside, other=0).to(tl.int32)
        y = _values(
            scale,
            zero_point,
            words,
            positions,
            low_planes,
            fourth_planes,
            base,
            tile,
            inside,
            n,
            fourths,
            LANES,
        )
        sextet = tile * 6
        shift = (sextet & 7).to(tl.int32)
        pivot = tl.load(pivots + (sextet >> 3), mask=inside, other=0).to(tl.int32) >> shift
        second = tl.load(pivots + (sextet >> 3) + 1, mask=inside & (shift > 2), other=0).to(tl.int32)
        pivot = (pivot | (second << (8 - shift))) & 63
        bits = hadamard(y, LANES).to(tl.int32, bitcast=True)
        top = tile_sum(tl.where(i == spread(pivot), bits, 0))
        zeroth = tile_sum(tl.where(i == 0, bits, 0))
        bits = tl.where(i == 0, spread(top), tl.where(i == spread(pivot), spread(zeroth), bits))
        y = denormalised(bits.to(tl.float32, bitcast=True), tl.load(exponent), LARGEST, LARGEST_EXPONENT)
        store_tiles(out, y, base, tile, inside, width, per_row, LANES, FLAT)
        start += tl.num_programs(0) * T


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
    turn: Launch = TAH_TURN_BACK,
) -> torch.Tensor:
    """As `kernels.tah.decode`, with the exponent on the device. `bit_map` must start at a multiple of 4 bytes
    in a buffer whose size is one: it is read by words.

    Returns int32 `[k]`, all 0 if the sections were sound: else the largest is what `kernels.ops` calls it.
    What was decoded is then meaningless, but lies within `out`.
    """
    width = out.shape[-1]
    n = scales.numel()
    device = out.device
    positions = torch.empty(triton.cdiv(n, 32), dtype=torch.int32, device=device)
    listed = torch.empty(n, dtype=torch.int32, device=device)
    length = torch.empty(1, dtype=torch.int32, device=device)
    status = torch.empty(triton.cdiv(n, launch.tiles), dtype=torch.int32, device=device)
    _positions[(triton.cdiv(n, 32 * _WORDS),)](bit_map, positions, length, n, WORDS=_WORDS, num_warps=4)
    halves = (scales.view(torch.int16), zero_points.view(torch.int16), bit_map)
    planes = (
        low_planes.view(torch.uint8),
        fourth_planes.view(torch.uint8),
        positions,
        exponent,
        as_bits(out),
    )
    common = {
        "LARGEST": torch.finfo(out.dtype).max,
        "LARGEST_EXPONENT": math.frexp(torch.finfo(out.dtype).max)[1],
        "FLAT": width % TILE == 0,
        "enable_fp_fusion": False,
    }
    fourths, per_row = samples * four_bit, tiles_per_row(width)
    _restore[(status.numel(),)](
        *halves,
        *planes,
        listed,
        length,
        status,
        n,
        n // samples,
        four_bit,
        fourths,
        width,
        per_row,
        **common,
        T=launch.tiles,
        LANES=launch.lanes,
        num_warps=launch.warps,
    )
    programs = min(triton.cdiv(n, turn.tiles), resident_programs(device, turn.warps))
    _turn_back[(programs,)](
        *halves,
        pivots,
        *planes,
        listed,
        length,
        n,
        fourths,
        width,
        per_row,
        **common,
        T=turn.tiles,
        LANES=turn.lanes,
        num_warps=turn.warps,
    )
    return status
