"""The two halves of a block as autograd functions that choose what backward keeps.

Shape legend: B batch, S sequence, C hidden, H heads, K key/value heads, D = C / H, F ffn.

Each half is one `autograd.Function` around norm, projections and residual. Forward packs what `Storage` says
and drops the rest; backward recomputes it. Weights are cast in both directions, so that no cast copy is kept.

Forward computes the same as the plain block, with one exception: if queries, keys and values are kept packed
and attention's output is kept too, attention runs on the packed values. The reason is that the weights in
backward, exp(q k - sums), add up to 1 only if the log-sum-exp belongs to these queries and keys. Otherwise
the gradients' relative error is 0.4 to 0.8 with 4 bits, and with 8 bits at least twice that of consistent
sums (scripts/results/memory.md).

With T tensor-parallel ranks, x and what is kept of it are a rank's S / T positions, and backward gathers the
norm's output again. Attention and the feed-forward see all positions, with H / T heads and width F / T.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.attention.ops import attention, attention_backward, sinks_gradient
from kernels.attention.reach import EVERYTHING, Reach
from kernels.blockfloat import ops
from kernels.layers import ops as layers
from node.model.lora import AdaptedProjections, FrozenLinear
from node.model.offload import mark
from node.model.past import BlockSlice
from node.model.products import AS_IT_IS, Linear, Projections, Way
from node.model.storage import AS_COMPUTED, PACKED, RECOMPUTE, Storage
from node.model.tensor_rank import TensorRank, compute_dtype

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, H, S, D], keys and values [B, K, S, D]."""
Layer = nn.Linear | FrozenLinear
Multiplied = Projections | AdaptedProjections
NORMS = 5
"""The length of `Norms.tensors`."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The weight of an RMSNorm, or weight and bias of a LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        weight, bias, eps = module.weight, getattr(module, "bias", None), module.eps
        assert isinstance(weight, Tensor) and isinstance(eps, float)
        # Gemma's norms multiply by 1 + weight. The gradient of that sum is the weight's gradient.
        scale = 1.0 + weight if getattr(module, "offset", False) else weight
        return cls(weight=scale, bias=bias, eps=eps)

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return self.weight, self.bias

    def store(self, x: Tensor, form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The norm of x, and x kept in `form`."""
        if form == AS_COMPUTED:
            return layers.norm(x, self.weight, self.bias, self.eps, dtype), x
        return ops.norm_store(x, self.weight, self.bias, self.eps, PACKED[form], dtype)

    def into(
        self, projections: Multiplied, x: Tensor, form: str, dtype: torch.dtype, rank: TensorRank
    ) -> tuple[list[Tensor], Tensor]:
        """The projections of the norm of x, and x kept in `form`."""
        normed, kept = self.store(x, form, dtype)
        return projections(rank.gather(normed)), kept

    def again(self, kept: Tensor, form: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The norm of x, computed again from what was kept."""
        if form == AS_COMPUTED:
            return layers.norm(kept, self.weight, self.bias, self.eps, dtype)
        return ops.norm_from_stored(kept, shape, self.weight, self.bias, self.eps, PACKED[form], dtype)

    def backward(
        self, grad: Tensor, kept: Tensor, form: str, residual: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradient of x plus the residual stream's gradient, and the gradients of weight and bias."""
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


class NoNorm:
    """The start of a half that has its norm at the end: x itself is projected, and kept like a norm's
    input."""

    tensors = None, None

    def into(
        self, projections: Multiplied, x: Tensor, form: str, dtype: torch.dtype, rank: TensorRank
    ) -> tuple[list[Tensor], Tensor]:
        kept = x if form == AS_COMPUTED else ops.store(x, PACKED[form])
        return projections(rank.gather(x.to(dtype))), kept

    def again(self, kept: Tensor, form: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if form == AS_COMPUTED:
            return kept.to(dtype)
        return ops.restore(kept, list(shape), PACKED[form], dtype)

    def backward(
        self, grad: Tensor, kept: Tensor, form: str, residual: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return layers.residual(residual, grad), None, None


@dataclass(frozen=True, kw_only=True)
class Norms:
    first: Norm | None
    """The norm of the residual stream; None projects the stream itself."""
    last: Norm | None = None
    """The norm of the result that is added to the residual stream."""
    heads: tuple[Tensor, ...] = ()
    """The weights of the norms of queries and keys."""

    @property
    def tensors(self) -> list[Tensor | None]:
        """Five tensors or None: weight and bias of the first norm, the last norm's weight, the weights for
        queries and keys."""
        first = self.first or NoNorm()
        last = None if self.last is None else self.last.weight
        return [*first.tensors, last, *(self.heads or (None, None))]

    @property
    def eps(self) -> float:
        """The epsilon, which all norms share."""
        return next(norm.eps for norm in (self.first, self.last) if norm is not None)

    @classmethod
    def again(cls, tensors: Sequence[Tensor | None], eps: float) -> "Norms":
        """Rebuild the norms from `tensors`."""
        weight, bias, last, *heads = tensors
        return cls(
            first=None if weight is None else Norm(weight=weight, bias=bias, eps=eps),
            last=None if last is None else Norm(weight=last, bias=None, eps=eps),
            heads=tuple(head for head in heads if head is not None),
        )

    def add(self, x: Tensor, added: Tensor, form: str) -> tuple[Tensor, Tensor]:
        """x plus the half's result, normalized if there is a last norm. Also what that norm keeps; empty
        without one."""
        if self.last is None:
            return layers.residual(x, added), added.new_empty(0)
        normed, kept = self.last.store(added, form, added.dtype)
        return layers.residual(x, normed), kept

    def of_added(self, grad: Tensor, kept: Tensor, form: str) -> tuple[Tensor, Tensor | None]:
        """The gradients of the result that `add` added, and of the last norm's weight."""
        if self.last is None:
            return grad, None
        of_made, of_weight, _ = self.last.backward(grad, kept, form, torch.zeros_like(grad))
        return of_made, of_weight


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Maps projected tensors to heads, and gradients of heads back.

    The weights of the norms of queries and keys are arguments. If there are such norms, the projected tensors
    are kept instead of the heads, because the norms' gradients need them, and `join` also returns the
    gradients of the weights.
    """

    split: Callable[[Sequence[Tensor], Sequence[Tensor]], Heads]
    join: Callable[[Heads, Sequence[Tensor], Sequence[Tensor]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


@dataclass(frozen=True, kw_only=True)
class AttentionParts:
    """The arguments of `attention_half` that are not tensors."""

    storage: Storage
    layout: HeadLayout
    rank: TensorRank
    at: BlockSlice | None = None
    """The slice that x is, if the microbatch is cut into slices."""
    inputs: Way = AS_IT_IS
    """How to compute attention's input projections. `output` is for the output projection."""
    output: Way = AS_IT_IS
    reach: Reach = EVERYTHING
    fixed_order: bool = True
    """Sum attention's gradients in a fixed order."""


@dataclass(frozen=True, kw_only=True)
class FfnParts:
    """The arguments of `ffn_half` that are not tensors."""

    storage: Storage
    rank: TensorRank
    gelu: bool = False
    """Whether a feed-forward with two inputs is gated by GELU instead of SiLU."""
    inputs: Way = AS_IT_IS
    """How to compute the feed-forward's input projections. `down` is for the output projection."""
    down: Way = AS_IT_IS


def attention_half(
    x_bsc: Tensor,
    parts: AttentionParts,
    norms: Norms,
    projections: Sequence[Layer],
    output: Layer,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """x + output(attention(heads(projections(norm(x))))), with the norm before, after or both."""
    layers = (output, *projections)
    tensors = [*norms.tensors, *trained(layers)]
    args = x_bsc, parts, norms.eps, layers, _drawn(layers), sinks_h, *tensors
    return cast(Tensor, _AttentionHalf.apply(*args))  # type: ignore[no-untyped-call]


def ffn_half(x_bsc: Tensor, parts: FfnParts, norms: Norms, inputs: Sequence[Layer], down: Layer) -> Tensor:
    """The feed-forward half: x + down(silu(gate(norm(x))) * up(norm(x))) with two inputs, x +
    down(gelu(up(norm(x)))) with one.

    With `parts.gelu`, GELU gates two inputs. The norm is before, after or both.
    """
    layers = (down, *inputs)
    tensors = [*norms.tensors, *trained(layers)]
    args = x_bsc, parts, norms.eps, layers, _drawn(layers), *tensors
    return cast(Tensor, _FfnHalf.apply(*args))  # type: ignore[no-untyped-call]


def trained(layers: Sequence[Layer]) -> list[Tensor | None]:
    """Weights and biases in turn; for frozen projections the A and B of their adapters."""
    tensors: list[Tensor | None] = []
    for layer in layers:
        if isinstance(layer, FrozenLinear):
            tensors += [layer.lora_A, layer.lora_B]
        else:
            tensors += [layer.weight, cast(Tensor | None, layer.bias)]
    return tensors


def _drawn(layers: Sequence[Layer]) -> Tensor | None:
    """The salt of the microbatch's dropout, which all layers of a chunk share; None without dropout."""
    salts = (layer.drawn() for layer in layers if isinstance(layer, FrozenLinear))
    return next((salt for salt in salts if salt is not None), None)


def _projections(
    layers: Sequence[Layer],
    tensors: Sequence[Tensor | None],
    drawn: Tensor | None,
    out_way: Way,
    into_way: Way,
) -> tuple[Multiplied, Multiplied]:
    """The output projection of a half and its input projections, from the result of `trained`."""
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
    return ops.store(x, PACKED[form])


def _kept(kept: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor that `_keep` kept, in `dtype`."""
    if form == AS_COMPUTED or (form == "bf16" and kept.dtype == torch.bfloat16):
        return kept
    return ops.restore(kept, list(shape), PACKED[form], dtype)


class _AttentionHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parts: AttentionParts,
        eps: float,
        projecting: Sequence[Layer],
        drawn: Tensor | None,
        sinks: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        dtype, storage = compute_dtype(x), parts.storage
        with torch.autocast(x.device.type, enabled=False):
            norms = Norms.again(tensors[:NORMS], eps)
            norm = norms.first or NoNorm()
            weights, ways = tensors[NORMS:], (parts.output, parts.inputs)
            output, projections = _projections(projecting, weights, drawn, *ways)
            projected, kept_x = norm.into(projections, x, storage.norm_input, dtype, parts.rank)
            heads = parts.layout.split(projected, norms.heads)
            head_shapes = [part.shape for part in heads]
            kept_heads = _keep_heads(projected if norms.heads else heads, storage.attention)
            del projected
            if RECOMPUTE not in (storage.attention, storage.attention_output):
                heads, _ = _kept_heads(kept_heads, head_shapes, parts, norms, dtype)
            if parts.at is not None:
                # Keys and values that are kept in the same form anyway are not kept a second time.
                own = _keep_heads(heads, storage.attention) if norms.heads else kept_heads
                parts.at.keep(_restoring(own, heads, storage.attention, dtype))
            attended, sums = attention(*_seen(heads, parts.at), parts.reach, sinks)
            flat = _flat(attended)
            added = output.row_parallel(flat, parts.rank)
            result, kept_made = norms.add(x, added, storage.norm_input)
            del added
            kept_output = _keep(flat, storage.attention_output)
        if storage.attention_output == RECOMPUTE:
            sums = sums.new_empty(0)
        ctx.parts, ctx.eps, ctx.dtype, ctx.shape = parts, eps, dtype, x.shape
        ctx.head_shapes, ctx.flat_shape, ctx.projecting = head_shapes, flat.shape, projecting
        mark("norm_input", [kept_x, kept_made])
        mark("attention", kept_heads)
        mark("attention_output", [kept_output, sums])
        ctx.save_for_backward(*tensors, sinks, drawn, kept_x, kept_made, *kept_heads, kept_output, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: AttentionParts = ctx.parts
        dtype, storage = ctx.dtype, parts.storage
        *tensors, sinks, drawn, kept_x, kept_made, query, key, value, kept_output, sums = ctx.saved_tensors
        norms = Norms.again(tensors[:NORMS], ctx.eps)
        norm = norms.first or NoNorm()
        weights, ways = tensors[NORMS:], (parts.output, parts.inputs)
        output, projections = _projections(ctx.projecting, weights, drawn, *ways)
        normed: Tensor | None = None
        projected: Sequence[Tensor]
        if storage.attention == RECOMPUTE:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, ctx.shape, dtype))
            projected = projections(normed)
            heads = parts.layout.split(projected, norms.heads)
            if not norms.heads:
                projected = ()
        else:
            heads, projected = _kept_heads((query, key, value), ctx.head_shapes, parts, norms, dtype)
        if storage.attention_output == RECOMPUTE:
            attended, sums = attention(*_seen(heads, parts.at), parts.reach, sinks)
            flat = _flat(attended)
        else:
            flat = _kept(kept_output, storage.attention_output, ctx.flat_shape, dtype)
            attended = torch.unflatten(flat, 2, (ctx.head_shapes[0][1], -1)).transpose(1, 2)
        of_made, of_last = norms.of_added(grad, kept_made, storage.norm_input)
        own = of_made.to(dtype)
        down = parts.rank.gather(own)
        of_output = output.gradients([down], flat, own)
        of_flat = output.backward([down])
        of_attended = torch.unflatten(of_flat, 2, (ctx.head_shapes[0][1], -1)).transpose(1, 2)
        del own, down, flat, of_made, of_flat
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            of_sinks = sinks_gradient(of_attended, attended, sums, sinks).to(sinks.dtype)
        through, order = (attended, sums, parts.reach), parts.fixed_order
        if parts.at is None:
            of_heads = attention_backward(of_attended, *heads, *through, fixed_order=order, sinks_h=sinks)
        else:
            of_heads = parts.at.backward(of_attended, heads, *through, fixed_order=order, sinks_h=sinks)
        del through
        del of_attended, heads, attended
        of_projected, of_norms = parts.layout.join(of_heads, projected, norms.heads)
        del of_heads, projected
        if normed is None and projections.needs_input:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, ctx.shape, dtype))
        of_normed = projections.backward(of_projected)
        of_weights = projections.gradients(of_projected, normed)
        del of_projected, normed
        of_normed = parts.rank.reduce_scatter(of_normed).to(dtype)
        of_x, of_weight, of_bias = norm.backward(of_normed, kept_x, storage.norm_input, grad)
        of_vectors = of_weight, of_bias, of_last, *(of_norms or (None, None))
        return of_x, None, None, None, None, of_sinks, *of_vectors, *of_output, *of_weights


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
            norms = Norms.again(tensors[:NORMS], eps)
            norm = norms.first or NoNorm()
            down, inputs = _projections(projecting, tensors[NORMS:], drawn, parts.down, parts.inputs)
            wide, kept_x = norm.into(inputs, x, storage.norm_input, dtype, parts.rank)
            gate, up = wide[0], wide[1] if len(wide) > 1 else None
            bits = PACKED.get(storage.ffn_input, 0)
            inner, *kept = (
                ops.ffn_store(gate, up, bits, parts.gelu)
                if bits
                else [layers.activation(gate, up, parts.gelu)]
            )
            added = down.row_parallel(inner, parts.rank)
            del inner
            kept = wide if storage.ffn_input == AS_COMPUTED else kept
            del wide, gate, up
            result, kept_made = norms.add(x, added, storage.norm_input)
            del added
        ctx.parts, ctx.eps, ctx.dtype, ctx.projecting = parts, eps, dtype, projecting
        mark("norm_input", [kept_x, kept_made])
        mark("ffn_input", kept[: len(inputs)])
        ctx.save_for_backward(*tensors, drawn, kept_x, kept_made, *kept[: len(inputs)])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: FfnParts = ctx.parts
        storage = parts.storage
        count = NORMS + 2 * len(ctx.projecting)
        saved = ctx.saved_tensors  # read once: a block that runs again hands them out once
        tensors, (drawn, kept_x, kept_made, *kept) = saved[:count], saved[count:]
        norms = Norms.again(tensors[:NORMS], ctx.eps)
        norm = norms.first or NoNorm()
        down, inputs = _projections(ctx.projecting, tensors[NORMS:], drawn, parts.down, parts.inputs)
        normed: Tensor | None = None
        if inputs.needs_input or storage.ffn_input == RECOMPUTE:
            normed = parts.rank.gather(norm.again(kept_x, storage.norm_input, grad.shape, ctx.dtype))
        of_made, of_last = norms.of_added(grad, kept_made, storage.norm_input)
        own = of_made.to(ctx.dtype)
        del of_made
        narrow = parts.rank.gather(own)
        inner = down.backward([narrow])
        bits = PACKED.get(storage.ffn_input, 0)
        wide = inputs(cast(Tensor, normed)) if storage.ffn_input == RECOMPUTE else kept
        gate, up = wide[0], wide[1] if len(wide) > 1 else None
        # These may overwrite `inner`, which until now is its own gradient.
        if bits:
            of_wide = list(ops.ffn_backward(inner, gate, up, bits, parts.gelu).chunk(len(inputs), dim=-1))
        else:
            inner, of_wide = layers.activation_backward(inner, gate, up, parts.gelu)
        del wide, gate, up
        of_down = down.gradients([narrow], inner, own)
        del inner, own, narrow
        of_normed = inputs.backward(of_wide)
        of_inputs = inputs.gradients(of_wide, normed)
        del of_wide, normed
        of_normed = parts.rank.reduce_scatter(of_normed).to(ctx.dtype)
        of_x, of_weight, of_bias = norm.backward(of_normed, kept_x, storage.norm_input, grad)
        of_vectors = of_weight, of_bias, of_last, None, None
        return of_x, None, None, None, None, *of_vectors, *of_down, *of_inputs


def _keep_heads(heads: Sequence[Tensor], form: str) -> list[Tensor]:
    """Heads [B, H, S, D], or projected tensors [B, S, H D], kept in `form`."""
    if form == AS_COMPUTED:
        return list(heads)
    return [_keep(_flat(part) if part.dim() == 4 else part, form) for part in heads]


def _seen(heads: Heads, at: BlockSlice | None) -> Heads:
    """The heads, with the keys and values of earlier slices prepended."""
    return heads if at is None else (heads[0], *at.joined(*heads[1:]))


def _restoring(
    kept: Sequence[Tensor], heads: Heads, form: str, dtype: torch.dtype
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Returns a function that restores keys and values from the result of `_keep_heads`, or returns the given
    ones if they are recomputed."""
    _, key, value = heads
    if form == RECOMPUTE:
        return lambda: (key, value)
    shapes, (_, *packed) = (key.shape, value.shape), kept

    def restore() -> tuple[Tensor, Tensor]:
        key, value = (_heads(*parts, form, dtype) for parts in zip(packed, shapes, strict=True))
        return key, value

    return restore


def _kept_heads(
    kept: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    parts: AttentionParts,
    norms: Norms,
    dtype: torch.dtype,
) -> tuple[Heads, Sequence[Tensor]]:
    """Heads of these shapes from the result of `_keep_heads`, and the projected tensors if those were
    kept."""
    form = parts.storage.attention
    if not norms.heads:
        each = zip(kept, shapes, strict=True)
        query, key, value = (_heads(part, shape, form, dtype) for part, shape in each)
        return (query, key, value), ()
    flat = [(batch, length, heads * width) for batch, heads, length, width in shapes]
    projected = [_kept(part, form, shape, dtype) for part, shape in zip(kept, flat, strict=True)]
    return parts.layout.split(projected, norms.heads), projected


def _heads(kept: Tensor, shape: torch.Size, form: str, dtype: torch.dtype) -> Tensor:
    """A kept tensor as heads [B, H, S, D]."""
    if form == AS_COMPUTED:
        return kept
    batch, heads, length, width = shape
    flat = _kept(kept, form, (batch, length, heads * width), dtype)
    return torch.unflatten(flat, 2, (heads, width)).transpose(1, 2)
