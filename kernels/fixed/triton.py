"""`kernels.fixed.reference` in Triton: the same bits, without waiting for the device.

Encoding reads the tensor once. The tensor's exponent is known only afterwards, but only the scales' exponents
depend on it. So a first kernel quantizes each tile with its own numbers, and a second, small kernel writes
the scales. Where that would not be exact (a tile 2**17 or more below the tensor's largest element, whose
scale is subnormal in fp16; elements beyond 2**-100 .. 2**100), it quantizes the tile again.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.common.dispatch import FIXED_DECODE, FIXED_ENCODE, FIXED_FINISH, Launch
from kernels.common.tiles import TILE, tiles_per_row
from kernels.common.triton.numbers import (
    MAGIC,
    MAGIC_BITS,
    RECORD,
    as_bits,
    ceil_half,
    ceil_short,
    denormalised,
    exponent_of,
    half_value,
    in_record,
    powers_of_two,
    quotient,
    reciprocal,
    sized_jit,
    wrapped,
)
from kernels.common.triton.planes import (
    BYTES,
    NIBBLES,
    gather_bytes,
    gather_nibbles,
    load_planes,
    spread_bytes,
    spread_nibbles,
    store_planes,
    transpose_nibbles,
)
from kernels.common.triton.tiles import (
    Rows,
    largest_of,
    load_block,
    peak_bits,
    spread,
    store_block,
    tile_max,
    tile_max_or_nan,
)

# Tiles that are quantized again at a time.
_AGAIN = 32


@triton.jit
def _pack(
    bits,
    planes,
    base,
    n,
    T: tl.constexpr,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    NIBBLE_BIAS: tl.constexpr,
    BYTE_BIAS: tl.constexpr,
):
    """Convert the bits of MAGIC + q, q in -LIMIT .. LIMIT, to the planes of q + LIMIT."""
    if BITS <= 4:
        words = gather_nibbles(bits) - NIBBLE_BIAS
        store_planes(planes, transpose_nibbles(words), base, n, T, BITS)
    else:
        plane = n.to(tl.int64) * 2
        if BITS > 8:
            code = bits - (MAGIC_BITS - LIMIT)
            low = gather_bytes(code & 255, 0)
            high = gather_bytes(code & 255, 1)
            top = transpose_nibbles(gather_nibbles(code >> 8))
            store_planes(planes + 8 * plane, top, base, n, T, BITS - 8)
        else:
            low = gather_bytes(bits, 0) - BYTE_BIAS
            high = gather_bytes(bits, 1) - BYTE_BIAS
        first = (low & 0x0F0F0F0F) | ((high << 4) & -0x0F0F0F10)
        second = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)
        store_planes(planes, transpose_nibbles(first), base, n, T, 4)
        store_planes(planes + 4 * plane, transpose_nibbles(second), base, n, T, min(BITS, 8) - 4)


@triton.jit
def _row(x, row, width, per_row, FLAT: tl.constexpr):
    """The start of a row; the compiler knows that 64 elements are aligned."""
    if FLAT:
        x += row * per_row * 64
    else:
        x += row * width
    return x


@sized_jit
def _quantize(
    x,
    planes,
    steps,
    peaks,
    n,
    width,
    row_stride,
    per_row,
    record,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    INVERSE_LIMIT: tl.constexpr,
    NIBBLE_BIAS: tl.constexpr,
    BYTE_BIAS: tl.constexpr,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    MANY: tl.constexpr,
):
    """Quantize every tile with its own scale; write that scale, fp32, to `steps` and the program's largest
    element to `peaks`. With `MANY`, for row `program_id(1)`, which is a tensor of its own."""
    program = tl.program_id(0)
    if MANY:
        row = tl.program_id(1).to(tl.int64)
        x = _row(x, row, width, per_row, FLAT)
        planes = in_record(planes, row, record)
        steps += row * n
        peaks += row * tl.num_programs(0)
    base = program.to(tl.int64) * T
    y, real = load_block(x, base, n, width, row_stride, per_row, T, FLAT, PAIRS)
    largest = tile_max_or_nan(tl.abs(y))
    tl.store(peaks + program, peak_bits(y, largest))
    # 0 only for a tile of zeros: tiles below 2**-100 are quantized again.
    step = tl.maximum(ceil_short(quotient(largest, LIMIT, INVERSE_LIMIT)), 1.1754943508222875e-38)
    tile = tl.arange(0, T)
    tl.store(steps + base + tile, tl.where(largest == 0, 0.0, step), mask=base + tile < n)
    bits = (y * spread(reciprocal(step)) + MAGIC).to(tl.int32, bitcast=True)
    if not FLAT:
        bits = tl.where(real, bits, MAGIC_BITS - LIMIT)
    _pack(bits, planes, base, n, T, BITS, LIMIT, NIBBLE_BIAS, BYTE_BIAS)


@sized_jit
def _finish(
    x,
    scales,
    planes,
    steps,
    peaks,
    exponent_out,
    programs,
    n,
    width,
    row_stride,
    per_row,
    record,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    INVERSE_LIMIT: tl.constexpr,
    NIBBLE_BIAS: tl.constexpr,
    BYTE_BIAS: tl.constexpr,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    AGAIN: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the exponent and every tile's scale from `steps`; requantize tiles where that is not exact."""
    program = tl.program_id(0)
    if MANY:
        row = tl.program_id(1).to(tl.int64)
        x = _row(x, row, width, per_row, FLAT)
        scales = in_record(scales, row, record)
        planes = in_record(planes, row, record)
        steps += row * n
        peaks += row * programs
        exponent_out += row
    first = program.to(tl.int64) * T
    tile = first + tl.arange(0, T)
    step = tl.load(steps + tile, mask=tile < n, other=0.0)
    exponent = exponent_of(largest_of(peaks, programs))
    if program == 0:
        tl.store(exponent_out, exponent)
    near, far = powers_of_two(-exponent)
    scaled = step * near * far
    wrong = (step != 0) & (
        (scaled < 6.103515625e-05) | (step < 7.888609052210118e-31) | (step > 1.2676506002282294e30)
    )
    tl.store(scales + tile, ceil_half(tl.maximum(scaled, 5.960464477539063e-08)).to(tl.int16), mask=tile < n)
    if tl.max(wrong.to(tl.int32), 0) > 0:
        # Quantize whole blocks again, after the scales above; tiles that were right get the same bits.
        tl.debug_barrier()
        start = 0
        while start < tl.minimum(T, n - program * T):
            base = first + start
            again = base + tl.arange(0, AGAIN)
            y, real = load_block(x, base, n, width, row_stride, per_row, AGAIN, FLAT, PAIRS)
            y = y * near * far
            largest = tile_max(tl.abs(y))
            exact = tl.div_rn(largest, tl.full((AGAIN,), LIMIT, tl.float32))
            scale = ceil_half(tl.maximum(exact, 5.960464477539063e-08))
            tl.store(scales + again, scale.to(tl.int16), mask=again < n)
            inverse = tl.div_rn(tl.full((AGAIN,), 1.0, tl.float32), half_value(scale))
            bits = (y * spread(inverse) + MAGIC).to(tl.int32, bitcast=True)
            bits = tl.where(real, bits, MAGIC_BITS - LIMIT)
            _pack(bits, planes, base, n, AGAIN, BITS, LIMIT, NIBBLE_BIAS, BYTE_BIAS)
            start += AGAIN


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
    record,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_EXPONENT: tl.constexpr,
    FLAT: tl.constexpr,
    T: tl.constexpr,
    MANY: tl.constexpr,
):
    """Decode T tiles; write their fault, or 0, to `status[program]`. `MANY`: of row `program_id(1)`."""
    program = tl.program_id(0)
    if MANY:
        row = tl.program_id(1).to(tl.int64)
        scales = in_record(scales, row, record)
        planes = in_record(planes, row, record)
        exponent += row
        out = _row(out, row, width, per_row, FLAT)
        status += row * tl.num_programs(0)
    base = program.to(tl.int64) * T
    tile = tl.arange(0, T)
    step = tl.load(scales + base + tile, mask=base + tile < n, other=0x3C00).to(tl.int32)
    if BITS <= 4:
        words, ones = load_planes(planes, base, n, T, BITS)
        code = spread_nibbles(transpose_nibbles(words))
    else:
        plane = n.to(tl.int64) * 2
        first, ones = load_planes(planes, base, n, T, 4)
        second, more_ones = load_planes(planes + 4 * plane, base, n, T, min(BITS, 8) - 4)
        ones &= more_ones
        first = transpose_nibbles(first)
        second = transpose_nibbles(second)
        low = (first & 0x0F0F0F0F) | ((second << 4) & -0x0F0F0F10)
        high = ((first >> 4) & 0x0F0F0F0F) | (second & -0x0F0F0F10)
        code = spread_bytes(low, high)
        if BITS > 8:
            top, more_ones = load_planes(planes + 8 * plane, base, n, T, BITS - 8)
            ones &= more_ones
            code |= spread_nibbles(transpose_nibbles(top)) << 8
    # A code of all ones is 2 * LIMIT + 1.
    wrong = tl.max((ones != 0).to(tl.int32), 0)
    negative = ((step & 0x8000) != 0) | ((step & 0x7FFF) == 0)
    infinite = ((step & 0x7FFF) > 0x7C00) | ((step & 0xFFFF) == 0x7C00)
    wrong = tl.maximum(wrong, tl.max(tl.where(infinite, 4, tl.where(negative, 2, 0)), 0))
    tl.store(status + program, wrong)
    # 2**23 + code, exactly.
    y = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LIMIT)
    y = y * spread(half_value(step))
    y = denormalised(y, tl.load(exponent), LARGEST, LARGEST_EXPONENT)
    store_block(out, y, base, n, width, per_row, T, FLAT)


def encode(
    x: torch.Tensor,
    scales: torch.Tensor,
    planes: torch.Tensor,
    exponent: torch.Tensor,
    *,
    record: int = 0,
    launch: Launch = FIXED_ENCODE,
    finish: Launch = FIXED_FINISH,
) -> None:
    """See `kernels.fixed.reference.encode`. Writes `exponent`, int32 with 1 element. Never waits.

    Args:
        record: if it is not 0, every row of x, fp32 `[n, C]` with n below 2**16, is a tensor of its own, and
            `exponent` has n elements. `scales` and `planes` are the first row's sections; each further row's
            begin `record` bytes, a multiple of `RECORD`, after the previous ones.
    """
    of, many, bits = Rows(x), record > 0, planes.shape[0]
    tiles, count = (of.per_row, x.shape[0]) if many else (of.tiles, 1)
    programs, device = triton.cdiv(tiles, launch.tiles), of.data.device
    steps = torch.empty(count * tiles, dtype=torch.float32, device=device)
    peaks = torch.empty(count * programs, dtype=torch.int32, device=device)
    limit = 2 ** (bits - 1) - 1
    common = {
        "BITS": bits,
        "LIMIT": limit,
        "INVERSE_LIMIT": torch.tensor(1.0 / limit, dtype=torch.float32).item(),
        "NIBBLE_BIAS": wrapped((MAGIC_BITS.value - limit) * NIBBLES),
        "BYTE_BIAS": wrapped((MAGIC_BITS.value - limit) * BYTES),
        "FLAT": of.width % TILE == 0 if many else of.flat,
        "PAIRS": of.pairs,
        "MANY": many,
        "enable_fp_fusion": False,
    }
    sizes = (tiles, of.width, of.stride, of.per_row, record // RECORD)
    words = planes.view(torch.int32)
    _quantize[(programs, count)](
        of.data, words, steps, peaks, *sizes, **common, T=launch.tiles, num_warps=launch.warps
    )
    _finish[(triton.cdiv(tiles, finish.tiles), count)](
        of.data,
        scales.view(torch.int16),
        words,
        steps,
        peaks,
        exponent,
        programs,
        *sizes,
        **common,
        T=finish.tiles,
        AGAIN=min(_AGAIN, finish.tiles),
        num_warps=finish.warps,
    )


def decode(
    scales: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
    exponent: torch.Tensor,
    *,
    record: int = 0,
    launch: Launch = FIXED_DECODE,
) -> torch.Tensor:
    """See `kernels.fixed.reference.decode`; here the exponent is on the device.

    Args:
        record: as for `encode`; `out` is contiguous.

    Returns int32 `[n, k]`: a tensor's largest is its fault (`kernels.common.dispatch`), or 0. With a fault
    `out` is meaningless; nothing outside it is written.
    """
    tiles, width, bits = scales.numel(), out.shape[-1], planes.shape[0]
    rows = out.shape[0] if record else 1
    status = torch.empty(rows, triton.cdiv(tiles, launch.tiles), dtype=torch.int32, device=out.device)
    _restore[(status.shape[1], rows)](
        scales.view(torch.int16),
        planes.view(torch.int32),
        exponent,
        as_bits(out),
        status,
        tiles,
        width,
        tiles_per_row(width),
        record // RECORD,
        BITS=bits,
        LIMIT=2 ** (bits - 1) - 1,
        LARGEST=torch.finfo(out.dtype).max,
        LARGEST_EXPONENT=math.frexp(torch.finfo(out.dtype).max)[1],
        FLAT=width % TILE == 0,
        T=launch.tiles,
        MANY=record > 0,
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )
    return status
