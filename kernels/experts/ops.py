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

from kernels.common.dispatch import by_device
from kernels.experts import reference

# Re-exported.
from kernels.experts.reference import Adapter as Adapter
from kernels.experts.reference import Order as Order
from kernels.experts.reference import PackedExperts as PackedExperts
from kernels.experts.reference import Weights as Weights

_PART, _TRITON = "experts", f"{__package__}.triton"

route = by_device(_PART, _TRITON, reference.route)
route_backward = by_device(_PART, _TRITON, reference.route_backward)
group = by_device(_PART, _TRITON, reference.group)
matmul = by_device(_PART, _TRITON, reference.matmul)
input_gradient = by_device(_PART, _TRITON, reference.input_gradient)
weight_gradient = by_device(_PART, _TRITON, reference.weight_gradient)
bias_gradient = by_device(_PART, _TRITON, reference.bias_gradient)
combine = by_device(_PART, _TRITON, reference.combine)
