"""Bit-planes: bit i of a plane's 64-bit word belongs to element i of its tile (little endian throughout).

There is one word per tile and plane, stored plane by plane. So any width from 1 to 16 bits packs densely, and
a tile may have fewer planes than its neighbour.
"""

import torch

from kernels.common.tiles import TILE

_BYTES = TILE // 8

# Hacker's Delight 7-3: swap blocks of 1, 2 and 4 bits across the diagonal of an 8 x 8 bit matrix.
_SWAPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def _transpose_bits(words: torch.Tensor) -> torch.Tensor:
    """Transpose each int64 as an 8 x 8 bit matrix (byte = row), in place. The function is its own inverse."""
    for shift, mask in _SWAPS:
        # The masks are zero at all bits into which an arithmetic shift brings the sign.
        swap = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(swap).bitwise_xor_(swap.bitwise_left_shift_(shift))
    return words


def pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The lowest `bits` (1 to 8) bits of codes, uint8 `[n, 64]`, as int64 `[bits, n]`, lowest bit first.

    The codes are overwritten.
    """
    _transpose_bits(codes.view(torch.int64))
    planes = codes.view(-1, _BYTES, 8).permute(2, 0, 1)[:bits].contiguous()
    return planes.view(bits, -1).view(torch.int64)


def unpack_planes(planes: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_planes`: int64 `[bits, n]`, with 1 to 8 bits, to uint8 `[n, 64]`."""
    bits, tiles = planes.shape
    codes = torch.zeros(tiles, _BYTES, 8, dtype=torch.uint8, device=planes.device)
    codes[:, :, :bits] = planes.contiguous().view(torch.uint8).view(bits, tiles, _BYTES).permute(1, 2, 0)
    _transpose_bits(codes.view(torch.int64))
    return codes.view(tiles, TILE)


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    """Bool `[n]` to uint8 `[ceil(n / 8)]`, lowest bit first, padded with zeros."""
    padded = torch.zeros(-(-flags.numel() // 8) * 8, dtype=torch.uint8, device=flags.device)
    padded[: flags.numel()] = flags
    return _transpose_bits(padded.view(torch.int64)).view(torch.uint8)[::8].contiguous()


def unpack_flags(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `pack_flags`: bool `[count]`."""
    places = 1 << torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) & places).view(-1)[:count] != 0


def pack_sextets(values: torch.Tensor) -> torch.Tensor:
    """Integers below 64, `[n]`, to uint8 `[ceil(6 n / 8)]`. Value i has bits 6 i to 6 i + 5."""
    count = values.numel()
    padded = torch.zeros(-(-count // 4), 4, dtype=torch.int32, device=values.device)
    padded.view(-1)[:count] = values
    words = (padded << torch.arange(0, 24, 6, device=values.device)).sum(1, dtype=torch.int32)
    return words.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)[: -(-count * 6 // 8)]


def unpack_sextets(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `pack_sextets`: int64 `[count]`."""
    padded = torch.zeros(-(-count // 4) * 3, dtype=torch.int64, device=packed.device)
    padded[: packed.numel()] = packed
    words = (padded.view(-1, 3) << torch.arange(0, 24, 8, device=packed.device)).sum(1, keepdim=True)
    return ((words >> torch.arange(0, 24, 6, device=packed.device)) & 63).view(-1)[:count]
