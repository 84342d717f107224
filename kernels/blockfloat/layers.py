"""Layers that keep their input stored in blocks: the reference in torch for `kernels.blockfloat.triton`.

Every implementation stores the same bits; results computed from them agree to rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.blockfloat import reference as blockfloat
from kernels.common import layers


def norm_store(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The norm of x (`layers.norm`) in `dtype`, and x stored in `bits`."""
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
    """The norm, in `dtype`, of the stored input."""
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
        grad: of the norm's result, `[..., C]`.
        residual: the gradient that passes by the norm, added to that of its input; gives the dtype.

    Returns:
        Of the input; of the weight and the bias, fp32 (empty without a bias).
    """
    x = blockfloat.unpack(packed, grad.shape, bits, torch.float32)
    of_input, of_weight, of_bias = layers.norm_gradient(grad, x, weight, bias, eps)
    empty = of_weight.new_empty(0)
    return of_input.add_(residual).to(residual.dtype), of_weight, empty if of_bias is None else of_bias


def ffn_store(
    gate: Tensor, up: Tensor | None, bits: int, gelu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, with `gelu` gelu(gate) * up, or gelu(gate) without `up`; and the inputs
    stored (the second empty without `up`)."""
    packed = blockfloat.pack(gate, bits)
    if up is None:
        return layers.gelu(gate), packed, packed.new_empty(0)
    return layers.gated(gate, up, gelu), packed, blockfloat.pack(up, bits)


def ffn_backward(
    grad: Tensor, packed_gate: Tensor, packed_up: Tensor | None, bits: int, gelu: bool = False
) -> Tensor:
    """Gradients of the stored inputs, in grad's dtype: [..., 2 F], the gate's and then up's; [..., F] without
    `packed_up`.

    `grad`, contiguous, is overwritten with the inner activations, computed again from what was stored.
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
