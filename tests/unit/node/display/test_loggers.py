"""Steps in TensorBoard and Weights & Biases."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from node.config.schema import RunConfig, TelemetrySection
from node.display.loggers import loggers, scalars
from node.telemetry.events import HeldOutLoss, Notice, StepDone
from tests.support.run_events import done, started
from wire.errors import UserError


def step(number: int, loss: float = 2.5) -> StepDone:
    return replace(done(number), loss=loss, idle=(0.25, 0.75))


def config(*names: str) -> RunConfig:
    return RunConfig(telemetry=TelemetrySection(loggers=names))


def test_every_number_of_a_step_is_a_scalar() -> None:
    found = scalars(step(2))
    assert found is not None and found[0] == 2
    assert found[1]["step/loss"] == 2.5 and found[1]["step/idle/1"] == 0.75
    assert found[1].keys() >= {"step/lr", "step/grad_norm", "step/tokens_per_second", "step/bits_forward"}
    diverged = scalars(step(2, float("nan")))
    assert diverged is not None and "step/loss" not in diverged[1] and "step/lr" in diverged[1]
    measured = HeldOutLoss(step=2, loss=2.25, uncompressed=2.0, samples=8, best=True, seconds=1.5)
    assert scalars(measured) == (
        2,
        {"held-out/loss": 2.25, "held-out/uncompressed": 2.0, "held-out/seconds": 1.5},
    )
    assert scalars(Notice(text="x")) is None


def test_tensorboard_reads_the_losses_back(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    with loggers(config("tensorboard")) as sinks:
        for event in (started(tmp_path), step(1, 3.0), Notice(text="x"), step(2, 2.0)):
            for sink in sinks:
                sink(event)
    (path,) = (tmp_path / "tensorboard").iterdir()
    data = path.read_bytes()
    losses: dict[int, float] = {}
    while data:
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        for value in event.summary.value:
            if value.tag == "step/loss":
                losses[event.step] = value.simple_value
        data = data[16 + size :]
    assert losses == {1: 3.0, 2: 2.0}


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        if step == 3:
            raise ConnectionError("no network")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_run_and_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), []

    def init(**values: Any) -> FakeRun:
        asked.append(values)
        return run

    package = ModuleType("wandb")
    package.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    with loggers(config("wandb")) as (sink,):
        for event in (started(tmp_path), step(1), step(2), started(tmp_path)):
            sink(event)
    assert [values["id"] for values in asked] == ["demo-abc"] and asked[0]["config"]["run"]["steps"] == 300
    assert [number for number, _ in run.logged] == [1, 2] and run.finished


def test_a_logger_that_fails_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun()
    package = ModuleType("wandb")
    package.init = lambda **values: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", package)
    with loggers(config("wandb")) as (sink,):
        for event in (started(tmp_path), step(1), step(3), step(2)):
            sink(event)
    assert [number for number, _ in run.logged] == [1]
    assert [record.message for record in caplog.records] == ["wandb is turned off: no network"]


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    expected = r"needs the wandb package: pip install \"thinwire\[wandb\]\""
    with pytest.raises(UserError, match=expected), loggers(config("wandb")):
        pytest.fail("it was not refused")
