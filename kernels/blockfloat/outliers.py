"""Stored tensors with outlier channels apart, for a CPU and with the kernels of a GPU: the same bytes.

Some channels of a model's hidden states are 20 to 1,000 times as large as the others. In a block of 128 such
a channel sets the scale, and the other elements lose their bits. As in Adacc (Chen et al. 2025, section 3.2,
equation 1) the channels with the largest sums of magnitudes are kept as they are, here in bf16, and are 0 in
the blocks. Adacc takes the channels whose sum lies 3 standard deviations above the mean. Here it is always
one channel of 64, so that the size follows from the shape, and nothing waits for the device.

Sums are of integers, so that their order does not matter: |x| in steps of the largest's power of two / 2**20,
rounded down. What is not finite counts as 0 there. Of equal sums the lower channel goes first.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from kernels.blockfloat.layout import APART, channels_apart, packed_bytes, values_apart_offset

STEPS = 20
"""The largest magnitude becomes an integer of one bit more than these."""


def pack(
    x: Tensor,
    bits: int,
    channel_sums: Callable[[Tensor, Tensor], Tensor],
    pack_rest: Callable[[Tensor, int, Tensor], Tensor],
) -> Tensor:
    """Store x in `bits`, `APART` included: uint8 of `packed_bytes(x.shape, bits)`.

    Args:
        channel_sums: int64 [C] of rows [R, C] and what `factor` gives.
        pack_rest: stores x in bits without `APART`, as if these channels, int64 [K], were 0.
    """
    rows = x.reshape(-1, x.shape[-1])
    sums = channel_sums(rows, factor(rows))
    order = torch.sort(sums, descending=True, stable=True).indices
    numbers = order[: channels_apart(rows.shape[1])].sort().values
    packed = x.new_zeros(packed_bytes(x.shape, bits), dtype=torch.uint8)
    rest = pack_rest(x, bits - APART, numbers)
    packed[: len(rest)] = rest
    into_numbers, into_values = _sections(packed, x.shape, bits)
    into_numbers.copy_(numbers)
    into_values.copy_(rows.index_select(1, numbers))
    return packed


def put_back(made: Tensor, packed: Tensor, bits: int) -> Tensor:
    """`made`, the blocks of a stored tensor unpacked, with the channels that are apart, in place."""
    numbers, values = _sections(packed, made.shape, bits)
    rows = made.view(-1, made.shape[-1])
    return rows.index_copy_(1, numbers.long(), values.to(made.dtype)).view(made.shape)


def factor(rows: Tensor) -> Tensor:
    """The power of two, float32 [1], by which magnitudes are multiplied before they are rounded down."""
    if not rows.numel():
        return torch.ones(1, device=rows.device)
    least, most = rows.aminmax()
    largest = torch.maximum(least.abs(), most.abs()).float().view(1)
    exponent = (largest.view(torch.int32) >> 23) & 255
    return ((2 * 127 + STEPS - exponent).clamp(max=254) << 23).view(torch.float32)


def channel_sums(rows: Tensor, by: Tensor) -> Tensor:
    """Of |x| times `by`, rounded down, int64 [C]; in plain torch."""
    scaled = rows.float().abs() * by
    # A NaN fails the comparison.
    return torch.where(scaled < 2.0 ** (STEPS + 1), scaled, 0.0).to(torch.int64).sum(0)


def _sections(packed: Tensor, shape: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """The numbers of the channels apart, int32 [K], and their values, bf16 [R, K]: views of the buffer."""
    count, rows = channels_apart(shape[-1]), prod(shape[:-1])
    first, values = packed_bytes(shape, bits - APART), values_apart_offset(shape, bits)
    numbers = packed[first : first + 4 * count].view(torch.int32)
    return numbers, packed[values : values + 2 * rows * count].view(torch.bfloat16).view(rows, count)
