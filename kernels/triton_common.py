"""What the Triton kernels share: tiles in registers, exponents, fp16 rounding, bit-planes.

A block of T tiles is `[8 / LANES, T, LANES, 8]`: element 8 (khi * LANES + klo) + j of tile t lies at
[khi, t, klo, j], so the 8 elements of one byte of every bit-plane belong to one thread and LANES neighbours
share a tile. LANES changes speed alone: every reduction is over integers or a maximum, exact in any order.

All arithmetic is that of `kernels.tiles`, one rounding an operation; compile with `enable_fp_fusion=False`.
A `tl.fma` stands only where its product is exact, so that the interpreter, which rounds it, gives the same.
"""

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

# Bound where kernels are defined: under the interpreter tensors lie on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# x + MAGIC rounds x to an integer, ties to even, and holds it in its lowest bits, for |x| < 2**22.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
_INTERPRETED = tl.constexpr(INTERPRETED)
_NON_FINITE = tl.constexpr(0x7FFF)

# Where element j's code goes in the word of 8 that is transposed, and 1 << that, summed over j.
NIBBLES = 0x11111111
BYTES = 0x01010101


# Triton compiles anew for sizes that are 1 or multiples of 16, which gains nothing here.
_SIZES = ("n", "tiles", "four_bit", "fourths", "chunks", "width", "row_stride", "per_row")


def sized_jit(function: Callable[..., None]) -> triton.runtime.jit.JITFunction:
    """`triton.jit` for kernels that are launched: one compilation for all sizes."""
    return triton.jit(function, do_not_specialize=_SIZES)


def wrapped(value: int) -> int:
    """As a signed 32-bit integer."""
    return (value + 2**31) % 2**32 - 2**31


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 as int16 under the interpreter, which truncates when it stores bf16; else the tensor."""
    return tensor.view(torch.int16) if INTERPRETED and tensor.dtype == torch.bfloat16 else tensor


@triton.jit
def element(LANES: tl.constexpr):
    """The index in its tile of every place of a block, int32 `[8 / LANES, 1, LANES, 8]`."""
    khi = tl.arange(0, 8 // LANES)[:, None, None, None]
    klo = tl.arange(0, LANES)[None, None, :, None]
    return (khi * LANES + klo) * 8 + tl.arange(0, 8)[None, None, None, :]


@triton.jit
def plane_byte(LANES: tl.constexpr):
    """The byte of a plane's word that every thread holds, int32 `[8 / LANES, 1, LANES]`."""
    return tl.arange(0, 8 // LANES)[:, None, None] * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def load_tiles(
    x,
    base,
    tile,
    inside,
    width,
    row_stride,
    per_row,
    LANES: tl.constexpr,
    FLAT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Tiles base + tile (int64 scalar and int `[T]`) in fp32, 0 outside; and which elements are real."""
    i = element(LANES)
    if PAIRS:
        # Two bf16 a word: one operation an element to widen them, where loading bf16 takes two.
        pair = plane_byte(LANES)[:, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
        words = x.to(tl.pointer_type(tl.int32), bitcast=True) + base * 32
        real = inside[None, :, None, None] & (pair >= 0)
        word = tl.load(words + (tile[None, :, None, None] * 32 + pair), mask=real, other=0)
        first = (word << 16).to(tl.float32, bitcast=True)
        second = (word & -65536).to(tl.float32, bitcast=True)
        real = inside[None, :, None, None] & (i >= 0)
        return tl.reshape(tl.join(first, second), real.shape), real
    if FLAT:
        real = inside[None, :, None, None] & (i >= 0)
        values = tl.load(x + base * 64 + (tile[None, :, None, None] * 64 + i), mask=real, other=0.0)
    else:
        whole = base + tile
        row = whole // per_row
        column = (whole - row * per_row)[None, :, None, None] * 64 + i
        real = inside[None, :, None, None] & (column < width)
        values = tl.load(x + row[None, :, None, None] * row_stride + column, mask=real, other=0.0)
    if x.dtype.element_ty == tl.bfloat16:
        # The interpreter's own conversion is wrong for subnormal numbers.
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True), real
    return values.to(tl.float32), real


@triton.jit
def store_tiles(out, y, base, tile, inside, width, per_row, LANES: tl.constexpr, FLAT: tl.constexpr):
    """Round y to the dtype of `out`, whose rows are contiguous."""
    if out.dtype.element_ty == tl.int16:
        # bf16 under the interpreter: to nearest even by integers.
        bits = y.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        rounded = y.to(out.dtype.element_ty)
    i = element(LANES)
    if FLAT:
        real = inside[None, :, None, None] & (i >= 0)
        tl.store(out + base * 64 + (tile[None, :, None, None] * 64 + i), rounded, mask=real)
    else:
        whole = base + tile
        row = whole // per_row
        column = (whole - row * per_row)[None, :, None, None] * 64 + i
        real = inside[None, :, None, None] & (column < width)
        tl.store(out + row[None, :, None, None] * width + column, rounded, mask=real)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_max(v):
    """The largest of every tile, `[T]`; NaN may be lost."""
    return tl.max(tl.max(tl.max(v, 3), 0), 1)


@triton.jit
def tile_min(v):
    return tl.min(tl.min(tl.min(v, 3), 0), 1)


@triton.jit
def tile_sum(v):
    """Sums of integers, modulo 2**32."""
    return tl.sum(tl.sum(tl.sum(v, 3), 0), 1)


@triton.jit
def tile_max_or_nan(v):
    """The largest of every tile, `[T]`, NaN if there is one; the interpreter needs `peak_bits` for that."""
    if _INTERPRETED:
        largest = tile_max(v)
    else:
        largest = tl.reduce(tl.reduce(tl.reduce(v, 3, _larger), 0, _larger), 1, _larger)
    return largest


@triton.jit
def peak_bits(y, largest):
    """The bits of the largest magnitude of a block: integers order infinities and NaNs above all numbers."""
    if _INTERPRETED:
        peak = tl.max(tl.max(tl.max(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 3), 2), 1), 0)
    else:
        peak = tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    return peak


@triton.jit
def spread(v):
    """`[T]` to `[1, T, 1, 1]`."""
    return v[None, :, None, None]


@triton.jit
def exponent_of(peak):
    """`kernels.tiles.tensor_exponent` of the bits of the largest magnitude."""
    normal = (peak >> 23) - 126
    subnormal = (
        (peak.to(tl.float32, bitcast=True) * 18446744073709551616.0).to(tl.int32, bitcast=True) >> 23
    ) - 190
    exponent = tl.where(peak < 0x00800000, subnormal, normal)
    exponent = tl.where(peak == 0, 0, exponent) - 13
    return tl.where(peak >= 0x7F800000, _NON_FINITE, exponent)


@triton.jit
def powers_of_two(exponent):
    """2**exponent as two factors, the nearer to 1 first (`kernels.tiles.powers_of_two`)."""
    far = tl.minimum(tl.maximum(exponent, -126), 126)
    near = exponent - far
    return ((near + 127) << 23).to(tl.float32, bitcast=True), ((far + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def denormalised(y, exponent, LARGEST: tl.constexpr, LARGEST_EXPONENT: tl.constexpr):
    """y times 2**exponent, within -LARGEST .. LARGEST, which is below 2**LARGEST_EXPONENT."""
    near, far = powers_of_two(exponent)
    if (exponent < -126) | (exponent + 24 >= LARGEST_EXPONENT):
        y = tl.minimum(tl.maximum(y * near * far, -LARGEST), LARGEST)
    else:
        # The near factor is 1, and decoded values lie below 2**24.
        y = y * far
    return y


@triton.jit
def ceil_half(x):
    """The bits, int32, of the smallest fp16 >= x."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(half.to(tl.float32) < x, tl.where(bits < 0, bits - 1, bits + 1), bits)


@triton.jit
def half_value(bits):
    """fp32 of fp16's bits in an int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def floor_half(x):
    """The bits of the largest fp16 <= x; below 2**-100 x counts as 0. Never -0."""
    bits = ceil_half(0.0 - tl.where(tl.abs(x) < 7.888609052210118e-31, 0.0, x))
    return tl.where((bits & 0x7FFF) == 0, 0, bits ^ 0x8000)


@triton.jit
def ceil_short(x):
    """x >= 0 rounded up to fp16's 11 digits, in fp32: what `ceil_half` gives, whatever the scale."""
    return ((x.to(tl.int32, bitcast=True) + 0x1FFF) & ~0x1FFF).to(tl.float32, bitcast=True)


@triton.jit
def floor_short(x):
    """x rounded down to 11 digits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + tl.where(bits < 0, 0x1FFF, 0)) & ~0x1FFF).to(tl.float32, bitcast=True)


@triton.jit
def transpose_nibbles(w):
    """Transpose each 4 x 4 block of the 8 nibbles' bits: of byte r = code r + 16 code (r + 4), byte p becomes
    plane p of the 8 codes. Its own inverse."""
    swap = (w ^ (w >> 7)) & 0x00AA00AA
    w = w ^ swap ^ (swap << 7)
    swap = (w ^ (w >> 14)) & 0x0000CCCC
    return w ^ swap ^ (swap << 14)


@triton.jit
def gather_nibbles(codes):
    """Codes `[.., 8]` to the words `[..]` for `transpose_nibbles`; bits above a nibble spill over."""
    j = tl.arange(0, 8)[None, None, None, :]
    return tl.sum(codes << ((j & 3) * 8 + (j >> 2) * 4), 3)


@triton.jit
def gather_bytes(codes, HIGH: tl.constexpr):
    """Codes `[.., 8]`: bytes of elements 0 to 3, or 4 to 7 if HIGH, in one word `[..]`."""
    j = tl.arange(0, 8)[None, None, None, :]
    return tl.sum(tl.where((j >> 2) == HIGH, codes << ((j & 3) * 8), 0), 3)


@triton.jit
def spread_nibbles(words):
    """Inverse of `gather_nibbles`: codes `[.., 8]`."""
    j = tl.arange(0, 8)[None, None, None, :]
    return (words[:, :, :, None] >> ((j & 3) * 8 + (j >> 2) * 4)) & 15


@triton.jit
def spread_bytes(low, high):
    """Inverse of `gather_bytes`: codes `[.., 8]`."""
    j = tl.arange(0, 8)[None, None, None, :]
    return (tl.where((j >> 2) == 0, low[:, :, :, None], high[:, :, :, None]) >> ((j & 3) * 8)) & 255


@triton.jit
def store_planes(planes, words, place, inside, stride, COUNT: tl.constexpr):
    """Byte p of `words` `[8 / LANES, T, LANES]` to byte `place` of plane p, planes `stride` bytes apart."""
    for p in tl.static_range(COUNT):
        tl.store(planes + p * stride + place, ((words >> (8 * p)) & 255).to(tl.uint8), mask=inside)


@triton.jit
def load_planes(planes, place, inside, stride, COUNT: tl.constexpr):
    """Inverse of `store_planes`, COUNT from 1 to 4."""
    words = tl.load(planes + place, mask=inside, other=0).to(tl.int32)
    for p in tl.static_range(1, COUNT):
        words |= tl.load(planes + p * stride + place, mask=inside, other=0).to(tl.int32) << (8 * p)
    return words


@triton.jit
def all_ones(words, COUNT: tl.constexpr):
    """What `load_planes` gave: a byte with the bits that are set in all COUNT planes."""
    common = words
    for p in tl.static_range(1, COUNT):
        common &= words >> (8 * p)
    return common & 255
