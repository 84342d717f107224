"""TAH-Quant's arithmetic in torch: the reference that every other implementation reproduces bit for bit.

Source: TAH-Quant, sections 3.1 to 3.4, with the sign of eq. 2 corrected; G = A = 64
(`kernels.common.tile_layout.TILE`).

**The exact arithmetic.** All values are IEEE fp32, and every operation below rounds on its own, to nearest
even: there is no fused multiply-add, and no product with a reciprocal where a division is written. Sums are
of integers below 2**24, so they are exact in any order. The normalised elements y come from
`kernels.common.tiles`. A tile is y_0 .. y_63 (a short one is filled up with zeros), and m is its largest
|y_k|.

1. *Entropy (eq. 1, 2).* Let 2**k <= m < 2**(k + 1), with k at least -63, and let n_j =
   rint(|y_j| * 2**(13 - k)), integers of at most 2**14. Let S = sum n_j and T = sum rint(n_j * log2(n_j)).
   Then H = log2(S) - T / S, which is -sum p_j log2 p_j for p_j = n_j / S. H is 0 if S is 0. No epsilons are
   needed, because a term with n_j = 0 is 0. `_log2` is the exponent bits plus f + f (1 - f) P(f), where f is
   the fraction. Tiles are ranked by the integer max(0, rint(H * 2**20)): the higher first, ties to the lower
   index.
2. *Bits (3.2).* The first `four_bit` tiles of every sample get 4 bits (15 steps), the others 3 (7 steps).
3. *Outliers (eq. 3).* A tile is an outlier tile if exactly one |y_k| >= m / 2 - 2**-24. That is r > tau with
   tau = 2 (`OUTLIER_RATIO`) and 2**-24 as epsilon, which is relative to the tensor, because y is normalised.
4. *Rotation (eq. 4).* Swap y_0 and y_pivot. For h = 1, 2, 4 .. 32 replace each pair (y_i, y_{i+h}), i without
   bit h, by (y_i + y_{i+h}, y_i - y_{i+h}). Multiply by 1/8. The inverse is the same butterfly, then the
   swap.
5. *Scale and zero-point.* z is the largest fp16 <= min. s is the smallest fp16 >= (max - z) / steps, but at
   least 2**-24. So z + steps * s reaches max, except for fp32's rounding. In a short tile that is not
   rotated, min and max are those of its real elements. A min below 2**-100 in magnitude counts as 0. The
   scale of a rotated tile is stored as -s.
6. *Codes.* q = rint((y - z) * (1 / s)), in 0 .. steps. It is 0 where a short tile that is not rotated is
   filled up.
7. *Decoding.* y = q * s + z (q * s is exact), rotated back if the scale is negative, times 2**e, clamped to
   the output dtype's finite range, rounded to it.
"""

from typing import NamedTuple

import torch

from kernels.common import bitplanes
from kernels.common.tile_layout import LOW_PLANES as LOW_PLANES
from kernels.common.tile_layout import OUTLIER_RATIO
from kernels.common.tiles import (
    TILE,
    blocks,
    floor_to_half,
    normalised,
    powers_of_two,
    restore,
    short_tiles,
    step_for,
    tensor_exponent,
    tile_rows,
)

EPSILON = 2.0**-24

# log2(1 + f) = f + f (1 - f) (C0 + C1 f + C2 f^2 + C3 f^3), minimax on [0, 1], exact at both ends.
_LOG2 = (
    float.fromhex("0x1.c485e6p-2"),
    float.fromhex("-0x1.11977ap-2"),
    float.fromhex("0x1.2ffa4ap-3"),
    float.fromhex("-0x1.71dc5ep-5"),
)
_RANK_UNIT = 2.0**20


class TahSections(NamedTuple):
    """The payload of n tiles, as views of one packed buffer."""

    scales: torch.Tensor  # fp16 [n], negative for rotated tiles
    zero_points: torch.Tensor  # fp16 [n]
    bit_map: torch.Tensor  # uint8 [ceil(n / 8)], a set bit for each 4-bit tile
    pivots: torch.Tensor  # uint8 [ceil(6 n / 8)], 6 bits a tile, 0 if not rotated
    low_planes: torch.Tensor  # int64 [3, n]
    fourth_planes: torch.Tensor  # int64 [4-bit tiles], in the order of the tiles


def encode(x: torch.Tensor, out: TahSections, *, samples: int, four_bit: int) -> torch.Tensor:
    """Quantize x (fp32, bf16 or fp16, `[..., C]`) into `out`; return its exponent (int32 0-d, on x's device).

    If the exponent is `tiles.NON_FINITE`, the contents of `out` are meaningless.

    Args:
        samples: The number of equal parts of the rows, in order.
        four_bit: The number of 4-bit tiles in each sample.
    """
    exponent = tensor_exponent(x)
    factors = powers_of_two(-exponent)
    rows = tile_rows(x)
    n = rows.shape[0]
    low = torch.empty(n, dtype=torch.float32, device=x.device)
    high = torch.empty_like(low)
    outlier = torch.empty(n, dtype=torch.bool, device=x.device)
    rank = torch.empty(n, dtype=torch.int64, device=x.device)
    for block in blocks(n, x.device):
        y = normalised(rows[block], factors)
        torch.amin(y, 1, out=low[block])
        torch.amax(y, 1, out=high[block])
        outlier[block], rank[block] = _outliers_and_entropy(y, low[block], high[block])

    four = _highest(rank.view(samples, -1), four_bit)
    steps = torch.where(four, 15.0, 7.0)
    width = x.shape[-1]
    if short := width % TILE:
        real = normalised(x.reshape(-1, width)[:, -short:], factors)
        short_tiles(low, width).copy_(real.amin(1))
        short_tiles(high, width).copy_(real.amax(1))

    pivot = torch.zeros(n, dtype=torch.int64, device=x.device)
    fourth = torch.empty(n, dtype=torch.int64, device=x.device)
    for block in blocks(n, x.device):
        y = normalised(rows[block], factors)
        turned = outlier[block].nonzero().squeeze(1)
        if turned.numel():
            rotated, pivot[block][turned] = rotate(y[turned])
            y[turned] = rotated
            low[block][turned] = rotated.amin(1)
            high[block][turned] = rotated.amax(1)
        zero_point = floor_to_half(low[block])
        base = zero_point.float()
        step = step_for(high[block] - base, steps[block])
        y.sub_(base[:, None]).mul_((1.0 / step.float())[:, None]).round_()
        # Only the elements that fill up short tiles lie outside; their codes are erased below.
        codes = y.clamp_(0, 15).to(torch.int32).to(torch.uint8)
        planes = bitplanes.pack_planes(codes, LOW_PLANES + 1)
        out.zero_points[block] = zero_point
        out.scales[block] = torch.where(outlier[block], -step, step)
        out.low_planes[:, block] = planes[:LOW_PLANES]
        fourth[block] = planes[LOW_PLANES]

    if short:
        keep = torch.where(short_tiles(outlier, width), -1, (1 << short) - 1)
        for words in (*out.low_planes, fourth):
            short_tiles(words, width).bitwise_and_(keep)
    out.fourth_planes.copy_(fourth[four])
    out.bit_map.copy_(bitplanes.pack_flags(four))
    out.pivots.copy_(bitplanes.pack_sextets(pivot))
    return exponent


def decode(sections: TahSections, out: torch.Tensor, exponent: int) -> None:
    """Decode `sections` into `out` (`[..., C]`, contiguous, fp32, bf16 or fp16).

    The caller must have checked that scales are finite and not zero, that zero-points are finite, and that
    the bit-map has as many set bits as there are fourth planes.
    """
    n = sections.scales.numel()
    four = bitplanes.unpack_flags(sections.bit_map, n)
    pivot = bitplanes.unpack_sextets(sections.pivots, n)
    outlier = sections.scales < 0
    planes = torch.zeros(LOW_PLANES + 1, n, dtype=torch.int64, device=out.device)
    planes[:LOW_PLANES] = sections.low_planes
    planes[LOW_PLANES][four] = sections.fourth_planes
    step = sections.scales.float().abs_()
    base = sections.zero_points.float()

    def tiles(block: slice) -> torch.Tensor:
        y = bitplanes.unpack_planes(planes[:, block]).to(torch.float32)
        y.mul_(step[block, None]).add_(base[block, None])
        turned = outlier[block].nonzero().squeeze(1)
        if turned.numel():
            y[turned] = unrotate(y[turned], pivot[block][turned])
        return y

    restore(out, tiles, exponent)


def rotate(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move each tile's largest element to position 0 and transform. y is fp32 `[m, 64]` and is not changed.

    Returns the rotated tiles and the pivots, int64 `[m]`.
    """
    pivot = y.abs().argmax(1)
    return _hadamard(_swap(y, pivot)), pivot


def unrotate(y: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    """Inverse of `rotate`."""
    return _swap(_hadamard(y), pivot)


def entropy_bits(n: torch.Tensor) -> torch.Tensor:
    """The entropy of tiles of integer magnitudes (fp32 `[t, 64]`, at most 2**14), in units of 2**-20 bits,
    int32 `[t]`."""
    total = n.sum(1)
    weighted = _log2(n).mul_(n).round_().sum(1)
    bits = torch.where(total > 0, _log2(total) - weighted / total, 0.0)
    return bits.mul_(_RANK_UNIT).round_().clamp_min_(0).int()


def _outliers_and_entropy(
    y: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 3 and 1 of the module's list for fp32 `[t, 64]`, which is overwritten."""
    largest = torch.maximum(-low, high)
    exponent_bits = (largest.view(torch.int32) >> 23).clamp_min_(64)
    factor = ((267 - exponent_bits) << 23).view(torch.float32)
    magnitude = y.mul_(factor[:, None]).abs_()
    # Both sides carry the same power of two, so the comparison is that of the unscaled values.
    threshold = (largest / OUTLIER_RATIO - EPSILON) * factor
    near = (magnitude >= threshold[:, None]).view(torch.int64).sum(1)
    # Each byte of `near` counts an eighth of the tile. A total of one is a single set bit, the lowest of a
    # byte.
    single = ((near & (near - 1)) == 0) & ((near & 0x0101010101010101) == near)
    return single, entropy_bits(magnitude.round_())


def _log2(n: torch.Tensor) -> torch.Tensor:
    """log2 of integers from 1 to 2**20 in fp32, within 3e-5. It is finite for 0, and no library call rounds
    it."""
    log = n.view(torch.int32).to(torch.float32).mul_(2.0**-23).sub_(127.0)
    f = log - log.floor()
    c0, c1, c2, c3 = _LOG2
    p = (f * c3).add_(c2).mul_(f).add_(c1).mul_(f).add_(c0)
    return log.add_(p.mul_((1.0 - f).mul_(f)))


def _highest(rank: torch.Tensor, count: int) -> torch.Tensor:
    """Flags of the `count` highest of each row of `[samples, tiles]`, flat bool. Ties go to the lower
    index."""
    if count == 0:
        return torch.zeros_like(rank, dtype=torch.bool).view(-1)
    tiles = rank.shape[1]
    # The keys are unique, so the result does not depend on how a sort treats equal ones.
    keys = (rank << 32) | torch.arange(tiles - 1, -1, -1, device=rank.device)
    threshold = torch.kthvalue(keys, tiles - count + 1, dim=1, keepdim=True).values
    return (keys >= threshold).view(-1)


def _swap(y: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    """A copy of `[m, 64]` with elements 0 and pivot exchanged in every row."""
    index = torch.arange(TILE, device=y.device).repeat(y.shape[0], 1)
    index.scatter_(1, pivot[:, None], 0)
    index[:, 0] = pivot
    return y.gather(1, index)


def _hadamard(y: torch.Tensor) -> torch.Tensor:
    h = 1
    while h < TILE:
        pairs = y.view(-1, TILE // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((a + b, a - b), dim=2).view(-1, TILE)
        h *= 2
    return y.mul_(0.125)
