"""Norms, activations, losses, rotary embedding and dropout by device: Triton kernels on a GPU, torch
elsewhere.

Kernels compute in float32 and round once. They agree with `kernels.common.layers` to rounding; rotary
embedding and dropout agree bit for bit. None of them waits for the device.
"""

import torch
from torch import Tensor

from kernels.blockfloat import ops
from kernels.blockfloat.layout import APART
from kernels.common import dispatch
from kernels.common import layers as reference
from kernels.fp8.products import code_rows
from kernels.fp8.rows import Coded


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one, over the last dimension, in `dtype`."""
    if dispatch.has_kernels(x.device, "layers"):
        from kernels.blockfloat.triton import norm as triton_norm

        return triton_norm.norm(x, weight, bias, eps, dtype)
    return reference.norm(x, weight, bias, eps).to(dtype)


def coded_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int, dtype: torch.dtype
) -> tuple[Coded, Tensor]:
    """The codes of the rows of `norm` (`kernels.fp8.rows`), and x stored in `bits`, or x itself with 0
    bits."""
    if dispatch.has_kernels(x.device, "layers") and bits < APART:
        from kernels.blockfloat.triton import norm as triton_norm

        coded, stored = triton_norm.coded_norm(x, weight, bias, eps, bits, dtype)
        return coded, stored if bits else x
    if bits:
        normed, stored = ops.norm_store(x, weight, bias, eps, bits, dtype)
    else:
        normed, stored = norm(x, weight, bias, eps, dtype), x
    return code_rows(normed.view(-1, normed.shape[-1])), stored


def norm_backward(
    grad: Tensor, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `norm`.

    Returns:
        The gradient of x plus the residual stream's, in the residual's dtype; those of weight and bias,
        float32.
    """
    if dispatch.has_kernels(grad.device, "layers"):
        from kernels.blockfloat.triton import norm as triton_norm

        of_x, of_weight, of_bias = triton_norm.norm_backward(grad, x, residual, weight, bias, eps, 0)
        return of_x, of_weight, None if bias is None else of_bias
    gradient, of_weight, wide_bias = reference.norm_gradient(grad, x, weight, bias, eps)
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


def coded_activation(gate: Tensor, up: Tensor | None, bits: int) -> tuple[Coded, list[Tensor]]:
    """The codes of the activation's rows (`kernels.fp8.rows`), and its inputs stored in `bits`.

    The codes take no pass of their own. The list of stored inputs is empty with 0 bits, and otherwise has one
    entry for each input.
    """
    if dispatch.has_kernels(gate.device, "layers"):
        from kernels.blockfloat.triton import coded_ffn

        coded, *stored = coded_ffn.activation(gate, up, bits)
    else:
        inner, *stored = ops.ffn_store(gate, up, bits) if bits else [activation(gate, up)]
        coded = code_rows(inner.view(-1, inner.shape[-1]))
    return coded, stored[: 1 if up is None else 2] if bits else []


def coded_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, bits: int
) -> tuple[Tensor, list[Tensor], Coded]:
    """`activation_backward` of inputs stored in `bits`, or not stored with 0 bits.

    Returns:
        The activation, the gradients of its inputs, and the codes of the rows of these gradients side by
        side.
    """
    if dispatch.has_kernels(grad.device, "layers"):
        from kernels.blockfloat.triton import coded_ffn

        grads, coded = coded_ffn.activation_backward(grad, gate, up, bits)
    elif bits:
        grads = ops.ffn_backward(grad, gate, up, bits)
        coded = code_rows(grads.view(-1, grads.shape[-1]))
    else:
        grad, parts = activation_backward(grad, gate, up)
        grads = torch.cat(parts, dim=-1)
        coded = code_rows(grads.view(-1, grads.shape[-1]))
    return grad, [grads] if up is None else list(grads.chunk(2, dim=-1)), coded


def residual(x: Tensor, made: Tensor) -> Tensor:
    """x + made, of any float dtypes, in x's dtype.

    On a GPU torch adds tensors of two dtypes at half the memory's speed; the kernel is faster.
    """
    if dispatch.has_kernels(x.device, "layers") and x.is_contiguous() and made.is_contiguous():
        from kernels.layers import triton

        return triton.add(x, made)
    return x + made


# On a GPU in one pass over the logits and one that writes, in a fixed order of sums.
cross_entropy_ = dispatch.by_device("layers", "kernels.layers.triton", reference.cross_entropy_)
# On a GPU in one pass, which draws the bits where it needs them.
drop = dispatch.by_device("layers", "kernels.layers.triton", reference.drop)


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
