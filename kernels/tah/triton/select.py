"""Entropies of tiles and the choice of those with the highest, in Triton (`kernels.tah.reference`, steps 1
and 2).

A radix select over the integer entropies (23 bits, two histograms), without a sort, in three small kernels
over one number per tile. `_rank` counts the upper 9 bits, and `_refine` the lower 14 of tiles in the
threshold's bin. `_place` marks the tiles that get 4 bits and counts those before each, with ties broken by
index. Its programs pass on their counts by "decoupled look-back" (Merrill and Garland 2016). All sums are of
integers, so the order of atomics changes nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.common.dispatch import Launch
from kernels.common.triton.numbers import (
    MAGIC,
    MAGIC_BITS,
    exponent_of,
    powers_of_two,
    sized_jit,
    wrapped,
)
from kernels.common.triton.tiles import (
    Rows,
    largest_of,
    load_block,
    spread,
    tile_max,
    tile_sum,
)
from kernels.tah import reference as tah

_COARSE = tl.constexpr(512)
_FINE = tl.constexpr(16384)
_FINE_BITS = tl.constexpr(14)
_TOTAL_BIAS = tl.constexpr(wrapped(MAGIC_BITS.value * 64))
_C0, _C1, _C2, _C3 = (tl.constexpr(c) for c in tah._LOG2)
# Tiles whose entropies are computed again at a time.
_RARE = 16


@triton.jit
def _log2(log, f):
    """`kernels.tah.reference._log2` of numbers given as exponent plus fraction, and their fraction."""
    p = f * _C3 + _C2
    p = p * f + _C1
    p = p * f + _C0
    return log + p * ((1.0 - f) * f)


@triton.jit
def _term(rounded):
    """The bits of MAGIC + rint(n log2 n), of MAGIC + n."""
    n = rounded - MAGIC
    parts = n.to(tl.int32, bitcast=True)
    # Exact, because n has at most 14 digits.
    log = tl.fma(parts.to(tl.float32), 1.1920928955078125e-07, -127.0)
    f = ((parts & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return (n * _log2(log, f) + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def entropy_sums(magnitude, largest):
    """S and T of `kernels.tah.reference`, step 1, for tiles of magnitudes, and the bits of the exponent of
    the largest.

    S is 0 only for a tile of zeros. Results are right for tiles whose largest lies in 2**-100 .. 2**100.
    """
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    factor = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = tl.fma(magnitude, spread(factor), MAGIC)
    bits = rounded.to(tl.int32, bitcast=True)
    sums = tile_sum(bits) - _TOTAL_BIAS
    sums = tl.where((largest > 0) & (exponent == 0), 1, sums)
    weights = tile_sum(_term(rounded)) - _TOTAL_BIAS
    return sums, weights & 0xFFFFFF, exponent


@triton.jit
def entropy_rank(sums, weights):
    """H of `kernels.tah.reference`, in 2**-20 bits, int32 from 0 to 2**23 - 1."""
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
    peaks,
    coarse,
    exponent_out,
    programs,
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
    """Replace `total` with the ranks of a chunk of a sample's tiles, keeping its sign; also write their
    histogram and the tensor's exponent."""
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    tile = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + tile < tiles
    first = sample.to(tl.int64) * tiles + chunk * CHUNK
    signed = tl.load(total + first + tile, mask=inside, other=0)
    packed = tl.load(weighted + first + tile, mask=inside, other=0)
    sign = signed & -0x80000000
    sums = signed & 0x7FFFFFFF
    exponent = (packed >> 24) & 255
    tensor_exponent = exponent_of(largest_of(peaks, programs))
    if (chunk == 0) & (sample == 0):
        tl.store(exponent_out, tensor_exponent)
    rank = entropy_rank(sums, packed & 0xFFFFFF)
    # The reference's integers have another unit 2**-75 below the tensor's largest element.
    rare = (sums != 0) & ((exponent - tensor_exponent < 64) | (exponent < 27) | (exponent > 227))
    if tl.max(rare.to(tl.int32), 0) > 0:
        near, far = powers_of_two(-tensor_exponent)
        start = 0
        while start < tl.minimum(CHUNK, tiles - chunk * CHUNK):
            some = start + tl.arange(0, RARE)
            y, _ = load_block(x, first + start, n, width, row_stride, per_row, RARE, FLAT, PAIRS)
            magnitude = tl.abs(y * near * far)
            largest = tl.maximum(tile_max(magnitude), 1.0842021724855044e-19)
            some_sums, some_weights, _ = entropy_sums(magnitude, largest)
            here = chunk * CHUNK + some < tiles
            tl.store(total + first + some, entropy_rank(some_sums, some_weights), mask=here)
            start += RARE
        tl.debug_barrier()
        rank = tl.load(total + first + tile, mask=inside, other=0)
        tl.debug_barrier()
    tl.store(total + first + tile, rank | sign, mask=inside)
    bins = tl.arange(0, _COARSE)
    counts = tl.histogram(rank >> _FINE_BITS, _COARSE)
    # Lanes beyond the sample were counted as 0.
    counts -= tl.where(bins == 0, tl.sum((inside == 0).to(tl.int32), 0), 0)
    tl.atomic_add(coarse + sample * _COARSE + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _find(histogram, wanted, BINS: tl.constexpr):
    """The bin of the `wanted`-th entry from above, and the number of entries above that bin."""
    bin = tl.arange(0, BINS)
    entries = tl.load(histogram + bin)
    above = tl.sum(entries, 0) - tl.cumsum(entries, 0)
    found = tl.sum((above + entries >= wanted).to(tl.int32), 0) - 1
    return found, tl.sum(tl.where(bin == found, above, 0), 0)


@triton.jit
def _find_fine(histogram, wanted):
    """Like `_find` for `_FINE` bins; searches rows of 128 first."""
    row = tl.arange(0, _FINE // 128)
    rows = tl.sum(tl.load(histogram + row[:, None] * 128 + tl.arange(0, 128)[None, :]), 1)
    above = tl.sum(rows, 0) - tl.cumsum(rows, 0)
    found = tl.sum((above + rows >= wanted).to(tl.int32), 0) - 1
    before = tl.sum(tl.where(row == found, above, 0), 0)
    bin, more = _find(histogram + found * 128, wanted - before, 128)
    return found * 128 + bin, before + more


@sized_jit
def _refine(ranks, coarse, fine, tiles, four_bit, CHUNK: tl.constexpr):
    """The fine histogram of the tiles in the coarse bin that holds the threshold."""
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    tile = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + tile < tiles
    first = sample.to(tl.int64) * tiles + chunk * CHUNK
    rank = tl.load(ranks + first + tile, mask=inside, other=0) & 0x7FFFFF
    found, _ = _find(coarse + sample * _COARSE, four_bit, _COARSE)
    among = inside & ((rank >> _FINE_BITS) == found)
    place = rank & (_FINE - 1)
    # Atomics on one address are serial, and many tiles may be equal, such as zeros: add the largest at once.
    top = tl.max(tl.where(among, place, -1), 0)
    tops = tl.sum((among & (place == top)).to(tl.int32), 0)
    tl.atomic_add(fine + sample * _FINE + tl.maximum(top, 0), tops, mask=tops > 0, sem="relaxed")
    tl.atomic_add(fine + sample * _FINE + place, 1, mask=among & (place != top), sem="relaxed")


@sized_jit
def _place(
    ranks,
    places,
    coarse,
    fine,
    counts,
    tiles,
    four_bit,
    chunks,
    CHUNK: tl.constexpr,
):
    """Write 2 p + s for every tile: p is -1 or, if it gets 4 bits, the number of earlier tiles in all samples
    that do; s is the sign of its rank."""
    chunk = tl.program_id(0)
    sample = tl.program_id(1)
    tile = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + tile < tiles
    first = sample.to(tl.int64) * tiles + chunk * CHUNK
    signed = tl.load(ranks + first + tile, mask=inside, other=0)
    upper, above_upper = _find(coarse + sample * _COARSE, four_bit, _COARSE)
    lower, above_lower = _find_fine(fine + sample * _FINE, four_bit - above_upper)
    threshold = (upper << _FINE_BITS) | lower
    ties = four_bit - above_upper - above_lower
    rank = tl.where(inside, signed & 0x7FFFFF, -1)
    above = (rank > threshold).to(tl.int32)
    same = (rank == threshold).to(tl.int32)

    # Both counts, and a flag that they are valid, in one word.
    mine = tl.sum(above + (same << 15), 0) | 0x40000000
    tl.atomic_xchg(counts + sample * chunks + chunk, mine, sem="relaxed")
    some = tl.arange(0, 128)
    higher = 0
    equal = 0
    start = 0
    while start < chunk:
        waited = tl.minimum(chunk - start, 128)
        place = counts + sample * chunks + start + some
        found = tl.load(place, mask=some < waited, other=0, volatile=True)
        while tl.sum(found >> 30, 0) < waited:
            found = tl.load(place, mask=some < waited, other=0, volatile=True)
        higher += tl.sum(found & 0x7FFF, 0)
        equal += tl.sum((found >> 15) & 0x7FFF, 0)
        start += 128

    before = tl.cumsum(above + (same << 16), 0) - above - (same << 16)
    before_same = equal + (before >> 16)
    four = (above > 0) | ((same > 0) & (before_same < ties))
    position = sample * four_bit + higher + (before & 0xFFFF) + tl.minimum(before_same, ties)
    place = tl.where(four, position, -1) * 2 + ((signed >> 31) & 1)
    tl.store(places + first + tile, place, mask=inside)


class Selection:
    """Scratch of one tensor's selection, on its device."""

    def __init__(self, samples: int, tiles: int, four_bit: int, launch: Launch, device: torch.device) -> None:
        chunks = triton.cdiv(tiles, launch.tiles)
        self._grid = (chunks, samples)
        self._tiles, self._four_bit, self._launch = tiles, four_bit, launch
        sizes = [samples * _COARSE.value, samples * _FINE.value, samples * chunks]
        # The kernel before `run` must clear it.
        self.scratch = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self._coarse, self._fine, self._counts = self.scratch.split(sizes)

    def run(
        self,
        rows: Rows,
        total: torch.Tensor,
        weighted: torch.Tensor,
        peaks: torch.Tensor,
        places: torch.Tensor,
        exponent: torch.Tensor,
    ) -> None:
        """Find the thresholds from the results of `entropy_sums` (`total` with a flag as its sign, `weighted`
        with the exponent above 24 bits). Fills `places` (see `_place`) and `exponent`; overwrites `total`."""
        common: dict[str, Any] = {
            "CHUNK": self._launch.tiles,
            "num_warps": self._launch.warps,
            "enable_fp_fusion": False,
        }
        _rank[self._grid](
            rows.data,
            total,
            weighted,
            peaks,
            self._coarse,
            exponent,
            peaks.numel(),
            rows.tiles,
            self._tiles,
            rows.width,
            rows.stride,
            rows.per_row,
            FLAT=rows.flat,
            PAIRS=rows.pairs,
            RARE=min(_RARE, self._launch.tiles),
            **common,
        )
        _refine[self._grid](total, self._coarse, self._fine, self._tiles, self._four_bit, **common)
        _place[self._grid](
            total,
            places,
            self._coarse,
            self._fine,
            self._counts,
            self._tiles,
            self._four_bit,
            self._grid[0],
            **common,
        )
