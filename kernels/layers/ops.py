"""Norms, activations and rotary embedding on any device: one Triton kernel each on a GPU, torch elsewhere.

Kernels compute in float32 and round once; they agree with `kernels.common.layers` to rounding, and rotary
bit for bit. None of them waits for the device.
"""

import torch
from torch import Tensor

from kernels.common import dispatch
from kernels.common import layers as reference


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one, over the last dimension, in `dtype`."""
    if dispatch.has_kernels(x.device.type):
        from kernels.blockfloat.triton import norm as triton_norm

        return triton_norm.norm(x, weight, bias, eps, dtype)
    return reference.norm(x, weight, bias, eps).to(dtype)


def norm_backward(
    grad: Tensor, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `norm`: of x, plus the residual stream's, in its dtype; of weight and bias, float32."""
    if dispatch.has_kernels(grad.device.type):
        from kernels.blockfloat.triton import norm as triton_norm

        of_x, of_weight, of_bias = triton_norm.norm_backward(grad, x, residual, weight, bias, eps, 0)
        return of_x, of_weight, None if bias is None else of_bias
    made, of_weight, wide_bias = reference.norm_gradient(grad, x, weight, bias, eps)
    return made.add_(residual).to(residual.dtype), of_weight, wide_bias


def activation(gate: Tensor, up: Tensor | None) -> Tensor:
    """silu(gate) * up, or gelu(gate) without `up`."""
    if dispatch.has_kernels(gate.device.type):
        from kernels.blockfloat.triton import ffn

        return ffn.activation(gate, up)
    return reference.gelu(gate) if up is None else reference.swiglu(gate, up)


def activation_backward(grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The activation again, and the gradients of its inputs, on a GPU columns of one tensor.

    May overwrite `grad`, which is contiguous.
    """
    if dispatch.has_kernels(grad.device.type):
        from kernels.blockfloat.triton import ffn

        made = ffn.ffn_backward(grad, gate, up, 0)
        return grad, [made] if up is None else list(made.chunk(2, dim=-1))
    if up is None:
        return reference.gelu(gate), [reference.gelu_gradient(grad, gate)]
    return reference.swiglu(gate, up), list(reference.swiglu_gradient(grad, gate, up))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """`reference.rotate` of heads x [B, H, S, D]. On a GPU x, which must not need a gradient, is overwritten.

    Args:
        cos, sin: float32 tables [at least S, D].
    """
    length = x.shape[-2]
    if not dispatch.has_kernels(x.device.type):
        return reference.rotate(x, cos[:length], sin[:length], back=back)
    from kernels.layers import triton

    # A projection's result, before its heads are moved forward, has them in a row: no copy is made of it.
    return triton.rotate_(x.transpose(1, 2), cos, sin, back=back).transpose(1, 2)
