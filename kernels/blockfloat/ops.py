"""Stored tensors by device: the reference on a CPU, Triton's kernels on a GPU, with the same stored bits.

These functions never wait for the device. A GPU without Triton runs the reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.blockfloat import layers as blockfloat_layers
from kernels.blockfloat import reference as blockfloat
from kernels.common import dispatch


def store(x: Tensor, bits: int) -> Tensor:
    """`kernels.blockfloat.reference.pack`."""
    if dispatch.has_kernels(x.device, "storage"):
        from kernels.blockfloat.triton import store as triton_store

        return triton_store.pack(x, bits)
    return blockfloat.pack(x, bits)


def restore(packed: Tensor, shape: Sequence[int], bits: int, dtype: torch.dtype) -> Tensor:
    """`kernels.blockfloat.reference.unpack`."""
    if dispatch.has_kernels(packed.device, "storage"):
        from kernels.blockfloat.triton import store as triton_store

        return triton_store.unpack(packed, torch.Size(shape), bits, dtype)
    return blockfloat.unpack(packed, shape, bits, dtype)


def norm_store(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`kernels.blockfloat.layers.norm_store`."""
    if dispatch.has_kernels(x.device, "storage"):
        from kernels.blockfloat.triton import norm as triton_store_norm

        return triton_store_norm.norm_store(x, weight, bias, eps, bits, dtype)
    return blockfloat_layers.norm_store(x, weight, bias, eps, bits, dtype)


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


def ffn_store(
    gate: Tensor, up: Tensor | None, bits: int, gelu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.blockfloat.layers.ffn_store`."""
    if dispatch.has_kernels(gate.device, "storage"):
        from kernels.blockfloat.triton import ffn as triton_store_ffn

        return triton_store_ffn.ffn_store(gate, up, bits, gelu)
    return blockfloat_layers.ffn_store(gate, up, bits, gelu)


def ffn_backward(
    grad: Tensor, packed_gate: Tensor, packed_up: Tensor | None, bits: int, gelu: bool = False
) -> Tensor:
    """`kernels.blockfloat.layers.ffn_backward`. Overwrites `grad` with the activations."""
    if dispatch.has_kernels(grad.device, "storage"):
        from kernels.blockfloat.triton import ffn as triton_store_ffn

        return triton_store_ffn.ffn_backward(grad, packed_gate, packed_up, bits, gelu)
    return blockfloat_layers.ffn_backward(grad, packed_gate, packed_up, bits, gelu)
