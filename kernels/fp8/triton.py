"""`kernels.fp8.reference` and `kernels.fp8.rows` on GPUs: each function passes over memory once, or twice for
the columns of a matrix.

A program handles rows of 128 elements (one block of e4m3 numbers each), a whole row of a matrix, or a tile.
GPUs that can convert to and from e4m3 do so, in a third of the instructions. Other GPUs, the interpreter and
moments use integers, which give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.common.triton.e4m3 import (
    converts_e4m3,
    encode,
    exponent_of,
    magnitude_bits,
    power_of_two,
    scale_of,
    store_codes,
)
from kernels.common.triton.numbers import half_bits, lacks_functions, mixed, random_16, widened, wrapped
from kernels.fp8.layout import blocks
from kernels.fp8.reference import AdamWStep, Draw, Fp8Gradient, Moment
from kernels.fp8.rows import Coded

ROWS = 4
WARPS = 2
ADDED_ROWS = 16
ADDED_WARPS = 4
"""Warps of a program that accumulates gradients; a thread has 16 elements of a block."""
CHUNK = 4096
"""Columns that a program reads at a time. Longer rows are read twice, the second time from the cache."""

TILE = 64
"""Rows and columns of a tile when columns of a matrix are coded."""

# Triton specializes kernels for sizes that are 1 or multiples of 16. That helps only for the number of
# elements: Triton then knows that a thread may read several at once.


def accumulate_gradient(
    gradient: Fp8Gradient,
    addend: Tensor,
    draw: Draw | None = None,
    rows: int = ADDED_ROWS,
    warps: int = ADDED_WARPS,
) -> None:
    """See `kernels.fp8.reference.accumulate_gradient`; the bits are the same."""
    n = addend.numel()
    count = blocks(n)
    _accumulate[(triton.cdiv(count, rows),)](
        gradient.codes,
        gradient.exponents,
        addend.contiguous(),
        gradient.codes if draw is None else draw.microbatch,
        0 if draw is None else wrapped(draw.parameter),
        n,
        count,
        STOCHASTIC=draw is not None,
        ROWS=rows,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def sum_gradients(
    codes: Tensor, exponents: Tensor, into: Fp8Gradient, rows: int = ADDED_ROWS, warps: int = ADDED_WARPS
) -> None:
    """See `kernels.fp8.reference.sum_gradients`; the bits are the same."""
    n = codes.shape[1]
    count = blocks(n)
    _sum[(triton.cdiv(count, rows),)](
        codes,
        exponents,
        into.codes,
        into.exponents,
        n,
        count,
        codes.stride(0),
        exponents.stride(0),
        MANY=len(codes),
        ROWS=rows,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def momentum_step(
    gradient: Tensor | Fp8Gradient,
    mean: Moment,
    momentum: float,
    clip_coefficient: float,
) -> Tensor:
    """See `kernels.fp8.reference.momentum_step`."""
    if isinstance(gradient, Fp8Gradient):
        codes, exponents = gradient.codes, gradient.exponents
    else:
        codes = exponents = gradient.contiguous()
    n = mean.codes.numel()
    count = blocks(n)
    after = torch.empty(n, dtype=torch.float32, device=mean.codes.device)
    _momentum[(triton.cdiv(count, ROWS),)](
        codes,
        exponents,
        mean.codes,
        mean.scales,
        mean.powers,
        after,
        n,
        count,
        clip_coefficient,
        momentum,
        PACKED=isinstance(gradient, Fp8Gradient),
        ROWS=ROWS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return after


def adamw_step(
    parameter: Tensor,
    gradient: Tensor | Fp8Gradient,
    mean: Moment,
    square: Moment,
    step: AdamWStep,
    rows: int = ROWS,
    warps: int = WARPS,
) -> None:
    """See `kernels.fp8.reference.adamw_step`."""
    if isinstance(gradient, Fp8Gradient):
        codes, exponents = gradient.codes, gradient.exponents
    else:
        codes = exponents = gradient.contiguous()
    n = parameter.numel()
    count = blocks(n)
    _adamw[(triton.cdiv(count, rows),)](
        parameter,
        codes,
        exponents,
        mean.codes,
        mean.scales,
        mean.powers,
        square.codes,
        square.scales,
        square.powers,
        n,
        count,
        step.clip_coefficient,
        step.beta1,
        step.beta2,
        step.keep,
        step.step_size,
        1 / step.root_correction,
        step.eps,
        wrapped(step.salt),
        step.first,
        PACKED=isinstance(gradient, Fp8Gradient),
        ROWS=rows,
        num_warps=warps,
        enable_fp_fusion=True,
    )


def code_rows(x: Tensor, into: Coded, *, chunk: int = CHUNK) -> None:
    """See `kernels.fp8.rows.code_rows`; rows of x need not be contiguous."""
    rows, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    chunk = min(chunk, triton.next_power_of_2(width))
    if rows:
        _code_rows[(rows,)](
            x,
            into.codes.view(torch.uint8),
            into.scales,
            width,
            x.stride(0),
            CHUNK=chunk,
            num_warps=min(max(chunk // 512, 1), 8),
            enable_fp_fusion=False,
        )


def code_columns(x: Tensor, into: Coded, tile: int = TILE) -> None:
    """See `kernels.fp8.rows.code_columns`; rows of x need not be contiguous."""
    rows, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    length = into.codes.shape[1]
    peaks = torch.zeros(width, dtype=torch.int32, device=x.device)
    columns = triton.cdiv(width, tile)
    _column_peaks[(triton.cdiv(rows, tile), columns)](
        x,
        peaks,
        rows,
        width,
        x.stride(0),
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=True,
    )
    _code_columns[(triton.cdiv(length, tile), columns)](
        x,
        peaks,
        into.codes.view(torch.uint8),
        into.scales,
        rows,
        width,
        x.stride(0),
        length,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=("parameter", "count"))
def _accumulate(
    codes,
    exponents,
    addend,
    microbatch,
    parameter,
    n,
    count,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = place < n
    value = _gradient(codes, exponents, row, place, inside, count, converts_e4m3())
    value += tl.load(addend + place, mask=inside, other=0.0).to(tl.float32)
    noise = place
    if STOCHASTIC:
        # `Draw.salt` is read on the device, because a captured graph is replayed with other salts.
        salt = mixed(tl.load(microbatch).to(tl.uint32) ^ parameter.to(tl.uint32))
        noise = (mixed(place.to(tl.uint32) ^ salt) & 0xFFFFF).to(tl.int32)
    _store_gradient(codes, exponents, value, noise, row, place, inside, count, STOCHASTIC)


@triton.jit(do_not_specialize=("count", "exponent_stride"))
def _sum(
    codes,
    exponents,
    out_codes,
    out_exponents,
    n,
    count,
    code_stride,
    exponent_stride,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = place < n
    value = _gradient(codes, exponents, row, place, inside, count, converts_e4m3())
    for more in range(1, MANY):
        offset = tl.cast(more, tl.int64)
        value += _gradient(
            codes + offset * code_stride,
            exponents + offset * exponent_stride,
            row,
            place,
            inside,
            count,
            converts_e4m3(),
        )
    _store_gradient(out_codes, out_exponents, value, place, row, place, inside, count, False)


@triton.jit
def _store_gradient(
    codes,
    exponents,
    value,
    noise,
    row,
    place,
    inside,
    count,
    STOCHASTIC: tl.constexpr,
):
    """Round to nearest, or stochastically with `noise`, 20 random bits per element, int32 [ROWS, 128]."""
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = exponent_of(largest)
    finite = largest < 0x7F800000
    scaled = value * power_of_two(-exponent[:, None])
    if converts_e4m3() and not STOCHASTIC:
        scaled = tl.where(finite[:, None], scaled, 0.0)
        code = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _encode_stochastically(scaled, noise) if STOCHASTIC else encode(scaled)
        code = tl.where(finite[:, None], code, 0).to(tl.uint8)
    tl.store(codes + place, code, mask=inside)
    tl.store(exponents + row, tl.where(finite, exponent, -128).to(tl.int8), mask=row < count)


@triton.jit(do_not_specialize=("count", "salt", "first"))
def _adamw(
    parameter,
    gradient,
    exponents,
    mean,
    mean_scales,
    mean_powers,
    square,
    square_scales,
    square_powers,
    n,
    count,
    clip,
    beta1,
    beta2,
    keep,
    step_size,
    inverse_root_correction,
    eps,
    salt,
    first,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = place < n
    real = row < count
    if PACKED:
        g = _gradient(gradient, exponents, row, place, inside, count, False)
    else:
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    g *= clip
    m = _moment(mean, mean_scales, mean_powers, row, place, inside, real)
    v = _moment(square, square_scales, square_powers, row, place, inside, real)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    weight = tl.load(parameter + place, mask=inside, other=0.0).to(tl.float32) * keep
    weight -= step_size * m / (tl.sqrt(v) * inverse_root_correction + eps)
    if parameter.dtype.element_ty == tl.bfloat16:
        bits = weight.to(tl.int32, bitcast=True)
        # The shift is unsigned, so that it does not copy the sign bit.
        rounded = (bits + random_16(first + place, salt)).to(tl.uint32, bitcast=True) >> 16
        kept = bits.to(tl.uint32, bitcast=True) >> 16
        halves = tl.where((bits & 0x7F800000) == 0x7F800000, kept, rounded)
        tl.store(parameter + place, (halves << 16).to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
    else:
        tl.store(parameter + place, weight, mask=inside)
    _store_moment(mean, mean_scales, mean_powers, m, row, place, inside, real)
    _store_moment(square, square_scales, square_powers, v, row, place, inside, real)


@triton.jit(do_not_specialize=("count",))
def _momentum(
    gradient,
    exponents,
    mean,
    mean_scales,
    mean_powers,
    after,
    n,
    count,
    clip,
    momentum,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = place < n
    real = row < count
    if PACKED:
        g = _gradient(gradient, exponents, row, place, inside, count, False)
    else:
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    g *= clip
    m = _moment(mean, mean_scales, mean_powers, row, place, inside, real)
    m += (1 - momentum) * (g - m)
    tl.store(after + place, m - (1 - momentum) * (m - g), mask=inside)
    _store_moment(mean, mean_scales, mean_powers, m, row, place, inside, real)


@triton.jit
def _gradient(codes, exponents, row, place, inside, count, CONVERTS: tl.constexpr):
    """A gradient's codes as fp32 [ROWS, 128]; 0 outside, except in a block that is not finite. With
    `CONVERTS` the device converts them; the numbers are the same."""
    code = tl.load(codes + place, mask=inside, other=0)
    exponent = tl.load(exponents + row, mask=row < count, other=0).to(tl.int32)
    scale = power_of_two(tl.maximum(exponent, -126))
    scale = tl.where(exponent == -128, float("nan"), scale)
    number = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) if CONVERTS else _decode(code.to(tl.int32))
    return number * scale[:, None]


@triton.jit
def _log2(x):
    """log2 with a relative or absolute error below 2**-22, far less than a step of e4m3. A correctly rounded
    logarithm would take most of an update's instructions."""
    return tl.log2(x) if lacks_functions() else libdevice.fast_log2f(x)


@triton.jit
def _moment(codes, scales, powers, row, place, inside, real):
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=real, other=0.0).to(tl.float32)[:, None]
    power = tl.load(powers + row, mask=real, other=16).to(tl.float32)[:, None]
    value = _decode(code & 0x7F)
    # 8.807... is log2(448).
    logarithm = (_log2(value) - 8.807354922057604) * (16.0 / power) + _log2(scale)
    # Not above zero for a code of 0, whose logarithm is minus infinity.
    bits = tl.exp2(logarithm).to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_moment(codes, scales, powers, value, row, place, inside, real):
    magnitude = tl.where(inside, tl.abs(value), 0.0)
    # bf16, to nearest even.
    largest = (half_bits(tl.max(magnitude, 1)) << 16).to(tl.float32, bitcast=True)
    smallest = tl.min(tl.where(magnitude > 0, magnitude, float("inf")), 1)
    some = largest > 0
    top = _log2(tl.where(some, largest, 1.0))
    octaves = top - _log2(tl.where(some, smallest, 1.0))
    power = tl.floor(16 * 16.614709844115207 / tl.maximum(octaves, 1.0))
    power = tl.where(some, tl.minimum(tl.maximum(power, 1.0), 255.0), 16.0)
    exponent = (_log2(magnitude) - top[:, None]) * (power * 0.0625)[:, None] + 8.807354922057604
    # The logarithm of 0 is minus infinity, and its code 0.
    code = encode(tl.exp2(exponent)) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(codes + place, tl.where(magnitude > 0, code, 0).to(tl.uint8), mask=inside)
    tl.store(scales + row, largest.to(scales.dtype.element_ty), mask=real)
    tl.store(powers + row, power.to(tl.uint8), mask=real)


@triton.jit
def _decode(code):
    """e4m3 codes, int32, as fp32. NaN decodes as 480 here; no stored code is NaN."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0


@triton.jit
def _encode_stochastically(value, noise):
    """See `kernels.fp8.reference`. Values are at most 448; codes of values that are not finite are unused."""
    magnitude = tl.abs(value)
    normal = magnitude.to(tl.int32, bitcast=True) - 0x3C000000
    subnormal = (magnitude + 0.015625).to(tl.int32, bitcast=True) - 0x3C800000
    return ((tl.maximum(normal, subnormal) + noise) >> 20) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _code_rows(x, codes, scales, width, stride, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    if width <= CHUNK:
        value = widened(tl.load(x + row * stride + column, mask=column < width, other=0.0))
        peak = tl.max(magnitude_bits(value), 0)
        store_codes(codes + row * width + column, value, peak, column < width)
    else:
        peaks = tl.zeros((CHUNK,), tl.int32)
        for start in range(0, width, CHUNK):
            real = start + column < width
            value = widened(tl.load(x + row * stride + start + column, mask=real, other=0.0))
            peaks = tl.maximum(peaks, magnitude_bits(value))
        peak = tl.max(peaks, 0)
        for start in range(0, width, CHUNK):
            real = start + column < width
            value = widened(tl.load(x + row * stride + start + column, mask=real, other=0.0))
            store_codes(codes + row * width + start + column, value, peak, real)
    tl.store(scales + row, scale_of(peak))


@triton.jit
def _column_peaks(x, peaks, rows, width, stride, TILE: tl.constexpr):
    """The bits of each column's largest magnitude, as a maximum of integers, which is exact in any order."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = widened(tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0))
    tl.atomic_max(peaks + column, tl.max(magnitude_bits(value), 0), mask=column < width)


@triton.jit
def _code_columns(x, peaks, codes, scales, rows, width, stride, length, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = widened(tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0))
    peak = tl.load(peaks + column, mask=column < width, other=0)
    # Rows outside the matrix are 0 and have the code 0.
    place = codes + column[:, None] * length + row[None, :]
    written = (column < width)[:, None] & (row < length)[None, :]
    store_codes(place, tl.trans(value), peak[:, None], written)
    tl.store(scales + column, scale_of(peak), mask=(column < width) & (tl.program_id(0) == 0))
