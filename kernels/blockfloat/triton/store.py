"""`kernels.blockfloat.reference` in Triton: the same bits, alone or inside kernels that produce the tensor.

T blocks are `[T, 128]`, as they lie in memory, so that neighbouring threads read neighbouring bytes. The 8
elements that share a word of a shard belong to one thread if rows are aligned to 16 bytes. Every reduction
here is a maximum of integers, exact in any order; the rest is elementwise, with one rounding per operation.
Compile with `enable_fp_fusion=False`.
"""

import torch
import triton
import triton.language as tl

from kernels.blockfloat import outliers
from kernels.blockfloat.layout import (
    APART,
    BLOCK,
    NAN_SCALE,
    SMALL_MAGNITUDES,
    SMALL_THRESHOLDS,
    SMALLEST_BITS,
    TOO_LARGE_BITS,
    blocks_of,
    limit,
    packed_bytes,
    payload_offset,
)
from kernels.common.triton.numbers import (
    MAGIC,
    MAGIC_BITS,
    as_bits,
    half_bits,
    reciprocal,
    rounded,
    widened,
)

_SMALLEST = tl.constexpr(SMALLEST_BITS)
_TOO_LARGE = tl.constexpr(TOO_LARGE_BITS)
_NAN_SCALE = tl.constexpr(NAN_SCALE)
_THRESHOLDS = tuple(tl.constexpr(value) for value in SMALL_THRESHOLDS)
_MOST_STEPS = tl.constexpr(2.0 ** (outliers.STEPS + 1))
_FIRST, _SECOND, _THIRD = _THRESHOLDS
_SMALL_0, _SMALL_1, _SMALL_2, _SMALL_3 = (tl.constexpr(value) for value in SMALL_MAGNITUDES)

# `MAGIC_BITS` at each of a word's eight places.
_MAGIC_IN_ALL = tl.constexpr((MAGIC_BITS.value * 0x11111111 + 2**31) % 2**32 - 2**31)

# Triton specializes kernels for sizes that are 1 or multiples of 16. That helps only for `width` and
# `stride`, from which it knows that a thread may read several elements at once.
SIZES = ("n", "rows", "per_row")

# Blocks per program, and its warps. No bit depends on them.
BLOCKS = 8
WARPS = 4
ROWS_SUMMED = 256
"""Rows per program that sums channels."""


@triton.jit
def load_wide(pointers, mask):
    """Load fp32, fp16 or bf16 numbers as fp32, 0 where masked."""
    return widened(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def store_rounded(pointers, y, mask):
    """Round y to the pointers' dtype; int16 stands for bf16 under the interpreter."""
    tl.store(pointers, rounded(y, pointers.dtype.element_ty), mask=mask)


@triton.jit
def as_stored(y, pointers):
    """y as `store_rounded` stores it, in fp32; for pointers to fp32 or bf16."""
    if pointers.dtype.element_ty == tl.float32:
        stored = y
    else:
        stored = (half_bits(y) << 16).to(tl.float32, bitcast=True)
    return stored


@triton.jit
def _scale_bits(largest, LIMIT: tl.constexpr):
    """bf16 bits, int32, of the scale of a block whose largest magnitude has these fp32 bits."""
    scale = half_bits(largest.to(tl.float32, bitcast=True) * (1.0 / LIMIT))
    scale = tl.where(largest < _SMALLEST, 0, scale)
    return tl.where(largest >= _TOO_LARGE, _NAN_SCALE, scale)


@triton.jit
def _nearest(scaled, BITS: tl.constexpr):
    """The nearest magnitude codes, above `MAGIC_BITS`, of magnitudes in scales, up to the limit."""
    STEP: tl.constexpr = 1 << (BITS - 3)
    # Products with powers of two are exact, so fused multiplication changes nothing.
    nearest = tl.minimum(scaled + MAGIC, tl.fma(scaled, 0.5, MAGIC + STEP))
    nearest = tl.minimum(nearest, tl.fma(scaled, 0.25, MAGIC + 2 * STEP))
    return nearest.to(tl.int32, bitcast=True)


@triton.jit
def _codes(y, inverse, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """Codes, int32 like y, of blocks whose scales have these reciprocals `[T]`."""
    bits = y.to(tl.int32, bitcast=True)
    scaled = tl.abs(y) * inverse[:, None]
    # A NaN fails the comparison.
    scaled = tl.where(scaled < LIMIT, scaled, LIMIT)
    if BITS == 3:
        codes = (scaled > _FIRST).to(tl.int32) + (scaled > _SECOND).to(tl.int32)
        codes += (scaled > _THIRD).to(tl.int32)
    else:
        codes = _nearest(scaled, BITS) - MAGIC_BITS
    return codes | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def _words_of_fours(y, scale, inverse):
    """Codes of 4 bits, eight per word: int32 `[T, 16]`."""
    # Only in a block of NaNs is a magnitude so far above the limit that its code changes.
    nearest = _nearest(tl.abs(y) * inverse[:, None], 4)
    place = tl.arange(0, 8)[None, None, :] * 4
    # The codes do not overlap, so a word is their sum. What each has above it is subtracted from all.
    magnitudes = tl.sum(tl.reshape(nearest, (y.shape[0], 16, 8)) << place, 2) - _MAGIC_IN_ALL
    magnitudes = tl.where((scale == _NAN_SCALE)[:, None], 0x77777777, magnitudes)
    bits = tl.reshape(y.to(tl.int32, bitcast=True), (y.shape[0], 16, 8))
    return magnitudes + tl.sum((bits >> (28 - place)) & (8 << place), 2)


@triton.jit
def _words_at(start, block, WIDTH: tl.constexpr):
    """Pointers `[T, 16]` to the words of 8 codes in the shard at `start`.

    The compiler cannot tell that they are contiguous, so it gives a thread one word at a time. The word's
    elements are those that the thread reads or writes as 16 bytes of bf16, so none moves to another thread.
    """
    if WIDTH == 4:
        words = start.to(tl.pointer_type(tl.int32), bitcast=True)
    elif WIDTH == 2:
        words = start.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        words = start
    return words + tl.multiple_of(block[:, None] * 16 + tl.arange(0, 16)[None, :], (1, 1))


@triton.jit
def _store_words(start, block, inside, words, WIDTH: tl.constexpr):
    target = _words_at(start, block, WIDTH)
    tl.store(target, words.to(target.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _store_shard(start, block, inside, codes, WIDTH: tl.constexpr):
    """Store the lowest WIDTH bits of codes `[T, 128]` in the shard at `start`."""
    if WIDTH == 8:
        where = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(start + where, codes.to(tl.uint8), mask=inside[:, None])
    else:
        j = tl.arange(0, 8)[None, None, :]
        eights = tl.reshape(codes & ((1 << WIDTH) - 1), (codes.shape[0], 16, 8))
        _store_words(start, block, inside, tl.sum(eights << (j * WIDTH), 2), WIDTH)


@triton.jit
def _load_words(start, block, inside, WIDTH: tl.constexpr):
    """Load what `_store_words` stored, int32."""
    return tl.load(_words_at(start, block, WIDTH), mask=inside[:, None], other=0).to(tl.int32)


@triton.jit
def _in_a_row(a, b, c, d, e, f, g, h):
    """Interleave the elements of eight `[T, 16]` to `[T, 128]`, within the threads that have them."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (a.shape[0], 128))


@triton.jit
def _load_shard(start, block, inside, WIDTH: tl.constexpr):
    """Inverse of `_store_shard`: int32 `[T, 128]`."""
    if WIDTH == 8:
        where = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        codes = tl.load(start + where, mask=inside[:, None], other=0).to(tl.int32)
    else:
        w = _load_words(start, block, inside, WIDTH)
        MASK: tl.constexpr = (1 << WIDTH) - 1
        codes = _in_a_row(
            w & MASK,
            (w >> WIDTH) & MASK,
            (w >> 2 * WIDTH) & MASK,
            (w >> 3 * WIDTH) & MASK,
            (w >> 4 * WIDTH) & MASK,
            (w >> 5 * WIDTH) & MASK,
            (w >> 6 * WIDTH) & MASK,
            (w >> 7 * WIDTH) & MASK,
        )
    return codes


@triton.jit
def _small_number(word, LEFT: tl.constexpr):
    """2**-127 times the value, in fp32, of the e2m1 code whose sign is `LEFT` bits below the word's. Its
    exponent takes the lowest bits of fp32's exponent, its mantissa the highest bits of fp32's mantissa."""
    # The bits between are copies of the sign and are dropped.
    bits = ((word << LEFT) >> 6) & -2118123520
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_fours(start, block, inside):
    """The values of codes of 4 bits, in units of the scale: fp32 `[T, 128]`."""
    w = _load_words(start, block, inside, 4)
    small = _in_a_row(
        _small_number(w, 28),
        _small_number(w, 24),
        _small_number(w, 20),
        _small_number(w, 16),
        _small_number(w, 12),
        _small_number(w, 8),
        _small_number(w, 4),
        _small_number(w, 0),
    )
    # Exact, also for fp32's subnormal numbers, which hold e2m1's subnormal ones.
    return small * 170141183460469231731687303715884105728.0


@triton.jit
def _payload(n):
    """Offset of the first shard (`kernels.blockfloat.layout.payload_offset`)."""
    return (n.to(tl.int64) * 2 + 15) // 16 * 16


@triton.jit
def store_blocks(packed, n, block, inside, y, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """Store y, fp32 `[T, 128]` with zeros as padding, as the blocks `block` (int64 `[T]`) of n."""
    if BITS == 16:
        bits = y.to(tl.int32, bitcast=True)
        halves = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _NAN_SCALE, half_bits(y)).to(tl.int16)
        where = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        target = packed.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(target + where, halves, mask=inside[:, None] & (where >= 0))
    else:
        magnitudes = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = _scale_bits(tl.max(magnitudes, 1), LIMIT)
        tl.store(packed.to(tl.pointer_type(tl.int16), bitcast=True) + block, scale.to(tl.int16), mask=inside)
        value = (scale << 16).to(tl.float32, bitcast=True)
        inverse = tl.where(scale == 0, 0.0, reciprocal(tl.where(scale == 0, 1.0, value)))
        start = packed + _payload(n)
        if BITS == 4:
            _store_words(start, block, inside, _words_of_fours(y, scale, inverse), 4)
        else:
            codes = _codes(y, inverse, BITS, LIMIT)
            if BITS == 8:
                _store_shard(start, block, inside, codes, 8)
            elif BITS == 3:
                _store_shard(start, block, inside, codes, 2)
                _store_shard(start + n.to(tl.int64) * 32, block, inside, codes >> 2, 1)
            else:
                _store_shard(start, block, inside, codes, 4)
                _store_shard(start + n.to(tl.int64) * 64, block, inside, codes >> 4, BITS - 4)


@triton.jit
def load_blocks(packed, n, block, inside, BITS: tl.constexpr):
    """Inverse of `store_blocks`: fp32 `[T, 128]`, zeros for blocks outside."""
    if BITS == 16:
        where = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        source = packed.to(tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.load(source + where, mask=inside[:, None] & (where >= 0), other=0).to(tl.int32)
        y = (bits << 16).to(tl.float32, bitcast=True)
    else:
        scales = packed.to(tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        scale = (bits << 16).to(tl.float32, bitcast=True)[:, None]
        start = packed + _payload(n)
        if BITS == 4:
            y = _load_fours(start, block, inside) * scale
        else:
            if BITS == 8:
                codes = _load_shard(start, block, inside, 8)
            elif BITS == 3:
                codes = _load_shard(start, block, inside, 2)
                codes |= _load_shard(start + n.to(tl.int64) * 32, block, inside, 1) << 2
            else:
                codes = _load_shard(start, block, inside, 4)
                codes |= _load_shard(start + n.to(tl.int64) * 64, block, inside, BITS - 4) << 4
            if BITS == 3:
                low = tl.where((codes & 1) == 0, _SMALL_0, _SMALL_1)
                high = tl.where((codes & 1) == 0, _SMALL_2, _SMALL_3)
                magnitude = tl.where((codes & 2) == 0, low, high)
            else:
                STEP: tl.constexpr = 1 << (BITS - 3)
                exponent = (codes >> (BITS - 3)) & 3
                value = (codes & (STEP - 1)) | tl.where(exponent == 0, 0, STEP)
                value = value << tl.maximum(exponent - 1, 0)
                # 2**23 + value, exactly.
                magnitude = (value | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            y = magnitude * scale
            # The sign is set as a bit, so that a zero keeps its own.
            sign = (codes << (32 - BITS)) & -2147483648
            y = (y.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return y


@triton.jit
def block_columns(block, per_row):
    """Each block's row (int64) and first column."""
    # Blocks always fit in 32 bits, whose division is several times as fast.
    narrow = block.to(tl.int32)
    row = narrow // per_row
    return row.to(tl.int64), (narrow - row * per_row) * 128


def store_jit(function):
    """`triton.jit` for kernels that the host launches: one compilation for all sizes."""
    return triton.jit(function, do_not_specialize=SIZES)


@store_jit
def _pack(
    x,
    apart,
    packed,
    n,
    width,
    per_row,
    stride,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    APART: tl.constexpr,
    T: tl.constexpr,
):
    """Pack blocks. With APART, channels that are 1 in `apart` count as 0."""
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = block < n
    row, column = block_columns(block, per_row)
    columns = column[:, None] + tl.arange(0, 128)[None, :]
    real = inside[:, None] & (columns < width)
    y = load_wide(x + (row * stride)[:, None] + columns, real)
    if APART:
        y = tl.where(tl.load(apart + columns, mask=real, other=0) != 0, 0.0, y)
    store_blocks(packed, n, block, inside, y, BITS, LIMIT)


@store_jit
def _unpack(packed, out, n, width, per_row, packed_stride, out_stride, BITS: tl.constexpr, T: tl.constexpr):
    """Unpack blocks of the tensors that start every `packed_stride` bytes."""
    packed += tl.program_id(1).to(tl.int64) * packed_stride
    out += tl.program_id(1).to(tl.int64) * out_stride
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = block < n
    y = load_blocks(packed, n, block, inside, BITS)
    row, column = block_columns(block, per_row)
    columns = column[:, None] + tl.arange(0, 128)[None, :]
    real = inside[:, None] & (columns < width)
    store_rounded(out + (row * width)[:, None] + columns, y, real)


@store_jit
def _channel_sums(x, by, sums, rows, width, stride, per_program, T: tl.constexpr):
    """Sum 128 channels over `per_program` rows (`kernels.blockfloat.outliers.channel_sums`)."""
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)
    factor = tl.load(by)
    first = tl.program_id(1).to(tl.int64) * per_program
    total = tl.zeros((128,), tl.int64)
    for start in range(0, per_program, T):
        row = first + start + tl.arange(0, T)
        real = ((row < rows) & (row < first + per_program))[:, None] & (columns < width)[None, :]
        scaled = tl.abs(load_wide(x + (row * stride)[:, None] + columns[None, :], real)) * factor
        whole = tl.where(scaled < _MOST_STEPS, scaled, 0.0).to(tl.int32)
        # No more than T of 21 bits.
        total += tl.sum(whole, 0).to(tl.int64)
    tl.store(sums + tl.program_id(1).to(tl.int64) * width + columns, total, mask=columns < width)


def row_view(x: torch.Tensor) -> torch.Tensor:
    """`[..., C]` as `[rows, C]` with contiguous elements in a row; a copy only if there is no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def empty_packed(shape: torch.Size, bits: int, device: torch.device) -> torch.Tensor:
    """The buffer of a stored tensor: the gap after the scales is zero, the rest uninitialized."""
    packed = torch.empty(packed_bytes(shape, bits), dtype=torch.uint8, device=device)
    blocks = blocks_of(shape)
    if bits != 16 and (2 * blocks) % 16:
        packed[2 * blocks : payload_offset(blocks, bits)].zero_()
    return packed


def channel_sums(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """See `kernels.blockfloat.outliers.channel_sums`."""
    rows = row_view(rows)
    count, width = rows.shape
    programs = max(1, triton.cdiv(count, ROWS_SUMMED))
    sums = torch.empty(programs, width, dtype=torch.int64, device=rows.device)
    _channel_sums[(triton.cdiv(width, 128), programs)](
        rows,
        by,
        sums,
        count,
        width,
        rows.stride(0),
        ROWS_SUMMED,
        T=16,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return sums.sum(0)


def pack(
    x: torch.Tensor,
    bits: int,
    apart: torch.Tensor | None = None,
    *,
    blocks: int = BLOCKS,
    warps: int = WARPS,
) -> torch.Tensor:
    """See `kernels.blockfloat.reference.pack`. Never waits. `apart`: channels that count as 0, int64 [K]."""
    if bits >= APART:
        return outliers.pack(x, bits, channel_sums, pack)
    is_apart = x
    if apart is not None:
        is_apart = torch.zeros(x.shape[-1], dtype=torch.int8, device=x.device).index_fill_(0, apart, 1)
    packed = empty_packed(x.shape, bits, x.device)
    count = blocks_of(x.shape)
    if count:
        rows = row_view(x)
        _pack[(triton.cdiv(count, blocks),)](
            rows,
            is_apart,
            packed,
            count,
            rows.shape[1],
            -(-rows.shape[1] // BLOCK),
            rows.stride(0),
            BITS=bits,
            LIMIT=limit(bits),
            APART=apart is not None,
            T=blocks,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return packed


def unpack(
    packed: torch.Tensor,
    shape: torch.Size,
    bits: int,
    dtype: torch.dtype,
    *,
    blocks: int = BLOCKS,
    warps: int = WARPS,
) -> torch.Tensor:
    """See `kernels.blockfloat.reference.unpack`."""
    if bits >= APART:
        return outliers.put_back(unpack(packed, shape, bits - APART, dtype), packed, bits)
    return unpack_each(packed[None], shape, bits, dtype, blocks=blocks, warps=warps)[0]


def unpack_each(
    packed: torch.Tensor,
    shape: torch.Size,
    bits: int,
    dtype: torch.dtype,
    *,
    blocks: int = BLOCKS,
    warps: int = WARPS,
) -> torch.Tensor:
    """[E, *shape] from E tensors of one shape, packed as uint8 [E, bytes], without outlier channels apart."""
    out = torch.empty((len(packed), *shape), dtype=dtype, device=packed.device)
    count = blocks_of(shape)
    if count and len(packed):
        _unpack[(triton.cdiv(count, blocks), len(packed))](
            packed,
            as_bits(out),
            count,
            shape[-1],
            -(-shape[-1] // BLOCK),
            packed.stride(0),
            out[0].numel(),
            BITS=bits,
            T=blocks,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out
