"""The layout of a stored tensor: block formats and their sizes in bytes. Imports no torch.

A tensor `[..., C]` is cut along its last dimension into blocks of 128 elements; a row's last block that is
shorter is filled up with zeros. Blocks are numbered row by row. One uint8 buffer holds sections, each from
a multiple of 16 bytes:

    scales      bf16, one a block
    shards      the codes' bits, low bits first, in sections whose width is a power of two

A shard of w bits puts element i of a block at bits w * (i mod (8 / w)) of byte i div (8 / w), little endian.

The formats are e2m(b - 3): sign, two exponent bits, b - 3 mantissa bits, gradual underflow; at 4 and 6 bits
those are OCP's E2M1 and E2M3 (Microscaling Formats 1.0, section 5.3), with a bf16 scale in place of E8M0. Two
exponent bits for all widths, because the scale already gives the range: at 8 bits e2m5 has a quarter of
e4m3's error. 3 bits have four magnitudes, 1, 4, 8 and 14, and no zero. 16 bits are bf16 itself, unscaled.

With `APART` added to the bits, one channel of 64, those with the largest sums of magnitudes, is kept apart in
bf16 and is 0 in the blocks (`kernels.blockfloat.outliers`). Behind the shards follow, each from a multiple of
16 bytes, the numbers of these channels, int32, ascending, and their values, row by row.
"""

from collections.abc import Sequence
from math import prod

BLOCK = 128
WIDTHS = (3, 4, 5, 6, 8, 16)
"""Bits of a code, its sign included."""
SHARDS = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,), 16: (16,)}
"""Widths of each format's shards, low bits first."""
APART = 64
"""Added to the bits of a format: some channels are apart."""
OF_CHANNELS = 64
"""One channel of so many is apart."""
SMALL_MAGNITUDES = (1.0, 4.0, 8.0, 14.0)
"""What the codes of 3 bits stand for, in scales: of those tried the least error on blocks of normal, Laplace
and Student (4 degrees) numbers alike (0.207, 0.242 and 0.272 relative; e2m0 has 0.239, 0.293 and 0.336)."""
SMALL_THRESHOLDS = (2.5, 6.0, 11.0)
"""Above these the next magnitude is nearer."""

# Largest magnitudes, as bits of fp32: a block whose largest lies below the first is stored as zeros, one that
# reaches the second, or is no number, as NaNs. Between them no scale and no reciprocal is subnormal.
SMALLEST_BITS = (127 - 100) << 23
TOO_LARGE_BITS = (127 + 126) << 23
NAN_SCALE = 0x7FC0


def mantissa(bits: int) -> int:
    """Mantissa bits of an e2m format."""
    return bits - 3


def limit(bits: int) -> float:
    """A format's largest magnitude, in its smallest steps: what a block's largest element becomes."""
    return SMALL_MAGNITUDES[-1] if bits == 3 else 8.0 * 2 ** mantissa(bits) - 4.0


def blocks_of(shape: Sequence[int]) -> int:
    """Blocks of a tensor of at least one dimension."""
    return prod(shape[:-1]) * -(-shape[-1] // BLOCK)


def payload_offset(blocks: int, bits: int) -> int:
    """Where the first shard starts."""
    return 0 if bits == 16 else (2 * blocks + 15) // 16 * 16


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a tensor of this shape, stored in `bits`."""
    if bits >= APART:
        return values_apart_offset(shape, bits) + _aligned(2 * prod(shape[:-1]) * channels_apart(shape[-1]))
    blocks = blocks_of(shape)
    return payload_offset(blocks, bits) + blocks * BLOCK * bits // 8


def channels_apart(width: int) -> int:
    """How many of a tensor's channels are kept apart."""
    return -(-width // OF_CHANNELS)


def values_apart_offset(shape: Sequence[int], bits: int) -> int:
    """Where the values of the channels apart start; their numbers end there."""
    return packed_bytes(shape, bits - APART) + _aligned(4 * channels_apart(shape[-1]))


def _aligned(size: int) -> int:
    return (size + 15) // 16 * 16
