"""`kernels.tah`'s encoder in Triton: the same bits, without a sort and without waiting for the device.

The tensor is read once, and about a quarter of it again:

1. `_measure` reads every tile, quantizes it as if it had 4 bits and were no outlier, and notes what its
   entropy follows from. Nothing there depends on the tensor's exponent, which is known only afterwards.
2. `kernels.triton_select` gives every tile its rank and finds the threshold of each sample, by histograms.
3. `_finish` writes the metadata, moves the fourth bit-planes together, and lists the tiles for which step 1
   was not the answer: those of 3 bits, those that may be outliers, and the few where arithmetic in the
   tensor's own scale is not exactly that in the normalised one (scales or zero-points subnormal in fp16).
4. `_again` quantizes the listed tiles by the reference's steps, one by one.
"""

import torch
import triton
import triton.language as tl

from kernels import triton_select
from kernels.triton_common import (
    MAGIC,
    MAGIC_BITS,
    NIBBLES,
    ceil_half,
    ceil_short,
    element,
    exponent_of,
    floor_half,
    floor_short,
    gather_nibbles,
    half_value,
    load_tiles,
    peak_bits,
    plane_byte,
    powers_of_two,
    sized_jit,
    spread,
    store_planes,
    tile_max,
    tile_max_or_nan,
    tile_min,
    tile_sum,
    transpose_nibbles,
    wrapped,
)
from kernels.triton_hadamard import hadamard
from kernels.triton_launch import TAH_AGAIN, TAH_CHUNK, TAH_CHUNK_WARPS, TAH_MEASURE, Launch
from kernels.triton_rows import Rows

_NIBBLE_BIAS = tl.constexpr(wrapped(MAGIC_BITS.value * NIBBLES))


@sized_jit
def _measure(
    x,
    low_planes,
    fourth,
    pivots,
    bit_map,
    total,
    weighted,
    steps,
    zeros,
    peak,
    table,
    n,
    width,
    row_stride,
    per_row,
    tau,
    HALF: tl.constexpr,
    TABLE: tl.constexpr,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    CLEAR_MAP: tl.constexpr,
    T: tl.constexpr,
    LANES: tl.constexpr,
):
    """Every tile in 4 bits, not rotated: codes to `low_planes` and `fourth`, scale and zero-point in fp32 to
    `steps` (negative if it may be an outlier) and `zeros`; sums for its entropy (`triton_select`)."""
    program = tl.program_id(0)
    first = program * T
    base = first.to(tl.int64)
    tile = tl.arange(0, T)
    inside = tile < n - first
    y, real = load_tiles(x, base, tile, inside, width, row_stride, per_row, LANES, FLAT, PAIRS)
    if FLAT:
        low = tile_min(y)
        high = tile_max_or_nan(y)
    else:
        low = tl.where(inside, tile_min(tl.where(real, y, float("inf"))), 0.0)
        high = tl.where(inside, tile_max_or_nan(tl.where(real, y, float("-inf"))), 0.0)
    largest = tl.maximum(0.0 - low, high, propagate_nan=tl.PropagateNan.ALL)
    tl.atomic_max(peak, peak_bits(y, largest), sem="relaxed")

    magnitude = tl.abs(y)
    sums, weights, exponent = triton_select.entropy_sums(magnitude, largest, table, TABLE)
    tl.store(total + base + tile, sums, mask=inside)
    tl.store(weighted + base + tile, weights | (exponent << 24), mask=inside)

    # Whether it is an outlier depends on an epsilon in the normalised scale; without one there are more.
    if HALF:
        # The sign of a difference is one bit to shift and add.
        below = (magnitude - spread(largest * 0.5)).to(tl.uint32, bitcast=True) >> 31
        single = tile_sum(below.to(tl.int32)) >= 63
    else:
        threshold = tl.div_rn(largest, tl.full((T,), 0.0, tl.float32) + tau)
        single = tile_sum((magnitude >= spread(threshold)).to(tl.int32)) <= 1

    zero_point = floor_short(low)
    span = high - zero_point
    step = tl.maximum(ceil_short(tl.div_rn(span, tl.full((T,), 15.0, tl.float32))), 1.1754943508222875e-38)
    step = tl.where(span == 0, 0.0, step)
    inverse = tl.div_rn(tl.full((T,), 1.0, tl.float32), tl.where(span == 0, 1.0, step))
    bits = ((y - spread(zero_point)) * spread(inverse) + MAGIC).to(tl.int32, bitcast=True)
    if not FLAT:
        bits = tl.where(real, bits, MAGIC_BITS)
    words = transpose_nibbles(gather_nibbles(bits) - _NIBBLE_BIAS)
    place = tile[None, :, None] * 8 + plane_byte(LANES)
    store_planes(low_planes + base * 8, words, place, inside[None, :, None], n.to(tl.int64) * 8, 3)
    tl.store(fourth + base * 8 + place, ((words >> 24) & 255).to(tl.uint8), mask=inside[None, :, None])

    # Too small for `floor_short`: to be done again, by a step out of range.
    step = tl.where((low != 0) & (tl.abs(low) < 7.888609052210118e-31), 1.1754943508222875e-38, step)
    signed = step.to(tl.int32, bitcast=True) | (single.to(tl.int32) << 31)
    tl.store(steps + base + tile, signed.to(tl.float32, bitcast=True), mask=inside)
    tl.store(zeros + base + tile, zero_point, mask=inside)

    # Sections that later kernels set bits in.
    tl.store(
        pivots + program.to(tl.int64) * (T * 3 // 4) + tile,
        tl.zeros((T,), tl.uint8),
        mask=(tile < T * 3 // 4) & (program * (T * 3 // 4) + tile < (n * 6 + 7) // 8),
    )
    if CLEAR_MAP:
        tl.store(
            bit_map + program.to(tl.int64) * (T // 8) + tile,
            tl.zeros((T,), tl.uint8),
            mask=(tile < T // 8) & (program * (T // 8) + tile < (n + 7) // 8),
        )


@sized_jit
def _finish(
    ranks,
    counts,
    chosen,
    steps,
    zeros,
    fourth,
    peak,
    exponent_out,
    scales,
    zero_points,
    bit_map,
    fourth_planes,
    listed,
    places,
    lengths,
    n,
    tiles,
    four_bit,
    chunks,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Metadata of a chunk of a sample's tiles, and the list of those to quantize again."""
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    exponent = exponent_of(tl.load(peak))
    if (chunk == 0) & (sample == 0):
        tl.store(exponent_out, exponent)
    near, far = powers_of_two(-exponent)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < tiles
    tile = sample * tiles + index
    four, position = triton_select.choose(
        ranks, counts, chosen, tile, inside, chunk, sample, four_bit, chunks, CHUNK
    )

    signed = tl.load(steps + tile, mask=inside, other=0.0)
    zero_point = tl.load(zeros + tile, mask=inside, other=0.0)
    single = signed.to(tl.int32, bitcast=True) < 0
    step = tl.abs(signed)
    scale = step * near * far
    base = zero_point * near * far
    wrong = (step != 0) & (
        (scale < 6.103515625e-05) | (step < 7.888609052210118e-31) | (step > 1.2676506002282294e30)
    )
    wrong |= (zero_point != 0) & (
        (tl.abs(base) < 6.103515625e-05) | (tl.abs(zero_point) < 7.888609052210118e-31)
    )
    tl.store(scales + tile, ceil_half(tl.maximum(scale, 5.960464477539063e-08)).to(tl.int16), mask=inside)
    tl.store(zero_points + tile, floor_half(base).to(tl.int16), mask=inside)
    plane = tl.load(fourth + tile, mask=inside & four, other=0)
    tl.store(fourth_planes + position, plane, mask=inside & four)
    if ALIGNED:
        byte = tl.arange(0, CHUNK // 8)
        flags = tl.reshape((four & inside).to(tl.int32), (CHUNK // 8, 8)) << tl.arange(0, 8)[None, :]
        tl.store(
            bit_map + (sample.to(tl.int64) * tiles + chunk * CHUNK) // 8 + byte,
            tl.sum(flags, 1).to(tl.uint8),
            mask=chunk * CHUNK + byte * 8 < tiles,
        )
    else:
        word = bit_map.to(tl.pointer_type(tl.int32), bitcast=True) + (tile >> 5)
        tl.atomic_or(word, tl.full((CHUNK,), 1, tl.int32) << (tile & 31), mask=inside & four, sem="relaxed")

    # The list's front holds what may be outliers, its back the others, so that few programs rotate.
    again = inside & (single | wrong | (four == 0))
    front = (again & single).to(tl.int32)
    back = (again & (single == 0)).to(tl.int32)
    before = tl.cumsum(front + (back << 16), 0) - front - (back << 16)
    fronts = tl.atomic_add(lengths, tl.sum(front, 0), sem="relaxed")
    backs = tl.atomic_add(lengths + 1, tl.sum(back, 0), sem="relaxed")
    slot = tl.where(single, fronts + (before & 0xFFFF), n - 1 - backs - (before >> 16))
    tl.store(listed + slot, tile, mask=again)
    tl.store(places + slot, tl.where(four, position, -1), mask=again)


@sized_jit
def _again(
    x,
    scales,
    zero_points,
    pivots,
    low_planes,
    fourth_planes,
    peak,
    listed,
    places,
    lengths,
    n,
    width,
    row_stride,
    per_row,
    tau,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    T: tl.constexpr,
    LANES: tl.constexpr,
):
    """Quantize the listed tiles by the steps of `kernels.tah`'s docstring."""
    fronts = tl.load(lengths)
    count = fronts + tl.load(lengths + 1)
    near, far = powers_of_two(-exponent_of(tl.load(peak)))
    i = element(LANES)
    start = tl.program_id(0) * T
    while start < count:
        entry = start + tl.arange(0, T)
        inside = entry < count
        slot = tl.where(entry < fronts, entry, n - 1 - (entry - fronts))
        tile = tl.load(listed + slot, mask=inside, other=0)
        position = tl.load(places + slot, mask=inside, other=-1)
        y, real = load_tiles(
            x,
            tl.zeros((), tl.int64),
            tile.to(tl.int64),
            inside,
            width,
            row_stride,
            per_row,
            LANES,
            FLAT,
            PAIRS,
        )
        y = y * near * far
        magnitude = tl.abs(y)
        largest = tile_max(magnitude)
        threshold = tl.div_rn(largest, tl.full((T,), 0.0, tl.float32) + tau) - 5.960464477539063e-08
        outlier = tile_sum((magnitude >= spread(threshold)).to(tl.int32)) <= 1
        low = tile_min(tl.where(real, y, float("inf")))
        high = tile_max(tl.where(real, y, float("-inf")))
        if tl.max(outlier.to(tl.int32), 0) > 0:
            pivot = tl.where(outlier, tile_min(tl.where(magnitude == spread(largest), i, 64)), 0)
            bits = y.to(tl.int32, bitcast=True)
            top = tile_sum(tl.where(i == spread(pivot), bits, 0))
            zeroth = tile_sum(tl.where(i == 0, bits, 0))
            swapped = tl.where(i == 0, spread(top), tl.where(i == spread(pivot), spread(zeroth), bits))
            turned = hadamard(swapped.to(tl.float32, bitcast=True), LANES)
            y = tl.where(spread(outlier), turned, y)
            low = tl.where(outlier, tile_min(turned), low)
            high = tl.where(outlier, tile_max(turned), high)
            sextet = tile.to(tl.int64) * 6
            word = pivots.to(tl.pointer_type(tl.int32), bitcast=True) + (sextet >> 5)
            shift = (sextet & 31).to(tl.int32)
            tl.atomic_or(word, pivot << shift, mask=inside & outlier, sem="relaxed")
            tl.atomic_or(
                word + 1,
                pivot >> tl.minimum(32 - shift, 31),
                mask=inside & outlier & (shift > 26),
                sem="relaxed",
            )
        zero_bits = floor_half(low)
        base = half_value(zero_bits)
        steps = tl.where(position >= 0, 15.0, 7.0)
        step_bits = ceil_half(tl.maximum(tl.div_rn(high - base, steps), 5.960464477539063e-08))
        inverse = tl.div_rn(tl.full((T,), 1.0, tl.float32), half_value(step_bits))
        code = (y - spread(base)) * spread(inverse)
        bits = (tl.minimum(tl.maximum(code, 0.0), 15.0) + MAGIC).to(tl.int32, bitcast=True)
        bits = tl.where(real | spread(outlier), bits, MAGIC_BITS)
        words = transpose_nibbles(gather_nibbles(bits) - _NIBBLE_BIAS)
        tl.store(scales + tile, tl.where(outlier, step_bits | 0x8000, step_bits).to(tl.int16), mask=inside)
        tl.store(zero_points + tile, zero_bits.to(tl.int16), mask=inside)
        byte = plane_byte(LANES)
        place = tile.to(tl.int64)[None, :, None] * 8 + byte
        store_planes(low_planes, words, place, inside[None, :, None], n.to(tl.int64) * 8, 3)
        fourth = position.to(tl.int64)[None, :, None] * 8 + byte
        tl.store(
            fourth_planes + fourth,
            ((words >> 24) & 255).to(tl.uint8),
            mask=(inside & (position >= 0))[None, :, None],
        )
        start += tl.num_programs(0) * T


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
    tau: float,
    look_up: bool = True,
    measure: Launch = TAH_MEASURE,
    again: Launch = TAH_AGAIN,
    chunk: int = TAH_CHUNK,
) -> None:
    """As `kernels.tah.encode` into the sections of `kernels.tah.TahSections`, the exponent into `exponent`
    (int32, 1 element). Never waits for the device.

    `bit_map` and `pivots` must start at multiples of 4 bytes in buffers whose size is one: bits are set by
    words. The scratch, 36 bytes a tile and 24 KiB a sample, comes from torch's allocator.
    """
    rows = Rows(x)
    n, device = rows.tiles, x.device
    tiles = n // samples
    # Rows of whole 16 bytes: Triton compiles once for aligned pointers.
    total, weighted, listed, places = torch.empty(4, -(-n // 4) * 4, dtype=torch.int32, device=device)
    steps, zeros = torch.empty(2, -(-n // 4) * 4, dtype=torch.float32, device=device)
    fourth = torch.empty(n, dtype=torch.int64, device=device)
    select = triton_select.Selection(samples, tiles, four_bit, chunk, device)
    sizes = (n, rows.width, rows.stride, rows.per_row)
    flat = {"FLAT": rows.flat, "PAIRS": rows.pairs, "enable_fp_fusion": False}
    aligned = tiles % 8 == 0 and chunk % 8 == 0
    half_scales, half_zeros = scales.view(torch.int16), zero_points.view(torch.int16)
    planes = low_planes.view(torch.uint8)
    table = triton_select.weights(device)

    _measure[(triton.cdiv(n, measure.tiles),)](
        rows.data,
        planes,
        fourth.view(torch.uint8),
        pivots,
        bit_map,
        total,
        weighted,
        steps,
        zeros,
        select.peak,
        table,
        *sizes,
        tau,
        HALF=tau == 2.0,
        TABLE=look_up,
        CLEAR_MAP=not aligned,
        **flat,
        T=measure.tiles,
        LANES=measure.lanes,
        num_warps=measure.warps,
    )
    select.run(rows, total, weighted, table)
    _finish[select.grid](
        total,
        select.counts,
        select.chosen,
        steps,
        zeros,
        fourth,
        select.peak,
        exponent,
        half_scales,
        half_zeros,
        bit_map,
        fourth_planes,
        listed,
        places,
        select.lengths,
        n,
        tiles,
        four_bit,
        select.grid[0],
        ALIGNED=aligned,
        CHUNK=chunk,
        num_warps=TAH_CHUNK_WARPS,
        enable_fp_fusion=False,
    )
    programs = min(triton.cdiv(n, again.tiles), triton_select.resident_programs(device, again.warps))
    _again[(programs,)](
        rows.data,
        half_scales,
        half_zeros,
        pivots,
        planes,
        fourth_planes.view(torch.uint8),
        select.peak,
        listed,
        places,
        select.lengths,
        *sizes,
        tau,
        **flat,
        T=again.tiles,
        LANES=again.lanes,
        num_warps=again.warps,
    )
