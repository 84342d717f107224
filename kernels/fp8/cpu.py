"""Sums of e4m3 gradients on a CPU, in pieces that fit its cache, with the same bits as
`kernels.fp8.reference`.

The reference allocates a dozen tensors as long as the gradient. Getting fresh memory from the system takes
longer than the arithmetic. Here all results go to a few short buffers.
"""

import torch
from torch import Tensor

from kernels.common.random_bits import random_bits
from kernels.fp8 import reference
from kernels.fp8.layout import BLOCK, blocks
from kernels.fp8.reference import (
    LARGEST,
    NON_FINITE,
    ROUNDED_BITS,
    SMALLEST_EXPONENT,
    Fp8Gradient,
    pack_gradient,
    power_of_two,
    unpack_gradient,
)

PIECE = 1 << 16
"""Elements to round stochastically at a time."""
PIECE_BLOCKS = 1024
"""Blocks to sum at a time: 131,072 elements, 1.3 MB of buffers."""
_MOST_EXPONENT = 119
"""The largest exponent e for which 2**(e + 8) is an fp32 number."""


class _Buffers:
    """Scratch memory for a piece of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        elements = blocks * BLOCK
        self.wide = torch.empty(elements, dtype=torch.int16)
        self.values = torch.empty(elements)
        self.total = torch.empty(elements)


def accumulate_gradient(gradient: Fp8Gradient, addend: Tensor, salt: int) -> None:
    """`kernels.fp8.reference.accumulate_gradient` with random bits drawn from `salt`."""
    for start in range(0, addend.numel(), PIECE):
        piece = addend[start : start + PIECE]
        noise = random_bits(piece.numel(), salt, piece.device, bits=ROUNDED_BITS, first=start)
        part = Fp8Gradient(
            gradient.codes[start : start + PIECE],
            gradient.exponents[start // BLOCK : blocks(start + piece.numel())],
        )
        pack_gradient(unpack_gradient(part) + piece.float(), part, noise)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """`kernels.fp8.reference.sum_gradients` of contiguous rows."""
    whole = into.codes.numel() // BLOCK
    plain = whole > 0 and bool(((exponents > NON_FINITE) & (exponents <= _MOST_EXPONENT)).all())
    done = 0
    if plain:
        # The scale includes the factor 2**8 by which the fp16 numbers are too small.
        scales = power_of_two(exponents.int().clamp(min=SMALLEST_EXPONENT) + 8)
        buffers = _Buffers(min(PIECE_BLOCKS, whole))
        while done < whole:
            end = min(done + PIECE_BLOCKS, whole)
            if not _sum_piece(codes, scales, into, done, end, buffers):
                break
            done = end
    if done < len(into.exponents):
        # A last block that is not full, or sums that are not finite.
        rest = slice(done * BLOCK, None)
        reference.sum_gradients(
            codes[:, rest], exponents[:, done:], Fp8Gradient(into.codes[rest], into.exponents[done:])
        )


def _sum_piece(
    codes: Tensor, scales: Tensor, into: Fp8Gradient, start: int, end: int, buffers: _Buffers
) -> bool:
    """Sum blocks `start` to `end`. If a sum is not finite, write nothing and return False."""
    count, where = (end - start) * BLOCK, slice(start * BLOCK, end * BLOCK)
    total, values = buffers.total[:count], buffers.values[:count]
    for number in range(len(codes)):
        decoded = values if number else total
        _decode(codes[number, where], buffers.wide[:count], decoded)
        decoded.view(-1, BLOCK).mul_(scales[number, start:end, None])
        if number:
            total.add_(values)
    rows = total.view(-1, BLOCK)
    torch.abs(total, out=values)
    largest = values.view(-1, BLOCK).amax(dim=1)
    # As in `kernels.fp8.reference.pack_gradient`.
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent.sub_(9).add_(mantissa > LARGEST / 512)
    exponent = torch.where(largest > 0, exponent, SMALLEST_EXPONENT).clamp_(min=SMALLEST_EXPONENT)
    if not torch.isfinite(largest).all():
        return False
    rows.mul_(power_of_two(-exponent)[:, None])
    into.codes[where].view(torch.float8_e4m3fn).copy_(total)
    into.exponents[start:end].copy_(exponent)
    return True


def _decode(codes: Tensor, wide: Tensor, into: Tensor) -> None:
    """e4m3 codes in fp32, divided by 2**8: their bits are read as those of an fp16 number."""
    wide.copy_(codes)
    # The sign is shifted out, and then in again as two copies, of which the mask removes the lower one.
    wide.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(-0x4080)
    into.copy_(wide.view(torch.float16))
