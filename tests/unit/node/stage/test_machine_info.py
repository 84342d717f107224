"""The hardware that a machine reports, with fake GPUs."""

from dataclasses import dataclass

import pytest
import torch

from node.config.schema import TrainingSection
from node.stage import machine_info
from node.stage.machine_info import cannot_compute, choose_device, describe, limit_memory
from wire.errors import UserError

CPU = torch.device("cpu")


@dataclass
class FakeGpu:
    name: str
    total_memory: int
    free: int


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpu]:
    """Two GPUs of one model; others use the second more than the first."""
    there = [FakeGpu("a model", 80_000, 70_000), FakeGpu("a model", 80_000, 60_000)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def asked(device: torch.device) -> tuple[int, int]:
        assert device.index == 0, "asking takes memory of a GPU that another process is to have"
        return there[0].free, there[0].total_memory

    def free_elsewhere(others: tuple[torch.device, ...]) -> int:
        return min(there[device.index].free for device in others)

    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    monkeypatch.setattr(machine_info, "_free_elsewhere", free_elsewhere)
    return there


def cuda(*indices: int) -> tuple[torch.device, ...]:
    return tuple(torch.device("cuda", index) for index in indices)


@pytest.mark.usefixtures("gpus")
def test_free_memory_of_the_fullest_gpu_counts() -> None:
    found = describe(cuda(0, 1), tensor_parallel=2)
    assert (found.device, found.memory_bytes) == ("a model", 60_000)
    assert (found.devices, found.tensor_parallel) == (2, 2)
    assert describe(cuda(0)).memory_bytes == 70_000


@pytest.mark.usefixtures("gpus")
def test_gpus_share_half_of_the_free_main_memory_or_what_the_owner_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_info, "available_bytes", lambda: 1000)
    assert describe(cuda(0)).host_bytes == 500
    assert describe(cuda(0, 1)).host_bytes == 250
    assert describe(cuda(0, 1), most_host_bytes=80).host_bytes == 40
    assert describe(cuda(0), most_host_bytes=0).host_bytes == 0
    assert describe([CPU]).host_bytes == 0


def test_the_free_main_memory_is_what_the_system_says() -> None:
    assert 0 < machine_info.available_bytes() <= 1 << 50


def test_a_gpu_that_cannot_be_asked_is_one_line() -> None:
    """By a real process, which finds no such GPU on any machine."""
    with pytest.raises(UserError, match="this node cannot use cuda:99 ") as caught:
        machine_info._free_elsewhere(cuda(99))
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.usefixtures("gpus")
def test_the_owners_memory_limit_applies_to_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append((share, device))
    )
    assert describe(cuda(0, 1), most_bytes=40_000).memory_bytes == 40_000
    assert limits == [(0.5, cuda(0)[0])]  # the others limit themselves, in processes of their own
    limit_memory(cuda(1)[0], 20_000)
    assert limits[1] == (0.25, cuda(1)[0])
    limit_memory(cuda(1)[0], 0)
    limit_memory(cuda(1)[0], 90_000)
    limit_memory(CPU, 5)
    assert len(limits) == 2


def test_processes_on_a_cpu_share_its_memory() -> None:
    one, four = describe((CPU,)), describe((CPU,) * 4, tensor_parallel=2)
    assert four.memory_bytes == one.memory_bytes // 4
    assert (four.device, four.devices, four.tensor_parallel) == ("cpu", 4, 2)
    assert describe((CPU,) * 4, most_bytes=1000).memory_bytes == 250


@pytest.mark.usefixtures("gpus")
def test_a_missing_gpu_is_one_line() -> None:
    assert choose_device("auto") == cuda(0)[0]
    with pytest.raises(
        UserError, match="--device cuda:2: this machine has 2 usable GPUs; use cpu or a lower N"
    ):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("training", "capability", "words"),
    [
        (TrainingSection(), (7, 5), None),
        (TrainingSection(precision="bfloat16"), (8, 0), None),
        (TrainingSection(precision="float16"), (7, 5), None),
        (
            TrainingSection(precision="bfloat16"),
            (7, 5),
            "training.precision float16, float32 or auto",
        ),
        (TrainingSection(precision="bfloat16", compute="fp8"), (8, 6), "compute capability 8.9 or later"),
        (TrainingSection(precision="bfloat16", compute="fp8"), (9, 0), None),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_cannot_compute_a_run_is_told_what_can(
    training: TrainingSection,
    capability: tuple[int, int],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    line = cannot_compute(training, cuda(0)[0])
    assert (line is None) == (words is None)
    assert words is None or (line is not None and words in line and "a model" in line)
    assert cannot_compute(training, CPU) is None
