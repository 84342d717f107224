"""e4m3 gradients and AdamW by device: Triton's kernels on a GPU, pieces on a CPU, and otherwise the
reference."""

from collections.abc import Iterator

from torch import Tensor

from kernels.common import dispatch
from kernels.common.random_bits import random_bits
from kernels.fp8 import reference
from kernels.fp8.layout import BLOCK, blocks
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
        for where, of_blocks in _pieces(addend.numel()):
            piece, noise = addend[where], None
            if salt is not None:
                noise = random_bits(piece.numel(), salt, piece.device, bits=ROUNDED_BITS, first=where.start)
            part = Fp8Gradient(gradient.codes[where], gradient.exponents[of_blocks])
            pack_gradient(unpack_gradient(part) + piece.float(), part, noise)
    else:
        reference.accumulate_gradient(gradient, addend, draw)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """`kernels.fp8.reference.sum_gradients`, with the same bits."""
    if dispatch.has_kernels(codes.device, "fp8"):
        from kernels.fp8 import triton

        triton.sum_gradients(codes, exponents, into)
    elif codes.device.type == "cpu":
        for where, of_blocks in _pieces(into.codes.numel()):
            part = Fp8Gradient(into.codes[where], into.exponents[of_blocks])
            reference.sum_gradients(codes[:, where], exponents[:, of_blocks], part)
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


def _pieces(elements: int) -> Iterator[tuple[slice, slice]]:
    """The elements and the blocks of each piece."""
    for start in range(0, elements, PIECE):
        end = min(start + PIECE, elements)
        yield slice(start, end), slice(start // BLOCK, blocks(end))
