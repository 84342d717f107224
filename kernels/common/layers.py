"""Norms, SwiGLU and GELU with their gradients, in torch: the reference of the fused kernels for stored
tensors.

Shape legend: C hidden, F ffn; leading dimensions are free. The forward functions are torch's own, so a layer
that stores its input packed gives the same bits as one that does not. Gradients are computed in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.random_bits import random_bits_of_columns

DROP_BITS = 24
"""The number of random bits that decide whether an element is dropped."""


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one, over the last dimension, in x's dtype."""
    if bias is None:
        # Numbers in half precision are normalized in float32, the weights' dtype.
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of `norm` with respect to x, weight and bias, all fp32 (AGoQ, equation 7, for RMSNorm).

    Args:
        grad: the gradient of the result, in x's shape.
    """
    rows, grads = x.reshape(-1, x.shape[-1]).float(), grad.reshape(-1, x.shape[-1]).float()
    if bias is not None:
        rows = rows - rows.mean(1, keepdim=True)
    inverse = torch.rsqrt(rows.square().mean(1, keepdim=True).add_(eps))
    normal = rows * inverse
    weighted = grads * weight.float()
    inner = (weighted * normal).mean(1, keepdim=True)
    if bias is not None:
        weighted = weighted - weighted.mean(1, keepdim=True)
    result = weighted.sub_(normal * inner).mul_(inverse)
    of_bias = None if bias is None else grads.sum(0)
    return result.view(x.shape), (grads * normal).sum(0), of_bias


def cross_entropy_(logits: Tensor, labels: Tensor, ignored: int, scale: float | None) -> Tensor:
    """The cross entropy of each token, fp32 [T], in nats; 0 where a label is `ignored`.

    Args:
        logits: [T, V], any float dtype. Unless `scale` is None, they are overwritten by the gradients of the
            sum of losses times `scale`, rounded once.
        labels: int64 [T].
    """
    wide = logits.float()
    losses = F.cross_entropy(wide, labels, ignore_index=ignored, reduction="none")
    if scale is not None:
        grads = wide.softmax(-1)
        counts = labels != ignored
        grads[counts, labels[counts]] -= 1.0
        logits.copy_(grads * (counts * scale).unsqueeze(1))
    return losses


def gated(gate: Tensor, up: Tensor, by_gelu: bool) -> Tensor:
    """silu(gate) * up, or gelu(gate) * up."""
    return (gelu(gate) if by_gelu else F.silu(gate)) * up


def gated_gradient(grad: Tensor, gate: Tensor, up: Tensor, by_gelu: bool) -> tuple[Tensor, Tensor]:
    """The gradients of `gated` with respect to gate and up, in grad's dtype."""
    wide, g, u = grad.float(), gate.float(), up.float()
    of_gate: Tensor
    if by_gelu:
        of_up = wide * gelu(g)
        of_gate = torch.ops.aten.gelu_backward(wide * u, g, approximate="tanh")
    else:
        share = torch.sigmoid(g)
        of_up = wide * g * share
        of_gate = wide * u * (share * (1 + g * (1 - share)))
    return of_gate.to(grad.dtype), of_up.to(grad.dtype)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `gelu` with respect to x, in grad's dtype."""
    gradient: Tensor = torch.ops.aten.gelu_backward(grad.float(), x.float(), approximate="tanh")
    return gradient.to(grad.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Rotary position embedding of a head's first half against its second (Llama's convention), in x's dtype.

    Args:
        x: heads [..., S, D].
        cos, sin: float32 tables [S, D] whose halves are equal.
        back: rotate in the other direction, as for gradients.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1) * sin
    return (x * cos - turned if back else x * cos + turned).to(x.dtype)


def drop(x: Tensor, salt: Tensor, share: float, *, first: int, stride: int) -> Tensor:
    """Dropout: elements are set to zero with probability `share`, and the others divided by 1 - share.

    Args:
        x: [..., C], columns of a tensor [..., stride] from its element `first` on.
        salt: the salt of the random bits, int32 [1].
    """
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    bits = random_bits_of_columns(rows, columns, salt, x.device, bits=DROP_BITS, first=first, stride=stride)
    kept = (bits >= drop_threshold(share)).to(x.dtype)
    return x * kept.mul_(1.0 / (1.0 - share)).view(x.shape)


def drop_threshold(share: float) -> int:
    """The least random number that keeps its element."""
    return round(share * (1 << DROP_BITS))
