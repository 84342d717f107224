"""Which implementation runs on a device, what decoders report, and the launch sizes of the Triton kernels.

Imports no Triton, which only machines with a GPU have.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec

import torch

# What a decoder found wrong. Of several faults the largest number is reported.
BAD_CODE = 1
BAD_SCALE = 2
NON_FINITE = 4


@cache
def has_kernels(device_type: str) -> bool:
    """Whether there are Triton kernels for tensors on such a device."""
    return device_type == "cuda" and find_spec("triton") is not None


class Room(Enum):
    """How large the tiles of products may be on a device. The bits of their sums follow from it."""

    LARGE = "200 KiB of shared memory a program, as H100, H200 and B200 have"
    SMALL = "64 KiB and more"
    NONE = "the same, and no tensor cores that Triton uses: GPUs before A100"


@cache
def room(device: torch.device) -> Room:
    """Of a GPU; of the CPU, where the interpreter runs, that of the smallest."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return Room.NONE
    properties = torch.cuda.get_device_properties(device)
    large = getattr(properties, "shared_memory_per_block_optin", 0) >= 200 << 10
    return Room.LARGE if large else Room.SMALL


@dataclass(frozen=True, slots=True)
class Launch:
    """Tiles a program handles (a power of two, at least 16) and its warps. They change no bit."""

    tiles: int
    warps: int

    def statuses(self, scales: torch.Tensor) -> torch.Tensor:
        """An int32 for each program of a decoder, one scale a tile; not initialized."""
        return scales.new_empty((scales.numel() + self.tiles - 1) // self.tiles, dtype=torch.int32)


FIXED_ENCODE = Launch(tiles=128, warps=4)
FIXED_FINISH = Launch(tiles=2048, warps=16)
FIXED_DECODE = Launch(tiles=32, warps=2)

TAH_MEASURE = Launch(tiles=128, warps=4)
TAH_QUANTIZE = Launch(tiles=32, warps=1)
TAH_DECODE = Launch(tiles=32, warps=1)
# For programs that handle metadata alone.
TAH_SELECT = Launch(tiles=4096, warps=16)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one has ended: CUDA's programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
