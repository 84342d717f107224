"""A Mac's GPU, which is not here: the table of devices says that the CPU is one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kernels.common import dispatch
from kernels.common.devices import MPS, of_arithmetic
from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.processes import doctor
from node.processes.doctor import Status, check_device
from node.stage import executor, machine_info, stage_model, step_passes
from node.stage.device_transfer import PlainTransfer
from node.stage.executor import StageExecutor
from node.stage.machine_info import cannot_compute, choose_device, describe
from node.stage.processes import choose_devices
from node.stage.self_test import golden
from node.tuning.device_memory import devices_of
from tests.support.cases import each
from tests.support.memory_pipeline import MemoryPipeline
from wire.codecs.formats import codec_format
from wire.errors import UserError

CPU = torch.device("cpu")
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
    monkeypatch.setattr(executor, "device_transfer", PlainTransfer)
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
