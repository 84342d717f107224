"""Stored tensors with separate outlier channels, with the same bytes on a CPU and on a GPU.

Some channels of a model's hidden states are 20 to 1,000 times as large as the others. In a block of 128 such
a channel sets the scale, and the other elements lose their bits. As in Adacc (Chen et al. 2025, section 3.2,
equation 1), the channels with the largest sums of magnitudes are stored separately, here in bf16, and are 0
in the blocks. Adacc takes the channels whose sum lies 3 standard deviations above the mean. Here it is always
one channel of 64, so that the size depends only on the shape and nothing waits for the device.

The sums are sums of integers, so their order does not matter: |x| is divided by the largest magnitude's power
of two / 2**20 and rounded down. Elements that are not finite count as 0. Ties go to the lower channel.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from kernels.blockfloat.layout import APART, channels_apart, packed_bytes, values_apart_offset

STEPS = 20
"""The largest magnitude becomes an integer of one bit more than this."""


def pack(
    x: Tensor,
    bits: int,
    channel_sums: Callable[[Tensor, Tensor], Tensor],
    pack_rest: Callable[[Tensor, int, Tensor], Tensor],
) -> Tensor:
    """Store x in `bits`, which include `APART`: uint8 of `packed_bytes(x.shape, bits)`.

    Args:
        channel_sums: Computes the sums, int64 [C], from rows [R, C] and the result of `factor`.
        pack_rest: Stores x in bits without `APART`, as if the given channels, int64 [K], were 0.
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
    """Write the separate channels into `made`, the unpacked blocks of a stored tensor, in place."""
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
    """The sums over rows of |x| times `by`, rounded down, int64 [C], in plain torch."""
    scaled = rows.float().abs() * by
    # The comparison is False for a NaN.
    return torch.where(scaled < 2.0 ** (STEPS + 1), scaled, 0.0).to(torch.int64).sum(0)


def _sections(packed: Tensor, shape: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """The separate channels' indices, int32 [K], and values, bf16 [R, K], as views of the buffer."""
    count, rows = channels_apart(shape[-1]), prod(shape[:-1])
    first, values = packed_bytes(shape, bits - APART), values_apart_offset(shape, bits)
    numbers = packed[first : first + 4 * count].view(torch.int32)
    return numbers, packed[values : values + 2 * rows * count].view(torch.bfloat16).view(rows, count)
