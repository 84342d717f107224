"""torch's allocator of GPU memory: expandable segments, and what the allocator holds.

A limit on a process counts what the allocator has reserved, and not what tensors take. With segments of
fixed size the allocator keeps the rest of each, and a tensor that fits in no single rest needs a new
segment. Plans whose tensors were estimated to take 0.1 to 1.9 GB less than the limit ran out
(scripts/results/memory_plan.json). Expandable segments are mapped in pages
(`node.tuning.device_memory.PAGE`). Before the allocator gives up, it unmaps every page that no tensor
touches and maps it where it is needed, so that only partly filled pages are lost. The plan counts those
(`Share.pages`).
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from node.telemetry.format import bytes_text

log = logging.getLogger(__name__)

GROWS = "expandable_segments"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's own, the newer one first."""
_earlier: dict[int, int] = {}
"""The most bytes in tensors before the newest `begin_peak`, by GPU."""


def grow_segments(device: torch.device) -> None:
    """Let the segments of this process grow, unless its owner sets the allocator in the environment: a call
    puts its own settings in place of those, and not all go together (max_split_size_mb with growing segments
    reserves ever more, pytorch issue 123548).

    Call it before the first tensor on the device: what was reserved before stays as it is.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        return
    core: Any = torch._C
    try:
        # The environment is read at an unknown moment after torch's import; this is torch 2.10's call and
        # later ones', which `torch.cuda.memory._set_allocator_settings` makes too.
        core._accelerator_setAllocatorSettings(f"{GROWS}:True")
    except (AttributeError, RuntimeError) as error:
        log.warning("the GPU's allocator keeps segments of fixed size (%s): plans may run out", error)


@dataclass(frozen=True, kw_only=True)
class Held:
    """The bytes that a process holds on one device."""

    allocated: int
    """Held by tensors."""
    reserved: int
    """Held by the allocator's segments, free parts included; a cap counts this."""
    largest_free: int
    """The largest tensor that fits into a free part."""
    most_allocated: int
    """The most bytes since `begin_peak`."""
    most_reserved: int

    def __str__(self) -> str:
        return f"{bytes_text(self.allocated)} in tensors, largest free piece {bytes_text(self.largest_free)}"


def held(device: torch.device) -> Held:
    """What this process now holds on a GPU."""
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch's
    return Held(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        largest_free=largest_free(snapshot, device.index or 0),
        most_allocated=torch.cuda.max_memory_allocated(device),
        most_reserved=torch.cuda.max_memory_reserved(device),
    )


def begin_peak(device: torch.device) -> None:
    """Count the most that is held from now on, if the device is a GPU."""
    if device.type == "cuda":
        _earlier[device.index or 0] = largest_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)


def most_allocated(device: torch.device) -> int:
    """The most bytes in tensors since `begin_peak`; 0 on a CPU, which does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def largest_allocated(device: torch.device) -> int:
    """The most bytes in tensors of a GPU since this process began, whatever `begin_peak` counts."""
    return max(_earlier.get(device.index or 0, 0), torch.cuda.max_memory_allocated(device))


def largest_free(segments: Iterable[Mapping[str, Any]], index: int) -> int:
    """The largest free block of GPU `index` in a snapshot of torch's allocator
    (`torch.cuda.memory_snapshot`)."""
    return max(
        (
            cast(int, block["size"])
            for segment in segments
            if segment["device"] == index
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )
