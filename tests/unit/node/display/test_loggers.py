"""Steps in TensorBoard and Weights & Biases."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from node.config.schema import RunConfig, TelemetrySection
from node.display.loggers import loggers, scalars
from node.telemetry.events import HeldOutLoss, Notice, RunStarted, StepDone
from wire.errors import UserError


def started(directory: Path) -> RunStarted:
    return RunStarted(
        run_id="run-1",
        name="run",
        directory=str(directory),
        stages=2,
        steps=3,
        first_step=0,
        tokens_per_step=64,
        forward_codec="tah",
        backward_codec="fixed-8",
    )


def step(number: int, loss: float = 2.5) -> StepDone:
    return StepDone(
        step=number,
        steps=3,
        loss=loss,
        lr=0.5,
        grad_norm=1.5,
        seconds=2.0,
        tokens_per_second=32.0,
        idle=(0.25, 0.75),
        bits_forward=4.4,
        bits_backward=8.0,
        up_mbit=(),
        down_mbit=(),
    )


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


@pytest.mark.filterwarnings("ignore")  # the package's own
def test_wandb_without_a_network_keeps_the_steps_to_send_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the package itself, where it is installed: its file holds the run, its settings and every step."""
    wandb = pytest.importorskip("wandb", reason='needs pip install "thinwire[wandb]"')
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    with loggers(config("wandb")) as (sink,):
        for event in (started(tmp_path), step(1, 3.0), Notice(text="x"), step(2, 2.0)):
            sink(event)
    wandb.teardown()  # the process that writes the file ends
    (path,) = tmp_path.glob("wandb/offline-run-*/run-run-1.wandb")
    losses: dict[int, float] = {}
    for data in written(path.read_bytes()):
        record = Record.FromString(data)
        values = {"".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        if "step/loss" in values:
            losses[int(values["_step"])] = float(values["step/loss"])
        if record.HasField("run"):
            assert record.run.run_id == "run-1" and record.run.display_name == "run"
            assert any(item.key == "pipeline" for item in record.run.config.update)
    assert losses == {1: 3.0, 2: 2.0}


def written(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: after 7 bytes, LevelDB's log format in blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


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
    assert [values["id"] for values in asked] == ["run-1"] and asked[0]["config"]["run"]["steps"] == 300
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
