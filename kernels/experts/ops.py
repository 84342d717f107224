"""Mixtures of experts for autograd: Triton's kernels on a GPU, the reference elsewhere.

Shape legend: T tokens, E experts, k experts per token, S = T k slots, N outputs, K inputs.

A routed feed-forward is

    weights, chosen = route(logits, k, normalize)
    order = group(chosen, E)
    both = grouped_matmul(x, gate_and_up, order, gathers=True)
    result = combine(grouped_matmul(activation(both), down, order), weights, order)

These functions do not wait for the device, except that the reference reads an order's offsets. All sizes
depend only on T, k and E. Sums have a fixed order: equal inputs give equal bits. An expert's rows do not
depend on how many tokens the other experts have.
"""

from typing import Any, cast

import torch
from torch import Tensor

from kernels.common import dispatch
from kernels.experts import reference

# Re-exported.
from kernels.experts.reference import Order as Order
from kernels.experts.reference import PackedExperts as PackedExperts
from kernels.experts.reference import Weights as Weights


def _kernels(like: Tensor) -> Any:
    """The module that computes on this tensor's device."""
    if dispatch.has_kernels(like.device, "experts"):
        from kernels.experts import triton

        return triton
    return reference


def route(logits_te: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`kernels.experts.reference.route`: the weights [T, k], which have a gradient, and the experts."""
    return cast(tuple[Tensor, Tensor], _Route.apply(logits_te, choices, normalize))  # type: ignore[no-untyped-call]


def group(experts_tk: Tensor, experts: int) -> Order:
    """`kernels.experts.reference.group`."""
    order: Order = _kernels(experts_tk).group(experts_tk, experts)
    return order


def grouped_matmul(
    x: Tensor, weights: Weights, order: Order, bias_en: Tensor | None = None, *, gathers: bool = False
) -> Tensor:
    """`kernels.experts.reference.matmul`: [S, N] in x's dtype, with gradients of x, weights and biases.

    Args:
        x: Sorted rows [S, K], or with `gathers` the tokens' rows [T, K].
        weights: [E, N, K] of any float dtype, or packed; packed ones have no gradient. Low-rank adapters can
            be passed too.
        bias_en: The experts' biases, or None.
    """
    dense = weights if isinstance(weights, Tensor) else None
    args = x, dense, bias_en, weights, order, gathers
    return cast(Tensor, _GroupedMatmul.apply(*args))  # type: ignore[no-untyped-call]


def combine(y_sn: Tensor, weights_tk: Tensor, order: Order) -> Tensor:
    """`kernels.experts.reference.combine`: [T, N], with gradients of the rows and of their weights."""
    return cast(Tensor, _Combine.apply(y_sn, weights_tk, order))  # type: ignore[no-untyped-call]


# ---- the arithmetic without autograd, for callers that decide what backward keeps


def matmul(
    x: Tensor, weights: Weights, order: Order, bias_en: Tensor | None, *, gathers: bool = False
) -> Tensor:
    """`grouped_matmul` without autograd."""
    with torch.autocast(x.device.type, enabled=False):
        product: Tensor = _kernels(x).matmul(x, weights, order, bias_en, gathers=gathers)
    return product


def input_gradient(grad_sn: Tensor, weights: Weights, order: Order, *, gathers: bool = False) -> Tensor:
    """The gradient of the sorted rows, [S, K]. With `gathers`, of the tokens' rows, [T, K]: the sum over
    choices."""
    kernels = _kernels(grad_sn)
    with torch.autocast(grad_sn.device.type, enabled=False):
        of_input: Tensor = kernels.input_gradient(grad_sn, weights, order)
        return kernels.combine(of_input, None, order) if gathers else of_input


def weight_gradient(
    grad_sn: Tensor, x: Tensor, order: Order, dtype: torch.dtype, *, gathers: bool = False
) -> Tensor:
    """`kernels.experts.reference.weight_gradient`."""
    with torch.autocast(x.device.type, enabled=False):
        gradient: Tensor = _kernels(x).weight_gradient(grad_sn, x, order, dtype, gathers=gathers)
    return gradient


def bias_gradient(grad_sn: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    """`kernels.experts.reference.bias_gradient`."""
    gradient: Tensor = _kernels(grad_sn).bias_gradient(grad_sn, order, dtype)
    return gradient


def route_backward(
    grad_tk: Tensor, logits_te: Tensor, weights_tk: Tensor, experts_tk: Tensor, normalize: bool
) -> Tensor:
    """`kernels.experts.reference.route_backward`."""
    kernels = _kernels(logits_te)
    gradient: Tensor = kernels.route_backward(grad_tk, logits_te, weights_tk, experts_tk, normalize)
    return gradient


def combine_backward(
    grad_tn: Tensor, y_sn: Tensor, weights_tk: Tensor, order: Order
) -> tuple[Tensor, Tensor]:
    """`kernels.experts.reference.combine_backward`."""
    grads: tuple[Tensor, Tensor] = _kernels(y_sn).combine_backward(grad_tn, y_sn, weights_tk, order)
    return grads


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        weights, experts = _kernels(logits).route(logits, choices, normalize)
        ctx.normalize = normalize
        ctx.save_for_backward(logits, weights, experts)
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, weights, experts = ctx.saved_tensors
        gradient = route_backward(grads[0].float(), logits, weights, experts, ctx.normalize)
        return gradient, None, None


class _GroupedMatmul(torch.autograd.Function):
    """Keeps x where the weights need a gradient, and no copy of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dense: Tensor | None,
        bias: Tensor | None,
        weights: Weights,
        order: Order,
        gathers: bool,
    ) -> Tensor:
        ctx.order, ctx.gathers, ctx.dtype = order, gathers, x.dtype
        ctx.frozen = None if dense is not None else weights
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, dense, bias)
        return matmul(x, weights, order, bias, gathers=gathers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dense, bias = ctx.saved_tensors
        grad, order, gathers = grads[0].contiguous(), ctx.order, ctx.gathers
        of_x = of_weights = of_bias = None
        if ctx.needs_input_grad[0]:
            weights = dense if ctx.frozen is None else ctx.frozen
            of_x = input_gradient(grad, weights, order, gathers=gathers)
        if ctx.needs_input_grad[1]:
            of_weights = weight_gradient(grad, x, order, dense.dtype, gathers=gathers)
        if ctx.needs_input_grad[2]:
            of_bias = bias_gradient(grad, order, bias.dtype)
        return of_x, of_weights, of_bias, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(y, weights)
        combined: Tensor = _kernels(y).combine(y, weights, order)
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        return *combine_backward(grads[0].contiguous(), y, weights, ctx.order), None
