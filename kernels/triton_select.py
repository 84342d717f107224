"""Entropies of tiles and the choice of those with the highest, in Triton (`kernels.tah`, steps 1 and 2).

A radix select over the integer entropies (23 bits, two histograms) in four small kernels over one number a
tile, no sort: `_rank` counts the upper 12 bits, `_refine` the lower 11 of those in the threshold's bin,
`_count` how many lie above the threshold and at it in every chunk of tiles, so that `choose` knows how many
come before a tile, and breaks ties by index. Every sum is of integers: the order of atomics changes nothing.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels import tah
from kernels.triton_common import (
    MAGIC,
    MAGIC_BITS,
    exponent_of,
    load_tiles,
    powers_of_two,
    sized_jit,
    spread,
    tile_max,
    tile_sum,
    wrapped,
)
from kernels.triton_launch import TAH_CHUNK_WARPS
from kernels.triton_rows import Rows

_COARSE = tl.constexpr(4096)
_FINE = tl.constexpr(2048)
_FINE_BITS = tl.constexpr(11)
_TOTAL_BIAS = tl.constexpr(wrapped(MAGIC_BITS.value * 64))
_C0, _C1, _C2, _C3 = (tl.constexpr(c) for c in tah._LOG2)
# Tiles at once where entropies are computed again.
_RARE = 16


@cache
def weights(device: torch.device) -> torch.Tensor:
    """rint(n log2 n) for n up to 2**14, at n + n / 64: bf16's magnitudes would else fall into one bank."""
    n = torch.arange(2**14 + 1, dtype=torch.int32)
    table = torch.zeros(2**15, dtype=torch.int32)
    table[(n + (n >> 6)).long()] = tah._log2(n.float()).mul_(n).round_().int()
    return table.to(device)


@cache
def resident_programs(device: torch.device, warps: int) -> int:
    """How many programs of so many warps fill the device."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * max(1, 16 // warps)


@triton.jit
def _log2(log, f):
    """`kernels.tah._log2` of numbers given as exponent plus fraction, and their fraction."""
    p = f * _C3 + _C2
    p = p * f + _C1
    p = p * f + _C0
    return log + p * ((1.0 - f) * f)


@triton.jit
def entropy_sums(magnitude, largest, table, TABLE: tl.constexpr):
    """For tiles of magnitudes: S and T of `kernels.tah`, step 1, and the bits of the exponent of the largest.

    S is 0 for a tile of zeros alone. All is right for tiles whose largest lies in 2**-100 .. 2**100. TABLE
    looks the terms of T up, or else they are computed: the same integers.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    factor = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = tl.fma(magnitude, spread(factor), MAGIC)
    bits = rounded.to(tl.int32, bitcast=True)
    sums = tile_sum(bits) - _TOTAL_BIAS
    sums = tl.where((largest > 0) & (exponent == 0), 1, sums)
    if TABLE:
        # Whatever the bits, the index lies in the table.
        weights = tile_sum(tl.load(table + ((bits + (bits >> 6)) & 0x7FFF)))
    else:
        n = rounded - MAGIC
        parts = n.to(tl.int32, bitcast=True)
        # Exact, because n has at most 14 digits.
        log = tl.fma(parts.to(tl.float32), 1.1920928955078125e-07, -127.0)
        f = ((parts & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        weights = tile_sum((n * _log2(log, f) + MAGIC).to(tl.int32, bitcast=True)) - _TOTAL_BIAS
    return sums, weights & 0xFFFFFF, exponent


@triton.jit
def entropy_rank(sums, weights):
    """H of `kernels.tah`, in 2**-20 bits, int32 from 0 to 2**23 - 1."""
    total = sums.to(tl.float32)
    log = total.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.0
    f = log - tl.floor(log)
    h = _log2(log, f) - tl.div_rn(weights.to(tl.float32), tl.where(sums > 0, total, 1.0))
    h = tl.where(sums > 0, tl.maximum(h * 1048576.0, 0.0), 0.0)
    # 2**23 + h rounds h to an integer.
    return (h + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF


@sized_jit
def _rank(
    x,
    total,
    weighted,
    peak,
    histogram,
    table,
    n,
    tiles,
    width,
    row_stride,
    per_row,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    RARE: tl.constexpr,
):
    """Ranks of a chunk of a sample's tiles, in place of `total`, and their histogram."""
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    tile = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + tile < tiles
    first = sample * tiles + chunk * CHUNK
    sums = tl.load(total + first + tile, mask=inside, other=0)
    packed = tl.load(weighted + first + tile, mask=inside, other=0)
    exponent = (packed >> 24) & 255
    tensor_exponent = exponent_of(tl.load(peak))
    rank = entropy_rank(sums, packed & 0xFFFFFF)
    # The reference's integers have another unit 2**-75 below the tensor's largest element.
    rare = (sums != 0) & ((exponent - tensor_exponent < 64) | (exponent < 27) | (exponent > 227))
    if tl.max(rare.to(tl.int32), 0) > 0:
        near, far = powers_of_two(-tensor_exponent)
        for start in range(0, CHUNK, RARE):
            some = start + tl.arange(0, RARE)
            here = chunk * CHUNK + some < tiles
            y, _ = load_tiles(x, first.to(tl.int64), some, here, width, row_stride, per_row, 8, FLAT, PAIRS)
            magnitude = tl.abs(y * near * far)
            largest = tl.maximum(tile_max(magnitude), 1.0842021724855044e-19)
            some_sums, some_weights, _ = entropy_sums(magnitude, largest, table, False)
            tl.store(total + first + some, entropy_rank(some_sums, some_weights), mask=here)
        tl.debug_barrier()
        rank = tl.load(total + first + tile, mask=inside, other=0)
    tl.store(total + first + tile, rank, mask=inside)
    tl.atomic_add(histogram + sample * _COARSE + (rank >> _FINE_BITS), 1, mask=inside, sem="relaxed")


@triton.jit
def _find(histogram, wanted, BINS: tl.constexpr):
    """The bin in which the `wanted`-th entry from above lies, and how many lie above that bin."""
    bin = tl.arange(0, BINS)
    entries = tl.load(histogram + bin)
    above = tl.sum(entries, 0) - tl.cumsum(entries, 0)
    found = tl.sum((above + entries >= wanted).to(tl.int32), 0) - 1
    return found, tl.sum(tl.where(bin == found, above, 0), 0)


@sized_jit
def _refine(ranks, coarse, fine, chosen, tiles, four_bit, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    found, above = _find(coarse + sample * _COARSE, four_bit, _COARSE)
    if chunk == 0:
        tl.store(chosen + sample * 4, found)
        tl.store(chosen + sample * 4 + 1, above)
    tile = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + tile < tiles
    rank = tl.load(ranks + sample * tiles + chunk * CHUNK + tile, mask=inside, other=0)
    place = fine + sample * _FINE + (rank & (_FINE - 1))
    tl.atomic_add(place, 1, mask=inside & ((rank >> _FINE_BITS) == found), sem="relaxed")


@sized_jit
def _count(ranks, fine, chosen, counts, tiles, four_bit, chunks, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    coarse = tl.load(chosen + sample * 4)
    above = tl.load(chosen + sample * 4 + 1)
    found, more = _find(fine + sample * _FINE, four_bit - above, _FINE)
    threshold = (coarse << _FINE_BITS) | found
    if chunk == 0:
        tl.store(chosen + sample * 4 + 2, threshold)
        tl.store(chosen + sample * 4 + 3, four_bit - above - more)
    tile = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + tile < tiles
    rank = tl.load(ranks + sample * tiles + chunk * CHUNK + tile, mask=inside, other=-1)
    place = counts + (sample * chunks + chunk) * 2
    tl.store(place, tl.sum((rank > threshold).to(tl.int32), 0))
    tl.store(place + 1, tl.sum((rank == threshold).to(tl.int32), 0))


@triton.jit
def choose(ranks, counts, chosen, tile, inside, chunk, sample, four_bit, chunks, CHUNK: tl.constexpr):
    """Which tiles of a chunk get 4 bits, and how many before each, in all samples, do."""
    threshold = tl.load(chosen + sample * 4 + 2)
    ties = tl.load(chosen + sample * 4 + 3)
    some = tl.arange(0, 128)
    higher = tl.zeros((128,), tl.int32)
    equal = tl.zeros((128,), tl.int32)
    start = 0
    while start < chunk:
        place = counts + (sample * chunks + start + some) * 2
        higher += tl.load(place, mask=start + some < chunk, other=0)
        equal += tl.load(place + 1, mask=start + some < chunk, other=0)
        start += 128
    rank = tl.load(ranks + tile, mask=inside, other=-1)
    above = (rank > threshold).to(tl.int32)
    same = (rank == threshold).to(tl.int32)
    before = tl.cumsum(above + (same << 16), 0) - above - (same << 16)
    before_same = tl.sum(equal, 0) + (before >> 16)
    four = (above > 0) | ((same > 0) & (before_same < ties))
    return four, sample * four_bit + tl.sum(higher, 0) + (before & 0xFFFF) + tl.minimum(before_same, ties)


class Selection:
    """Scratch of one tensor's selection, on its device."""

    def __init__(self, samples: int, tiles: int, four_bit: int, chunk: int, device: torch.device) -> None:
        self.grid = (triton.cdiv(tiles, chunk), samples)
        self._tiles, self._four_bit, self._chunk = tiles, four_bit, chunk
        coarse, fine = samples * _COARSE.value, samples * _FINE.value
        zeros = torch.zeros(4 + coarse + fine, dtype=torch.int32, device=device)
        self.peak, self.lengths = zeros[:1], zeros[1:3]
        self._coarse, self._fine = zeros[4 : 4 + coarse], zeros[4 + coarse :]
        self.chosen = torch.empty(samples, 4, dtype=torch.int32, device=device)
        self.counts = torch.empty(samples, self.grid[0], 2, dtype=torch.int32, device=device)

    def run(self, rows: Rows, total: torch.Tensor, weighted: torch.Tensor, table: torch.Tensor) -> None:
        """Turn what `entropy_sums` gave (`weighted` with the exponent above 24 bits) into ranks, in `total`,
        and find the thresholds."""
        common = {"CHUNK": self._chunk, "num_warps": TAH_CHUNK_WARPS, "enable_fp_fusion": False}
        _rank[self.grid](
            rows.data,
            total,
            weighted,
            self.peak,
            self._coarse,
            table,
            rows.tiles,
            self._tiles,
            rows.width,
            rows.stride,
            rows.per_row,
            FLAT=rows.flat,
            PAIRS=rows.pairs,
            RARE=min(_RARE, self._chunk),
            **common,
        )
        _refine[self.grid](
            total, self._coarse, self._fine, self.chosen, self._tiles, self._four_bit, **common
        )
        _count[self.grid](
            total, self._fine, self.chosen, self.counts, self._tiles, self._four_bit, self.grid[0], **common
        )
