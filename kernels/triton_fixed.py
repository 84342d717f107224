"""`kernels.fixed` in Triton: the same bits, without waiting for the device.

Encoding reads the tensor once. Its exponent is known only when all of it has been read, but nothing except
the scales' exponents depends on it: a tile is quantized with its own numbers, and a second, small kernel
writes the scales. Where that would not be exact (a tile 2**17 or more below the tensor's largest element,
whose scale is subnormal in fp16; elements beyond 2**-100 .. 2**100), it quantizes the tile again.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.tiles import TILE, tiles_per_row
from kernels.triton_common import (
    BYTES,
    MAGIC,
    MAGIC_BITS,
    NIBBLES,
    all_ones,
    as_bits,
    ceil_half,
    ceil_short,
    denormalised,
    exponent_of,
    gather_bytes,
    gather_nibbles,
    half_value,
    load_planes,
    load_tiles,
    peak_bits,
    plane_byte,
    powers_of_two,
    sized_jit,
    spread,
    spread_bytes,
    spread_nibbles,
    store_planes,
    store_tiles,
    tile_max,
    tile_max_or_nan,
    transpose_nibbles,
    wrapped,
)
from kernels.triton_launch import FIXED_DECODE, FIXED_ENCODE, FIXED_FINISH, Launch
from kernels.triton_rows import Rows


@triton.jit
def _pack(
    bits,
    planes,
    place,
    inside,
    stride,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    NIBBLE_BIAS: tl.constexpr,
    BYTE_BIAS: tl.constexpr,
):
    """Bits of MAGIC + q, q in -LIMIT .. LIMIT, to the planes of q + LIMIT."""
    if BITS <= 4:
        words = gather_nibbles(bits) - NIBBLE_BIAS
        store_planes(planes, transpose_nibbles(words), place, inside, stride, BITS)
    else:
        if BITS > 8:
            code = bits - (MAGIC_BITS - LIMIT)
            low = gather_bytes(code & 255, 0)
            high = gather_bytes(code & 255, 1)
            top = transpose_nibbles(gather_nibbles(code >> 8))
            store_planes(planes + 8 * stride, top, place, inside, stride, BITS - 8)
        else:
            low = gather_bytes(bits, 0) - BYTE_BIAS
            high = gather_bytes(bits, 1) - BYTE_BIAS
        first = (low & 0x0F0F0F0F) | ((high << 4) & -0x0F0F0F10)
        second = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)
        store_planes(planes, transpose_nibbles(first), place, inside, stride, 4)
        store_planes(planes + 4 * stride, transpose_nibbles(second), place, inside, stride, min(BITS, 8) - 4)


@sized_jit
def _quantize(
    x,
    planes,
    steps,
    peak,
    n,
    width,
    row_stride,
    per_row,
    constant,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    NIBBLE_BIAS: tl.constexpr,
    BYTE_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    LANES: tl.constexpr,
):
    """Codes of every tile by its own scale; that scale, fp32, to `steps`; the largest element to `peak`."""
    first = tl.program_id(0) * T
    base = first.to(tl.int64)
    tile = tl.arange(0, T)
    inside = tile < n - first
    y, real = load_tiles(x, base, tile, inside, width, row_stride, per_row, LANES, FLAT, PAIRS)
    if SCALED:
        y = y * constant
    largest = tile_max_or_nan(tl.abs(y))
    tl.atomic_max(peak, peak_bits(y, largest), sem="relaxed")
    step = ceil_short(tl.div_rn(largest, tl.full((T,), LIMIT, tl.float32)))
    # Never 0 but for a tile of zeros: what is below 2**-100 is quantized again.
    step = tl.where(largest == 0, 0.0, tl.maximum(step, 1.1754943508222875e-38))
    tl.store(steps + base + tile, step, mask=inside)
    inverse = tl.div_rn(tl.full((T,), 1.0, tl.float32), tl.where(largest == 0, 1.0, step))
    bits = (y * spread(inverse) + MAGIC).to(tl.int32, bitcast=True)
    if not FLAT:
        bits = tl.where(real, bits, MAGIC_BITS - LIMIT)
    place = tile[None, :, None] * 8 + plane_byte(LANES)
    _pack(
        bits,
        planes + base * 8,
        place,
        inside[None, :, None],
        n.to(tl.int64) * 8,
        BITS,
        LIMIT,
        NIBBLE_BIAS,
        BYTE_BIAS,
    )


@sized_jit
def _finish(
    x,
    scales,
    planes,
    steps,
    peak,
    exponent_out,
    n,
    width,
    row_stride,
    per_row,
    constant,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    NIBBLE_BIAS: tl.constexpr,
    BYTE_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    LANES: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The exponent, and every tile's scale from `steps`; tiles for which that is not exact once more."""
    program = tl.program_id(0)
    exponent = exponent_of(tl.load(peak))
    if program == 0:
        tl.store(exponent_out, exponent)
    near, far = powers_of_two(-exponent)
    first = program * T
    tile = first + tl.arange(0, T)
    inside = tile < n
    step = tl.load(steps + tile, mask=inside, other=0.0)
    scaled = step * near * far
    wrong = (step != 0) & (
        (scaled < 6.103515625e-05) | (step < 7.888609052210118e-31) | (step > 1.2676506002282294e30)
    )
    tl.store(scales + tile, ceil_half(tl.maximum(scaled, 5.960464477539063e-08)).to(tl.int16), mask=inside)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        # Whole blocks again, which writes the same where it was right; after the scales above.
        tl.debug_barrier()
        for start in range(0, T, AGAIN):
            again = first + start + tl.arange(0, AGAIN)
            among = again < n
            base = tl.zeros((), tl.int64)
            y, real = load_tiles(
                x, base, again.to(tl.int64), among, width, row_stride, per_row, LANES, FLAT, PAIRS
            )
            if SCALED:
                y = y * constant
            y = y * near * far
            largest = tile_max(tl.abs(y))
            exact = tl.div_rn(largest, tl.full((AGAIN,), LIMIT, tl.float32))
            scale = ceil_half(tl.maximum(exact, 5.960464477539063e-08))
            tl.store(scales + again, scale.to(tl.int16), mask=among)
            inverse = tl.div_rn(tl.full((AGAIN,), 1.0, tl.float32), half_value(scale))
            bits = (y * spread(inverse) + MAGIC).to(tl.int32, bitcast=True)
            bits = tl.where(real, bits, MAGIC_BITS - LIMIT)
            place = again.to(tl.int64)[None, :, None] * 8 + plane_byte(LANES)
            _pack(
                bits,
                planes,
                place,
                among[None, :, None],
                n.to(tl.int64) * 8,
                BITS,
                LIMIT,
                NIBBLE_BIAS,
                BYTE_BIAS,
            )


@sized_jit
def _restore(
    scales,
    planes,
    exponent,
    out,
    status,
    n,
    width,
    per_row,
    constant,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    SCALED: tl.constexpr,
    FLAT: tl.constexpr,
    T: tl.constexpr,
    LANES: tl.constexpr,
):
    """Decode T tiles; what is wrong with them to `status[program]`."""
    program = tl.program_id(0)
    first = program * T
    base = first.to(tl.int64)
    tile = tl.arange(0, T)
    inside = tile < n - first
    step = tl.load(scales + base + tile, mask=inside, other=0x3C00).to(tl.int32)
    stride = n.to(tl.int64) * 8
    place = tile[None, :, None] * 8 + plane_byte(LANES)
    here = inside[None, :, None]
    mine = planes + base * 8
    if BITS <= 4:
        words = load_planes(mine, place, here, stride, BITS)
        ones = all_ones(words, BITS)
        code = spread_nibbles(transpose_nibbles(words))
    else:
        first = load_planes(mine, place, here, stride, 4)
        second = load_planes(mine + 4 * stride, place, here, stride, min(BITS, 8) - 4)
        ones = all_ones(first, 4) & all_ones(second, min(BITS, 8) - 4)
        first = transpose_nibbles(first)
        second = transpose_nibbles(second)
        low = (first & 0x0F0F0F0F) | ((second << 4) & -0x0F0F0F10)
        high = ((first >> 4) & 0x0F0F0F0F) | (second & -0x0F0F0F10)
        code = spread_bytes(low, high)
        if BITS > 8:
            top = load_planes(mine + 8 * stride, place, here, stride, BITS - 8)
            ones &= all_ones(top, BITS - 8)
            code |= spread_nibbles(transpose_nibbles(top)) << 8
    # A code of all ones is 2 * LIMIT + 1.
    wrong = tl.where(tl.max(tl.max(tl.max(ones, 2), 1), 0) > 0, 1, 0)
    negative = ((step & 0x8000) != 0) | ((step & 0x7FFF) == 0)
    infinite = ((step & 0x7FFF) > 0x7C00) | ((step & 0xFFFF) == 0x7C00)
    wrong = tl.maximum(wrong, tl.max(tl.where(infinite, 4, tl.where(negative, 2, 0)), 0))
    tl.store(status + program, wrong)
    # 2**23 + code, exactly.
    y = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LIMIT)
    y = y * spread(half_value(step))
    if SCALED:
        near, far = powers_of_two(tl.load(exponent))
        y = tl.div_rn(y * near * far, tl.full(y.shape, 0.0, tl.float32) + constant)
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    else:
        y = denormalised(y, tl.load(exponent), LARGEST, LARGEST_EXPONENT)
    store_tiles(out, y, base, tile, inside, width, per_row, LANES, FLAT)


def _shape(bits: int) -> dict[str, int]:
    limit = 2 ** (bits - 1) - 1
    return {
        "BITS": bits,
        "LIMIT": limit,
        "NIBBLE_BIAS": wrapped((MAGIC_BITS.value - limit) * NIBBLES),
        "BYTE_BIAS": wrapped((MAGIC_BITS.value - limit) * BYTES),
    }


def encode(
    x: torch.Tensor,
    scales: torch.Tensor,
    planes: torch.Tensor,
    exponent: torch.Tensor,
    *,
    constant: float,
    launch: Launch = FIXED_ENCODE,
    finish: Launch = FIXED_FINISH,
) -> None:
    """As `kernels.fixed.encode`, the exponent into `exponent` (int32, 1 element). Never waits."""
    rows = Rows(x)
    steps = torch.empty(rows.tiles, dtype=torch.float32, device=x.device)
    peak = torch.zeros(1, dtype=torch.int32, device=x.device)
    common = {
        **_shape(planes.shape[0]),
        "SCALED": constant != 1.0,
        "FLAT": rows.flat,
        "PAIRS": rows.pairs,
        "enable_fp_fusion": False,
    }
    sizes = (rows.tiles, rows.width, rows.stride, rows.per_row, constant)
    words = planes.view(torch.uint8)
    _quantize[(triton.cdiv(rows.tiles, launch.tiles),)](
        rows.data,
        words,
        steps,
        peak,
        *sizes,
        **common,
        T=launch.tiles,
        LANES=launch.lanes,
        num_warps=launch.warps,
    )
    _finish[(triton.cdiv(rows.tiles, finish.tiles),)](
        rows.data,
        scales.view(torch.int16),
        words,
        steps,
        peak,
        exponent,
        *sizes,
        **common,
        T=finish.tiles,
        LANES=finish.lanes,
        AGAIN=min(32, finish.tiles),
        num_warps=finish.warps,
    )


def decode(
    scales: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
    exponent: torch.Tensor,
    *,
    constant: float,
    launch: Launch = FIXED_DECODE,
) -> torch.Tensor:
    """As `kernels.fixed.decode`, with the exponent on the device.

    Returns int32 `[k]`, all 0 if the sections were sound: else the largest is what `kernels.ops` calls it.
    What was decoded is then meaningless, but lies within `out`.
    """
    width = out.shape[-1]
    tiles = scales.numel()
    status = torch.empty(triton.cdiv(tiles, launch.tiles), dtype=torch.int32, device=out.device)
    _restore[(status.numel(),)](
        scales.view(torch.int16),
        planes.view(torch.uint8),
        exponent,
        as_bits(out),
        status,
        tiles,
        width,
        tiles_per_row(width),
        constant,
        **{key: value for key, value in _shape(planes.shape[0]).items() if not key.endswith("BIAS")},
        LARGEST=torch.finfo(out.dtype).max,
        LARGEST_EXPONENT=math.frexp(torch.finfo(out.dtype).max)[1],
        SCALED=constant != 1.0,
        FLAT=width % TILE == 0,
        T=launch.tiles,
        LANES=launch.lanes,
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )
    return status
