"""A run that is stopped and resumed ends as if it had never stopped, bit for bit."""

import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from zipfile import ZipFile

import pytest

from node.config.schema import RunConfig
from node.coordinator.store import Store
from node.run_file.loader import stored_config
from node.state.snapshot import list_snapshots, snapshot_directory
from node.telemetry.events import (
    JoinLine,
    Notice,
    PlacementMade,
    RunFinished,
    RunStarted,
    StepDone,
)
from node.training.schedule import global_norm, learning_rate
from node.tuning.memory import stage_storages
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, TINY, Run, Still, packed, undisturbed
from wire.identity.authority import CertificateAuthority

CONFIG = replace(SMALL, run=replace(SMALL.run, steps=12), pipeline=replace(SMALL.pipeline, stages=2))
PACKED = packed(
    replace(CONFIG, run=replace(CONFIG.run, steps=10), model=replace(TINY, ffn=256, vocab=1024, sequence=32))
)
TIED_RING = replace(
    CONFIG,
    model=replace(CONFIG.model, tied=True),
    training=replace(CONFIG.training, precision="float16", loss_scale=2.0**20, loss_scale_steps=4),
    pipeline=replace(CONFIG.pipeline, chunks=2),
)
"""Some steps are skipped before it stops, and some after: the factor of the loss goes on."""

pytestmark = pytest.mark.timeout(240)


def stop(run: Run) -> None:
    """Start a run of two nodes and stop it while one stands still."""
    first = run.start()
    run.add_nodes(2)
    still = run.wait_still()
    first.interrupt()
    still.go_on()
    run.assert_quiet()


Stopped = Callable[[Path, RunConfig, int], Run]


@pytest.fixture(scope="module")
def stopped(prefork: Prefork, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Gives, in a folder, a run that was stopped after so many steps of a config. Each is made once, and
    copied: its directory, and what its coordinator said."""

    @cache
    def made(config: RunConfig, steps: int) -> Run:
        folder, still = tmp_path_factory.mktemp("stopped"), Still(stage=0, steps=steps)
        with Run(folder, config, launch=prefork.popen, still=still) as run:
            stop(run)
        return run

    def copied(directory: Path, config: RunConfig, steps: int) -> Run:
        source = made(config, steps)
        run = Run(directory, config, launch=prefork.popen)
        shutil.copytree(source.run_dir, run.run_dir)
        shutil.copytree(source.state_dir(1), directory / "earlier")
        run.coordinators += source.coordinators
        return run

    return copied


def test_stop_and_resume(prefork: Prefork, tmp_path: Path) -> None:
    """Ctrl-C at the coordinator ends the run after the step and a snapshot; half of the nodes change."""
    with Run(tmp_path, PACKED, launch=prefork.popen, still=Still(stage=0, steps=5)) as run:
        first = run.start()
        nodes = run.add_nodes(2)
        still = run.wait_still()
        first.interrupt()
        still.go_on()
        assert first.wait_exit() == 130
        # So that what keeps them up starts them again: the same line goes on.
        assert [node.wait_exit() for node in nodes] == [1, 1]
        for node in nodes:
            assert any("same join line" in said for said in node.lines), node.report()
            assert node.complaints == []
        finished = first.all(RunFinished)
        assert [event.reason for event in finished] == ["stopped by the operator"]
        assert not finished[0].failed
        (stopped_at,) = run.snapshots
        assert 5 <= stopped_at < PACKED.run.steps
        assert stopped_at == max(run.losses)
        run.assert_quiet()

        second = run.resume("coordinator.regroup_seconds=0.5")
        assert second.wait_event(RunStarted).first_step == stopped_at
        run.add_node(state_dir=run.state_dir(1))
        run.add_node()
        assert second.wait_exit() == 0
        assert [node.wait_exit() for node in run.nodes[2:]] == [0, 0]
        assert [placed.resume_step for placed in second.all(PlacementMade)] == [stopped_at]
        run.assert_undisturbed()
        with Store.open(run.run_dir) as store:
            norms, steps = store.unit_norms(after=-1), store.steps()
        assert {one.step: one.grad_norm for one in steps} == {
            step: global_norm(units.values()) for step, units in norms.items()
        }, "a resumed run judges votes by these"

        kept = (run.run_dir / "run.toml").read_bytes()
        third = run.resume("pipeline.forward_codec=fp16")
        assert third.wait_exit() == 0
        weights = run.run_dir / "snapshots" / f"step-{PACKED.run.steps:08d}"
        (notice,) = third.all(Notice)
        assert f"all {PACKED.run.steps} steps" in notice.text and str(weights) in notice.text
        assert (run.run_dir / "run.toml").read_bytes() == kept, "the record says how the run was trained"


def test_the_packed_runs_stages_differ_in_bits() -> None:
    assert [storage.ffn_input for storage in stage_storages(PACKED, 2)] == ["4", "8"]


def test_resume_on_another_number_of_stages(prefork: Prefork, tmp_path: Path) -> None:
    """Two stages of two chunks, then three of one with a window: another split of the layers. The factor of
    the loss goes on."""
    with Run(tmp_path, TIED_RING, launch=prefork.popen, still=Still(stage=0, steps=5)) as run:
        stop(run)
        (stopped_at,) = run.snapshots

        with (run.run_dir / "run.toml").open() as reader:
            second = run.resume(
                *("pipeline.stages=3", "pipeline.chunks=1", "pipeline.window=1"),
                "coordinator.regroup_seconds=0.5",
            )
            run.add_nodes(3)
            assert second.wait_exit() == 0
            # Replaced, not written over: whoever reads it meanwhile reads the whole of one or the other.
            assert "\nstages = 2\n" in reader.read()
        assert "\nstages = 3\n" in (run.run_dir / "run.toml").read_text()
        (placed,) = second.all(PlacementMade)
        assert placed.resume_step == stopped_at
        assert len(placed.nodes) == 3
        run.assert_undisturbed()
        with Store.open(run.run_dir) as store:
            norms, steps = store.unit_norms(after=-1), store.steps()
        taken = {one.step: one.grad_norm for one in steps if one.grad_norm < inf}
        assert taken == {step: global_norm(units.values()) for step, units in norms.items()}
        skipped = {one.step for one in steps} - taken.keys()
        assert min(skipped) < stopped_at <= max(skipped), "steps that overflow are on record as skipped"


def test_resume_with_a_lower_learning_rate(stopped: Stopped, tmp_path: Path) -> None:
    """The advice for a run that diverged; a node from before has some of its files on disk."""
    with stopped(tmp_path, CONFIG, 3) as run:
        (stopped_at,) = run.snapshots
        changes = ("training.lr=1e-3", "training.min_lr_ratio=0.5", "training.clip=0.5")
        second = run.resume(*changes, "coordinator.regroup_seconds=0.5")
        run.add_node(state_dir=tmp_path / "earlier")
        run.add_node()
        assert second.wait_exit() == 0
        training, steps = replace(CONFIG.training, lr=1e-3, min_lr_ratio=0.5), CONFIG.run.steps
        assert {done.step: done.lr for done in second.all(StepDone)} == {
            step: learning_rate(step - 1, training, steps) for step in range(stopped_at + 1, steps + 1)
        }


SNAPSHOTS = replace(CONFIG, run=replace(CONFIG.run, snapshot_every=2))


def damage(run: Run, step: int) -> Path:
    """Other bytes in the middle of one of a snapshot's files."""
    path = snapshot_directory(run.run_dir / "snapshots", step) / "head.safetensors"
    data = bytearray(path.read_bytes())
    data[2000:2004] = bytes(byte ^ 0xFF for byte in data[2000:2004])
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_damaged_newest_snapshot_costs_some_steps(when: str, stopped: Stopped, tmp_path: Path) -> None:
    """Damaged before the run is resumed, or once its coordinator has looked at it: an older one is whole."""
    with stopped(tmp_path, SNAPSHOTS, 7) as run:
        *_, older, newest = list_snapshots(run.run_dir / "snapshots")
        assert newest == max(run.losses)

        if when == "before":
            damage(run, newest)
        second = run.resume("coordinator.regroup_seconds=0.5")
        second.wait_event(RunStarted)
        if when == "after":
            second.wait_event(JoinLine)
            damage(run, newest)
        # They hold nothing: all of it comes from the snapshot.
        run.add_nodes(2)
        assert second.wait_exit() == 0
        (told,) = [notice.text for notice in second.all(Notice) if "is damaged" in notice.text]
        assert "head.safetensors" in told and f"the snapshot of step {newest}" in told
        assert told.endswith(f"of step {older}")
        assert second.all(RunStarted)[0].first_step == (older if when == "before" else newest)
        assert second.all(StepDone)[0].step == older + 1
        assert second.all(PlacementMade)[-1].resume_step == older
        run.assert_undisturbed()


def test_a_damaged_record_is_rebuilt_by_resume(stopped: Stopped, tmp_path: Path) -> None:
    """The run goes on from its newest snapshot, and a manifest of another one that is nonsense is damage."""
    with stopped(tmp_path, SNAPSHOTS, 7) as run:
        oldest, *_, newest = list_snapshots(run.run_dir / "snapshots")
        manifest = snapshot_directory(run.run_dir / "snapshots", oldest) / "manifest.json"
        manifest.write_text("[" * 100_000)
        database = run.run_dir / "run.db"
        for companion in ("-wal", "-shm"):
            database.with_name(f"run.db{companion}").unlink(missing_ok=True)
        whole = database.read_bytes()
        database.write_bytes(whole[: len(whole) // 2])
        second = run.resume("coordinator.regroup_seconds=0.5")
        told = second.wait_event(Notice, lambda notice: "rebuilt from the snapshot" in notice.text)
        assert f"of step {newest}" in told.text
        assert second.wait_event(RunStarted).first_step == newest
        run.add_nodes(2)
        assert second.wait_exit() == 0
        run.assert_undisturbed()


def test_a_run_whose_only_snapshot_is_damaged_ends_and_is_not_resumed(
    stopped: Stopped, tmp_path: Path
) -> None:
    """Damaged while the run is on, and nodes would have to fetch it."""
    with stopped(tmp_path, CONFIG, 3) as run:
        (newest,) = run.snapshots
        second = run.resume("coordinator.regroup_seconds=0.5")
        second.wait_event(JoinLine)
        path = damage(run, newest)
        run.add_nodes(2)
        assert second.wait_exit() == 1
        (finished,) = second.all(RunFinished)
        assert finished.failed and "intact" not in finished.reason
        assert f"snapshot of step {newest}" in finished.reason and "no older" in finished.reason
        run.assert_quiet()
        for _ in range(2):
            again = run.command("resume", str(run.run_dir))
            assert again.wait_exit() == 2
            (line,) = again.stderr.splitlines()
            assert str(path) in line


STORED = Path(__file__).parents[1] / "golden" / "stored_run.zip"
"""A run directory, without its keys, that commit bcfc07db stored after 6 of 12 steps. It is never made again:
it stands for the runs that people have. `@TEXT@` is the path of its text."""


def test_a_run_that_an_earlier_commit_stored_goes_on(prefork: Prefork, tmp_path: Path) -> None:
    stored = tmp_path / "run"
    with ZipFile(STORED) as archive:
        archive.extractall(stored)
    with closing(sqlite3.connect(stored / "run.db")) as db:
        run_id, text = db.execute("SELECT run_id, config_json FROM run").fetchone()
        authority = CertificateAuthority.create(run_id, time.time())
        authority.save(stored / "authority")
        text = text.replace("@TEXT@", str(tmp_path / "text.txt"))
        db.execute("UPDATE run SET config_json = ?, pin = ?", (text, authority.pin))
        db.commit()

    with Run(tmp_path, stored_config(text), launch=prefork.popen) as run:
        coordinator = run.resume("coordinator.regroup_seconds=0.5")
        run.add_nodes(2)
        assert coordinator.wait_exit() == 0
        # Another kind of processor has other last bits.
        expected = {step: loss for step, loss in undisturbed(run.config).losses.items() if step > 6}
        assert run.losses == pytest.approx(expected, rel=1e-4)
