"""`kernels.tah.reference`'s encoder in Triton: the same bits, without a sort and without waiting for the
device.

The tensor is read twice, the second time from its end, much of which the L2 cache still holds:

1. `_measure` reads every tile, sums what determines its entropy, and marks it if it may be an outlier.
   Nothing there depends on the tensor's exponent, which is known only afterwards.
2. `kernels.tah.triton.select` ranks the tiles and chooses those that get 4 bits.
3. `_quantize` packs every tile by the reference's steps.
"""

import torch
import triton
import triton.language as tl

from kernels.common.dispatch import TAH_MEASURE, TAH_QUANTIZE, TAH_SELECT, Launch
from kernels.common.tile_layout import OUTLIER_RATIO
from kernels.common.triton.numbers import (
    MAGIC,
    MAGIC_BITS,
    ceil_half,
    floor_half,
    half_value,
    powers_of_two,
    quotient,
    reciprocal,
    sized_jit,
    wrapped,
)
from kernels.common.triton.planes import NIBBLES, columns, four_bytes, gather_nibbles, transpose_nibbles
from kernels.common.triton.tiles import (
    Rows,
    first_of,
    hadamard,
    halves,
    load_block,
    load_tile,
    peak_bits,
    spread,
    swapped,
    tile_max,
    tile_max_or_nan,
    tile_min,
    tile_sum,
    whole,
)
from kernels.tah.triton import select as triton_select

_NIBBLE_BIAS = tl.constexpr(wrapped(MAGIC_BITS.value * NIBBLES))
_OF_LARGEST = tl.constexpr(1 / OUTLIER_RATIO)


@sized_jit
def _measure(
    x,
    total,
    weighted,
    peaks,
    scratch,
    scratch_size,
    n,
    width,
    row_stride,
    per_row,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    """Write every tile's S to `total` (negative if it may be an outlier), its T and exponent to `weighted`
    (`select.entropy_sums`), and the program's largest element to `peaks`. Clears `scratch`."""
    program = tl.program_id(0)
    base = program.to(tl.int64) * T
    y, _ = load_block(x, base, n, width, row_stride, per_row, T, FLAT, PAIRS)
    magnitude = tl.abs(y)
    largest = tile_max_or_nan(magnitude)
    tl.store(peaks + program, peak_bits(y, largest))
    sums, weights, exponent = triton_select.entropy_sums(magnitude, largest)
    # The test for outliers has an epsilon in the normalised scale; without it, this finds more of them.
    # The sign of a difference is one bit to shift and add.
    below = (magnitude - spread(largest * _OF_LARGEST)).to(tl.uint32, bitcast=True) >> 31
    single = tile_sum(below.to(tl.int32)) >= 63
    tile = tl.arange(0, T)
    tl.store(total + base + tile, sums | (single.to(tl.int32) << 31), mask=base + tile < n)
    tl.store(weighted + base + tile, weights | (exponent << 24), mask=base + tile < n)
    start = program * 1024
    while start < scratch_size:
        word = start + tl.arange(0, 1024)
        tl.store(scratch + word, tl.zeros((1024,), tl.int32), mask=word < scratch_size)
        start += tl.num_programs(0) * 1024


@triton.jit
def _steps(low, high, four):
    """Step 5 of `kernels.tah.reference`: bits of scale and zero-point, and the numbers to code with."""
    zero_bits = floor_half(low)
    zero_point = half_value(zero_bits)
    step = quotient(high - zero_point, tl.where(four, 15.0, 7.0), tl.where(four, 1.0 / 15.0, 1.0 / 7.0))
    step_bits = ceil_half(tl.maximum(step, 5.960464477539063e-08))
    return step_bits, zero_bits, zero_point, reciprocal(half_value(step_bits))


@triton.jit
def _pack_outlier(
    x,
    scales,
    zero_points,
    low_planes,
    fourth_planes,
    tile,
    position,
    near,
    far,
    n,
    width,
    row_stride,
    per_row,
):
    """Pack one tile (int64) again, rotated, if it is an outlier. Returns its pivot, else 0."""
    i = tl.arange(0, 64)
    y = load_tile(x, tile, width, row_stride, per_row) * near * far
    magnitude = tl.abs(y)
    largest = tl.max(magnitude, 0)
    threshold = largest * _OF_LARGEST - 5.960464477539063e-08
    pivot = 0
    if tl.sum((magnitude >= threshold).to(tl.int32), 0) <= 1:
        pivot = tl.min(tl.where(magnitude == largest, i, 64), 0)
        y = hadamard(swapped(y, pivot))
        four = position >= 0
        step_bits, zero_bits, zero_point, inverse = _steps(tl.min(y, 0), tl.max(y, 0), four)
        tl.store(scales + tile, (step_bits | 0x8000).to(tl.int16))
        tl.store(zero_points + tile, zero_bits.to(tl.int16))
        code = ((y - zero_point) * inverse + MAGIC).to(tl.int32, bitcast=True)
        half = tl.arange(0, 2)
        for p in tl.static_range(4):
            words = tl.sum(tl.reshape(((code >> p) & 1) << (i & 31), (2, 32)), 1)
            if p < 3:
                tl.store(low_planes + n.to(tl.int64) * (2 * p) + tile * 2 + half, words)
            else:
                tl.store(fourth_planes + position * 2 + half, words, mask=four & (half >= 0))
    return pivot


@triton.jit
def _store_flags(bit_map, four, base, n, T: tl.constexpr):
    """Store a bit for each tile, from tile base, a multiple of 8, on."""
    byte = tl.arange(0, T // 8)
    flags = tl.sum(tl.reshape(four.to(tl.int32), (T // 8, 8)) << tl.arange(0, 8)[None, :], 1)
    tl.store(bit_map + base // 8 + byte, flags.to(tl.uint8), mask=base + byte * 8 < n)


@triton.jit
def _store_sextets(pivots, pivot, base, n, T: tl.constexpr):
    """Store 6 bits for each tile, from tile base, a multiple of 4, on."""
    words = tl.sum(tl.reshape(pivot, (T // 4, 4)) << (tl.arange(0, 4)[None, :] * 6), 1)
    place = base // 4 * 3 + tl.arange(0, T // 4) * 3
    size = (n.to(tl.int64) * 6 + 7) // 8
    for byte in tl.static_range(3):
        tl.store(pivots + place + byte, ((words >> (8 * byte)) & 255).to(tl.uint8), mask=place + byte < size)


@sized_jit
def _quantize(
    x,
    places,
    exponents,
    scales,
    zero_points,
    bit_map,
    pivots,
    low_planes,
    fourth_planes,
    n,
    width,
    row_stride,
    per_row,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
):
    """Write every section's part for T tiles (`kernels.tah.reference`). Programs go from the end."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    base = program.to(tl.int64) * T
    tile = tl.arange(0, T)
    inside = base + tile < n
    y, real = load_block(x, base, n, width, row_stride, per_row, T, FLAT, PAIRS)
    place = tl.load(places + base + tile, mask=inside, other=-2)
    exponent = tl.load(exponents)
    near, far = powers_of_two(-exponent)
    # Normalising a tile's own numbers and scaling them back is exact; elsewhere, every element is normalised.
    factor = far
    _, back = powers_of_two(exponent)
    if (exponent < -64) | (exponent > 64):
        y = y * near * far
        factor = 1.0
        back = 1.0
    position = place >> 1
    four = position >= 0
    if FLAT:
        low = tile_min(y) * factor
        high = tile_max(y) * factor
    else:
        low = tl.where(inside, tile_min(tl.where(real, y, float("inf"))), 0.0) * factor
        high = tl.where(inside, tile_max(tl.where(real, y, float("-inf"))), 0.0) * factor
    low_even, low_odd = halves(low, T)
    high_even, high_odd = halves(high, T)
    position_even, position_odd = halves(position, T)
    step_even, zero_even, point_even, inverse_even = _steps(low_even, high_even, position_even >= 0)
    step_odd, zero_odd, point_odd, inverse_odd = _steps(low_odd, high_odd, position_odd >= 0)
    step_bits = whole(step_even, step_odd, T)
    zero_bits = whole(zero_even, zero_odd, T)
    zero_point = whole(point_even * back, point_odd * back, T)
    inverse = whole(inverse_even * factor, inverse_odd * factor, T)
    tl.store(scales + base + tile, step_bits.to(tl.int16), mask=inside)
    tl.store(zero_points + base + tile, zero_bits.to(tl.int16), mask=inside)
    _store_flags(bit_map, four, base, n, T)
    code = (y - spread(zero_point)) * spread(inverse)
    if not FLAT:
        code = tl.where(real, code, 0.0)
    words = transpose_nibbles(gather_nibbles((code + MAGIC).to(tl.int32, bitcast=True)) - _NIBBLE_BIAS)
    first, second, third, fourth = columns(words, T)
    half = tl.arange(0, T * 2)
    for p in tl.static_range(3):
        plane = low_planes + n.to(tl.int64) * (2 * p) + base * 2
        tl.store(plane + half, four_bytes(first, second, third, fourth, p), mask=half < (n - base) * 2)
    at = tl.reshape(tl.join(position * 2, position * 2 + 1), (T * 2,))
    tl.store(fourth_planes + at, four_bytes(first, second, third, fourth, 3), mask=at >= 0)

    pivot = tl.zeros((T,), tl.int32)
    single = (place & 1) != 0
    one = first_of(single, T)
    if one < T:
        # Must follow the stores above, which packed these tiles unrotated.
        tl.debug_barrier()
        while one < T:
            here = tile == one
            its_position = tl.sum(tl.where(here, position, 0), 0)
            found = _pack_outlier(
                x,
                scales,
                zero_points,
                low_planes,
                fourth_planes,
                base + one,
                its_position,
                near,
                far,
                n,
                width,
                row_stride,
                per_row,
            )
            pivot = tl.where(here, found, pivot)
            single = single & (tile > one)
            one = first_of(single, T)
    _store_sextets(pivots, pivot, base, n, T)


def encode(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    bit_map: torch.Tensor,
    pivots: torch.Tensor,
    low_planes: torch.Tensor,
    fourth_planes: torch.Tensor,
    exponent: torch.Tensor,
    *,
    samples: int,
    four_bit: int,
    measure: Launch = TAH_MEASURE,
    quantize: Launch = TAH_QUANTIZE,
    select: Launch = TAH_SELECT,
) -> None:
    """`kernels.tah.reference.encode` into the sections of `TahSections`; the exponent goes to `exponent`
    (int32, 1 element). Never waits for the device.

    The scratch, 12 bytes per tile and 66 KiB per sample, comes from torch's allocator.
    """
    rows = Rows(x)
    n, device = rows.tiles, x.device
    tiles = n // samples
    # Rows are multiples of 16 bytes, so that Triton compiles only for aligned pointers.
    total, weighted, places = torch.empty(3, -(-n // 4) * 4, dtype=torch.int32, device=device)
    programs = triton.cdiv(n, measure.tiles)
    peaks = torch.empty(programs, dtype=torch.int32, device=device)
    selection = triton_select.Selection(samples, tiles, four_bit, select, device)
    sizes = (n, rows.width, rows.stride, rows.per_row)
    flat = {"FLAT": rows.flat, "PAIRS": rows.pairs, "enable_fp_fusion": False}
    _measure[(programs,)](
        rows.data,
        total,
        weighted,
        peaks,
        selection.scratch,
        selection.scratch.numel(),
        *sizes,
        **flat,
        T=measure.tiles,
        num_warps=measure.warps,
    )
    selection.run(rows, total, weighted, peaks, places, exponent)
    _quantize[(triton.cdiv(n, quantize.tiles),)](
        rows.data,
        places,
        exponent,
        scales.view(torch.int16),
        zero_points.view(torch.int16),
        bit_map,
        pivots,
        low_planes.view(torch.int32),
        fourth_planes.view(torch.int32),
        *sizes,
        **flat,
        T=quantize.tiles,
        num_warps=quantize.warps,
    )
