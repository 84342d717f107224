"""The GPU's allocator: segments grow unless the owner says otherwise; what it holds, from its snapshot."""

from typing import Any

import pytest
import torch

from node.stage import allocator
from node.stage.allocator import (
    Held,
    begin_peak,
    grow_segments,
    held,
    largest_allocated,
    largest_free,
    most_allocated,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is told."""
    told: list[str] = []
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    return told


def test_segments_of_a_gpu_grow(settings: list[str]) -> None:
    grow_segments(CPU)
    assert settings == []
    grow_segments(GPU)
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:512"])
def test_what_the_owner_sets_in_the_environment_stays(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    grow_segments(GPU)
    assert settings == []
    monkeypatch.setenv(variable, "")
    grow_segments(GPU)
    assert settings == ["expandable_segments:True"]


def test_this_torch_knows_the_setting() -> None:
    """In a process whose allocator of GPU memory never starts."""
    core: Any = torch._C
    before = core._accelerator_getAllocatorSettings()
    try:
        core._accelerator_setAllocatorSettings("expandable_segments:True")
        assert "expandable_segments:True" in core._accelerator_getAllocatorSettings()
    finally:
        core._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def test_a_torch_without_it_only_gets_a_warning(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(text: str) -> None:
        raise RuntimeError(f"Unrecognized key in {text}")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuses)
    grow_segments(GPU)
    assert "segments of fixed size (Unrecognized key in expandable_segments:True)" in caplog.text


def segment(index: int, *blocks: tuple[int, str]) -> dict[str, Any]:
    return {"device": index, "blocks": [{"size": size, "state": state} for size, state in blocks]}


def test_the_largest_free_piece_is_the_largest_block_that_no_tensor_and_no_event_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = [
        segment(0, (900, "inactive")),
        segment(1, (500, "active_allocated"), (70, "inactive"), (300, "active_pending_free")),
        segment(1, (40, "inactive"), (90, "active_allocated")),
    ]
    assert largest_free(snapshot, 1) == 70
    assert largest_free(snapshot, 2) == 0
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    for number, name in enumerate(("memory_allocated", "memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=1000 * (1 + number): size)
        monkeypatch.setattr(torch.cuda, f"max_{name}", lambda device, size=3000 * (1 + number): size)
    found = held(GPU)
    assert found == Held(
        allocated=1000, reserved=2000, largest_free=70, most_allocated=3000, most_reserved=6000
    )
    assert str(found) == "1 kB in tensors, largest free piece 70 B"


def test_the_largest_of_the_process_outlasts_peaks_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [0]
    monkeypatch.setattr(allocator, "_earlier", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.__setitem__(0, 0))
    for most, largest in ((500, 500), (300, 500), (700, 700), (100, 700)):
        begin_peak(GPU)
        peak[0] = most
        assert (most_allocated(GPU), largest_allocated(GPU)) == (most, largest)
    assert most_allocated(CPU) == 0
