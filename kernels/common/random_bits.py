"""Random bits as a hash of (salt, element), for stochastic rounding.

There is no generator state: the same salt gives the same bits, however often and in whatever pieces they are
drawn. `kernels.common.triton.numbers` has the same hash.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
FIRST_FACTOR = 0x7FEB352D
SECOND_FACTOR = 0x846CA68B


def random_bits(
    count: int, salt: int | Tensor, device: torch.device, *, bits: int = 16, first: int = 0
) -> Tensor:
    """`bits` random bits, at most 31, for each element from `first` on, int32 [count].

    Args:
        salt: 32 bits; or int32 [1] on the device, which a CUDA graph reads at every replay.
    """
    return _hashed(_numbers(first, first + count, device), salt, bits)


def random_bits_of_columns(
    rows: int,
    columns: int,
    salt: int | Tensor,
    device: torch.device,
    *,
    bits: int = 16,
    first: int = 0,
    stride: int,
) -> Tensor:
    """`random_bits` for columns of a matrix: int32 [rows, columns]. Row r starts at element `first + r *
    stride`."""
    begins = _numbers(0, rows, device).mul_(signed(stride)).add_(signed(first % (1 << 32)))
    return _hashed(begins[:, None] + _numbers(0, columns, device), salt, bits)


def _numbers(first: int, end: int, device: torch.device) -> Tensor:
    """The numbers from `first` to `end`, as int32. It also holds the lower half of a larger number."""
    kind = torch.int32 if end <= 1 << 31 else torch.int64
    return torch.arange(first, end, dtype=kind, device=device).int()


def _hashed(x: Tensor, salt: int | Tensor, bits: int) -> Tensor:
    x.bitwise_xor_(salt if isinstance(salt, Tensor) else signed(salt))
    return _mix(x).bitwise_and_((1 << bits) - 1)


def mixed_on_device(numbers: Tensor) -> Tensor:
    """`mixed` for 32-bit numbers in an int32 tensor."""
    return _mix(numbers.clone())


def _mix(x: Tensor) -> Tensor:
    # A right shift of a signed number copies its sign. The masks remove the copies.
    shifted = (x >> 16).bitwise_and_(0xFFFF)
    x.bitwise_xor_(shifted).mul_(signed(FIRST_FACTOR))
    torch.bitwise_right_shift(x, 15, out=shifted).bitwise_and_(0x1FFFF)
    x.bitwise_xor_(shifted).mul_(signed(SECOND_FACTOR))
    torch.bitwise_right_shift(x, 16, out=shifted).bitwise_and_(0xFFFF)
    return x.bitwise_xor_(shifted)


def mixed(number: int) -> int:
    """Hash 32 bits to 32 bits, as `random_bits` does for elements. Similar salts give unrelated hashes."""
    number = ((number ^ (number >> 16)) * FIRST_FACTOR) & _MASK
    number = ((number ^ (number >> 15)) * SECOND_FACTOR) & _MASK
    return number ^ (number >> 16)


def signed(number: int) -> int:
    """The int32 with these 32 bits."""
    return (number + 2**31) % 2**32 - 2**31
