"""A damaged database is rebuilt from the snapshots, and what cannot be recovered is said."""

import contextlib
import json
import math
import re
import sqlite3
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.coordinator.decisions import recorded_codecs, recorded_storages
from node.coordinator.rebuild import damage, rebuild
from node.coordinator.store import DATABASE_FILE, Member, SnapshotRecord, StepRecord, Store
from node.run_file.loader import to_json, to_toml
from node.telemetry import events
from node.telemetry.history import EVICTED
from tests.support import snapshots
from tests.support.recorded_run import append
from tests.support.run_events import BEGAN, NODES, done, joined, placed, started
from wire.errors import RunError, UserError
from wire.identity.authority import CertificateAuthority
from wire.identity.enrolment import Hardware

STEPS = (5, 10, 15)
CONFIG = replace(
    snapshots.CONFIG,
    model=replace(snapshots.MODEL, vocab=256),
    pipeline=replace(snapshots.CONFIG.pipeline, stages=2),
)
"""As the support's, with values that a run file may have."""
DATABASE = [DATABASE_FILE + ending for ending in ("", "-wal", "-shm")]


def member(node: str) -> Member:
    return Member(node, node.encode() * 3, Hardware("cpu", 2, 10**9), joined=BEGAN)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 15 steps with three snapshots; node-bbbb was evicted after a checkpoint of the database."""
    directory = tmp_path / "run"
    authority = CertificateAuthority.create("run-1", BEGAN)
    directory.mkdir()
    authority.save(directory / "authority")
    store = Store.create(directory, run_id="run-1", config_json=to_json(CONFIG), pin=authority.pin, now=BEGAN)
    with store:
        store.set_addresses(["127.0.0.1:7700"])
        store.create_token(BEGAN, timedelta(hours=1), 2)
        store.restore_members([member(node) for node in NODES])
        for step in range(15):
            store.record_step(StepRecord(step, 3, 2.0, 1.0, 1e-3, 0.5, 4096, 1.0, BEGAN + step))
        for step in STEPS:
            manifest = snapshots.write_snapshot(directory / "snapshots", step)
            path = directory / "snapshots" / f"step-{step:08}" / "manifest.json"
            fields = json.loads(path.read_text())
            fields["config"]["model"]["vocab"] = 256
            fields["config"]["pipeline"]["stages"] = 2
            path.write_text(json.dumps(fields))
            store.record_snapshot(SnapshotRecord(step, "0" * 64, manifest.total_bytes, True, BEGAN))
        store.evict(NODES[1], BEGAN + 20)
    for at, event in enumerate((started(), *map(joined, NODES), placed(3), *map(done, range(1, 16)))):
        append(directory, BEGAN + at, event)
    append(directory, BEGAN + 20, events.NodeLeft(node_id=NODES[1], reason=EVICTED))
    return directory


def evicted(store: Store) -> list[str]:
    return [one.node_id for one in store.members() if one.evicted is not None]


def test_a_healthy_database_is_not_touched(run: Path) -> None:
    before = (run / DATABASE_FILE).read_bytes()
    assert damage(run) is None
    assert (run / DATABASE_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (None, "is missing"),
        (0, "is empty"),
        (100, "damaged|not a run's database"),
        (8192, "not a run's database"),
    ],
)
def test_a_truncated_database_is_rebuilt_from_the_snapshots(run: Path, size: int | None, says: str) -> None:
    path = run / DATABASE_FILE
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
        with (
            pytest.raises((UserError, RunError), match=r"thinwire resume .* rebuilds"),
            Store.open(run) as broken,
        ):
            broken.run(), broken.last_step(), broken.members(), broken.snapshots()
    what = damage(run)
    assert what is not None and re.search(says, what)
    line = rebuild(run, what, BEGAN + 100)
    assert line.startswith(what) and "of step 15" in line and "all tokens" in line
    assert damage(run) is None
    with Store.open(run) as store:
        record = store.run()
        assert (record.run_id, record.config_json) == ("run-1", to_json(CONFIG))
        assert record.pin == CertificateAuthority.load(run / "authority").pin
        assert [(one.step, one.complete) for one in store.snapshots()] == [(step, True) for step in STEPS]
        last = store.last_step()
        assert last is not None and (last.step, last.loss) == (14, done(15).loss) and math.isnan(last.clip)
        assert store.last_epoch() == 3 and [one.node_id for one in store.placement(3)] == list(NODES[:2])
        assert store.list_tokens() == []
    if size:
        assert (run / f"{DATABASE_FILE}.damaged").stat().st_size == size


def test_a_lost_write_ahead_log_is_noticed_and_evictions_in_the_history_hold(run: Path) -> None:
    """The database goes back to before the last snapshots and the eviction."""
    with sqlite3.connect(run / DATABASE_FILE) as db:
        db.execute("DELETE FROM steps WHERE step > 7")
        db.execute("DELETE FROM snapshots WHERE step > 5")
        db.execute("UPDATE members SET evicted = NULL")
    what = damage(run)
    assert what is not None and "step 8" in what and "step 15" in what
    line = rebuild(run, what, BEGAN + 100)
    assert "3 members (1 evicted)" in line
    with Store.open(run) as store:
        assert [one.node_id for one in store.members()] == list(NODES)
        assert evicted(store) == [NODES[1]]
        assert [one.step for one in store.snapshots()] == list(STEPS)


def test_planned_codecs_and_storages_are_recovered_from_the_history(run: Path) -> None:
    """The last ones were made after a rollback, in place of those of step 9."""
    codecs = {0: ("trellis-4",), 9: ("trellis-5",), 6: ("trellis-3",)}
    names = {0: ("none/8/none/none",) * 2, 9: ("none/4/none/none",), 6: ("none/6/none/none",)}
    for step, codec in codecs.items():
        plan = events.CodecsPlanned(text="", step=step, activations=codec, gradients=("dither-4",))
        append(run, BEGAN + 30, plan)
        append(run, BEGAN + 30, events.StoragesPlanned(text="", step=step, storages=names[step]))
    (run / DATABASE_FILE).unlink()
    what = damage(run)
    assert what is not None
    rebuild(run, what, BEGAN + 100)
    with Store.open(run) as store:
        planned, stored = recorded_codecs(store).changes, recorded_storages(store).changes
    assert [(step, plan.activations) for step, plan in planned] == [(step, codecs[step]) for step in (0, 6)]
    assert [(step, plan.names) for step, plan in stored] == [(step, names[step]) for step in (0, 6)]


def test_damage_inside_is_found(run: Path) -> None:
    path = run / DATABASE_FILE
    data = bytearray(path.read_bytes())
    for page in range(2, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(bytes(data))
    what = damage(run)
    assert what is not None
    rebuild(run, what, BEGAN + 100)
    assert damage(run) is None


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM run",
        "DROP TABLE tokens",
        "ALTER TABLE members DROP COLUMN cores",
        "UPDATE run SET addresses = '[5]'",
        "UPDATE run SET config_json = '{'",
        "UPDATE run SET config_json = '{\"run\": 5}'",
        "UPDATE steps SET loss = 'x' WHERE step = 3",
        "UPDATE members SET device = CAST(x'ff' AS TEXT)",
    ],
)
def test_records_that_no_program_wrote_are_found(run: Path, change: str) -> None:
    with contextlib.closing(sqlite3.connect(run / DATABASE_FILE, isolation_level=None)) as db:
        db.execute(change)
    what = damage(run)
    assert what is not None
    rebuild(run, what, BEGAN + 100)
    assert damage(run) is None


def test_an_edited_config_is_replaced_by_the_one_that_the_directory_has(run: Path) -> None:
    """Keys that nothing here knows are another version's: that database is whole, and stays."""
    other = json.loads(to_json(CONFIG))
    other["run"]["unheard_of"] = 1
    edit(run, json.dumps(other))
    assert damage(run) is None

    edited = to_json(CONFIG).replace('"stages":2', '"stages":"two"')
    edit(run, edited)
    assert damage(run) is None, "there is nothing to compare it with"
    (run / "run.toml").write_text(to_toml(CONFIG))
    what = damage(run)
    assert what is not None and "pipeline.stages" in what
    rebuild(run, what, BEGAN + 100)
    assert damage(run) is None
    with Store.open(run) as store:
        assert store.run().config_json == to_json(CONFIG)


def edit(run: Path, config_json: str) -> None:
    with contextlib.closing(sqlite3.connect(run / DATABASE_FILE, isolation_level=None)) as db:
        db.execute("UPDATE run SET config_json = ?", [config_json])


def test_a_damaged_manifest_and_history_leave_enough(run: Path) -> None:
    (run / "snapshots" / "step-00000015" / "manifest.json").write_text("[" * 100_000)
    (run / "history.jsonl").unlink()
    (run / "history.jsonl").mkdir()
    (run / DATABASE_FILE).write_bytes(b"")
    what = damage(run)
    assert what is not None
    assert "of step 10" in rebuild(run, what, BEGAN + 100)
    with Store.open(run) as store:
        assert [one.step for one in store.snapshots()] == [5, 10]
        assert store.last_step() is None


def test_snapshots_of_another_run_are_refused(run: Path) -> None:
    manifest = run / "snapshots" / "step-00000015" / "manifest.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**fields, "run_id": "run-2"}))
    (run / DATABASE_FILE).write_bytes(b"")
    with pytest.raises(UserError, match="run-2, not of run-1"):
        rebuild(run, "run.db is empty", BEGAN)
    assert (run / DATABASE_FILE).read_bytes() == b""


def test_without_snapshots_there_is_nothing_to_rebuild_from(run: Path) -> None:
    for manifest in run.glob("snapshots/*/manifest.json"):
        manifest.unlink()
    (run / DATABASE_FILE).write_bytes(b"")
    assert damage(run) is None
    with pytest.raises(UserError, match="was never finished: delete"):
        Store.open(run)
