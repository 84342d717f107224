"""Norms that store their input as they read it, and norms recomputed from the stored input.

One program per row, which is entirely in registers. The number of threads that share a row changes the bits
of its sums, so it depends only on the width.
"""

import torch
import triton
import triton.language as tl

from kernels.blockfloat.layout import APART, BLOCK, blocks_of, limit
from kernels.blockfloat.triton.store import (
    empty_packed,
    load_blocks,
    load_wide,
    pack,
    row_view,
    store_blocks,
    store_jit,
    store_rounded,
    unpack,
)
from kernels.common.dispatch import limits_registers
from kernels.common.triton.numbers import as_bits

# Warps of all programs of the backward kernel together: 32 for each of 132 multiprocessors. Each program sums
# the weight's gradient over its share of the rows, so their number changes bits; it depends on the width.
BACKWARD_WARPS = 4224


@triton.jit
def _total(v):
    return tl.sum(tl.sum(v, 1), 0)


@triton.jit
def _normal(y, real, width, eps, LAYER: tl.constexpr):
    """y normalised, 0 outside, and the normalising factor."""
    if LAYER:
        y = tl.where(real, y - _total(y) / width, 0.0)
    inverse = 1.0 / tl.sqrt(_total(y * y) / width + eps)
    return y * inverse, inverse


@store_jit
def _forward(
    x,
    weight,
    bias,
    normed,
    packed,
    n,
    rows,
    width,
    per_row,
    stride,
    eps,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    LAYER: tl.constexpr,
    STORED: tl.constexpr,
    T: tl.constexpr,
):
    """The norm of one row: with STORED of the row in `packed`, else of x, which is packed unless BITS is
    0."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, T)
    inside = t < per_row
    columns = t[:, None] * 128 + tl.arange(0, 128)[None, :]
    real = inside[:, None] & (columns < width)
    if STORED:
        y = load_blocks(packed, n, row * per_row + t, inside, BITS)
        y = tl.where(real, y, 0.0)
    else:
        y = load_wide(x + row * stride + columns, real)
        if BITS > 0:
            store_blocks(packed, n, row * per_row + t, inside, y, BITS, LIMIT)
    normal, _ = _normal(y, real, width, eps, LAYER)
    result = normal * load_wide(weight + columns, real)
    if LAYER:
        result += load_wide(bias + columns, real)
    store_rounded(normed + row * width + columns, result, real)


@store_jit
def _backward(
    grad,
    packed,
    residual,
    weight,
    out,
    of_weight,
    of_bias,
    n,
    rows,
    width,
    per_row,
    eps,
    BITS: tl.constexpr,
    LAYER: tl.constexpr,
    ADDS: tl.constexpr,
    T: tl.constexpr,
):
    """out = gradient of the row, with ADDS plus residual; and partial sums of the parameters' gradients, one
    row each."""
    program = tl.program_id(0)
    t = tl.arange(0, T)
    inside = t < per_row
    columns = t[:, None] * 128 + tl.arange(0, 128)[None, :]
    real = inside[:, None] & (columns < width)
    scale = load_wide(weight + columns, real)
    sum_weight = tl.zeros((T, 128), tl.float32)
    sum_bias = tl.zeros((T, 128), tl.float32)
    row = program.to(tl.int64)
    while row < rows:
        if BITS > 0:
            y = tl.where(real, load_blocks(packed, n, row * per_row + t, inside, BITS), 0.0)
        else:
            y = load_wide(packed + row * width + columns, real)
        # All reads come before the first wait, because the compiler moves none across it.
        upstream = load_wide(grad + row * width + columns, real)
        if ADDS:
            beside = load_wide(residual + row * width + columns, real)
        normal, inverse = _normal(y, real, width, eps, LAYER)
        sum_weight += upstream * normal
        weighted = upstream * scale
        inner = _total(weighted * normal) / width
        if LAYER:
            sum_bias += upstream
            weighted -= _total(weighted) / width
        result = (weighted - normal * inner) * inverse
        if ADDS:
            result += beside
        store_rounded(out + row * width + columns, result, real)
        row += tl.num_programs(0)
    partial = program.to(tl.int64) * width + columns
    tl.store(of_weight + partial, sum_weight, mask=real)
    if LAYER:
        tl.store(of_bias + partial, sum_bias, mask=real)


def _launch(width: int) -> dict[str, int]:
    blocks = triton.next_power_of_2(-(-width // BLOCK))
    return {"T": blocks, "num_warps": min(max(blocks // 4, 1), 8)}


def _registers(launch: dict[str, int], device: torch.device) -> dict[str, int]:
    """Limits registers per thread so that 16 warps of the backward kernel share a multiprocessor, and some
    read while others compute. With more than 16 elements per thread, too many registers would spill."""
    return {"maxnreg": 128} if launch["T"] <= 4 * launch["num_warps"] and limits_registers(device) else {}


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """The norm of x in `dtype`. Stores nothing."""
    rows = row_view(x)
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    if rows.shape[0]:
        _run_forward(rows, weight, bias, normed, normed, eps, 0, stored=False)
    return normed


def norm_store(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    bits: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x in `dtype`, and the stored x (`kernels.blockfloat.layers.norm_store`)."""
    if bits >= APART:
        return norm(x, weight, bias, eps, dtype), pack(x, bits)
    rows = row_view(x)
    packed = empty_packed(x.shape, bits, x.device)
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    if rows.shape[0]:
        _run_forward(rows, weight, bias, normed, packed, eps, bits, stored=False)
    return normed, packed


def norm_from_stored(
    packed: torch.Tensor,
    shape: torch.Size,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The norm of the stored input, in `dtype`."""
    if bits >= APART:
        return norm(unpack(packed, shape, bits, torch.float32), weight, bias, eps, dtype)
    normed = torch.empty(shape, dtype=dtype, device=packed.device)
    if normed.numel():
        _run_forward(normed.view(-1, shape[-1]), weight, bias, normed, packed, eps, bits, stored=True)
    return normed


def _run_forward(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normed: torch.Tensor,
    packed: torch.Tensor,
    eps: float,
    bits: int,
    *,
    stored: bool,
) -> None:
    count, width = rows.shape
    _forward[(count,)](
        as_bits(normed) if stored else rows,
        weight,
        weight if bias is None else bias,
        as_bits(normed),
        packed,
        blocks_of(rows.shape),
        count,
        width,
        -(-width // BLOCK),
        rows.stride(0),
        eps,
        BITS=bits,
        LIMIT=limit(bits) if bits else 1,
        LAYER=bias is not None,
        STORED=stored,
        **_launch(width),
        enable_fp_fusion=False,
    )


def norm_backward(
    grad: torch.Tensor,
    packed: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    bits: int,
    *,
    programs: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.blockfloat.layers.norm_backward`. If `bits` is 0, `packed` is the unpacked input.
    Without a residual the gradient of x is in grad's dtype."""
    if bits >= APART:
        packed, bits = unpack(packed, grad.shape, bits, torch.float32), 0
    width = grad.shape[-1]
    rows = grad.reshape(-1, width).contiguous()
    beside = rows if residual is None else residual.reshape(-1, width).contiguous()
    if not bits:
        packed = packed.contiguous()
    out = torch.empty(grad.shape, dtype=beside.dtype, device=grad.device)
    launch = _launch(width)
    programs = min(rows.shape[0], programs or BACKWARD_WARPS // launch["num_warps"])
    # Each program writes its row.
    sums = torch.empty(2 if bias is not None else 1, programs, width, dtype=torch.float32, device=grad.device)
    if programs:
        _backward[(programs,)](
            rows,
            packed,
            beside,
            weight,
            as_bits(out),
            sums[0],
            sums[-1],
            blocks_of(rows.shape),
            rows.shape[0],
            width,
            -(-width // BLOCK),
            eps,
            BITS=bits,
            LAYER=bias is not None,
            ADDS=residual is not None,
            **launch,
            **_registers(launch, grad.device),
            enable_fp_fusion=False,
        )
    of_weight = sums[0].sum(0)
    return out, of_weight, of_weight.new_empty(0) if bias is None else sums[1].sum(0)
