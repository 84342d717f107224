"""How many tiles a tensor has. Imports no torch; `kernels.common.tiles` has the arithmetic."""

TILE = 64
LOW_PLANES = 3
"""Bit-planes that every tile of `tah` has; those of 4 bits have one more."""


def tiles_per_row(width: int) -> int:
    """Tiles in a row of `width` elements."""
    return -(-width // TILE)
