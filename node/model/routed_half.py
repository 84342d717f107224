"""A mixture of experts as a block's second half: an autograd function, as in `node.model.stored_layers`.

Shape legend: B batch, S sequence, T tokens (B S), C hidden, E experts, k experts per token, R rows (T k), F
ffn. Rows are sorted by expert (`kernels.experts`).

The router computes in float32. Forward keeps its logits unchanged, whatever `Storage` says. Backward routes
by them again, so it chooses the same experts. The outputs of gate and up are kept like a feed-forward's
inputs. The gradient of an expert's weight in the sum is the product of the expert's result and the gradient
of the sum. Backward derives it from the activations, so the experts' results, C wide in every row, are
neither kept nor computed again.

Each block adds its own terms to the loss, for balance between experts (Fedus et al. 2021, arXiv 2101.03961,
equation 4) and against large logits (Zoph et al. 2022, arXiv 2202.08906, equation 5). They are not part of
the block's result: backward adds their gradients. They are defined for a whole microbatch, also if it is cut
along the sequence: all of its slices go forward before the first goes backward, so the load of all slices is
known.

With several tensor-parallel ranks, every expert is cut by columns of its inner width, like a dense
feed-forward. Each rank routes its own positions and gathers all logits. The ranks sum each token's result,
and in backward the gradients of its experts' weights and of its norm. Only the first rank adds the biases of
the experts' results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kernels.blockfloat import ops as blockfloat
from kernels.experts import ops
from kernels.experts.ops import Adapter, Order, Weights
from kernels.layers import ops as layers
from node.model.families.mixture import SWIGLU_ALPHA
from node.model.lora import AdaptedProjections, FrozenLinear
from node.model.offload import mark
from node.model.past import BlockSlice
from node.model.products import Linear, Projections
from node.model.storage import AS_COMPUTED, PACKED, RECOMPUTE, Storage
from node.model.stored_layers import NORMS, Layer, Norms, trained
from node.model.tensor_rank import TensorRank, compute_dtype

ELEMENTS_AT_ONCE = 1 << 21
"""The elements of clamped activations that are computed at once, in float32 by a dozen operators."""


@dataclass(frozen=True, kw_only=True)
class RoutedParts:
    """The arguments of `routed_half` that are not tensors."""

    storage: Storage
    rank: TensorRank
    experts: int
    choices: int
    """The number of experts that compute a token."""
    normalize: bool
    """Normalize the weights of a token's experts, so that they sum to 1."""
    limit: float = 0.0
    """Gate and input are clamped to this value; 0 does not clamp."""
    tokens: int
    balance: float = 0.0
    """The factor of the balance term in the gradient of a microbatch."""
    z: float = 0.0
    """The factor of the term against large logits in the gradient of a microbatch."""
    at: BlockSlice | None = None
    """The slice that x is, if the microbatch is cut into slices."""

    def route(self, logits_te: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """The weights and experts [T, k] of all ranks' positions, from this rank's logits."""
        everybodys = self.rank.gather(logits_te.view(batch, -1, self.experts)).flatten(0, -2)
        return ops.route(everybodys, self.choices, self.normalize)

    def own(self, x_tk: Tensor, batch: int) -> Tensor:
        """The part of x that belongs to this rank's own positions."""
        positions = x_tk.view(batch, -1, x_tk.shape[-1]).chunk(self.rank.count, dim=1)
        return positions[self.rank.index].flatten(0, -2)


def routed_half(
    x_bsc: Tensor,
    parts: RoutedParts,
    norms: Norms,
    router: Layer,
    projections: Sequence[Layer],
    load_e: Tensor,
) -> Tensor:
    """x + the sum over a token's experts of weight * down(silu(gate(norm(x))) * up(norm(x))).

    Args:
        projections: gate, up and down, each with the stacked matrices of all experts.
        load_e: int64; the number of tokens that each expert gets is added to it.
    """
    through = (router, *projections)
    args = x_bsc, parts, norms.eps, through, load_e, *norms.tensors, *trained(through)
    return cast(Tensor, _RoutedHalf.apply(*args))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class _Experts:
    """One projection of all experts: trained weights, or adapters on frozen weights."""

    layer: Layer
    first: Tensor | None
    """The weights [E N, K], or A of the adapters [E r, K]; None without adapters."""
    second: Tensor | None
    """The biases [E N], or B of the adapters [E N, r]."""
    count: int
    counts_bias: bool = True
    """Whether this rank adds the bias. Only one tensor-parallel rank does."""

    @property
    def is_trained(self) -> bool:
        return self.first is not None

    def _weights(self, dtype: torch.dtype) -> Weights:
        if isinstance(self.layer, FrozenLinear):
            return self.layer.weight.of_experts(dtype)
        return self._each(self.first, dtype)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias [E, N], or None."""
        bias = self.layer.bias if isinstance(self.layer, FrozenLinear) else self.second
        return None if bias is None or not self.counts_bias else bias.to(dtype).view(self.count, -1)

    def _each(self, stack: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Stacked matrices as [E, ...]."""
        assert stack is not None
        return stack.to(dtype).view(self.count, -1, stack.shape[-1])

    def _adapter(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float] | None:
        """A, B and the scale of their product; None without an adapter."""
        if not isinstance(self.layer, FrozenLinear) or self.first is None:
            return None
        return self._each(self.first, dtype), self._each(self.second, dtype), self.layer.scale

    def of_inner(self, grad: Tensor, order: Order) -> Tensor | None:
        """The gradients of the results of A [R, r] from those of the results; None without an adapter."""
        if (adapter := self._adapter(grad.dtype)) is None:
            return None
        _, up, scale = adapter
        return ops.input_gradient(grad, up, order).mul_(scale)

    def __call__(self, x: Tensor, order: Order, *, gathers: bool = False) -> Tensor:
        """The results [R, N] of rows [R, K], or with `gathers` of tokens [T, K]."""
        added: Adapter | None = None
        if (adapter := self._adapter(x.dtype)) is not None:
            down, up, scale = adapter
            added = ops.matmul(x, down, order, gathers=gathers).mul_(scale), up
        weights, bias = self._weights(x.dtype), self.bias(x.dtype)
        return ops.matmul(x, weights, order, bias, gathers=gathers, adapter=added)

    def backward(
        self, grad: Tensor, of_inner: Tensor | None, order: Order, onto: Tensor | None = None
    ) -> Tensor:
        """The gradient of the rows [R, K] from those of the results and of A's; added to `onto`, if given."""
        adapter, added = self._adapter(grad.dtype), None
        if adapter is not None and of_inner is not None:
            added = of_inner, adapter[0]
        return ops.input_gradient(grad, self._weights(grad.dtype), order, adapter=added, onto=onto)

    def gradients(
        self, grad: Tensor, of_inner: Tensor | None, x: Tensor, order: Order, *, gathers: bool = False
    ) -> list[Tensor | None]:
        """The gradients of weights and biases, or of A and B. The bias's gradient sums `grad` as it is."""
        if self.first is None:
            return [None, None]
        adapter = self._adapter(grad.dtype)
        if adapter is not None and of_inner is not None:
            down, _, scale = adapter
            assert self.second is not None
            inner = ops.matmul(x, down, order, gathers=gathers).mul_(scale)
            return [
                ops.weight_gradient(of_inner, x, order, self.first.dtype, gathers=gathers).flatten(0, 1),
                ops.weight_gradient(grad, inner, order, self.second.dtype).flatten(0, 1),
            ]
        of_weight = ops.weight_gradient(grad, x, order, self.first.dtype, gathers=gathers).flatten(0, 1)
        if self.second is None:
            return [of_weight, None]
        return [of_weight, ops.bias_gradient(grad, order, self.second.dtype).flatten()]


class _RoutedHalf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parts: RoutedParts,
        eps: float,
        projecting: Sequence[Layer],
        load: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        dtype, storage = compute_dtype(x), parts.storage
        with torch.autocast(x.device.type, enabled=False):
            norms = Norms.again(tensors[:NORMS], eps)
            assert norms.first is not None, "a mixture has its norms at the input"
            router, gate_of, up_of, down = _projections(projecting, tensors[NORMS:], parts)
            normed, kept_x = norms.first.store(x, storage.norm_input, dtype)
            (logits,) = router(normed.flatten(0, -2).float())
            tokens = parts.rank.gather(normed).flatten(0, -2)
            weights, chosen = parts.route(logits, len(x))
            order = ops.group(chosen, parts.experts)
            own_load = order.offsets.diff()
            load += own_load
            if parts.at is not None:
                parts.at.keep_load(own_load)
            gate, up = (into(tokens, order, gathers=True) for into in (gate_of, up_of))
            inner, *kept = _activate(gate, up, PACKED.get(storage.ffn_input, 0), parts.limit)
            if storage.ffn_input == AS_COMPUTED:
                kept = [gate, up]
            elif storage.ffn_input == RECOMPUTE:
                kept = []
            del gate, up
            combined = ops.combine(down(inner, order), weights, order)
            del inner
            result = layers.residual(x, parts.rank.reduce_scatter(combined.view(len(x), -1, x.shape[-1])))
        ctx.parts, ctx.eps, ctx.dtype, ctx.projecting = parts, eps, dtype, projecting
        mark("norm_input", [kept_x])
        mark("ffn_input", [logits, *kept])
        ctx.save_for_backward(*tensors, kept_x, logits, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        parts: RoutedParts = ctx.parts
        storage, dtype = parts.storage, ctx.dtype
        count = NORMS + 2 * len(ctx.projecting)
        saved = ctx.saved_tensors  # read once: a block that runs again hands them out once
        tensors, (kept_x, logits, *kept) = saved[:count], saved[count:]
        norms = Norms.again(tensors[:NORMS], ctx.eps)
        assert norms.first is not None
        router, gate_of, up_of, down = _projections(ctx.projecting, tensors[NORMS:], parts)
        weights, chosen = parts.route(logits, len(grad))
        order = ops.group(chosen, parts.experts)
        normed = norms.first.again(kept_x, storage.norm_input, grad.shape, dtype)
        tokens = parts.rank.gather(normed).flatten(0, -2)
        if storage.ffn_input == RECOMPUTE:
            kept = [into(tokens, order, gathers=True) for into in (gate_of, up_of)]
        # Every row gets the gradient of its token's result, without the expert's weight.
        of_made = parts.rank.gather(grad.to(dtype)).flatten(0, -2)
        rows = of_made.index_select(0, order.slots // parts.choices)
        del of_made
        by_row = weights.reshape(-1).index_select(0, order.slots)[:, None]
        of_low = down.of_inner(rows, order)
        unweighted = down.backward(rows, of_low, order)
        of_inner = unweighted * by_row.to(dtype)
        gate, up = kept
        bits = PACKED.get(storage.ffn_input, 0)
        inner, of_gate, of_up = _activate_backward(of_inner, gate, up, bits, parts.limit)
        del kept, gate, up, of_inner
        unweighted = unweighted.float()
        of_rows = (unweighted * inner.float()).sum(1)
        del unweighted
        if (bias := down.bias(torch.float32)) is not None:
            numbers = torch.arange(len(rows), dtype=order.offsets.dtype, device=rows.device)
            expert = torch.searchsorted(order.offsets, numbers, right=True) - 1
            of_rows += (rows.float() * bias.index_select(0, expert)).sum(1)
        of_all = of_rows.index_select(0, order.places.flatten()).view(len(grad), -1, parts.choices)
        of_weights = parts.rank.reduce_scatter(of_all).flatten(0, -2)
        of_down: list[Tensor | None] = [None, None]
        if down.is_trained:
            of_down = down.gradients(rows, of_low, inner * by_row.to(dtype), order)
            if of_down[1] is not None and not isinstance(down.layer, FrozenLinear):
                of_bias = ops.bias_gradient(rows * by_row.to(dtype), order, of_down[1].dtype)
                of_down[1] = of_bias.flatten() if down.counts_bias else torch.zeros_like(of_down[1])
        del rows, inner
        of_low_gate, of_low_up = gate_of.of_inner(of_gate, order), up_of.of_inner(of_up, order)
        of_tokens = gate_of.backward(of_gate, of_low_gate, order)
        of_tokens = up_of.backward(of_up, of_low_up, order, onto=of_tokens)
        of_projections = [
            *gate_of.gradients(of_gate, of_low_gate, tokens, order, gathers=True),
            *up_of.gradients(of_up, of_low_up, tokens, order, gathers=True),
        ]
        del of_gate, of_up
        of_normed = ops.combine(of_tokens, None, order)
        del of_tokens
        of_normed = parts.rank.reduce_scatter(of_normed.view(len(grad), -1, grad.shape[-1])).to(dtype)
        own_weights, own_chosen = (parts.own(part, len(grad)) for part in (weights, chosen))
        of_logits = ops.route_backward(of_weights, logits, own_weights, own_chosen, parts.normalize)
        _add_auxiliary(of_logits, logits, order, parts)
        of_router = router.gradients([of_logits], normed.flatten(0, -2).float())
        of_normed = of_normed.add_(router.backward([of_logits]).to(dtype).view(grad.shape))
        of_x, of_weight, _ = norms.first.backward(of_normed, kept_x, storage.norm_input, grad)
        of_vectors = of_weight, None, None, None, None
        return of_x, None, None, None, None, *of_vectors, *of_router, *of_projections, *of_down


def _projections(
    projecting: Sequence[Layer], tensors: Sequence[Tensor | None], parts: RoutedParts
) -> tuple[Projections | AdaptedProjections, _Experts, _Experts, _Experts]:
    """The router, and the projections gate, up and down, from the result of `trained`."""
    router, first, second = projecting[0], tensors[0], tensors[1]
    routing: Projections | AdaptedProjections
    if isinstance(router, FrozenLinear):
        routing = AdaptedProjections([router], [first, second], None)
    else:
        routing = Projections(linears=[Linear(weight=cast(Tensor, first), bias=second)])
    gate, up, down = (
        _Experts(layer=layer, first=weights, second=other, count=parts.experts)
        for layer, weights, other in zip(projecting[1:], tensors[2::2], tensors[3::2], strict=True)
    )
    down = replace(down, counts_bias=parts.rank.index == 0)
    return routing, gate, up, down


def _activate(gate: Tensor, up: Tensor, bits: int, limit: float) -> list[Tensor]:
    """The activations, and gate and up packed unless `bits` is 0."""
    if not limit:
        return list(blockfloat.ffn_store(gate, up, bits)) if bits else [layers.activation(gate, up)]
    packed = [blockfloat.store(part, bits) for part in (gate, up)] if bits else []
    inner = torch.empty_like(gate)
    for rows in _few_rows(gate):
        inner[rows], _, _ = _clamped(gate[rows], up[rows], limit)
    return [inner, *packed]


def _activate_backward(
    grad: Tensor, gate: Tensor, up: Tensor, bits: int, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The activations, computed again, and the gradients of gate and up. `grad` may be overwritten."""
    if not limit and bits:
        of_gate, of_up = blockfloat.ffn_backward(grad, gate, up, bits).chunk(2, dim=-1)
        return grad, of_gate.contiguous(), of_up.contiguous()
    if not limit:
        inner, (of_gate, of_up) = layers.activation_backward(grad, gate, up)
        return inner, of_gate.contiguous(), of_up.contiguous()
    if bits:
        shape = list(grad.shape)
        gate, up = (blockfloat.restore(part, shape, bits, grad.dtype) for part in (gate, up))
    inner, of_gate, of_up = (torch.empty_like(grad) for _ in range(3))
    for rows in _few_rows(grad):
        inner[rows], by_gate, by_up = _clamped(gate[rows], up[rows], limit)
        of_gate[rows], of_up[rows] = grad[rows] * by_gate, grad[rows] * by_up
    return inner, of_gate, of_up


def _few_rows(x: Tensor) -> Iterator[slice]:
    """Pieces of the rows of x [R, N] that are small enough for a dozen float32 copies beside the whole."""
    # On a CPU, elements that fill no vector register are rounded differently. Only the last piece has such.
    count = 64 * max(1, ELEMENTS_AT_ONCE // (64 * x.shape[1]))
    return (slice(first, first + count) for first in range(0, len(x), count))


def _clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """(up + 1) * gate * sigmoid(1.702 gate) of clamped inputs, and its derivatives by gate and up; all
    float32."""
    clamped, value = gate.float().clamp(max=limit), up.float().clamp(-limit, limit) + 1
    share = torch.sigmoid(SWIGLU_ALPHA * clamped)
    gated = clamped * share
    slope = share + SWIGLU_ALPHA * gated * (1 - share)
    within = up.float().abs() <= limit
    return value * gated, value * slope * (gate.float() <= limit), gated * within


def _add_auxiliary(of_logits: Tensor, logits: Tensor, order: Order, parts: RoutedParts) -> None:
    """Add the gradients of the block's own loss terms, in place."""
    if not (parts.balance or parts.z):
        return
    count = parts.tokens
    probabilities = logits.softmax(1)
    if parts.balance:
        # Only the mean probabilities have a gradient: the experts' token counts do not change with the
        # logits.
        load = order.offsets.diff() if parts.at is None else parts.at.load()
        slopes = load.float() * (parts.balance * parts.experts / count**2)
        inner = (probabilities * slopes).sum(1, keepdim=True)
        of_logits += probabilities * (slopes - inner)
    if parts.z:
        of_logits += probabilities * logits.logsumexp(1, keepdim=True) * (2 * parts.z / count)
