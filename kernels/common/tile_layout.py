"""The number of tiles of a tensor. This module imports no torch; `kernels.common.tiles` has the
arithmetic."""

TILE = 64
LOW_PLANES = 3
"""The bit-planes that every tile of `tah` has. Tiles of 4 bits have one more."""
OUTLIER_RATIO = 2.0
"""tau of `tah`: the ratio of the two largest elements from which a tile counts as an outlier. Dividing by
this power of two is exact."""


def tiles_per_row(width: int) -> int:
    return -(-width // TILE)
