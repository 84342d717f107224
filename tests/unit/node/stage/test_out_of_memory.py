"""Running out of memory during a run: recognized errors, the message, and the note for the next start."""

import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from node.stage import out_of_memory
from node.stage.allocator import Held
from node.stage.collectives import collective
from node.stage.out_of_memory import (
    NOTE_FILE,
    VALID_SECONDS,
    MemoryNote,
    device_memory_text,
    exhausted,
    ran_out,
)
from node.stage.session import short_reason
from wire.errors import DeviceLostError
from wire.identity.enrolment import Hardware

TOO_MUCH = 1 << 50
CPU = torch.device("cpu")
GPU = torch.device("cuda:1")
HARDWARE = Hardware("a GPU", 8, 80_000, devices=2)


def test_out_of_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(TOO_MUCH)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(TOO_MUCH)
    for error in (
        of_torch.value,
        of_numpy.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ):
        assert ran_out(error), error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        DeviceLostError("the process of another device is gone"),
        ValueError("out of memory"),
    ],
)
def test_other_trouble_is_not_taken_for_it(error: Exception) -> None:
    assert not ran_out(error)


def test_it_is_not_mistaken_for_another_ranks_end() -> None:
    with pytest.raises(torch.OutOfMemoryError), collective():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(DeviceLostError), collective():
        raise RuntimeError("Connection closed by peer")


def test_the_line_names_the_stage_the_estimate_the_device_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5_000 * device.index, 80_000))
    there = Held(
        allocated=50_000, reserved=60_000, largest_free=7_000, most_allocated=50_000, most_reserved=60_000
    )
    monkeypatch.setattr(out_of_memory, "held", lambda device: there)
    error = exhausted(GPU, device_memory_text(GPU), offered=70_000, stage=2, stages=4, need=65_000)
    for place in ("stage 2 of 4", "need 65 kB", "offered 70 kB", "has 80 kB", "60 kB are this process's"):
        assert place in str(error) and place in error.happened
    for remedy in ("training.microbatch", "pipeline.window", "storage.preset", "pipeline.stages"):
        assert remedy in str(error) and remedy not in error.happened
    assert "\n" not in str(error)
    assert "and this node ends" not in error.happened and error.happened.endswith("5 kB free")
    assert short_reason(error) == error.happened, "it is not cut"
    assert (error.need, error.exit_code) == (65_000, 1)
    early = exhausted(GPU, "", offered=1)
    assert early.need == 0 and str(early).startswith("cuda:1 ran out of memory before it had a stage, ")


def test_a_silent_device_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert device_memory_text(GPU) == "cuda:1 does not report how much memory it has"
    assert device_memory_text(CPU).startswith("the machine has ")


def test_memory_that_ran_out_is_not_offered_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    note = MemoryNote(tmp_path, most_bytes=0)
    assert note.limit(HARDWARE) == HARDWARE
    note.write(HARDWARE, 65_000)
    limited = note.limit(HARDWARE)
    assert limited == replace(HARDWARE, memory_bytes=64_999)
    assert "65 kB" in caplog.text and str(tmp_path / NOTE_FILE) in caplog.text
    # What others leave of a GPU is another amount each time, and may be less already.
    assert note.limit(replace(HARDWARE, memory_bytes=90_000)).memory_bytes == 64_999
    assert note.limit(replace(HARDWARE, memory_bytes=30_000)).memory_bytes == 30_000
    # The owner decided otherwise meanwhile.
    assert MemoryNote(tmp_path, most_bytes=70_000).limit(HARDWARE) == HARDWARE
    for other in (replace(HARDWARE, devices=4), replace(HARDWARE, tensor_parallel=2)):
        assert note.limit(other) == other
    note.write(limited, 60_000)
    assert note.limit(HARDWARE).memory_bytes == 59_999, "the next smaller stage did not fit either"


def test_a_memory_note_is_valid_for_a_day_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
    note, path = MemoryNote(tmp_path, most_bytes=0), tmp_path / NOTE_FILE
    note.write(HARDWARE, 65_000)
    written = json.loads(path.read_bytes())
    for change in ({"written": time.time() - VALID_SECONDS}, {"need": "much"}, {"need": None}):
        path.write_text(json.dumps({**written, **change}))
        assert note.limit(HARDWARE) == HARDWARE
    for damaged in (b"", b"{}", b"[1]"):
        path.write_bytes(damaged)
        assert note.limit(HARDWARE) == HARDWARE
    path.write_text(json.dumps(written))
    assert note.limit(HARDWARE).memory_bytes == 64_999
