"""A stage's device has its next action before it ends the one before; the clock shows the device's work."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.stage.device_transfer import CpuTransfer
from node.stage.executor import StageExecutor
from node.stage.tensor_transfer import Incoming, TensorTransfer
from node.telemetry.clock import StageClock, TimeKind
from tests.support.memory_pipeline import MemoryPipeline
from tests.unit.node.stage.test_tensor_transfer import SECONDS, SPEC, Box, key, tensor
from wire.codecs.base import Codec
from wire.codecs.host_copies import Mark
from wire.codecs.registry import codec

FORWARD_SECONDS, BACKWARD_SECONDS = 3.0, 5.0
HEAD_FIRST = RunConfig(
    run=RunSection(steps=8, seed=3),
    model=ModelSection(layers=4, hidden=32, heads=4, kv_heads=4, ffn=48, vocab=256, sequence=16, tied=True),
    training=TrainingSection(global_batch=4, microbatch=1, lr=1e-2, warmup_steps=2),
    pipeline=PipelineSection(stages=3, window=1, head="first", forward_codec="fp32", backward_codec="fp32"),
)
ALONE = replace(HEAD_FIRST, pipeline=replace(HEAD_FIRST.pipeline, stages=1))


@dataclass
class Device:
    """Computes one action after another, in virtual time that passes only while somebody waits for it."""

    now: float = 0.0
    free: float = 0.0
    """When the newest action ends."""
    given: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """Actions as they are given to the device, and `end of` those that the stage has waited for."""

    def give(self, action: str, seconds: float) -> None:
        self.given.append(action)
        self.free = max(self.free, self.now) + seconds

    def mark(self) -> "Reached":
        self.log.append(self.given[-1])
        return Reached(self, self.given[-1], self.free)


@dataclass(frozen=True)
class Reached:
    device: Device
    action: str
    at: float

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)
        self.device.log.append(f"end of {self.action}")


class Behind(CpuTransfer):
    """Of a device that works by itself."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._behind = device

    def mark(self) -> Mark:  # type: ignore[override]  # a CPU has none
        return self._behind.mark()


def put_behind(executor: StageExecutor, patch: pytest.MonkeyPatch) -> Device:
    """Have a stage's passes computed by such a device."""
    device, model = Device(), executor.model
    forward, backward = model.forward, model.backward

    def forwards(chunk: int, microbatch: int, *rest: Any) -> Tensor:
        device.give(f"forward {chunk} {microbatch}", FORWARD_SECONDS)
        return forward(chunk, microbatch, *rest)

    def backwards(chunk: int, microbatch: int, *rest: Any) -> Tensor | None:
        device.give(f"backward {chunk} {microbatch}", BACKWARD_SECONDS)
        return backward(chunk, microbatch, *rest)

    patch.setattr(model, "forward", forwards)
    patch.setattr(model, "backward", backwards)
    clock = StageClock(lambda: device.now)
    executor.clock = clock
    executor._transfer = TensorTransfer(Behind(device), clock.beside, unpacks_beside=True)
    return device


@pytest.fixture
def head_first() -> Iterator[MemoryPipeline]:
    with MemoryPipeline(HEAD_FIRST) as pipeline:
        yield pipeline


def test_time_is_that_of_the_devices_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryPipeline(ALONE) as pipeline:
        (stage,) = pipeline.executors
        device = put_behind(stage, monkeypatch)
        pipeline.train(1)
    spent = stage.clock.snapshot()
    assert spent[TimeKind.FORWARD] == ALONE.microbatches * FORWARD_SECONDS
    assert spent[TimeKind.BACKWARD] == ALONE.microbatches * BACKWARD_SECONDS
    assert device.now == ALONE.microbatches * (FORWARD_SECONDS + BACKWARD_SECONDS), "it never stood still"


def test_one_action_is_given_ahead_and_no_more(
    head_first: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [put_behind(executor, monkeypatch) for executor in head_first.executors]
    head_first.train(2)
    for device in devices:
        running: list[str] = []
        for line in device.log:
            if line.startswith("end of "):
                assert running.pop(0) == line.removeprefix("end of ")
            else:
                running.append(line)
            assert len(running) <= 2
        assert not running, "a step ends with its last action"


def test_a_heads_backward_follows_its_forward_without_a_pause(
    head_first: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = put_behind(head_first.executors[0], monkeypatch).log
    head_first.train(1)
    for microbatch in range(HEAD_FIRST.microbatches):
        given = log.index(f"forward 1 {microbatch}")
        assert log.index(f"backward 1 {microbatch}") < log.index(f"end of forward 1 {microbatch}")
        assert log.index(f"backward 1 {microbatch}") > given


def test_the_bits_are_the_same(head_first: MemoryPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryPipeline(HEAD_FIRST) as plain:
        expected = plain.train(3), plain.weights_sha256()
    for executor in head_first.executors:
        put_behind(executor, monkeypatch)
    assert (head_first.train(3), head_first.weights_sha256()) == expected


@pytest.mark.parametrize("beside", [True, False])
def test_what_comes_is_unpacked_while_a_tensor_waits_to_be_packed(beside: bool) -> None:
    made, packs = threading.Event(), threading.Event()

    class Waiting(CpuTransfer):
        def pack(self, codec: Codec, tensor: Tensor, mark: Mark | None) -> Tensor:
            packs.set()
            assert made.wait(SECONDS)
            return super().pack(codec, tensor, mark)

    there, box = TensorTransfer(Waiting(), lambda *_: nullcontext(), unpacks_beside=beside), Box()
    box.arrived[key(1)] = codec("bf16").encode(tensor(1))
    there.send(key(0), codec("bf16"), tensor(0), None, box)
    assert packs.wait(SECONDS)
    there.look_ahead([Incoming(key(1), SPEC)], lambda _: codec("bf16"), box)
    if not beside:
        assert not there.unpacked(Incoming(key(1), SPEC))
        made.set()
    there.begin(Incoming(key(1), SPEC), codec("bf16"), box)
    assert torch.equal(there.finish(key(1)), tensor(1).bfloat16().float())
    assert bool(box.sent) is not beside
    made.set()
    there.drain()
