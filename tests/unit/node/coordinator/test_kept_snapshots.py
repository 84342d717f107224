"""Snapshots on the disks of nodes: who may have one given up."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from node.config.schema import RunConfig
from node.coordinator import kept_snapshots, snapshot_uses
from node.coordinator.kept_snapshots import (
    DOUBTS_A_SECOND,
    DOUBTS_AT_ONCE,
    KeptSnapshots,
    SnapshotBook,
    write_kept_manifest,
)
from node.coordinator.snapshot_uses import MOST_TEXT, EveryNth, SnapshotExports, SnapshotSamples
from node.model.units import unit_names
from node.state.manifest import Manifest, UnitEntry, unit_file
from node.telemetry.events import Event, Notice, SampleMade
from tests.support.process import SECONDS
from tests.unit.node.coordinator.test_snapshot_handler import CONFIG, UNITS, Told
from wire.channels import MESSAGE_BYTES
from wire.errors import NotYetError, RunError
from wire.messages import HeldLayer, Prefetch
from wire.messages_proto import coordinator_message_to_proto

HOLDERS, LIAR = ("node-a", "node-b"), "node-liar"
PATIENCE = CONFIG.coordinator.regroup_seconds + CONFIG.coordinator.silent_seconds
OLD, NEW = 4, 8
EMBED = UNITS[0]


class Here(Told):
    def addresses(self) -> dict[str, str]:
        return dict.fromkeys((*HOLDERS, LIAR), "127.0.0.1:1")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    at = [0.0]
    monkeypatch.setattr(kept_snapshots, "time", SimpleNamespace(monotonic=lambda: at[0], time=lambda: 0.0))
    yield at


@pytest.fixture
def run() -> Here:
    return Here()


@pytest.fixture
def kept(tmp_path: Path, clock: list[float], run: Here) -> KeptSnapshots:
    book = SnapshotBook(
        config=CONFIG, windows=1, directory=tmp_path, run_id="run-1", store=Mock(), disk=run.disk
    )
    entries = [UnitEntry(unit, unit_file(unit), 8, "0" * 64, "0" * 64) for unit in UNITS]
    for step in (OLD, NEW):
        write_kept_manifest(tmp_path, Manifest.of("run-1", step, CONFIG, entries, None))
    return KeptSnapshots(book, CONFIG, run)


def hold(kept: KeptSnapshots) -> None:
    files = [HeldLayer(step=s, unit=u, bytes=8, sha256="0" * 64) for s in (OLD, NEW) for u in UNITS]
    for node in HOLDERS:
        assert kept.hold(node, files, []) == []


def test_a_member_that_calls_all_copies_damaged_has_no_snapshot_given_up(
    kept: KeptSnapshots, clock: list[float], run: Here
) -> None:
    hold(kept)
    for clock[0] in range(0, 5 * int(PATIENCE), 7):
        with pytest.raises(NotYetError):
            kept.where(LIAR, NEW, EMBED, HOLDERS, epoch=0)
        asked = {node for node, message in run.sent if isinstance(message, Prefetch)}
        assert asked == {*HOLDERS}, "they look at their copies"
        hold(kept)
    assert kept.complete == (OLD, NEW) and run.damaged == []
    _, others, _ = kept.where(LIAR, NEW, EMBED, (), epoch=0)
    assert {place.node_id for place in others} == {*HOLDERS}


def test_one_host_that_calls_all_copies_damaged_has_no_snapshot_given_up(
    kept: KeptSnapshots, clock: list[float], run: Here
) -> None:
    """Its stage goes to another node. If that gets none either, the holders lie."""
    hold(kept)
    failed = []
    for clock[0] in range(0, 5 * int(PATIENCE), 7):
        with pytest.raises((NotYetError, RunError)) as refused:
            kept.where(LIAR, NEW, EMBED, HOLDERS, epoch=1)
        failed.append(not isinstance(refused.value, NotYetError))
        hold(kept)
        _, others, _ = kept.where("node-honest", NEW, EMBED, (), epoch=1)
        assert {place.node_id for place in others} == {*HOLDERS}
    assert any(failed) and kept.complete == (OLD, NEW) and run.damaged == []
    for _ in range(4):
        assert run.damaged == []
        with pytest.raises((NotYetError, RunError)):
            kept.where("node-honest", NEW, EMBED, HOLDERS, epoch=2)
        clock[0] += PATIENCE / 3
    assert run.damaged == [(NEW, OLD)] and kept.complete == (OLD,)


def test_a_member_that_doubts_copies_again_and_again_has_few_of_them_read(
    kept: KeptSnapshots, clock: list[float], run: Here
) -> None:
    for turn in range(5000):
        hold(kept)
        clock[0] = turn / 50
        with contextlib.suppress(NotYetError):
            kept.where(LIAR, NEW, EMBED, HOLDERS, epoch=0)
    assert len(run.sent) <= DOUBTS_AT_ONCE + DOUBTS_A_SECOND * clock[0] + 1


def test_a_layer_that_the_run_needs_and_nobody_holds_is_waited_for_each_time(
    kept: KeptSnapshots, clock: list[float], run: Here
) -> None:
    def missed(at: float) -> None:
        clock[0] = at
        with pytest.raises(NotYetError):
            kept.where(LIAR, NEW, EMBED, (), epoch=1)

    missed(0.0)
    later = 3 * PATIENCE
    missed(later)
    missed(later + PATIENCE - 1)
    assert run.damaged == []
    hold(kept)
    kept.hold(HOLDERS[0], [], [(NEW, EMBED)])
    kept.hold(HOLDERS[1], [], [(NEW, EMBED)])
    clock[0] = later + PATIENCE
    with pytest.raises(RunError) as refused:
        kept.where(LIAR, NEW, EMBED, (), epoch=1)
    assert not isinstance(refused.value, NotYetError)
    assert run.damaged == [(NEW, OLD)] and kept.complete == (OLD,)


def test_a_layer_whose_hash_of_the_weights_is_missing_is_not_handed_in(
    kept: KeptSnapshots, run: Here
) -> None:
    """No manifest could be made of it, and the run would wait for that without end."""
    step, node = NEW + 4, "node-c"
    kept.expect(step, [[node]])
    for weights in ("", "1" * 64):
        file = HeldLayer(step=step, unit=EMBED, bytes=8, sha256="0" * 64, weights_sha256=weights)
        assert kept.hold(node, [file], []) == []
        assert run.received == ([(step, EMBED)] if weights else [])


async def test_a_snapshot_of_which_a_layer_is_gone_is_given_up_after_a_while(
    kept: KeptSnapshots, clock: list[float], run: Here
) -> None:
    """The node that saved the layer died before another one had a copy, and does not come back."""
    step, gone = NEW + 4, "node-gone"
    kept.expect(step, [[gone]])
    kept.agreed(step, dict.fromkeys(UNITS, "0" * 64))
    kept.hold(gone, [HeldLayer(step=step, unit=EMBED, bytes=8, sha256="0" * 64)], [])
    for clock[0] in (1.0, PATIENCE, PATIENCE + 1.0):
        assert run.gone == []
        await kept._complete()
    assert run.gone == [step]


def test_the_record_of_many_snapshots_of_many_layers_fits_a_message(tmp_path: Path, run: Here) -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, layers=126))
    entries = [
        UnitEntry(unit, unit_file(unit), 10**9, "0" * 64, "0" * 64) for unit in unit_names(config.model)
    ]
    for step in range(1, 21):
        write_kept_manifest(tmp_path, Manifest.of("run-1", step, config, entries, None))
    book = SnapshotBook(
        config=config, windows=1, directory=tmp_path, run_id="run-1", store=Mock(), disk=run.disk
    )
    message = KeptSnapshots(book, config, run).message()
    assert coordinator_message_to_proto(message).ByteSize() < MESSAGE_BYTES
    assert message.steps == tuple(range(1, 21)), "all are kept"
    known = [Manifest.from_json(text, "") for text in json.loads(message.record)["manifests"]]
    assert len(known) > 2 and [one.step for one in known] == [*range(21 - len(known), 21)]


# ---- what is made of every n-th snapshot: model folders, and samples by a process beside the run


DEFAULTS = RunConfig()
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
    run = replace(DEFAULTS.run, steps=7, snapshot_every=1)
    data = replace(DEFAULTS.data, prompts=("a b", "--c"), prompts_every=2, format="chat" if chat else "text")
    return SnapshotSamples(replace(DEFAULTS, run=run, data=data), tmp_path, told.append, free), told


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
    by_time = EveryNth(replace(DEFAULTS, run=replace(DEFAULTS.run, steps=9, snapshot_every="10 min")), 2)
    assert [step for step in (3, 4, 7, 8, 9) if by_time.is_due(step)] == [4, 8, 9]
    assert not EveryNth(DEFAULTS, 0).is_due(DEFAULTS.run.steps)


async def test_every_nth_snapshot_is_exported_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def export(run_directory: Path, out: Path, *, step: int) -> None:
        made.append(f"{step} {out.relative_to(run_directory)}")
        if step == 6:
            raise RunError("the disk is full")

    monkeypatch.setattr(snapshot_uses, "export", export)
    run = replace(DEFAULTS.run, steps=7, snapshot_every=1)
    exports = SnapshotExports(
        replace(DEFAULTS, run=run, training=replace(DEFAULTS.training, export_every=3)), tmp_path
    )
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        running = group.create_task(exports.run())
        for step in range(1, 8):
            exports.stored(step)
        await exports.finish()
        running.cancel()
    assert made == [f"{step} exports/step-{step:08d}" for step in (3, 6, 7)]
    assert "step 6 was not exported" in caplog.text
