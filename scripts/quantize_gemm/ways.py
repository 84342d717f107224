"""The ways to compute a layer's product and store its input, and which layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.blockfloat.triton import ffn as triton_store_ffn
from kernels.blockfloat.triton import norm as triton_store_norm
from kernels.blockfloat.triton import store as triton_store
from kernels.blockfloat.triton.store import load_wide, store_rounded
from kernels.common.triton.numbers import as_bits
from quantize_gemm.kernel import BITS, Config, quantize_gemm

EPS = 1e-5
BLOCK_ELEMENTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A product of a model's block: `width` in, `columns` out, behind SwiGLU or a norm."""

    model: str
    name: str
    width: int
    columns: int
    norm: bool
    dtype: torch.dtype
    """Of what is stored: SwiGLU's inputs in bf16; the residual stream in fp32, as in a block, or in bf16."""


LAYERS = tuple(
    Layer(model=model, name=name, width=width, columns=columns, norm=norm, dtype=dtype)
    for model, hidden, ffn, projected in (
        ("LLaMA2-13B", 5120, 13824, 3 * 5120),
        ("LLaMA3-8B", 4096, 14336, 4096 + 2 * 1024),
    )
    for name, width, columns, norm, dtype in (
        ("SwiGLU, down", ffn, hidden, False, torch.bfloat16),
        ("norm, QKV", hidden, projected, True, torch.float32),
        ("norm, QKV", hidden, projected, True, torch.bfloat16),
    )
)
"""Queries, keys and values as one product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a layer's product starts from (`quantize_gemm.kernel.quantize_gemm`)."""

    x: Tensor
    beside: Tensor | None
    scale: Tensor | None
    weight: Tensor


def sample(rows: int, layer: Layer, device: str, seed: int = 0) -> Inputs:
    """Normal numbers; weights as a new layer has them."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    return Inputs(
        x=normal(rows, layer.width).to(layer.dtype),
        beside=None if layer.norm else normal(rows, layer.width).to(layer.dtype),
        scale=1 + 0.1 * normal(layer.width) if layer.norm else None,
        weight=(0.02 * normal(layer.columns, layer.width)).bfloat16(),
    )


@triton.jit
def _swiglu(gate, up, inner, n, T: tl.constexpr):
    where = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    g, u = load_wide(gate + where, where < n), load_wide(up + where, where < n)
    store_rounded(inner + where, g * (1.0 / (1.0 + tl.exp(-g))) * u, where < n)


@triton.jit
def _rms_norm(x, scale, normed, width, eps, T: tl.constexpr):
    column = tl.arange(0, T)
    where = tl.program_id(0).to(tl.int64) * width + column
    y = load_wide(x + where, column < width)
    inverse = 1.0 / tl.sqrt(tl.sum(y * y, 0) / width + eps)
    store_rounded(normed + where, y * inverse * load_wide(scale + column, column < width), column < width)


def inner(inputs: Inputs) -> Tensor:
    """What enters the product, bf16, by a kernel that stores nothing else."""
    x = inputs.x
    made = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if inputs.beside is not None:
        grid = (triton.cdiv(x.numel(), BLOCK_ELEMENTS),)
        _swiglu[grid](x, inputs.beside, as_bits(made), x.numel(), T=BLOCK_ELEMENTS, num_warps=8)
    else:
        width = x.shape[1]
        size = triton.next_power_of_2(width)
        _rms_norm[(x.shape[0],)](x, inputs.scale, as_bits(made), width, EPS, T=size, num_warps=8)
    return made


def _producer(inputs: Inputs) -> tuple[Tensor, ...]:
    if inputs.beside is not None:
        made, *packed = triton_store_ffn.ffn_store(inputs.x, inputs.beside, BITS)
    else:
        assert inputs.scale is not None
        made, *packed = triton_store_norm.norm_store(inputs.x, inputs.scale, None, EPS, BITS, torch.bfloat16)
    return F.linear(made, inputs.weight), *packed


def _separate(inputs: Inputs) -> tuple[Tensor, ...]:
    stored = [tensor for tensor in (inputs.x, inputs.beside) if tensor is not None]
    return F.linear(inner(inputs), inputs.weight), *(triton_store.pack(tensor, BITS) for tensor in stored)


def fused(
    inputs: Inputs, config: Config, *, store: bool = True, only_compile: bool = False
) -> tuple[Tensor, ...]:
    """The product, and what was stored."""
    x = inputs.x
    out = torch.empty(x.shape[0], inputs.weight.shape[0], dtype=torch.bfloat16, device=x.device)
    count = (1 if inputs.beside is None else 2) if store else 0
    packed = tuple(triton_store.empty_packed(x.shape, BITS, x.device) for _ in range(count))
    quantize_gemm(
        x,
        inputs.beside,
        inputs.scale,
        inputs.weight,
        out,
        packed,
        config=config,
        eps=EPS,
        only_compile=only_compile,
    )
    return out, *packed


def ways(inputs: Inputs, config: Config) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """By name, what is timed."""
    ready = inner(inputs)
    return {
        "producer": lambda: _producer(inputs),
        "separate": lambda: _separate(inputs),
        "fused": lambda: fused(inputs, config),
        "unstored": lambda: (F.linear(inner(inputs), inputs.weight),),
        "fused_unstored": lambda: fused(inputs, config, store=False),
        "gemm": lambda: (F.linear(ready, inputs.weight),),
    }
