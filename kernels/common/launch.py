"""How the Triton kernels are spread over a GPU. Without Triton, which only machines with a GPU have."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles of a program (a power of two, at least 16), and its warps. No bit depends on them."""

    tiles: int
    warps: int


FIXED_ENCODE = Launch(tiles=128, warps=4)
FIXED_FINISH = Launch(tiles=2048, warps=16)
FIXED_DECODE = Launch(tiles=32, warps=2)

TAH_MEASURE = Launch(tiles=128, warps=4)
TAH_QUANTIZE = Launch(tiles=32, warps=1)
TAH_DECODE = Launch(tiles=32, warps=1)
# Programs that handle metadata alone.
TAH_SELECT = Launch(tiles=4096, warps=16)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel's programs may be placed before the kernel before it has ended (CUDA's programmatic
    dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
