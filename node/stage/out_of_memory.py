"""Handles running out of memory: recognizes it, explains it in one line, and offers less memory next time.

The memory estimate refuses stages that cannot fit before anything is allocated. But other programs use a
device too, and estimates can be wrong. A node that runs out of memory continues with a plan for less
(`node.stage.memory_control`). If no plan needs less, it ends, because every later step would fail too. If a
service manager restarts it, it offers less than that stage needs for a day, so that the coordinator does not
assign the same stage again.
"""

import errno
import json
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from node.stage.allocator import held
from node.telemetry.format import bytes_text
from wire.errors import MemoryExhaustedError
from wire.identity.enrolment import Hardware
from wire.identity.files import write_private

log = logging.getLogger(__name__)

NOTE_FILE = "out-of-memory.json"
VALID_SECONDS = 86_400.0

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in the messages of torch's CPU allocator, CUDA, cuBLAS, NCCL and Triton, which raise plain
RuntimeErrors."""

REMEDY = (
    "close other programs that use this memory, or join with more (another --device, --gpus with "
    "--tensor-parallel), or give the run a smaller training.microbatch, a narrower pipeline.window, "
    "storage.preset agoq or compact, or more pipeline.stages"
)


def ran_out(error: BaseException) -> bool:
    """Whether an allocation failed in main memory or on a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def device_memory_text(device: torch.device) -> str:
    """A device's total and free memory in words. Call it in the process that computes on the device."""
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
            own = held(device)
        except RuntimeError:
            return f"{device} does not report how much memory it has"
        return (
            f"{device} has {bytes_text(total)}, of which {bytes_text(own.reserved)} are this process's "
            f"({own}) and {bytes_text(free)} free"
        )
    page = os.sysconf("SC_PAGE_SIZE")
    words = f"the machine has {bytes_text(page * os.sysconf('SC_PHYS_PAGES'))}"
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        words += f", of which {bytes_text(page * os.sysconf('SC_AVPHYS_PAGES'))} are free"
    return words


def exhausted(
    device: torch.device, there: str, *, offered: int, stage: int = -1, stages: int = 0, need: int = 0
) -> MemoryExhaustedError:
    """The error of a node whose `device` ran out of memory.

    Args:
        there: the result of `device_memory_text`.
        offered: the bytes of each device that the node offered when it joined.
        stage: the stage of `stages`; below 0 if the node had none yet.
        need: the stage's estimated bytes on each device.
    """
    at = "before it had a stage"
    if stage >= 0:
        at = f"at stage {stage} of {stages}, which was estimated to need {bytes_text(need)}"
    ran_out_at, facts = f"{device} ran out of memory {at}", f"it offered {bytes_text(offered)}, and {there}"
    return MemoryExhaustedError(
        f"{ran_out_at}, and this node ends; {facts}: {REMEDY}", need=need, happened=f"{ran_out_at}; {facts}"
    )


@dataclass(frozen=True)
class MemoryNote:
    """A node's record of a stage that did not fit. It only counts for the same options."""

    directory: Path
    """The node's state directory, of one run."""
    most_bytes: int
    """`--max-memory`; 0 if not given."""

    def write(self, hardware: Hardware, need: int) -> None:
        """Record that a stage with an estimate of `need` bytes did not fit on these devices."""
        note = {"need": need, "written": time.time(), "of": self._of(hardware)}
        try:
            write_private(self.directory / NOTE_FILE, json.dumps(note).encode())
        except OSError as error:
            log.warning("this node may be given the same stage again: %s", error)

    def limit(self, hardware: Hardware) -> Hardware:
        """The hardware, with less memory if a valid note requires it, which is logged."""
        path = self.directory / NOTE_FILE
        try:
            note = json.loads(path.read_bytes())
            need, age, of = int(note["need"]), time.time() - float(note["written"]), note["of"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return hardware
        if of != self._of(hardware) or not 0 <= age < VALID_SECONDS or hardware.memory_bytes < need:
            return hardware
        log.warning(
            "a stage that was estimated to need %s ran out of memory here: this node offers less than that "
            "for a day (to end this, change --max-memory or delete %s)",
            bytes_text(need),
            path,
        )
        return replace(hardware, memory_bytes=need - 1)

    def _of(self, hardware: Hardware) -> list[str | int]:
        # Memory is left out, because on a GPU it changes with other programs.
        return [hardware.device, hardware.devices, hardware.tensor_parallel, self.most_bytes]
