"""Stored tensors as torch operators: the reference on a CPU, Triton's kernels on a GPU, the same stored bits.

They never wait for the device. A GPU without Triton runs the reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.blockfloat import layers as blockfloat_layers
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import packed_bytes
from kernels.common import dispatch
from kernels.common.operators import operator


@operator("thinwire::store")
def store(x: Tensor, bits: int) -> Tensor:
    """`kernels.blockfloat.reference.pack`."""
    if dispatch.has_kernels(x.device, "storage"):
        from kernels.blockfloat.triton import store as triton_store

        return triton_store.pack(x, bits)
    return blockfloat.pack(x, bits)


@operator("thinwire::restore")
def restore(packed: Tensor, shape: Sequence[int], bits: int, dtype: torch.dtype) -> Tensor:
    """`kernels.blockfloat.reference.unpack`."""
    if dispatch.has_kernels(packed.device, "storage"):
        from kernels.blockfloat.triton import store as triton_store

        return triton_store.unpack(packed, torch.Size(shape), bits, dtype)
    return blockfloat.unpack(packed, shape, bits, dtype)


@operator("thinwire::norm_store")
def norm_store(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`kernels.blockfloat.layers.norm_store`."""
    if dispatch.has_kernels(x.device, "storage"):
        from kernels.blockfloat.triton import norm as triton_store_norm

        return triton_store_norm.norm_store(x, weight, bias, eps, bits, dtype)
    return blockfloat_layers.norm_store(x, weight, bias, eps, bits, dtype)


@operator("thinwire::norm_from_stored")
def norm_from_stored(
    packed: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """`kernels.blockfloat.layers.norm_from_stored`."""
    if dispatch.has_kernels(packed.device, "storage"):
        from kernels.blockfloat.triton import norm as triton_store_norm

        return triton_store_norm.norm_from_stored(packed, torch.Size(shape), weight, bias, eps, bits, dtype)
    return blockfloat_layers.norm_from_stored(packed, shape, weight, bias, eps, bits, dtype)


@operator("thinwire::norm_backward")
def norm_backward(
    grad: Tensor,
    packed: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.blockfloat.layers.norm_backward`."""
    if dispatch.has_kernels(grad.device, "storage"):
        from kernels.blockfloat.triton import norm as triton_store_norm

        return triton_store_norm.norm_backward(grad, packed, residual, weight, bias, eps, bits)
    return blockfloat_layers.norm_backward(grad, packed, residual, weight, bias, eps, bits)


@operator("thinwire::ffn_store")
def ffn_store(
    gate: Tensor, up: Tensor | None, bits: int, gelu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.blockfloat.layers.ffn_store`."""
    if dispatch.has_kernels(gate.device, "storage"):
        from kernels.blockfloat.triton import ffn as triton_store_ffn

        return triton_store_ffn.ffn_store(gate, up, bits, gelu)
    return blockfloat_layers.ffn_store(gate, up, bits, gelu)


@operator("thinwire::ffn_backward", mutates_args=("grad",))
def ffn_backward(
    grad: Tensor, packed_gate: Tensor, packed_up: Tensor | None, bits: int, gelu: bool = False
) -> Tensor:
    """`kernels.blockfloat.layers.ffn_backward`: `grad` becomes the inner activations."""
    if dispatch.has_kernels(grad.device, "storage"):
        from kernels.blockfloat.triton import ffn as triton_store_ffn

        return triton_store_ffn.ffn_backward(grad, packed_gate, packed_up, bits, gelu)
    return blockfloat_layers.ffn_backward(grad, packed_gate, packed_up, bits, gelu)


def _packed(like: Tensor, shape: Sequence[int], bits: int) -> Tensor:
    return like.new_empty(packed_bytes(shape, bits), dtype=torch.uint8)


@store.register_fake
def _(x: Tensor, bits: int) -> Tensor:
    return _packed(x, x.shape, bits)


@restore.register_fake
def _(packed: Tensor, shape: Sequence[int], bits: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


@norm_store.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), _packed(x, x.shape, bits)


@norm_from_stored.register_fake
def _(
    packed: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


@norm_backward.register_fake
def _(
    grad: Tensor, packed: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    sums = [
        grad.new_empty(weight.numel() if there else 0, dtype=torch.float32)
        for there in (True, bias is not None)
    ]
    return residual.new_empty(residual.shape), sums[0], sums[1]


@ffn_store.register_fake
def _(gate: Tensor, up: Tensor | None, bits: int, gelu: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    packed = _packed(gate, gate.shape, bits)
    return gate.new_empty(gate.shape), packed, packed.new_empty(0) if up is None else torch.empty_like(packed)


@ffn_backward.register_fake
def _(grad: Tensor, packed_gate: Tensor, packed_up: Tensor | None, bits: int, gelu: bool = False) -> Tensor:
    width = grad.shape[-1]
    return grad.new_empty(*grad.shape[:-1], width if packed_up is None else 2 * width)
