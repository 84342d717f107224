"""torch's allocator of GPU memory: expandable segments, and what the allocator holds.

The limit on a process counts what the allocator has reserved, not what tensors occupy. With segments of
fixed size, a tensor that fits into no free part of a segment needs a new segment. So plans whose tensors were
estimated to need 0.1 to 1.9 GB less than the limit ran out of memory (scripts/results/memory_plan.json).
Expandable segments are mapped in pages (`node.tuning.device_memory.PAGE`). Before the allocator gives up, it
unmaps every page without a tensor and maps it where it is needed. Only partly filled pages are lost, and the
plan counts them (`Share.pages`).
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
"""torch's environment variables for the allocator, the newer name first."""
_earlier: dict[int, int] = {}
"""The peak of bytes in tensors before the newest `begin_peak`, by GPU."""


def grow_segments(device: torch.device) -> None:
    """Let the segments of this process grow, unless the owner configures the allocator in the environment. A
    call replaces the owner's settings, and some do not work with growing segments (`max_split_size_mb` then
    reserves ever more, pytorch issue 123548).

    Call this before the first tensor on the device: existing segments do not change.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in VARIABLES):
        return
    core: Any = torch._C
    try:
        # The environment is read at an unknown time after torch's import. torch 2.10 and later have this
        # call, which `torch.cuda.memory._set_allocator_settings` makes too.
        core._accelerator_setAllocatorSettings(f"{GROWS}:True")
    except (AttributeError, RuntimeError) as error:
        log.warning("the GPU's allocator keeps segments of fixed size (%s): plans may run out", error)


@dataclass(frozen=True, kw_only=True)
class Held:
    """The bytes that a process holds on one device."""

    allocated: int
    """The bytes of tensors."""
    reserved: int
    """The bytes of the allocator's segments, including free parts. The limit counts these."""
    largest_free: int
    """The largest tensor that fits into a free part, in bytes."""
    most_allocated: int
    """The peak of bytes in tensors since `begin_peak`."""
    most_reserved: int

    def __str__(self) -> str:
        return f"{bytes_text(self.allocated)} in tensors, largest free piece {bytes_text(self.largest_free)}"


def held(device: torch.device) -> Held:
    """What this process holds on a GPU now."""
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch's
    return Held(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        largest_free=largest_free(snapshot, device.index or 0),
        most_allocated=torch.cuda.max_memory_allocated(device),
        most_reserved=torch.cuda.max_memory_reserved(device),
    )


def begin_peak(device: torch.device) -> None:
    """Start a new measurement of the peak, if the device is a GPU."""
    if device.type == "cuda":
        _earlier[device.index or 0] = largest_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)


def most_allocated(device: torch.device) -> int:
    """The peak of bytes in tensors since `begin_peak`; 0 on a CPU, where they are not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def largest_allocated(device: torch.device) -> int:
    """The peak of bytes in a GPU's tensors since the process started, independent of `begin_peak`."""
    return max(_earlier.get(device.index or 0, 0), torch.cuda.max_memory_allocated(device))


def largest_free(segments: Iterable[Mapping[str, Any]], index: int) -> int:
    """The largest free block of GPU `index` in a snapshot of torch's allocator
    (`torch.cuda.memory_snapshot`), in bytes."""
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
