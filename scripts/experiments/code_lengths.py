"""Bits that several entropy codes need for a quantizer's indices; `codec_choices` compares them."""

import math

import numpy as np
import torch

from kernels.trellis.tables import ESCAPE, FAMILIES, MAX_CLASS, MIDDLE, bits_of_counts, split, tables

TILE = 64
ESCAPED = 40.0
"""Upper limit of the bits of one index: a distribution's tails underflow."""


def static_bits(index: torch.Tensor, scale: torch.Tensor, half: torch.Tensor | float, extra: float) -> float:
    """Bits under a normal or a Laplace distribution, whichever is shorter.

    Args:
        scale: mean magnitude of the elements, in units of the index.
        half: 0.5 for odd multiples of the step, whose index is rounded down; else 0.
        extra: variance added to each element's own.
    """
    totals = []
    deviation = torch.sqrt((scale * math.sqrt(math.pi / 2)).square() + extra)
    for gaussian in (True, False):
        if gaussian:
            edges = [(index + half + side) / deviation * math.sqrt(0.5) for side in (-0.5, 0.5)]
            # Mirror to the left tail: a difference of two values near one would lose all digits.
            flip = edges[0] > 0
            low = torch.where(flip, -edges[1], edges[0])
            high = torch.where(flip, -edges[0], edges[1])
            share = 0.5 * (torch.erfc(-high) - torch.erfc(-low))
        else:
            width = deviation / math.sqrt(math.pi / 2)
            low, high = ((index + half + side) / width for side in (-0.5, 0.5))
            flip = low > 0
            low, high = torch.where(flip, -high, low), torch.where(flip, -low, high)
            share = torch.where(
                high <= 0,
                0.5 * (torch.exp(high.clamp_max(0)) - torch.exp(low.clamp_max(0))),
                1 - 0.5 * torch.exp(-high.clamp_min(0)) - 0.5 * torch.exp(low.clamp_max(0)),
            )
        totals.append(float(-torch.log2(share.clamp_min(2.0**-ESCAPED)).sum(dtype=torch.float64)))
    return min(totals)


def histogram_bits(index: torch.Tensor) -> float:
    """Entropy of the tensor's own histogram."""
    _, counts = torch.unique(index, return_counts=True)
    return float(-(counts * torch.log2(counts.double() / counts.sum())).sum())


def table_bits(index: torch.Tensor, scale: torch.Tensor) -> float:
    """Bits with the 12-bit tables of `trellis-R`, for even multiples of a step."""
    deviation = scale * math.sqrt(math.pi / 2)
    number = torch.round(12 + 4 * torch.log2(deviation.clamp_min(1e-9))).clamp(0, MAX_CLASS)
    table, shift = (torch.from_numpy(part).long() for part in split(number.numpy().astype(np.int32)))
    symbol = (index.long() >> shift) + MIDDLE
    totals = []
    for family in range(FAMILIES):
        counts = tables(family).frequency
        cost = torch.from_numpy(np.where(counts > 0, bits_of_counts()[counts], 0) / (1 << 16))
        known = (symbol >= 0) & (symbol < ESCAPE)
        place = torch.where(known, symbol, ESCAPE)
        known &= torch.from_numpy(counts)[2 * table, place] > 0
        place = torch.where(known, place, ESCAPE)
        totals.append(float((cost[2 * table, place] + torch.where(known, shift, 26)).sum()))
    return min(totals)


def rice_bits(index: torch.Tensor, scale: torch.Tensor, tiles: bool) -> float:
    """Length of Rice codes, with the best parameter of each tile or one derived from the scale."""
    symbol = 2 * index.abs() - (index > 0).to(index.dtype)
    if tiles:
        lengths = torch.stack([(torch.floor(symbol / 2**k) + 1 + k).view(-1, TILE).sum(1) for k in range(12)])
        least, chosen = lengths.min(0)
        # The parameter is sent instead of the scale.
        return float(least.sum()) + histogram_bits(chosen)
    mean = torch.log2((2 * scale).clamp_min(2.0**-8))
    totals = []
    for offset in (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25):
        k = torch.round(mean + offset).clamp(0, 20)
        totals.append(float((torch.floor(symbol / torch.exp2(k)) + 1 + k).sum(dtype=torch.float64)))
    return min(totals) + 8
