"""What is made of every n-th snapshot: model folders, and samples by a process beside the run."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import RunConfig
from node.coordinator import snapshot_uses
from node.coordinator.snapshot_uses import MOST_TEXT, EveryNth, SnapshotExports, SnapshotSamples
from node.telemetry.events import Event, Notice, SampleMade
from tests.support.process import SECONDS
from wire.errors import RunError

CONFIG = RunConfig()
SAMPLER = """
import json, pathlib, sys, time
options, (directory, *prompts) = (sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :])
assert options[options.index("--step") + 1] == "last"
step = int(pathlib.Path(directory, "newest").read_text())
pathlib.Path(directory, f"sampled-{step}").touch()
if step == 4:
    sys.exit("thinwire: error: the snapshot is gone\\x1b[2J")
if step == 6:
    time.sleep(600)
for prompt in prompts:
    print(json.dumps({"step": step, "prompt": prompt, "text": f"{'--chat' in options} " + 2000 * "x"}))
"""
"""Stands for `thinwire sample`."""


def sampling(tmp_path: Path, *, chat: bool = False, free: int = 0) -> tuple[SnapshotSamples, list[Event]]:
    told: list[Event] = []
    run = replace(CONFIG.run, steps=7, snapshot_every=1)
    data = replace(CONFIG.data, prompts=("a b", "--c"), prompts_every=2, format="chat" if chat else "text")
    return SnapshotSamples(replace(CONFIG, run=run, data=data), tmp_path, told.append, free), told


@pytest.fixture
def sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sampler.py").write_text(SAMPLER)
    command = [sys.executable, str(tmp_path / "sampler.py")]
    monkeypatch.setattr(snapshot_uses, "program", lambda module: command)


@pytest.mark.usefixtures("sampler")
@pytest.mark.parametrize("chat", [False, True])
async def test_every_nth_snapshot_that_is_here_continues_the_prompts(tmp_path: Path, chat: bool) -> None:
    samples, told = sampling(tmp_path, chat=chat)
    samples.stored(1, is_here=True)
    samples.stored(2, is_here=True)
    (tmp_path / "newest").write_text("2")
    await samples.finish()
    text = f"{chat} {2000 * 'x'}"[:MOST_TEXT]
    assert told == [SampleMade(step=2, prompt=prompt, text=text) for prompt in ("a b", "--c")]
    await samples.finish()
    assert len(told) == 2, "each snapshot once"
    samples.stored(4, is_here=False)
    samples.stored(6, is_here=False)
    await samples.finish()
    assert [type(event) for event in told[2:]] == [Notice], "told once that snapshots are elsewhere"


@pytest.mark.usefixtures("sampler")
async def test_a_sampler_that_fails_or_hangs_does_not_concern_the_run(tmp_path: Path) -> None:
    samples, told = sampling(tmp_path)
    (tmp_path / "newest").write_text("4")
    for _ in range(2):
        samples.stored(4, is_here=True)
        await samples.finish()
    (notice,) = told
    assert isinstance(notice, Notice) and "the snapshot is gone" in notice.text and "\x1b" not in notice.text
    samples.stored(6, is_here=True)
    (tmp_path / "newest").write_text("6")
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        running = group.create_task(samples.run())
        while not (tmp_path / "sampled-6").exists():  # noqa: ASYNC110 - the file comes from a process
            await asyncio.sleep(0.01)
        samples.give_up()
        while samples._process is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
    await samples.finish()
    assert told == [notice]


async def test_a_model_that_does_not_fit_beside_the_run_is_not_sampled(tmp_path: Path) -> None:
    samples, told = sampling(tmp_path, free=1000)
    samples.stored(2, is_here=True)
    await samples.finish()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(samples.run())
        await asyncio.sleep(0)
        running.cancel()
    (notice,) = told
    assert isinstance(notice, Notice) and "of the 1 kB free" in notice.text


def test_snapshots_by_time_are_counted() -> None:
    by_time = EveryNth(replace(CONFIG, run=replace(CONFIG.run, steps=9, snapshot_every="10 min")), 2)
    assert [step for step in (3, 4, 7, 8, 9) if by_time.is_due(step)] == [4, 8, 9]
    assert not EveryNth(CONFIG, 0).is_due(CONFIG.run.steps)


async def test_every_nth_snapshot_is_exported_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def export(run_directory: Path, out: Path, *, step: int) -> None:
        made.append(f"{step} {out.relative_to(run_directory)}")
        if step == 6:
            raise RunError("the disk is full")

    monkeypatch.setattr(snapshot_uses, "export", export)
    run = replace(CONFIG.run, steps=7, snapshot_every=1)
    exports = SnapshotExports(
        replace(CONFIG, run=run, training=replace(CONFIG.training, export_every=3)), tmp_path
    )
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        running = group.create_task(exports.run())
        for step in range(1, 8):
            exports.stored(step)
        await exports.finish()
        running.cancel()
    assert made == [f"{step} exports/step-{step:08d}" for step in (3, 6, 7)]
    assert "step 6 was not exported" in caplog.text
