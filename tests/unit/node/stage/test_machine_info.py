"""The hardware that a machine reports, with fake GPUs."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kernels.attention.ops import _order
from kernels.common import dispatch
from kernels.common.devices import MPS, of_arithmetic
from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.model.host_memory import Copy, HostMemory
from node.model.storage import KINDS, PACKED, Storage, configured
from node.processes import doctor
from node.processes.doctor import Status, check_device
from node.stage import allocator, executor, machine_info, stage_model, step_passes
from node.stage.allocator import (
    Held,
    begin_peak,
    grow_segments,
    held,
    largest_allocated,
    largest_free,
    most_allocated,
)
from node.stage.block_measure import block_seconds, copy_rate, measured_times
from node.stage.device_transfer import CpuTransfer
from node.stage.executor import StageExecutor
from node.stage.machine_info import cannot_compute, choose_device, describe, fix_order, limit_memory
from node.stage.packing_meter import LEAST_TENSORS, PackingMeter
from node.stage.processes import choose_devices
from node.stage.self_test import golden
from node.telemetry.clock import WorkKind
from node.tuning.block_times import BlockTimes, PackTime, stored_forms
from node.tuning.device_memory import devices_of
from tests.support.cases import each
from tests.support.memory_pipeline import MemoryPipeline
from tests.support.stored_runs import CPU, run
from wire.codecs.formats import codec_format
from wire.errors import UserError
from wire.telemetry import CodecTime, CodecTimes


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


# ---- a Mac's GPU, which is not here: the table of devices says that the CPU is one


CONFIG = RunConfig(
    run=RunSection(steps=4, seed=3),
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16, tied=True),
    training=TrainingSection(global_batch=4, microbatch=1, lr=1e-2, warmup_steps=2),
    pipeline=PipelineSection(stages=2, forward_codec="tah", backward_codec="fixed-8"),
)


class NoFloat64(TorchDispatchMode):
    """Metal has no float64: an operation that makes such a tensor of others fails there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))

        def wide(values: Any) -> bool:
            return any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in tree_leaves(values))

        assert not wide(made) or wide((args, kwargs)), f"{function} makes a tensor in float64"
        return made


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, stage_model, machine_info):
        monkeypatch.setattr(module, "kind_of", lambda device: MPS)
    monkeypatch.setattr(executor, "device_transfer", CpuTransfer)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 << 30)


@each("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.usefixtures("mac")
def test_a_stage_steps_without_float64(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, training=replace(CONFIG.training, precision=precision))
    wide = dispatch.in_double

    def on_the_host(x: Tensor) -> Tensor:
        with _disable_current_modes():
            return wide(x)

    for module in (dispatch, executor, stage_model, step_passes):
        monkeypatch.setattr(module, "in_double", on_the_host)
    for name in ("run_step", "apply"):
        monkeypatch.setattr(StageExecutor, name, forbidding(getattr(StageExecutor, name)))
    with MemoryPipeline(config) as stages:
        losses = [step.loss for step in stages.train(4)]
    assert losses[-1] < losses[0]


def forbidding(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        with NoFloat64():
            return method(*args, **named)

    return called


@pytest.mark.usefixtures("mac")
def test_a_mac_offers_what_its_driver_recommends() -> None:
    (device,) = choose_devices("mps", 1)
    assert device.type == "mps" and choose_device("auto") == CPU
    with pytest.raises(UserError, match="a Mac has one GPU"):
        choose_devices("mps", 2)
    hardware = describe((device,), most_bytes=8 << 30)
    assert (hardware.device, hardware.memory_bytes, hardware.host_bytes) == ("mps", 8 << 30, 0)
    again = describe((device,))
    assert again.memory_bytes == 12 << 30
    assert again.arithmetic != hardware.arithmetic, "a Mac is compared with no other"
    assert of_arithmetic(hardware.arithmetic) == MPS
    assert devices_of(hardware).on_cpu
    assert cannot_compute(TrainingSection(precision="bfloat16"), device) is None
    assert "8.9" in (cannot_compute(TrainingSection(precision="bfloat16", compute="fp8"), device) or "")


@pytest.mark.usefixtures("mac")
def test_doctor_says_how_fast_a_mac_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_info, "measure_flops", lambda device: 3e12 if device.type == "mps" else 1e12)
    monkeypatch.setattr(doctor, "check_results", lambda device, kind: (device.type, kind.name))
    _, gpu, results = check_device()
    assert gpu.status is Status.OK and "3.0 TFLOP/s" in gpu.detail and "1.0" in gpu.detail
    assert results == ("mps", "mps")


@pytest.mark.usefixtures("mac")
def test_codecs_of_a_mac_are_the_cpus() -> None:
    """Of tensors on a device that can compute nothing."""
    assert golden("tah", torch.device("meta")) == codec_format("tah").golden[1]


@each(("device", "words"), [("mps", "torch finds no Apple GPU"), ("xpu", "does not compute on Intel")])
def test_a_device_of_no_use_is_one_line(device: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_device(device)


# ---- what a node measures of its own device when it joins


RATE = 2e9
"""Bytes a second each way."""


class Timeline(HostMemory):
    """A device whose seconds are made up: two engines run beside compute. The host waits only when asked
    to."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now = 0.0
        self.copied = {"out": 0.0, "in": 0.0}
        """When each is done."""

    def _copy(self, way: str, copies: Iterable[Copy]) -> None:
        size = sum(source.nbytes for source, _ in copies)
        self.copied[way] = max(self.now, self.copied[way]) + size / RATE

    def copy_out(self, copies: Iterable[Copy]) -> None:
        self._copy("out", copies)

    def copy_in(self, copies: Iterable[Copy]) -> None:
        self._copy("in", copies)

    def wait(self, mark: Any) -> None:
        raise AssertionError("nothing waits for a copy here")

    def settle(self) -> None:
        raise AssertionError("nothing waits for a copy here")

    def finish(self) -> None:
        self.now = max(self.now, *self.copied.values())

    def clock(self) -> float:
        return self.now

    def _allocate(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)


def test_both_directions_are_copied_at_once_while_the_device_works() -> None:
    memory, began = Timeline(), list[bool]()

    def work() -> None:
        began.append(min(memory.copied.values()) > memory.now)

    assert copy_rate(memory, work, size=1 << 20) == pytest.approx(RATE)
    assert began and all(began)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["plain", "autocast"])
def test_each_form_that_a_run_may_have_is_packed_and_unpacked_by_the_clock(form: str, family: str) -> None:
    allow = ("8", "6", "5", "4", "attention:8", "attention:4", "attention_output:4", "attention_output:bf16")
    config = replace(run(form, family), storage=StorageSection(allow=allow))
    config = replace(config, model=replace(config.model, layers=2, sequence=64))
    times = measured_times(config, CPU)
    assert times is not None and times.measured
    assert min(times.forward, times.backward, times.attention, times.attention_output, times.ffn_input) > 0
    assert [(one.kind, one.form) for one in times.packing] == stored_forms(config)
    assert ("attention_output", "bf16") in stored_forms(config) or form == "autocast"
    assert {kind for kind, _ in stored_forms(config)} == set(KINDS)
    # Where nothing else is done, packing takes time; elsewhere a loaded machine may say 0.
    known = {(one.kind, one.form): (one.pack, one.unpack) for one in times.packing}
    assert all(min(known[kind, "4"]) > 0 for kind in ("attention", "attention_output"))
    assert all(min(pair) >= 0 for pair in known.values())


def test_a_run_that_stores_nothing_in_few_bits_has_nothing_to_measure() -> None:
    assert stored_forms(run("plain")) == []
    by_stage = replace(run("plain"), storage=StorageSection(preset="agoq", bits_by_stage=True))
    forms = [form for kind, form in stored_forms(by_stage) if kind == "norm_input"]
    assert sorted(forms) == sorted(form for form in KINDS["norm_input"] if form in PACKED)


def test_a_stage_in_another_storage_takes_its_packing_in_place_of_the_measured_ones() -> None:
    config = replace(run("plain"), storage=StorageSection(preset="compact", allow=("norm_input:8",)))
    times = measured_times(config, CPU)
    assert times is not None and times.stored == configured(config.storage)
    assert times.of_storage(times.stored) == times and BlockTimes.from_json(times.to_json()) == times
    assert block_seconds(config, CPU) > 0
    # The clock's own would be another each time.
    packing = {
        ("norm_input", "4"): (0.25, 0.5),
        ("norm_input", "8"): (0.125, 0.75),
        ("attention", "8"): (1, 1),
    }
    times = replace(
        times,
        forward=4.0,
        backward=8.0,
        packing=tuple(
            PackTime(kind=kind, form=form, pack=pack, unpack=unpack)
            for (kind, form), (pack, unpack) in packing.items()
        ),
    )
    wide = times.of_storage(replace(times.stored, norm_input="8"))
    assert (wide.forward, wide.backward) == (3.875, 8.25)
    bare = times.of_storage(Storage())
    assert (bare.forward, bare.backward) == (2.75, 6.5)
    # Parts that were measured to take more than the whole.
    assert replace(times, forward=1.0).of_storage(Storage()).forward == 0.5


# ---- what packing takes a node: as tried, slowed as its steps show, and told when it changes


def said(times: CodecTimes | None) -> dict[str, tuple[float, float]]:
    return {} if times is None else {one.codec: (one.pack, one.unpack) for one in times.times}


def test_steps_slow_what_packs_in_the_same_way_until_they_use_it_again() -> None:
    meter = PackingMeter()
    assert meter.news() == CodecTimes(times=()) or meter.news() is None
    meter.tried("trellis-4.41", 4e-8, 1e-8)
    meter.tried("trellis-8", 6e-8, 1e-8)
    meter.tried("fixed-8", 2e-9, 2e-9)
    assert said(meter.news())["trellis-8"] == (6e-8, 1e-8)
    assert meter.news() is None, "nothing is new"
    for _ in range(LEAST_TENSORS):
        meter.add(WorkKind.PACK, "trellis-5", 1000, 3 * 5e-5)
        meter.add(WorkKind.PACK, "fp32", 1000, 9.0)  # nobody tried it
    slowed = said(meter.news())
    assert slowed["trellis-4.41"] == pytest.approx((1.2e-7, 3e-8))
    assert slowed["fixed-8"] == (2e-9, 2e-9)
    # Steps with another codec leave that as it is.
    for _ in range(LEAST_TENSORS):
        meter.add(WorkKind.UNPACK, "fixed-8", 1000, 2e-6)
    assert meter.news() is None
    for _ in range(LEAST_TENSORS):
        meter.add(WorkKind.PACK, "trellis-8", 1000, 5e-5)
    assert said(meter.news())["trellis-8"] == pytest.approx((6e-8, 1e-8))


def test_a_coordinator_that_begins_anew_is_told_all() -> None:
    meter = PackingMeter()
    meter.tried("fixed-8", 2e-9, 3e-9)
    first = meter.news()
    assert first == CodecTimes(times=(CodecTime(codec="fixed-8", pack=2e-9, unpack=3e-9),))
    assert meter.news() is None
    meter.forget_told()
    assert meter.news() == first


# ---- a node's settings of torch


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_a_gpu_sums_in_a_fixed_order_or_refuses() -> None:
    fix_order(torch.device("cuda", 1))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ[WORKSPACE] == ":4096:8"


def test_cpus_are_not_limited() -> None:
    fix_order(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ


@pytest.mark.parametrize(("enabled", "warns"), [(False, False), (True, True), (True, False)])
def test_attention_keeps_its_order_whatever_is_set(enabled: bool, warns: bool) -> None:
    """Where torch only warns, its operator adds in no fixed order, too."""
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    with _order(fixed=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.are_deterministic_algorithms_enabled() == enabled
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warns


# ---- the GPU's allocator: segments grow unless the owner says otherwise; what it holds, from its snapshot


GPU = torch.device("cuda", 1)


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
