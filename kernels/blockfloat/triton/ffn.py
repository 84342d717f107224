"""SwiGLU and GELU that store their inputs as they read them, and their gradients from the stored inputs."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from kernels.blockfloat.layout import BLOCK, blocks_of, limit
from kernels.blockfloat.triton.store import (
    BLOCKS,
    WARPS,
    block_columns,
    empty_packed,
    load_blocks,
    load_wide,
    row_view,
    store_blocks,
    store_jit,
    store_rounded,
)
from kernels.common.triton.numbers import INTERPRETED, as_bits

_INTERPRETED = tl.constexpr(INTERPRETED)
_ROOT = tl.constexpr(0.7978845608028654)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def _sigmoid(v):
    """1 / (1 + exp(-v)), with the bits of Triton's `exp` and division.

    It omits their handling of subnormal powers, which vanish beside 1, and of divisors below 1, which do not
    occur.
    """
    if _INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-v))
    divisor = 1.0 + tl.exp2(v * -1.4426950408889634)
    # The inverse of a larger divisor is subnormal.
    factor = tl.where(divisor > 8.507059173023461e37, 0.25, 1.0)
    return libdevice.fast_dividef(1.0, divisor * factor) * factor


@triton.jit
def _gelu_tanh(v):
    """tanh(sqrt(2 / pi) (v + 0.044715 v**3))."""
    return 2.0 * _sigmoid(2.0 * _ROOT * (v + _CUBE * v * v * v)) - 1.0


@triton.jit
def result_of(g, u, GATED: tl.constexpr, GELU: tl.constexpr = False):
    """silu(g) * u, gelu(g) * u if GELU, or gelu(g) if not GATED."""
    if GATED and not GELU:
        result = g * _sigmoid(g) * u
    elif GATED:
        result = 0.5 * g * (1.0 + _gelu_tanh(g)) * u
    else:
        result = 0.5 * g * (1.0 + _gelu_tanh(g))
    return result


@triton.jit
def gradients(g, u, upstream, GATED: tl.constexpr, GELU: tl.constexpr = False):
    """The gradients of g and u (not of u if not GATED), and the result again."""
    if GATED and not GELU:
        share = _sigmoid(g)
        silu = g * share
        of_g, of_u = upstream * (u * (share * (1.0 + g * (1.0 - share)))), upstream * silu
        result = silu * u
    else:
        tanh = _gelu_tanh(g)
        slope = 0.5 * (1.0 + tanh) + 0.5 * g * (1.0 - tanh * tanh) * _ROOT * (1.0 + 3.0 * _CUBE * g * g)
        result = 0.5 * g * (1.0 + tanh)
        if GATED:
            of_g, of_u = upstream * u * slope, upstream * result
            result = result * u
        else:
            of_g, of_u = upstream * slope, upstream
    return of_g, of_u, result


@store_jit
def _forward(
    gate,
    up,
    inner,
    packed_gate,
    packed_up,
    n,
    width,
    per_row,
    stride,
    BITS: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    T: tl.constexpr,
):
    """inner = silu(gate) * up, gelu(gate) * up if GELU, or gelu(gate) if not GATED. Stores the inputs unless
    BITS is 0."""
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = block < n
    row, column = block_columns(block, per_row)
    columns = column[:, None] + tl.arange(0, 128)[None, :]
    real = inside[:, None] & (columns < width)
    source = (row * stride)[:, None] + columns
    # All reads come before the first wait, because the compiler moves none across it.
    g = load_wide(gate + source, real)
    u = load_wide(up + source, real) if GATED else g
    store_rounded(inner + (row * width)[:, None] + columns, result_of(g, u, GATED, GELU), real)
    if BITS > 0:
        store_blocks(packed_gate, n, block, inside, g, BITS, LIMIT)
        if GATED:
            store_blocks(packed_up, n, block, inside, u, BITS, LIMIT)


@store_jit
def _backward(
    grad,
    packed_gate,
    packed_up,
    inner,
    of_gate,
    of_up,
    n,
    width,
    per_row,
    stride,
    out_stride,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    T: tl.constexpr,
):
    """Gradients of the stored inputs, and inner computed again; `inner` may be `grad`.

    `stride` is that of the inputs' rows if BITS is 0, `out_stride` that of their gradients.
    """
    block = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = block < n
    row, column = block_columns(block, per_row)
    columns = column[:, None] + tl.arange(0, 128)[None, :]
    real = inside[:, None] & (columns < width)
    where = (row * width)[:, None] + columns
    source = (row * stride)[:, None] + columns
    target = (row * out_stride)[:, None] + columns
    upstream = load_wide(grad + where, real)
    g = (
        load_blocks(packed_gate, n, block, inside, BITS)
        if BITS > 0
        else load_wide(packed_gate + source, real)
    )
    if GATED:
        u = (
            load_blocks(packed_up, n, block, inside, BITS)
            if BITS > 0
            else load_wide(packed_up + source, real)
        )
        of_g, of_u, result = gradients(g, u, upstream, True, GELU)
        store_rounded(of_up + target, of_u, real)
    else:
        of_g, _, result = gradients(g, g, upstream, False)
    store_rounded(of_gate + target, of_g, real)
    store_rounded(inner + where, result, real)


def activation(gate: torch.Tensor, up: torch.Tensor | None, gelu: bool = False) -> torch.Tensor:
    """silu(gate) * up, with `gelu` gelu(gate) * up, or gelu(gate) without `up`. Stores nothing."""
    inner = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    none = inner.new_empty(0, dtype=torch.uint8)
    _run_forward(gate, up, inner, none, none, 0, gelu)
    return inner


def ffn_store(
    gate: torch.Tensor, up: torch.Tensor | None, bits: int, gelu: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.blockfloat.layers.ffn_store`."""
    inner = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    packed_gate = empty_packed(gate.shape, bits, gate.device)
    packed_up = packed_gate.new_empty(0) if up is None else empty_packed(gate.shape, bits, gate.device)
    _run_forward(gate, up, inner, packed_gate, packed_up, bits, gelu)
    return inner, packed_gate, packed_up


def _run_forward(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    inner: torch.Tensor,
    packed_gate: torch.Tensor,
    packed_up: torch.Tensor,
    bits: int,
    gelu: bool,
) -> None:
    first = row_view(gate)
    second = first if up is None else row_view(up)
    if second.stride(0) != first.stride(0):
        first, second = first.contiguous(), second.contiguous()
    count = blocks_of(gate.shape)
    if count:
        _forward[(triton.cdiv(count, BLOCKS),)](
            first,
            second,
            as_bits(inner),
            packed_gate,
            packed_gate if up is None else packed_up,
            count,
            gate.shape[-1],
            -(-gate.shape[-1] // BLOCK),
            first.stride(0),
            BITS=bits,
            LIMIT=limit(bits) if bits else 1,
            GATED=up is not None,
            GELU=gelu,
            T=BLOCKS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def ffn_backward(
    grad: torch.Tensor,
    packed_gate: torch.Tensor,
    packed_up: torch.Tensor | None,
    bits: int,
    gelu: bool = False,
) -> torch.Tensor:
    """See `kernels.blockfloat.layers.ffn_backward`. Overwrites `grad`, contiguous, with the inner
    activations.

    If `bits` is 0, `packed_gate` and `packed_up` are the unpacked inputs.
    """
    count, width = blocks_of(grad.shape), grad.shape[-1]
    gated = packed_up is not None
    grads = grad.new_empty(*grad.shape[:-1], 2 * width if gated else width)
    gate, up = packed_gate, packed_gate if packed_up is None else packed_up
    stride = width
    if not bits and count:
        gate, up = row_view(gate), row_view(up)
        if gate.stride(0) != up.stride(0):
            gate, up = gate.contiguous(), up.contiguous()
        stride = gate.stride(0)
    if count:
        _backward[(triton.cdiv(count, BLOCKS),)](
            grad,
            gate,
            up,
            as_bits(grad),
            as_bits(grads),
            as_bits(grads[..., width:] if gated else grads),
            count,
            width,
            -(-width // BLOCK),
            stride,
            grads.shape[-1],
            BITS=bits,
            GATED=gated,
            GELU=gelu,
            T=BLOCKS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return grads
