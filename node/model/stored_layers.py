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
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention.ops import attention, attention_backward
from kernels.blockfloat import ops
from kernels.layers import ops as layers
from node.model.storage import AS_COMPUTED, PACKED, RECOMPUTE, Storage
from node.model.tensor_rank import TensorRank, compute_dtype

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, H, S, D], keys and values [B, K, S, D]."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A projection's weight [outputs, inputs] and bias."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Linear) -> "Linear":
        return cls(weight=module.weight, bias=cast(Tensor | None, module.bias))

    def __call__(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        return F.linear(x, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient of the input."""
        return grad @ self.weight.to(grad.dtype)

    def gradients(self, grad: Tensor, x: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Those of weight and bias, in their own dtypes.

        Args:
            own: the rank's own positions of `grad`, for the bias of a row-parallel projection.
        """
        grads, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_weight = (grads.t() @ rows).to(self.weight.dtype)
        if self.bias is None:
            return of_weight, None
        if own is not None:
            grads = own.reshape(-1, own.shape[-1])
        return of_weight, grads.sum(0).to(self.bias.dtype)

    def row_parallel(self, x: Tensor, rank: TensorRank) -> Tensor:
        """As `node.model.tensor_rank.row_parallel`."""
        if rank.count == 1:
            return self(x)
        made = rank.reduce_scatter(F.linear(x, self.weight.to(x.dtype)))
        return made if self.bias is None else made.add_(self.bias)


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


@dataclass(frozen=True, kw_only=True)
class FfnParts:
    """The arguments of `ffn_half` that are not tensors."""

    storage: Storage
    rank: TensorRank


def attention_half(
    x_bsc: Tensor, parts: AttentionParts, norm: Norm, projections: Sequence[Linear], output: Linear
) -> Tensor:
    """x + output(attention(heads(projections(norm(x)))))."""
    tensors = [norm.weight, norm.bias, output.weight, output.bias]
    for projection in projections:
        tensors += [projection.weight, projection.bias]
    made = _AttentionHalf.apply(x_bsc, parts, norm.eps, *tensors)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


def ffn_half(x_bsc: Tensor, parts: FfnParts, norm: Norm, inputs: Sequence[Linear], down: Linear) -> Tensor:
    """x + down(silu(gate(norm(x))) * up(norm(x))) for two inputs, x + down(gelu(up(norm(x)))) for one."""
    tensors = [norm.weight, norm.bias, down.weight, down.bias]
    for projection in inputs:
        tensors += [projection.weight, projection.bias]
    made = _FfnHalf.apply(x_bsc, parts, norm.eps, *tensors)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


def _linears(tensors: Sequence[Tensor | None]) -> list[Linear]:
    """Weights and biases in turn."""
    return [
        Linear(weight=cast(Tensor, weight), bias=bias)
        for weight, bias in zip(tensors[::2], tensors[1::2], strict=True)
    ]


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
    def forward(ctx: Any, x: Tensor, parts: AttentionParts, eps: float, *tensors: Tensor | None) -> Tensor:
        dtype, storage = compute_dtype(x), parts.storage
        with torch.autocast(x.device.type, enabled=False):
            norm = Norm(weight=cast(Tensor, tensors[0]), bias=tensors[1], eps=eps)
            output, *projections = _linears(tensors[2:])
            normed, kept_x = norm.store(x, storage.norm_input, dtype)
            normed = parts.rank.gather(normed)
            heads = parts.layout.split([projection(normed) for projection in projections])
            del normed
            head_shapes = [part.shape for part in heads]
            kept_heads = [
                _keep(part if storage.attention == AS_COMPUTED else _flat(part), storage.attention)
                for part in heads
            ]
            if RECOMPUTE not in (storage.attention, storage.attention_output):
                heads = _all_heads(kept_heads, head_shapes, storage.attention, dtype)
            attended, sums = attention(*heads)
            flat = _flat(attended)
            result = x + output.row_parallel(flat, parts.rank)
            kept_output = _keep(flat, storage.attention_output)
        if storage.attention_output == RECOMPUTE:
            sums = sums.new_empty(0)
        ctx.parts, ctx.eps, ctx.dtype, ctx.shape = parts, eps, dtype, x.shape
        ctx.head_shapes, ctx.flat_shape = head_shapes, flat.shape
        ctx.save_for_backward(*tensors, kept_x, *kept_heads, kept_output, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: AttentionParts = ctx.parts
        dtype, storage = ctx.dtype, parts.storage
        *tensors, kept_x, query, key, value, kept_output, sums = ctx.saved_tensors
        norm = Norm(weight=tensors[0], bias=tensors[1], eps=ctx.eps)
        output, *projections = _linears(tensors[2:])
        normed: Tensor | None = None
        heads: Heads
        if storage.attention == RECOMPUTE:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, ctx.shape, dtype))
            heads = parts.layout.split([projection(normed) for projection in projections])
        else:
            heads = _all_heads((query, key, value), ctx.head_shapes, storage.attention, dtype)
        if storage.attention_output == RECOMPUTE:
            attended, sums = attention(*heads)
            flat = _flat(attended)
        else:
            flat = _kept(kept_output, storage.attention_output, ctx.flat_shape, dtype)
            attended = torch.unflatten(flat, 2, (ctx.head_shapes[0][1], -1)).transpose(1, 2)
        own = grad.to(dtype)
        down = parts.rank.gather(own)
        of_output = output.gradients(down, flat, own)
        of_attended = torch.unflatten(output.backward(down), 2, (ctx.head_shapes[0][1], -1)).transpose(1, 2)
        del own, down, flat
        of_heads = attention_backward(of_attended, *heads, attended, sums)
        del of_attended, heads, attended
        of_projected = parts.layout.join(of_heads)
        del of_heads
        if normed is None:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, ctx.shape, dtype))
        of_normed, of_projections = _through(projections, of_projected, normed)
        del of_projected, normed
        of_normed = parts.rank.reduce_scatter(of_normed).to(dtype)
        of_x, of_weight, of_bias = norm.backward(of_normed, kept_x, storage.norm_input, grad)
        return of_x, None, None, of_weight, of_bias, *of_output, *of_projections


class _FfnHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: FfnParts, eps: float, *tensors: Tensor | None) -> Tensor:
        dtype, storage = compute_dtype(x), parts.storage
        with torch.autocast(x.device.type, enabled=False):
            norm = Norm(weight=cast(Tensor, tensors[0]), bias=tensors[1], eps=eps)
            down, *inputs = _linears(tensors[2:])
            normed, kept_x = norm.store(x, storage.norm_input, dtype)
            normed = parts.rank.gather(normed)
            wide = [projection(normed) for projection in inputs]
            del normed
            gate, up = wide[0], wide[1] if len(wide) > 1 else None
            if storage.ffn_input in (AS_COMPUTED, RECOMPUTE):
                kept = wide if storage.ffn_input == AS_COMPUTED else []
                inner = layers.activation(gate, up)
            else:
                inner, *kept = ops.ffn_store(gate, up, PACKED[storage.ffn_input])
            del wide, gate, up
            result = x + down.row_parallel(inner, parts.rank)
        ctx.parts, ctx.eps, ctx.dtype, ctx.inputs = parts, eps, dtype, len(inputs)
        ctx.save_for_backward(*tensors, kept_x, *kept[: len(inputs)])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: FfnParts = ctx.parts
        storage = parts.storage
        count = 4 + 2 * ctx.inputs
        saved = ctx.saved_tensors  # read once: a block that runs again hands them out once
        tensors, (kept_x, *kept) = saved[:count], saved[count:]
        norm = Norm(weight=tensors[0], bias=tensors[1], eps=ctx.eps)
        down, *inputs = _linears(tensors[2:])
        normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, grad.shape, ctx.dtype))
        own = grad.to(ctx.dtype)
        narrow = parts.rank.gather(own)
        inner = down.backward(narrow)
        of_wide: list[Tensor]
        if storage.ffn_input in (AS_COMPUTED, RECOMPUTE):
            wide = kept if storage.ffn_input == AS_COMPUTED else [projection(normed) for projection in inputs]
            inner, of_wide = layers.activation_backward(inner, wide[0], wide[1] if len(wide) > 1 else None)
            del wide
        else:
            up = kept[1] if len(kept) > 1 else None
            # Overwrites `inner`, until here its own gradient.
            of_wide = list(ops.ffn_backward(inner, kept[0], up, PACKED[storage.ffn_input]))[: ctx.inputs]
        of_down = down.gradients(narrow, inner, own)
        del inner, own, narrow
        of_normed, of_inputs = _through(inputs, of_wide, normed)
        del of_wide, normed
        of_normed = parts.rank.reduce_scatter(of_normed).to(ctx.dtype)
        of_x, of_weight, of_bias = norm.backward(of_normed, kept_x, storage.norm_input, grad)
        return of_x, None, None, of_weight, of_bias, *of_down, *of_inputs


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


def _through(
    projections: Sequence[Linear], grads: Sequence[Tensor], normed: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of projections' common input, and those of their weights and biases in turn."""
    of_normed = projections[0].backward(grads[0])
    flat = of_normed.view(-1, of_normed.shape[-1])
    for projection, grad in zip(projections[1:], grads[1:], strict=True):
        flat.addmm_(grad.reshape(-1, grad.shape[-1]), projection.weight.to(grad.dtype))
    of_parameters: list[Tensor | None] = []
    for projection, grad in zip(projections, grads, strict=True):
        of_parameters += projection.gradients(grad, normed)
    return of_normed, of_parameters
