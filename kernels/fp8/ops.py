"""e4m3 gradients and AdamW by device: Triton's kernels on a GPU, pieces on a CPU, and otherwise the
reference."""

from torch import Tensor

from kernels.common import dispatch
from kernels.common.random_bits import random_bits
from kernels.fp8 import reference
from kernels.fp8.layout import BLOCK
from kernels.fp8.reference import (
    ROUNDED_BITS,
    Draw,
    Fp8Gradient,
    Moment,
    pack_gradient,
    unpack_gradient,
)

PIECE = 1 << 17
"""The elements of a piece on a CPU. The reference allocates a dozen tensors as long as its arguments. Getting
fresh memory from the system takes longer than the arithmetic; a piece's memory is used again for the next
one."""


def accumulate_gradient(gradient: Fp8Gradient, addend: Tensor, draw: Draw | None = None) -> None:
    """`kernels.fp8.reference.accumulate_gradient`, with the same bits."""
    if dispatch.has_kernels(addend.device, "fp8"):
        from kernels.fp8 import triton

        triton.accumulate_gradient(gradient, addend, draw)
    elif addend.device.type == "cpu":
        salt = None if draw is None else draw.salt
        for first in range(0, addend.numel(), PIECE):
            piece, noise = addend[first : first + PIECE], None
            if salt is not None:
                noise = random_bits(piece.numel(), salt, piece.device, bits=ROUNDED_BITS, first=first)
            part = gradient.part(first, first + PIECE)
            pack_gradient(unpack_gradient(part) + piece.float(), part, noise)
    else:
        reference.accumulate_gradient(gradient, addend, draw)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """`kernels.fp8.reference.sum_gradients`, with the same bits."""
    if dispatch.has_kernels(codes.device, "fp8"):
        from kernels.fp8 import triton

        triton.sum_gradients(codes, exponents, into)
    elif codes.device.type == "cpu":
        for first in range(0, into.codes.numel(), PIECE):
            end = first + PIECE
            of_blocks = slice(first // BLOCK, end // BLOCK)
            reference.sum_gradients(codes[:, first:end], exponents[:, of_blocks], into.part(first, end))
    else:
        reference.sum_gradients(codes, exponents, into)


def momentum_step(
    gradient: Tensor | Fp8Gradient, mean: Moment, momentum: float, clip_coefficient: float
) -> Tensor:
    """`kernels.fp8.reference.momentum_step`. On a GPU the last bits of logarithms may differ."""
    if dispatch.has_kernels(mean.codes.device, "fp8"):
        from kernels.fp8 import triton

        return triton.momentum_step(gradient, mean, momentum, clip_coefficient)
    return reference.momentum_step(gradient, mean, momentum, clip_coefficient)


# On a GPU the last bits of the moments' logarithms may differ.
adamw_step = dispatch.by_device("fp8", f"{__package__}.triton", reference.adamw_step)
