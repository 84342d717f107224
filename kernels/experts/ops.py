"""Mixtures of experts by device: Triton's kernels on a GPU, the reference elsewhere.

Shape legend: T tokens, E experts, k experts per token, S = T k slots, N outputs, K inputs.

A routed feed-forward is

    weights, chosen = route(logits, k, normalize)
    order = group(chosen, E)
    both = matmul(x, gate_and_up, order, gathers=True)
    result = combine(matmul(activation(both), down, order), weights, order)

Callers decide what backward keeps (`node.model.routed_half`).

These functions do not wait for the device, except that the reference reads an order's offsets. All sizes
depend only on T, k and E. Sums have a fixed order: equal inputs give equal bits. An expert's rows do not
depend on how many tokens the other experts have.
"""

from typing import Any

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
    """`kernels.experts.reference.route`."""
    weights, experts = _kernels(logits_te).route(logits_te, choices, normalize)
    return weights, experts


def group(experts_tk: Tensor, experts: int) -> Order:
    """`kernels.experts.reference.group`."""
    order: Order = _kernels(experts_tk).group(experts_tk, experts)
    return order


def matmul(
    x: Tensor, weights: Weights, order: Order, bias_en: Tensor | None = None, *, gathers: bool = False
) -> Tensor:
    """`kernels.experts.reference.matmul`."""
    with torch.autocast(x.device.type, enabled=False):
        product: Tensor = _kernels(x).matmul(x, weights, order, bias_en, gathers=gathers)
    return product


def input_gradient(grad_sn: Tensor, weights: Weights, order: Order) -> Tensor:
    """`kernels.experts.reference.input_gradient`."""
    with torch.autocast(grad_sn.device.type, enabled=False):
        gradient: Tensor = _kernels(grad_sn).input_gradient(grad_sn, weights, order)
    return gradient


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


def combine(y_sn: Tensor, weights_tk: Tensor | None, order: Order) -> Tensor:
    """`kernels.experts.reference.combine`."""
    combined: Tensor = _kernels(y_sn).combine(y_sn, weights_tk, order)
    return combined
