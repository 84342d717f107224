"""SwiGLU and GELU whose result, or whose inputs' gradients, are the operand of a product in e4m3.

One program per row, because a row has one scale (`kernels.fp8.rows`). It reads the row twice, the second time
from the cache. It codes the results of `kernels.blockfloat.triton.ffn`, with the same rounding.
"""

import torch
import triton
import triton.language as tl

from kernels.blockfloat.layout import BLOCK, blocks_of, limit
from kernels.blockfloat.triton.ffn import gradients, result_of
from kernels.blockfloat.triton.store import (
    as_stored,
    empty_packed,
    load_blocks,
    load_wide,
    row_view,
    store_blocks,
    store_jit,
    store_rounded,
)
from kernels.common.triton.e4m3 import magnitude_bits, scale_of, store_codes
from kernels.common.triton.numbers import as_bits
from kernels.fp8.rows import Coded

BLOCKS = 16
"""Blocks of 128 that a program reads at a time, and its warps. No bit depends on them."""
WARPS = 4


@triton.jit
def _load_stored(pointers, mask):
    """fp32 of what `store_rounded` stored."""
    values = tl.load(pointers, mask=mask, other=0)
    if pointers.dtype.element_ty == tl.float32:
        wide = values
    else:
        wide = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@store_jit
def _forward(
    gate,
    up,
    like,
    codes,
    scales,
    packed_gate,
    packed_up,
    n,
    width,
    per_row,
    stride,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    T: tl.constexpr,
):
    """Write the codes of the result, rounded to the dtype of `like`; store the inputs unless BITS is 0."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, T)
    peaks = tl.zeros((T, 128), tl.int32)
    for start in range(0, per_row, T):
        columns = (start + t)[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = start + t < per_row
        real = columns < width
        g = load_wide(gate + row * stride + columns, real)
        u = load_wide(up + row * stride + columns, real)
        if BITS > 0:
            store_blocks(packed_gate, n, row * per_row + start + t, inside, g, BITS, LIMIT)
            if GATED:
                store_blocks(packed_up, n, row * per_row + start + t, inside, u, BITS, LIMIT)
        peaks = tl.maximum(peaks, magnitude_bits(as_stored(result_of(g, u, GATED), like)))
    peak = tl.max(tl.max(peaks, 1), 0)
    for start in range(0, per_row, T):
        columns = (start + t)[:, None] * 128 + tl.arange(0, 128)[None, :]
        real = columns < width
        g = load_wide(gate + row * stride + columns, real)
        u = load_wide(up + row * stride + columns, real)
        result = as_stored(result_of(g, u, GATED), like)
        store_codes(codes + row * width + columns, result, peak, real)
    tl.store(scales + row, scale_of(peak))


@store_jit
def _backward(
    grad,
    packed_gate,
    packed_up,
    inner,
    made,
    codes,
    scales,
    n,
    width,
    per_row,
    stride,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    T: tl.constexpr,
):
    """See `kernels.blockfloat.triton.ffn._backward`. Also writes the gradients' codes, the gate's first."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, T)
    peaks = tl.zeros((T, 128), tl.int32)
    wide = width * 2 if GATED else width
    for start in range(0, per_row, T):
        columns = (start + t)[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = start + t < per_row
        real = columns < width
        block = row * per_row + start + t
        upstream = load_wide(grad + row * width + columns, real)
        if BITS > 0:
            g = load_blocks(packed_gate, n, block, inside, BITS)
        else:
            g = load_wide(packed_gate + row * stride + columns, real)
        u = g
        if GATED:
            if BITS > 0:
                u = load_blocks(packed_up, n, block, inside, BITS)
            else:
                u = load_wide(packed_up + row * stride + columns, real)
        of_g, of_u, result = gradients(g, u, upstream, GATED)
        store_rounded(inner + row * width + columns, result, real)
        target = made + row * wide + columns
        store_rounded(target, of_g, real)
        peaks = tl.maximum(peaks, tl.where(real, magnitude_bits(as_stored(of_g, made)), 0))
        if GATED:
            store_rounded(target + width, of_u, real)
            peaks = tl.maximum(peaks, tl.where(real, magnitude_bits(as_stored(of_u, made)), 0))
    peak = tl.max(tl.max(peaks, 1), 0)
    # The code below reads what other threads stored above.
    tl.debug_barrier()
    for start in range(0, wide, T * 128):
        columns = start + t[:, None] * 128 + tl.arange(0, 128)[None, :]
        real = columns < wide
        value = _load_stored(made + row * wide + columns, real)
        store_codes(codes + row * wide + columns, value, peak, real)
    tl.store(scales + row, scale_of(peak))


def activation(
    gate: torch.Tensor, up: torch.Tensor | None, bits: int
) -> tuple[Coded, torch.Tensor, torch.Tensor]:
    """The codes of silu(gate) * up, or of gelu(gate) without `up`; and the stored inputs as in
    `kernels.blockfloat.layers.ffn_store`, empty if `bits` is 0."""
    first = row_view(gate)
    second = first if up is None else row_view(up)
    if second.stride(0) != first.stride(0):
        first, second = first.contiguous(), second.contiguous()
    rows, width = first.shape
    none = first.new_empty(0, dtype=torch.uint8)
    packed_gate = empty_packed(gate.shape, bits, gate.device) if bits else none
    packed_up = none if up is None or not bits else empty_packed(gate.shape, bits, gate.device)
    coded = Coded.empty(rows, width, gate.device)
    if rows:
        _forward[(rows,)](
            first,
            second,
            as_bits(none.view(gate.dtype)),
            coded.codes.view(torch.uint8),
            coded.scales,
            packed_gate,
            packed_gate if up is None else packed_up,
            blocks_of(gate.shape),
            width,
            -(-width // BLOCK),
            first.stride(0),
            BITS=bits,
            LIMIT=limit(bits) if bits else 1,
            GATED=up is not None,
            T=min(BLOCKS, triton.next_power_of_2(-(-width // BLOCK))),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return coded, packed_gate, packed_up


def activation_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, bits: int
) -> tuple[torch.Tensor, Coded]:
    """See `kernels.blockfloat.triton.ffn.ffn_backward`. Also returns the codes of its result's rows."""
    width = grad.shape[-1]
    gated = up is not None
    grads = grad.new_empty(*grad.shape[:-1], 2 * width if gated else width)
    rows = grad.numel() // width
    coded = Coded.empty(rows, grads.shape[-1], grad.device)
    first, second = gate, gate if up is None else up
    stride = width
    if not bits:
        first, second = row_view(first), row_view(second)
        if first.stride(0) != second.stride(0):
            first, second = first.contiguous(), second.contiguous()
        stride = first.stride(0)
    if rows:
        _backward[(rows,)](
            grad,
            first,
            second,
            as_bits(grad),
            as_bits(grads),
            coded.codes.view(torch.uint8),
            coded.scales,
            blocks_of(grad.shape),
            width,
            -(-width // BLOCK),
            stride,
            BITS=bits,
            GATED=gated,
            T=min(BLOCKS, triton.next_power_of_2(-(-width // BLOCK))),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return grads, coded
