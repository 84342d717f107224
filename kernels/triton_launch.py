"""How the Triton kernels are spread over a GPU. Without Triton, which only machines with a GPU have."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of a program, neighbouring threads that share a tile, and warps. No bit depends on them."""

    tiles: int
    lanes: int
    warps: int


FIXED_ENCODE = Launch(tiles=32, lanes=4, warps=1)
FIXED_FINISH = Launch(tiles=512, lanes=8, warps=4)
FIXED_DECODE = Launch(tiles=16, lanes=8, warps=1)

TAH_MEASURE = Launch(tiles=16, lanes=4, warps=1)
TAH_AGAIN = Launch(tiles=16, lanes=4, warps=1)
TAH_DECODE = Launch(tiles=16, lanes=8, warps=1)
TAH_TURN_BACK = Launch(tiles=16, lanes=8, warps=4)
# Tiles of a program that handles metadata alone, and its warps.
TAH_CHUNK = 1024
TAH_CHUNK_WARPS = 4
