"""Norms, activations, losses, rotary embedding and dropout by device: Triton kernels on a GPU, torch
elsewhere.

Kernels compute in float32 and round once. They agree with `kernels.common.layers` to rounding; rotary
embedding and dropout agree bit for bit. None of them waits for the device.
"""

import torch
from torch import Tensor

from kernels.common import dispatch
from kernels.common import layers as reference


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one, over the last dimension, in `dtype`."""
    if dispatch.has_kernels(x.device, "layers"):
        from kernels.blockfloat.triton import norm as triton_norm

        return triton_norm.norm(x, weight, bias, eps, dtype)
    return reference.norm(x, weight, bias, eps).to(dtype)


def norm_backward(
    grad: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `norm`.

    Returns:
        The gradient of x plus the residual stream's, in the residual's dtype, or without it in grad's dtype;
        those of weight and bias, float32.
    """
    if dispatch.has_kernels(grad.device, "layers"):
        from kernels.blockfloat.triton import norm as triton_norm

        of_x, of_weight, of_bias = triton_norm.norm_backward(grad, x, residual, weight, bias, eps, 0)
        return of_x, of_weight, None if bias is None else of_bias
    gradient, of_weight, wide_bias = reference.norm_gradient(grad, x, weight, bias, eps)
    if residual is None:
        return gradient.to(grad.dtype), of_weight, wide_bias
    return gradient.add_(residual).to(residual.dtype), of_weight, wide_bias


def activation(gate: Tensor, up: Tensor | None, gelu: bool = False) -> Tensor:
    """silu(gate) * up, with `gelu` gelu(gate) * up, or gelu(gate) without `up`."""
    if dispatch.has_kernels(gate.device, "layers"):
        from kernels.blockfloat.triton import ffn

        return ffn.activation(gate, up, gelu)
    return reference.gelu(gate) if up is None else reference.gated(gate, up, gelu)


def activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, gelu: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The activation, computed again, and the gradients of its inputs.

    On a GPU the gradients are columns of one tensor. `grad` must be contiguous and may be overwritten.
    """
    if dispatch.has_kernels(grad.device, "layers"):
        from kernels.blockfloat.triton import ffn

        grads = ffn.ffn_backward(grad, gate, up, 0, gelu)
        return grad, [grads] if up is None else list(grads.chunk(2, dim=-1))
    if up is None:
        return reference.gelu(gate), [reference.gelu_gradient(grad, gate)]
    return reference.gated(gate, up, gelu), list(reference.gated_gradient(grad, gate, up, gelu))


def residual(x: Tensor, made: Tensor) -> Tensor:
    """x + made, of any float dtypes, in x's dtype.

    On a GPU torch adds tensors of two dtypes at half the memory's speed; the kernel is faster.
    """
    if dispatch.has_kernels(x.device, "layers") and x.is_contiguous() and made.is_contiguous():
        from kernels.layers import triton

        return triton.add(x, made)
    return x + made


# On a GPU in one pass over the logits and one that writes, in a fixed order of sums.
cross_entropy_ = dispatch.by_device("layers", f"{__package__}.triton", reference.cross_entropy_)
# On a GPU in one pass, which draws the bits where it needs them.
drop = dispatch.by_device("layers", f"{__package__}.triton", reference.drop)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """`reference.rotate` of heads x [B, H, S, D]. On a GPU x, which must not need a gradient, is overwritten.

    Args:
        cos, sin: float32 tables [at least S, D].
    """
    length = x.shape[-2]
    if not dispatch.has_kernels(x.device, "layers"):
        return reference.rotate(x, cos[:length], sin[:length], back=back)
    from kernels.layers import triton

    # A projection's result, before its heads are moved forward, has them in a row: no copy is made of it.
    return triton.rotate_(x.transpose(1, 2), cos, sin, back=back).transpose(1, 2)
