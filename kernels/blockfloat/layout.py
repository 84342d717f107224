"""The layout of a stored tensor: block formats and their sizes in bytes. Does not import torch.

A tensor `[..., C]` is cut along its last dimension into blocks of 128 elements. A shorter last block of a row
is filled up with zeros. Blocks are numbered row by row. A uint8 buffer holds these sections, each aligned to
16 bytes:

    scales      bf16, one per block
    shards      the codes' bits, low bits first, in sections whose width is a power of two

A shard of w bits stores element i of a block at bits w * (i mod (8 / w)) of byte i div (8 / w), little
endian.

The formats are e2m(b - 3): sign, two exponent bits, b - 3 mantissa bits, gradual underflow. With 4 and 6 bits
they are OCP's E2M1 and E2M3 (Microscaling Formats 1.0, section 5.3), but the scale is bf16 instead of E8M0.
All widths have two exponent bits, because the scale already covers the range: with 8 bits, e2m5 has a quarter
of e4m3's error. 3 bits have four magnitudes, 1, 4, 8 and 14, and no zero. 16 bits are plain bf16 without a
scale.

If `APART` is added to the bits, one channel of 64 is stored separately in bf16 and is 0 in the blocks: those
with the largest sums of magnitudes (`kernels.blockfloat.outliers`). Two more sections follow the shards, each
aligned to 16 bytes: the indices of these channels, int32, ascending; and their values, row by row.
"""

from collections.abc import Sequence
from math import prod

BLOCK = 128
WIDTHS = (3, 4, 5, 6, 8, 16)
"""Bits of a code, including its sign."""
SHARDS = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,), 16: (16,)}
"""Widths of each format's shards, low bits first."""
APART = 64
"""Added to a format's bits if outlier channels are stored separately."""
OF_CHANNELS = 64
"""One channel of this many is stored separately."""
SMALL_MAGNITUDES = (1.0, 4.0, 8.0, 14.0)
"""The magnitudes that the codes of 3 bits stand for, in units of the scale.

Of the magnitudes tried they have the least error on blocks of normal, Laplace and Student (4 degrees of
freedom) numbers: 0.207, 0.242 and 0.272 relative. e2m0 has 0.239, 0.293 and 0.336.
"""
SMALL_THRESHOLDS = (2.5, 6.0, 11.0)
"""Above each of these the next magnitude is nearer."""

# Limits of a block's largest magnitude, as bits of fp32. Below the first the block is stored as zeros. From
# the second on, or if it is not finite, it is stored as NaNs. Between them neither scale nor reciprocal is
# subnormal.
SMALLEST_BITS = (127 - 100) << 23
TOO_LARGE_BITS = (127 + 126) << 23
NAN_SCALE = 0x7FC0


def mantissa(bits: int) -> int:
    """Mantissa bits of an e2m format."""
    return bits - 3


def limit(bits: int) -> float:
    """A format's largest magnitude in units of its smallest step. A block's largest element is scaled to
    it."""
    return SMALL_MAGNITUDES[-1] if bits == 3 else 8.0 * 2 ** mantissa(bits) - 4.0


def blocks_of(shape: Sequence[int]) -> int:
    """The number of blocks of a tensor of at least one dimension."""
    return prod(shape[:-1]) * -(-shape[-1] // BLOCK)


def payload_offset(blocks: int, bits: int) -> int:
    """The byte at which the first shard starts."""
    return 0 if bits == 16 else (2 * blocks + 15) // 16 * 16


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """The size in bytes of a tensor of this shape, stored in `bits`."""
    if bits >= APART:
        return values_apart_offset(shape, bits) + _aligned(2 * prod(shape[:-1]) * channels_apart(shape[-1]))
    blocks = blocks_of(shape)
    return payload_offset(blocks, bits) + blocks * BLOCK * bits // 8


def channels_apart(width: int) -> int:
    """How many of a tensor's channels are stored separately."""
    return -(-width // OF_CHANNELS)


def values_apart_offset(shape: Sequence[int], bits: int) -> int:
    """The byte at which the separate channels' values start, just after their indices."""
    return packed_bytes(shape, bits - APART) + _aligned(4 * channels_apart(shape[-1]))


def _aligned(size: int) -> int:
    return (size + 15) // 16 * 16
