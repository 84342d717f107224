"""The fixed-point quantizer's arithmetic in torch: symmetric, b bits, a scale for each tile of 64.

The constant c in TAH-Quant's `g -> Q(c g) / c` (eq. 24) would change nothing but rounding, because a tile's
scale follows its largest element; so c is 1. All arithmetic is fp32, and each operation rounds on its own, to
nearest even. y is the normalised g (`kernels.common.tiles`), m the largest |y_k| of a tile, L
= 2**(b - 1) - 1:

1. s = the smallest fp16 >= max(m / L, 2**-24).
2. q = rint(y * (1 / s)), from -L to L.
3. The stored code is q + L, from 0 to 2 L, in b bit-planes. It is 0 where a short tile is filled up.
4. Decoding: q * s (exact), times 2**e, clamped to the output dtype's finite range, rounded to it.
"""

from typing import NamedTuple

import torch

from kernels.common import bitplanes
from kernels.common.tiles import (
    TILE,
    blocks,
    normalised,
    powers_of_two,
    restore,
    short_tiles,
    step_for,
    tensor_exponent,
    tile_rows,
)


class FixedSections(NamedTuple):
    """The payload of n tiles in b bits, as views of one packed buffer."""

    scales: torch.Tensor  # fp16 [n]
    planes: torch.Tensor  # int64 [b, n], lowest bit first


def encode(x: torch.Tensor, out: FixedSections) -> torch.Tensor:
    """Quantize x (fp32, bf16 or fp16, `[..., C]`) into `out`; return its exponent (int32 0-d, on x's device).

    If the exponent is `tiles.NON_FINITE`, the contents of `out` are meaningless. Never waits for the device.
    """
    bits = out.planes.shape[0]
    limit = _limit(bits)
    exponent = tensor_exponent(x)
    factors = powers_of_two(-exponent)
    rows = tile_rows(x)
    for block in blocks(rows.shape[0], x.device):
        y = normalised(rows[block], factors)
        largest = torch.maximum(-y.amin(1), y.amax(1))
        step = step_for(largest, torch.full_like(largest, limit))
        out.scales[block] = step
        codes = y.mul_((1.0 / step.float())[:, None]).round_().add_(limit).to(torch.int32)
        out.planes[:8, block] = bitplanes.pack_planes(codes.to(torch.uint8), min(bits, 8))
        if bits > 8:
            out.planes[8:, block] = bitplanes.pack_planes((codes >> 8).to(torch.uint8), bits - 8)
    if short := x.shape[-1] % TILE:
        for words in out.planes:
            short_tiles(words, x.shape[-1]).bitwise_and_((1 << short) - 1)
    return exponent


def decode(sections: FixedSections, out: torch.Tensor, exponent: int) -> bool:
    """Decode `sections` into `out` (`[..., C]`, contiguous, fp32, bf16 or fp16).

    The caller must have checked that scales are finite and above zero. Returns whether all codes are in the
    range -L to L. If not, `out` is meaningless.
    """
    limit = _limit(sections.planes.shape[0])
    step = sections.scales.float()

    def tiles(block: slice) -> torch.Tensor:
        y = bitplanes.unpack_planes(sections.planes[:8, block]).to(torch.float32)
        if sections.planes.shape[0] > 8:
            high = bitplanes.unpack_planes(sections.planes[8:, block]).to(torch.float32)
            y.add_(high.mul_(256.0))
        return y.sub_(limit).mul_(step[block, None])

    restore(out, tiles, exponent)
    all_ones = sections.planes[0] & sections.planes[1]
    for plane in sections.planes[2:]:
        all_ones.bitwise_and_(plane)
    return not bool(all_ones.any())


def _limit(bits: int) -> float:
    return float(2 ** (bits - 1) - 1)
