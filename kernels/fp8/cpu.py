"""`kernels.fp8.reference` on a CPU, a piece of the gradient at a time, with the same bits.

The reference allocates a dozen tensors as long as its arguments. Getting fresh memory from the system takes
longer than the arithmetic; the memory of a piece is used again for the next one.
"""

from collections.abc import Iterator

from torch import Tensor

from kernels.common.random_bits import random_bits
from kernels.fp8 import reference
from kernels.fp8.layout import BLOCK, blocks
from kernels.fp8.reference import ROUNDED_BITS, Fp8Gradient, pack_gradient, unpack_gradient

PIECE = 1 << 17
"""Elements at a time."""


def accumulate_gradient(gradient: Fp8Gradient, addend: Tensor, salt: int | None) -> None:
    """`kernels.fp8.reference.accumulate_gradient` with random bits drawn from `salt`, if there is one."""
    for where, of_blocks in _pieces(addend.numel()):
        piece, noise = addend[where], None
        if salt is not None:
            noise = random_bits(piece.numel(), salt, piece.device, bits=ROUNDED_BITS, first=where.start)
        part = Fp8Gradient(gradient.codes[where], gradient.exponents[of_blocks])
        pack_gradient(unpack_gradient(part) + piece.float(), part, noise)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """`kernels.fp8.reference.sum_gradients`."""
    for where, of_blocks in _pieces(into.codes.numel()):
        part = Fp8Gradient(into.codes[where], into.exponents[of_blocks])
        reference.sum_gradients(codes[:, where], exponents[:, of_blocks], part)


def _pieces(elements: int) -> Iterator[tuple[slice, slice]]:
    """The elements and the blocks of each piece."""
    for start in range(0, elements, PIECE):
        end = min(start + PIECE, elements)
        yield slice(start, end), slice(start // BLOCK, blocks(end))
