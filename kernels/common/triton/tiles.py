"""Tiles in Triton: reads and writes blocks of tiles, finds largest elements, and transforms a tile
(Hadamard).

A block of T tiles is `[T, 8, 8]`: element 8 k + j of tile t is at [t, k, j]. So the 8 elements of one byte of
every bit-plane belong to one thread, and the 8 bytes of a tile to 8 neighbours, which read 16 bytes each.
Every reduction is a maximum or a sum of integers, so it is exact in any order.
"""

import torch
import triton
import triton.language as tl

from kernels.common.tiles import TILE, tiles_per_row
from kernels.common.triton.numbers import INTERPRETED, rounded, widened

_INTERPRETED = tl.constexpr(INTERPRETED)


class Rows:
    """`[..., C]` as rows of C contiguous elements `stride` apart; a copy only if there is no such view."""

    __slots__ = ("data", "flat", "pairs", "per_row", "stride", "tiles", "width")

    def __init__(self, x: torch.Tensor) -> None:
        self.width = x.shape[-1]
        self.per_row = tiles_per_row(self.width)
        try:
            data = x.view(-1, self.width)
        except RuntimeError:
            data = x.contiguous().view(-1, self.width)
        if data.stride(1) != 1 and self.width > 1:
            data = data.contiguous()
        self.data = data
        self.stride = data.stride(0) if data.shape[0] > 1 else self.width
        self.tiles = data.shape[0] * self.per_row
        # Tile t starts at element 64 t.
        self.flat = self.width % TILE == 0 and self.stride == self.width
        # Two elements may be read as one aligned word.
        self.pairs = self.flat and data.dtype == torch.bfloat16 and data.data_ptr() % 16 == 0


@triton.jit
def load_block(
    x, base, n, width, row_stride, per_row, T: tl.constexpr, FLAT: tl.constexpr, PAIRS: tl.constexpr
):
    """Load tiles base (int64) to base + T - 1 in fp32, 0 after the n-th tile; and which elements are real."""
    tile = tl.arange(0, T)[:, None, None]
    if PAIRS:
        # Reading two bf16 as one word takes one operation per element to widen them; loading bf16 takes two.
        i = tl.arange(0, T * 32)
        words = x.to(tl.pointer_type(tl.int32), bitcast=True) + base * 32
        word = tl.load(words + i, mask=i < (n - base) * 32, other=0)
        first = (word << 16).to(tl.float32, bitcast=True)
        second = (word & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(first, second), (T, 8, 8)), base + tile < n
    i = tl.arange(0, T * 64)
    if FLAT:
        values = tl.load(x + base * 64 + i, mask=i < (n - base) * 64, other=0.0)
        real = base + tile < n
    else:
        whole = base + i // 64
        row = whole // per_row
        column = (whole - row * per_row) * 64 + i % 64
        mask = (whole < n) & (column < width)
        values = tl.load(x + row * row_stride + column, mask=mask, other=0.0)
        real = tl.reshape(mask, (T, 8, 8))
    return tl.reshape(widened(values), (T, 8, 8)), real


@triton.jit
def load_tile(x, tile, width, row_stride, per_row):
    """Load one tile (int64) in fp32, `[64]`, 0 outside its row."""
    row = tile // per_row
    column = (tile - row * per_row) * 64 + tl.arange(0, 64)
    return widened(tl.load(x + row * row_stride + column, mask=column < width, other=0.0))


@triton.jit
def store_tile(out, y, tile, width, per_row):
    """Inverse of `load_tile`, into contiguous rows."""
    row = tile // per_row
    column = (tile - row * per_row) * 64 + tl.arange(0, 64)
    tl.store(out + row * width + column, rounded(y, out.dtype.element_ty), mask=column < width)


@triton.jit
def store_block(out, y, base, n, width, per_row, T: tl.constexpr, FLAT: tl.constexpr):
    """Round y to the dtype of `out`, whose rows are contiguous; inverse of `load_block`."""
    numbers = tl.reshape(rounded(y, out.dtype.element_ty), (T * 64,))
    i = tl.arange(0, T * 64)
    if FLAT:
        tl.store(out + base * 64 + i, numbers, mask=i < (n - base) * 64)
    else:
        whole = base + i // 64
        row = whole // per_row
        column = (whole - row * per_row) * 64 + i % 64
        tl.store(out + row * width + column, numbers, mask=(whole < n) & (column < width))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_max(v):
    """The largest element of every tile, `[T]`; NaN may be lost."""
    return tl.max(tl.max(v, 2), 1)


@triton.jit
def tile_min(v):
    return tl.min(tl.min(v, 2), 1)


@triton.jit
def tile_sum(v):
    """Sums of integers, modulo 2**32."""
    return tl.sum(tl.sum(v, 2), 1)


@triton.jit
def tile_max_or_nan(v):
    """The largest element of every tile, `[T]`, or NaN if it has one; the interpreter needs `peak_bits`."""
    return tile_max(v) if _INTERPRETED else tl.reduce(tl.reduce(v, 2, _larger), 1, _larger)


@triton.jit
def peak_bits(y, largest):
    """The bits of the largest magnitude of a block: integers order infinities and NaNs above all numbers."""
    if _INTERPRETED:
        peak = tl.max(tl.max(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2), 1), 0)
    else:
        peak = tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    return peak


@triton.jit
def largest_of(peaks, programs):
    """The largest value that `programs` programs left in `peaks`."""
    # Read as many at once as a tensor of 64 MiB has, because each iteration waits for memory.
    i = tl.arange(0, 8192)
    largest = tl.zeros((8192,), tl.int32)
    start = 0
    while start < programs:
        largest = tl.maximum(largest, tl.load(peaks + start + i, mask=start + i < programs, other=0))
        start += 8192
    return tl.max(largest, 0)


@triton.jit
def halves(per_tile, T: tl.constexpr):
    """Split `[T]` into even and odd tiles, each tile in one thread instead of all 8 that share it, for
    computations with many operations per tile. `whole` is the inverse."""
    return tl.split(tl.reshape(per_tile, (T // 2, 2)))


@triton.jit
def whole(even, odd, T: tl.constexpr):
    """Inverse of `halves`."""
    return tl.reshape(tl.join(even, odd), (T,))


@triton.jit
def spread(v):
    """Reshape `[T]` to `[T, 1, 1]`."""
    return v[:, None, None]


@triton.jit
def hadamard(y):
    """Transform `[64]` and divide by 8."""
    v = tl.reshape(y, (2, 2, 2, 2, 2, 2))
    for _ in tl.static_range(6):
        a, b = tl.split(v)
        # The next bit of the element's index becomes the last; after six, all are back in their places.
        v = tl.permute(tl.join(a + b, a - b), (5, 0, 1, 2, 3, 4))
    return tl.reshape(v, (64,)) * 0.125


@triton.jit
def swapped(y, pivot):
    """`[64]` with elements 0 and pivot exchanged."""
    i = tl.arange(0, 64)
    bits = y.to(tl.int32, bitcast=True)
    top = tl.sum(tl.where(i == pivot, bits, 0), 0)
    zeroth = tl.sum(tl.where(i == 0, bits, 0), 0)
    bits = tl.where(i == 0, top, tl.where(i == pivot, zeroth, bits))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_of(flags, T: tl.constexpr):
    """The lowest index of a set flag in `[T]`, or T if there is none."""
    return tl.min(tl.where(flags, tl.arange(0, T), T), 0)
