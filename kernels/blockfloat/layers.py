"""Layers that store their input in blocks: the reference in torch for `kernels.blockfloat.triton`.

All implementations store the same bits. Results computed from them agree to rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.blockfloat import reference as blockfloat
from kernels.common import layers


def norm_store(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The norm of x (`kernels.common.layers.norm`) in `dtype`, and x stored in `bits`."""
    return layers.norm(x, weight, bias, eps).to(dtype), blockfloat.pack(x, bits)


def norm_from_stored(
    packed: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The norm of the stored input, in `dtype`."""
    x = blockfloat.unpack(packed, shape, bits, torch.float32)
    return layers.norm(x, weight, bias, eps).to(dtype)


def norm_backward(
    grad: Tensor,
    packed: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the norm of the stored input.

    Args:
        grad: The gradient of the norm's result, `[..., C]`.
        residual: The gradient that bypasses the norm. It is added to the input's gradient, which gets its
            dtype.

    Returns:
        The gradients of the input, of the weight and of the bias. The last two are float32; the last is empty
        without a bias.
    """
    x = blockfloat.unpack(packed, grad.shape, bits, torch.float32)
    of_input, of_weight, of_bias = layers.norm_gradient(grad, x, weight, bias, eps)
    empty = of_weight.new_empty(0)
    return of_input.add_(residual).to(residual.dtype), of_weight, empty if of_bias is None else of_bias


def ffn_store(
    gate: Tensor, up: Tensor | None, bits: int, gelu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation and its inputs as stored: silu(gate) * up; gelu(gate) * up with `gelu`; gelu(gate)
    without `up`.

    The second stored input is empty without `up`.
    """
    packed = blockfloat.pack(gate, bits)
    if up is None:
        return layers.gelu(gate), packed, packed.new_empty(0)
    return layers.gated(gate, up, gelu), packed, blockfloat.pack(up, bits)


def ffn_backward(
    grad: Tensor, packed_gate: Tensor, packed_up: Tensor | None, bits: int, gelu: bool = False
) -> Tensor:
    """Gradients of the stored inputs in grad's dtype, `[..., 2 F]`: the gate's, then up's.

    Without `packed_up` the shape is `[..., F]`. `grad` must be contiguous. It is overwritten with the
    activations, which are computed again from the stored inputs.
    """
    gate = blockfloat.unpack(packed_gate, grad.shape, bits, grad.dtype)
    if packed_up is None:
        of_gate = layers.gelu_gradient(grad, gate)
        grad.copy_(layers.gelu(gate))
        return of_gate
    up = blockfloat.unpack(packed_up, grad.shape, bits, grad.dtype)
    grads = torch.cat(layers.gated_gradient(grad, gate, up, gelu), dim=-1)
    grad.copy_(layers.gated(gate, up, gelu))
    return grads
