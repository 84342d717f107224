"""`kernels.tah.reference.decode` on a CPU, the same bits, by compiled loops.

Torch goes over a block of tiles again and again. Here a tile is decoded in the innermost cache and written
once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.loops import (
    add_plane,
    bits_to_fill,
    compiled,
    hadamard,
    inlined,
    ranges,
    run,
    store,
    two_factors,
    value_of_half,
)
from kernels.common.tiles import TILE
from kernels.tah.reference import LOW_PLANES


@inlined
def _pivot(pivots, t):
    """The 6 bits of tile t."""
    first, place = 6 * t >> 3, 6 * t & 7
    pivot = np.int64(pivots[first]) >> place
    if place > 2:
        pivot |= np.int64(pivots[first + 1]) << (8 - place)
    return pivot & 63


@compiled
def _dequantize(words, scale, zero_point, tile):
    """q * s + z of the 64 codes in the bytes of `words`."""
    step = value_of_half(np.int32(scale & 0x7FFF))
    base = value_of_half(np.int32(zero_point & 0x7FFF))
    if zero_point < 0:
        base = -base
    codes = words.view(np.uint8)
    for k in range(TILE):
        tile[k] = np.float32(np.int32(codes[k])) * step + base


@compiled
def _unpack(
    scales,
    zero_points,
    four,
    pivots,
    low_planes,
    fourth_planes,
    before,
    width,
    first,
    last,
    near,
    far,
    limit,
    half,
    out,
):
    """Step 7 of the reference's list for tiles `first` to `last`; `before`: 4-bit tiles before `first`."""
    per_row = (width + TILE - 1) // TILE
    tile = np.empty(TILE, dtype=np.float32)
    words = np.empty(8, dtype=np.uint64)
    for t in range(first, last):
        words[:] = 0
        for plane in range(LOW_PLANES):
            add_plane(words, low_planes[plane, t], plane)
        if four[t]:
            add_plane(words, fourth_planes[before], LOW_PLANES)
            before += 1
        _dequantize(words, scales[t], zero_points[t], tile)
        if scales[t] < 0:
            hadamard(tile)
            pivot = _pivot(pivots, t)
            tile[0], tile[pivot] = tile[pivot], tile[0]
        row, column = t // per_row, t % per_row * TILE
        store(tile, min(TILE, width - column), near, far, limit, half, out, row * width + column)


def decode(sections: Sequence[NDArray[Any]], out: torch.Tensor, exponent: int) -> None:
    """`kernels.tah.reference.decode` of the sections as arrays, those of fp16 as int16.

    The caller has checked the sections.
    """
    scales, zero_points, bit_map, pivots, low_planes, fourth_planes = sections
    n, width = scales.size, out.shape[-1]
    four = np.unpackbits(bit_map, count=n, bitorder="little").view(np.bool_)
    # With too few planes the loops would read past their end.
    if np.count_nonzero(four) != fourth_planes.size:
        raise ValueError(
            f"the bit-map has {np.count_nonzero(four)} of {n} tiles with 4 bits, but there are "
            f"{fourth_planes.size} fourth planes: check the bit-map before decoding"
        )
    near, far = two_factors(exponent)
    limit, half = np.float32(torch.finfo(out.dtype).max), out.dtype == torch.float16
    elements = bits_to_fill(out)
    planes = low_planes.view(np.uint64), fourth_planes.view(np.uint64)
    arrays = scales, zero_points, four, pivots, *planes

    def unpack(first: int, last: int) -> None:
        before = np.count_nonzero(four[:first])
        _unpack(*arrays, before, width, first, last, near, far, limit, half, elements)

    run(unpack, ranges(n))
