"""What the Triton kernels share: tiles in registers, exponents, exact division, fp16 rounding.

A block of T tiles is `[T, 8, 8]`: element 8 k + j of tile t lies at [t, k, j], so the 8 elements of one byte
of every bit-plane belong to one thread and the 8 bytes of a tile to 8 neighbours, which read 16 bytes each.
Every reduction is over integers or a maximum, exact in any order.

All arithmetic is that of `kernels.common.tiles`, one rounding an operation; compile with `enable_fp_fusion=False`.
Outside of `quotient` and `reciprocal` a `tl.fma` stands only where its product is exact, so that the
interpreter, which rounds it, gives the same.
"""

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

# Bound where kernels are defined: under the interpreter tensors lie on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# x + MAGIC rounds x to an integer, ties to even, and holds it in its lowest bits, for |x| < 2**22.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
_INTERPRETED = tl.constexpr(INTERPRETED)
_NON_FINITE = tl.constexpr(0x7FFF)

# Triton compiles anew for sizes that are 1 or multiples of 16, which gains nothing here.
_SIZES = (
    "n",
    "tiles",
    "four_bit",
    "fourths",
    "chunks",
    "programs",
    "scratch_size",
    "width",
    "row_stride",
    "per_row",
)


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
def let_next_start(EARLY: tl.constexpr):
    """Let the next kernel's programs start as this one's last are placed; they wait in `await_previous`."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """Before the first access to what earlier kernels of the same call wrote. Every program must come here,
    so that whoever waits for this kernel has waited for those before it too."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def load_block(
    x, base, n, width, row_stride, per_row, T: tl.constexpr, FLAT: tl.constexpr, PAIRS: tl.constexpr
):
    """Tiles base (int64) to base + T - 1 in fp32, 0 beyond the n-th tile; and which elements are real."""
    tile = tl.arange(0, T)[:, None, None]
    if PAIRS:
        # Two bf16 a word: one operation an element to widen them, where loading bf16 takes two.
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
    return tl.reshape(_widened(values), (T, 8, 8)), real


@triton.jit
def _widened(values):
    if values.dtype == tl.bfloat16:
        # The interpreter's own conversion is wrong for subnormal numbers.
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def load_tile(x, tile, width, row_stride, per_row):
    """One tile (int64) in fp32, `[64]`, 0 beyond its row."""
    row = tile // per_row
    column = (tile - row * per_row) * 64 + tl.arange(0, 64)
    return _widened(tl.load(x + row * row_stride + column, mask=column < width, other=0.0))


@triton.jit
def store_tile(out, y, tile, width, per_row):
    """Inverse of `load_tile`, into contiguous rows."""
    row = tile // per_row
    column = (tile - row * per_row) * 64 + tl.arange(0, 64)
    tl.store(out + row * width + column, _rounded(y, out.dtype.element_ty), mask=column < width)


@triton.jit
def _rounded(y, dtype: tl.constexpr):
    if dtype == tl.int16:
        # bf16 under the interpreter: to nearest even by integers.
        bits = y.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    return y.to(dtype)


@triton.jit
def store_block(out, y, base, n, width, per_row, T: tl.constexpr, FLAT: tl.constexpr):
    """Round y to the dtype of `out`, whose rows are contiguous; inverse of `load_block`."""
    rounded = tl.reshape(_rounded(y, out.dtype.element_ty), (T * 64,))
    i = tl.arange(0, T * 64)
    if FLAT:
        tl.store(out + base * 64 + i, rounded, mask=i < (n - base) * 64)
    else:
        whole = base + i // 64
        row = whole // per_row
        column = (whole - row * per_row) * 64 + i % 64
        tl.store(out + row * width + column, rounded, mask=(whole < n) & (column < width))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_max(v):
    """The largest of every tile, `[T]`; NaN may be lost."""
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
    """The largest of every tile, `[T]`, NaN if there is one; the interpreter needs `peak_bits` for that."""
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
    """The largest of what `programs` programs left in `peaks`."""
    # As many at once as a tensor of 64 MiB has: each turn of the loop waits for memory.
    i = tl.arange(0, 8192)
    largest = tl.zeros((8192,), tl.int32)
    start = 0
    while start < programs:
        largest = tl.maximum(largest, tl.load(peaks + start + i, mask=start + i < programs, other=0))
        start += 8192
    return tl.max(largest, 0)


@triton.jit
def halves(per_tile, T: tl.constexpr):
    """`[T]` as every other tile and the rest, each with a tile in one thread, not in all 8 that share it: for
    what takes many operations a tile. Back with `whole`."""
    return tl.split(tl.reshape(per_tile, (T // 2, 2)))


@triton.jit
def whole(even, odd, T: tl.constexpr):
    """Inverse of `halves`."""
    return tl.reshape(tl.join(even, odd), (T,))


@triton.jit
def spread(v):
    """`[T]` to `[T, 1, 1]`."""
    return v[:, None, None]


@triton.jit
def exponent_of(peak):
    """`kernels.common.tiles.tensor_exponent` of the bits of the largest magnitude."""
    normal = (peak >> 23) - 126
    subnormal = (
        (peak.to(tl.float32, bitcast=True) * 18446744073709551616.0).to(tl.int32, bitcast=True) >> 23
    ) - 190
    exponent = tl.where(peak < 0x00800000, subnormal, normal)
    exponent = tl.where(peak == 0, 0, exponent) - 13
    return tl.where(peak >= 0x7F800000, _NON_FINITE, exponent)


@triton.jit
def powers_of_two(exponent):
    """2**exponent as two factors, the nearer to 1 first (`kernels.common.tiles.powers_of_two`)."""
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
def quotient(a, divisor, inverse):
    """a / divisor rounded once, for a whole divisor below 2**11 and its inverse rounded once.

    The remainder of the first guess is exact, and no quotient of 24 digits by so short a divisor lies so near
    to the middle of two numbers that the corrected guess could round the other way (Markstein). No branch,
    which division has. Not for |a| below 2**-100, unless it is 0.
    """
    if _INTERPRETED:
        q = tl.div_rn(a, tl.zeros_like(a) + divisor)
    else:
        guess = a * inverse
        q = tl.fma(tl.fma(-guess, divisor, a), inverse, guess)
    return q


@triton.jit
def reciprocal(short):
    """1 / short rounded once, for numbers of 11 digits from 2**-126 to 2**126, after one step by Newton.

    Its relative error is the square of the guess's, below 2**-40; the nearest middle is 2**-36 away."""
    if _INTERPRETED:
        inverse = tl.div_rn(tl.zeros_like(short) + 1.0, short)
    else:
        guess = 1.0 / short
        inverse = tl.fma(guess, tl.fma(-short, guess, 1.0), guess)
    return inverse


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
