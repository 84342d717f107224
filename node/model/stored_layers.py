"""The two halves of a block as autograd functions that choose what backward keeps (design, section 4).

Shape legend: B batch, S sequence, C hidden, H heads, K key/value heads, D = C / H, F ffn.

Each half is one `autograd.Function` around norm, projections and residual: forward packs what `Storage` says
and drops the rest, and backward recomputes it. Weights are cast in both directions, so that no cast copy is
kept.

Forward computes the same as the plain block, with one exception: if queries, keys and values are kept packed
and attention's output is kept too, attention runs on the packed values. Backward's weights, exp(q k - sums),
add up to 1 only if the log-sum-exp is that of these queries and keys: else 4 bits put the gradients' error at
0.4 to 0.8, and 8 bits at twice or more of that with consistent sums
(scripts/experiments/stored_activations.py).

Between T tensor-parallel ranks, x and what is kept of it are a rank's S / T positions; backward gathers the
norm's output again. Attention and the feed-forward see all positions, with H / T heads and width F / T.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.attention.ops import attention, attention_backward
from kernels.attention.reach import EVERYTHING, Reach
from kernels.blockfloat import ops
from kernels.fp8.products import code_halved_rows
from kernels.fp8.rows import Coded
from kernels.layers import ops as layers
from node.model.lora import AdaptedProjections, FrozenLinear
from node.model.offload import mark
from node.model.products import AS_IT_IS, Linear, Projections, Way
from node.model.storage import AS_COMPUTED, PACKED, RECOMPUTE, Storage
from node.model.tensor_rank import TensorRank, compute_dtype

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, H, S, D], keys and values [B, K, S, D]."""
Layer = nn.Linear | FrozenLinear
Multiplied = Projections | AdaptedProjections


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm's weight, or LayerNorm's weight and bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        weight, bias, eps = module.weight, getattr(module, "bias", None), module.eps
        assert isinstance(weight, Tensor) and isinstance(eps, float)
        return cls(weight=weight, bias=bias, eps=eps)

    def store(self, x: Tensor, form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The norm of x, and x kept in `form`."""
        if form == AS_COMPUTED:
            return layers.norm(x, self.weight, self.bias, self.eps, dtype), x
        return cast(
            tuple[Tensor, Tensor],
            ops.norm_store(x, self.weight, self.bias, self.eps, PACKED[form], dtype),
        )

    def into(
        self, projections: Multiplied, x: Tensor, form: str, dtype: torch.dtype, rank: TensorRank
    ) -> tuple[list[Tensor], Tensor]:
        """The projections of the norm of x, and x kept in `form`."""
        if isinstance(projections, Projections) and projections.way.coded is not None and rank.count == 1:
            codes, kept = layers.coded_norm(
                x, self.weight, self.bias, self.eps, 0 if form == AS_COMPUTED else PACKED[form], dtype
            )
            return projections.of_codes(codes, x.shape[:-1], dtype), kept
        normed, kept = self.store(x, form, dtype)
        return projections(rank.gather(normed)), kept

    def again(self, kept: Tensor, form: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The norm of what was kept."""
        if form == AS_COMPUTED:
            return layers.norm(kept, self.weight, self.bias, self.eps, dtype)
        return cast(
            Tensor,
            ops.norm_from_stored(kept, shape, self.weight, self.bias, self.eps, PACKED[form], dtype),
        )

    def backward(
        self, grad: Tensor, kept: Tensor, form: str, residual: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradient of x, with that of the residual stream; those of weight and bias."""
        if form == AS_COMPUTED:
            of_x, of_weight, of_bias = layers.norm_backward(
                grad, kept, residual, self.weight, self.bias, self.eps
            )
        else:
            of_x, of_weight, of_bias = ops.norm_backward(
                grad, kept, residual, self.weight, self.bias, self.eps, PACKED[form]
            )
        return (
            of_x,
            of_weight.to(self.weight.dtype),
            None if self.bias is None or of_bias is None else of_bias.to(self.bias.dtype),
        )


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Maps projected tensors to heads, and gradients of heads back."""

    split: Callable[[Sequence[Tensor]], Heads]
    join: Callable[[Heads], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """The arguments of `attention_half` that are not tensors."""

    storage: Storage
    layout: HeadLayout
    rank: TensorRank
    inputs: Way = AS_IT_IS
    """How the projections into attention compute, and the one out of it."""
    output: Way = AS_IT_IS
    reach: Reach = EVERYTHING
    fixed_order: bool = True
    """Sum attention's gradients in a fixed order."""


@dataclass(frozen=True, kw_only=True)
class FfnParts:
    """The arguments of `ffn_half` that are not tensors."""

    storage: Storage
    rank: TensorRank
    inputs: Way = AS_IT_IS
    """How the projections into the feed-forward compute, and the one out of it."""
    down: Way = AS_IT_IS


def attention_half(
    x_bsc: Tensor, parts: AttentionParts, norm: Norm, projections: Sequence[Layer], output: Layer
) -> Tensor:
    """x + output(attention(heads(projections(norm(x)))))."""
    layers = (output, *projections)
    tensors = [norm.weight, norm.bias, *_trained(layers)]
    args = x_bsc, parts, norm.eps, layers, _drawn(layers), *tensors
    return cast(Tensor, _AttentionHalf.apply(*args))  # type: ignore[no-untyped-call]


def ffn_half(x_bsc: Tensor, parts: FfnParts, norm: Norm, inputs: Sequence[Layer], down: Layer) -> Tensor:
    """x + down(silu(gate(norm(x))) * up(norm(x))) for two inputs, x + down(gelu(up(norm(x)))) for one."""
    layers = (down, *inputs)
    tensors = [norm.weight, norm.bias, *_trained(layers)]
    args = x_bsc, parts, norm.eps, layers, _drawn(layers), *tensors
    return cast(Tensor, _FfnHalf.apply(*args))  # type: ignore[no-untyped-call]


def _trained(layers: Sequence[Layer]) -> list[Tensor | None]:
    """Weights and biases in turn; of frozen projections their adapters' A and B."""
    found: list[Tensor | None] = []
    for layer in layers:
        if isinstance(layer, FrozenLinear):
            found += [layer.lora_A, layer.lora_B]
        else:
            found += [layer.weight, cast(Tensor | None, layer.bias)]
    return found


def _drawn(layers: Sequence[Layer]) -> Tensor | None:
    """The salt of the microbatch's dropout; all layers of a chunk have the same."""
    salts = (layer.drawn() for layer in layers if isinstance(layer, FrozenLinear))
    return next((salt for salt in salts if salt is not None), None)


def _projections(
    layers: Sequence[Layer],
    tensors: Sequence[Tensor | None],
    drawn: Tensor | None,
    out_way: Way,
    into_way: Way,
) -> tuple[Multiplied, Multiplied]:
    """The projection out of the half, and those into it, from what `_trained` gives."""
    frozen = [layer for layer in layers if isinstance(layer, FrozenLinear)]
    if frozen:
        out = AdaptedProjections(frozen[:1], tensors[:2], drawn)
        return out, AdaptedProjections(frozen[1:], tensors[2:], drawn)
    own, *into = [
        Linear(weight=cast(Tensor, weight), bias=bias)
        for weight, bias in zip(tensors[::2], tensors[1::2], strict=True)
    ]
    return Projections(linears=[own], way=out_way), Projections(linears=into, way=into_way)


def _flat(heads_bhsd: Tensor) -> Tensor:
    """[B, H, S, D] to [B, S, H D]."""
    return heads_bhsd.transpose(1, 2).flatten(2)


def _keep(x: Tensor, form: str) -> Tensor:
    """x `[B, S, ...]` in `form`; empty if it is recomputed."""
    if form == RECOMPUTE:
        return x.new_empty(0)
    if form == AS_COMPUTED or (form == "bf16" and x.dtype == torch.bfloat16):
        return x
    return cast(Tensor, ops.store(x, PACKED[form]))


def _kept(kept: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `_keep` kept, in `dtype`."""
    if form == AS_COMPUTED or (form == "bf16" and kept.dtype == torch.bfloat16):
        return kept
    return cast(Tensor, ops.restore(kept, list(shape), PACKED[form], dtype))


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parts: AttentionParts,
        eps: float,
        projecting: Sequence[Layer],
        drawn: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        dtype, storage = compute_dtype(x), parts.storage
        with torch.autocast(x.device.type, enabled=False):
            norm = Norm(weight=cast(Tensor, tensors[0]), bias=tensors[1], eps=eps)
            output, projections = _projections(projecting, tensors[2:], drawn, parts.output, parts.inputs)
            projected, kept_x = norm.into(projections, x, storage.norm_input, dtype, parts.rank)
            heads = parts.layout.split(projected)
            del projected
            head_shapes = [part.shape for part in heads]
            kept_heads = [
                _keep(part if storage.attention == AS_COMPUTED else _flat(part), storage.attention)
                for part in heads
            ]
            if RECOMPUTE not in (storage.attention, storage.attention_output):
                heads = _all_heads(kept_heads, head_shapes, storage.attention, dtype)
            attended, sums = attention(*heads, parts.reach)
            flat = _flat(attended)
            result = layers.residual(x, output.row_parallel(flat, parts.rank))
            kept_output = _keep(flat, storage.attention_output)
        if storage.attention_output == RECOMPUTE:
            sums = sums.new_empty(0)
        ctx.parts, ctx.eps, ctx.dtype, ctx.shape = parts, eps, dtype, x.shape
        ctx.head_shapes, ctx.flat_shape, ctx.projecting = head_shapes, flat.shape, projecting
        mark("norm_input", [kept_x])
        mark("attention", kept_heads)
        mark("attention_output", [kept_output, sums])
        ctx.save_for_backward(*tensors, drawn, kept_x, *kept_heads, kept_output, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: AttentionParts = ctx.parts
        dtype, storage = ctx.dtype, parts.storage
        *tensors, drawn, kept_x, query, key, value, kept_output, sums = ctx.saved_tensors
        norm = Norm(weight=tensors[0], bias=tensors[1], eps=ctx.eps)
        output, projections = _projections(ctx.projecting, tensors[2:], drawn, parts.output, parts.inputs)
        normed: Tensor | None = None
        heads: Heads
        if storage.attention == RECOMPUTE:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, ctx.shape, dtype))
            heads = parts.layout.split(projections(normed))
        else:
            heads = _all_heads((query, key, value), ctx.head_shapes, storage.attention, dtype)
        if storage.attention_output == RECOMPUTE:
            attended, sums = attention(*heads, parts.reach)
            flat = _flat(attended)
        else:
            flat = _kept(kept_output, storage.attention_output, ctx.flat_shape, dtype)
            attended = torch.unflatten(flat, 2, (ctx.head_shapes[0][1], -1)).transpose(1, 2)
        own, codes = _halved(grad, dtype, output, parts.rank)
        down = parts.rank.gather(own)
        of_output = output.gradients([down], flat, own)
        of_attended = torch.unflatten(
            output.backward([down], codes), 2, (ctx.head_shapes[0][1], -1)
        ).transpose(1, 2)
        del own, down, flat
        of_heads = attention_backward(
            of_attended, *heads, attended, sums, parts.reach, fixed_order=parts.fixed_order
        )
        del of_attended, heads, attended
        of_projected = parts.layout.join(of_heads)
        del of_heads
        if normed is None and projections.needs_input:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, ctx.shape, dtype))
        of_normed = projections.backward(of_projected)
        of_weights = projections.gradients(of_projected, normed)
        del of_projected, normed
        of_normed = parts.rank.reduce_scatter(of_normed).to(dtype)
        of_x, of_weight, of_bias = norm.backward(of_normed, kept_x, storage.norm_input, grad)
        return of_x, None, None, None, None, of_weight, of_bias, *of_output, *of_weights


class _FfnHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parts: FfnParts,
        eps: float,
        projecting: Sequence[Layer],
        drawn: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        dtype, storage = compute_dtype(x), parts.storage
        with torch.autocast(x.device.type, enabled=False):
            norm = Norm(weight=cast(Tensor, tensors[0]), bias=tensors[1], eps=eps)
            down, inputs = _projections(projecting, tensors[2:], drawn, parts.down, parts.inputs)
            wide, kept_x = norm.into(inputs, x, storage.norm_input, dtype, parts.rank)
            gate, up = wide[0], wide[1] if len(wide) > 1 else None
            bits = PACKED.get(storage.ffn_input, 0)
            if isinstance(down, Projections) and down.way.coded is not None and parts.rank.count == 1:
                codes, kept = layers.coded_activation(gate, up, bits)
                (made,) = down.of_codes(codes, x.shape[:-1], dtype)
            else:
                inner, *kept = ops.ffn_store(gate, up, bits) if bits else [layers.activation(gate, up)]
                made = down.row_parallel(inner, parts.rank)
                del inner
            kept = wide if storage.ffn_input == AS_COMPUTED else kept
            del wide, gate, up
            result = layers.residual(x, made)
        ctx.parts, ctx.eps, ctx.dtype, ctx.projecting = parts, eps, dtype, projecting
        mark("norm_input", [kept_x])
        mark("ffn_input", kept[: len(inputs)])
        ctx.save_for_backward(*tensors, drawn, kept_x, *kept[: len(inputs)])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: FfnParts = ctx.parts
        storage = parts.storage
        count = 2 + 2 * len(ctx.projecting)
        saved = ctx.saved_tensors  # read once: a block that runs again hands them out once
        tensors, (drawn, kept_x, *kept) = saved[:count], saved[count:]
        norm = Norm(weight=tensors[0], bias=tensors[1], eps=ctx.eps)
        down, inputs = _projections(ctx.projecting, tensors[2:], drawn, parts.down, parts.inputs)
        normed: Tensor | None = None
        if inputs.needs_input or storage.ffn_input == RECOMPUTE:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, grad.shape, ctx.dtype))
        own, codes = _halved(grad, ctx.dtype, down, parts.rank)
        narrow = parts.rank.gather(own)
        inner = down.backward([narrow], codes)
        bits = PACKED.get(storage.ffn_input, 0)
        wide = inputs(cast(Tensor, normed)) if storage.ffn_input == RECOMPUTE else kept
        gate, up = wide[0], wide[1] if len(wide) > 1 else None
        codes = None
        # Each may overwrite `inner`, until here its own gradient.
        if inputs.way.coded is not None:
            inner, of_wide, codes = layers.coded_activation_backward(inner, gate, up, bits)
        elif bits:
            of_wide = list(ops.ffn_backward(inner, gate, up, bits).chunk(len(inputs), dim=-1))
        else:
            inner, of_wide = layers.activation_backward(inner, gate, up)
        del wide, gate, up
        of_down = down.gradients([narrow], inner, own)
        del inner, own, narrow
        of_normed = inputs.backward(of_wide, codes)
        del codes
        of_inputs = inputs.gradients(of_wide, normed)
        del of_wide, normed
        of_normed = parts.rank.reduce_scatter(of_normed).to(ctx.dtype)
        of_x, of_weight, of_bias = norm.backward(of_normed, kept_x, storage.norm_input, grad)
        return of_x, None, None, None, None, of_weight, of_bias, *of_down, *of_inputs


def _halved(
    grad: Tensor, dtype: torch.dtype, out: Multiplied, rank: TensorRank
) -> tuple[Tensor, Coded | None]:
    """The gradient of the residual stream in `dtype`, and its codes if the projection out of the half
    multiplies by them."""
    if out.way.coded is None or rank.count > 1 or dtype != torch.bfloat16:
        return grad.to(dtype), None
    return code_halved_rows(grad)


def _all_heads(kept: Sequence[Tensor], shapes: Sequence[torch.Size], form: str, dtype: torch.dtype) -> Heads:
    query, key, value = (_heads(part, shape, form, dtype) for part, shape in zip(kept, shapes, strict=True))
    return query, key, value


def _heads(kept: Tensor, shape: torch.Size, form: str, dtype: torch.dtype) -> Tensor:
    """[B, H, S, D] of what was kept."""
    if form == AS_COMPUTED:
        return kept
    batch, heads, length, width = shape
    flat = _kept(kept, form, (batch, length, heads * width), dtype)
    return torch.unflatten(flat, 2, (heads, width)).transpose(1, 2)
