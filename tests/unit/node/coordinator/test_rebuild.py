"""A damaged database is rebuilt from the snapshots, and what cannot be recovered is said."""

import contextlib
import json
import math
import re
import sqlite3
from dataclasses import asdict, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from node.cli.main import main
from node.cli.resume import CHANGEABLE
from node.config.schema import ModelSection, RunConfig
from node.coordinator.decisions import recorded_codecs, recorded_storages
from node.coordinator.kept_snapshots import RECORD_FORMAT, kept_manifests
from node.coordinator.rebuild import damage, newest_record, rebuild
from node.coordinator.store import DATABASE_FILE, Member, SnapshotRecord, StepRecord, Store
from node.model.chunk import build_chunk
from node.model.units import unit_names
from node.run_file.loader import (
    change_config,
    default_config,
    from_json,
    to_json,
    to_toml,
    with_absolute_paths,
)
from node.run_state.epoch import Assignment, Epoch, OnRecord, StepRules
from node.run_state.failures import Failures
from node.run_state.votes import VoteHistory
from node.schedule.placement import split_units
from node.state.manifest import FORMAT, Manifest, UnitEntry, unit_file, weights_sha256
from node.state.serialization import serialize_unit
from node.state.snapshot import list_snapshots
from node.state.snapshot_cache import SnapshotCache
from node.state.unit_state import parameters_of, read_tensors
from node.telemetry import events
from node.telemetry.history import EVICTED
from node.training.optimizer import StageOptimizer
from tests.support import snapshots
from tests.support.recorded_run import append
from tests.support.run_events import BEGAN, NODES, done, joined, placed, started
from tests.support.snapshots import unit_weights_sha256
from wire.errors import ConfigError, RunError, UserError
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


# ---- a run's directory made again from the disks of its nodes


MODEL = ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=256, sequence=8)
RUN = replace(RunConfig(model=MODEL), pipeline=replace(RunConfig().pipeline, stages=2))
UNITS = unit_names(MODEL)


def states() -> dict[str, bytes]:
    chunks = [build_chunk(MODEL, units, 0, torch.device("cpu")) for units in split_units(MODEL, 1)]
    optimizer = StageOptimizer(chunks, RUN.training)
    return {unit: serialize_unit(optimizer.unit_state(unit)) for unit in UNITS}


def manifest(step: int, files: dict[str, bytes], config: RunConfig = RUN, run_id: str = "run-1") -> Manifest:
    entries = tuple(
        UnitEntry(
            unit=unit,
            file=unit_file(unit),
            bytes=len(data),
            sha256=sha256(data).hexdigest(),
            weights_sha256=unit_weights_sha256(parameters_of(read_tensors(data))),
        )
        for unit, data in files.items()
    )
    fields = json.loads(json.dumps(asdict(config)))
    weights = weights_sha256(entry.weights_sha256 for entry in entries)
    return Manifest(
        format=FORMAT, run_id=run_id, step=step, config=fields, units=entries, weights_sha256=weights
    )


def node_folder(folder: Path, kept: Manifest, files: dict[str, bytes], *, epoch: int = 3) -> Path:
    cache = SnapshotCache(folder / "snapshots", 10**8)
    for unit, data in files.items():
        cache.put(kept.step, unit, data)
    record = {"format": RECORD_FORMAT, "run_id": kept.run_id, "epoch": epoch, "corpus_sha256": "c" * 64}
    cache.hold([kept.step], json.dumps({**record, "manifests": [kept.to_json()]}))
    return folder


def test_one_nodes_record_is_enough_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = states()
    node = node_folder(tmp_path / "node", manifest(40, files), {UNITS[0]: files[UNITS[0]]})
    made = tmp_path / "made"
    assert main(["recover", "--from", str(node), "--run-dir", str(made), "training.lr=0.0005"]) == 0
    assert "recovered run run-1 at the snapshot of step 40; the run continues when" in capsys.readouterr().out
    (kept,) = kept_manifests(made)
    assert kept == manifest(40, files) and list_snapshots(made / "snapshots") == ()
    with Store.open(made) as store:
        assert store.run().run_id == "run-1" and store.last_epoch() > 3 and store.members() == []
        assert json.loads(store.run().config_json)["training"]["lr"] == 0.0005
    assert json.loads((made / "corpus.json").read_bytes()) == {"sha256": "c" * 64}


def test_folders_that_hold_everything_give_a_whole_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, made = states(), tmp_path / "made"
    kept = manifest(40, files)
    parts = [{unit: files[unit] for unit in UNITS[:2]}, {unit: files[unit] for unit in UNITS[1:]}]
    folders = [node_folder(tmp_path / f"node-{n}", kept, part) for n, part in enumerate(parts)]
    command = ["recover", *(f"--from={folder}" for folder in folders), "--run-dir", str(made)]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run_id": "run-1", "step": 40, "run_dir": str(made)}
    assert list_snapshots(made / "snapshots") == (40,)


def test_the_newest_of_several_records_counts(tmp_path: Path) -> None:
    files = states()
    folders = [node_folder(tmp_path / str(step), manifest(step, files), {}) for step in (20, 40, 30)]
    assert newest_record(folders).manifests[-1].step == 40
    assert newest_record([folders[1] / "snapshots"]).run_id == "run-1"


def test_records_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    files = states()
    other = {**files, UNITS[0]: files[UNITS[1]]}
    right = node_folder(tmp_path / "right", manifest(40, files), {})
    wrong = node_folder(tmp_path / "wrong", manifest(40, other), {})
    with pytest.raises(UserError, match="step 40") as error:
        newest_record([right, wrong])
    assert str(right) in str(error.value) and str(wrong) in str(error.value)


def test_records_whose_configs_differ_contradict_each_other_too(tmp_path: Path) -> None:
    files, other = states(), replace(RUN, training=replace(RUN.training, lr=1.0))
    folders = [
        node_folder(tmp_path / str(config.training.lr), manifest(40, files, config), {})
        for config in (RUN, other)
    ]
    with pytest.raises(UserError, match="step 40"):
        newest_record(folders)


def test_a_snapshot_that_not_all_records_name_is_said(tmp_path: Path) -> None:
    """A member may have invented it."""
    files = states()
    folders = [node_folder(tmp_path / str(at), manifest(20, files), {}) for at in range(2)]
    assert newest_record(folders).named_by == 2
    later = node_folder(tmp_path / "later", manifest(40, files), {})
    record = newest_record([*folders, later])
    assert (record.manifests[-1].step, record.named_by) == (40, 1)


LONG = 10**400
OF_RECORDS = {
    "run_id": ("../../x", "A", None, 7, "x" * 41),
    "epoch": (-1, 1e300, LONG, 2**40, None, True, "3"),
    "corpus_sha256": (None, 7, []),
}
OF_MANIFESTS = {
    "step": (-1, 2**63, LONG, 1.5, True, None, "../../x"),
    "run_id": ("run-2", None),
    "config": (None, 7, [], "x", {"model": 1}),
}
OF_LAYERS = {
    "unit": ("../../../x", "/etc/passwd", "", "..", None, 7, "\ud800"),
    "bytes": (-1, 2**63, LONG, 1.5, None, "8"),
    "sha256": ("", "../x", "A" * 64, None, 7, []),
    "weights_sha256": ("x", None),
}


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (place, key, value)
        for place, fields in enumerate((OF_RECORDS, OF_MANIFESTS, OF_LAYERS))
        for key, values in fields.items()
        for value in values
    ],
)
def test_a_record_that_no_coordinator_wrote_is_refused(
    tmp_path: Path, place: int, key: str, value: object
) -> None:
    """The node that has it may be a stranger's."""
    files = states()
    folder = node_folder(tmp_path / "node", manifest(40, files), files)
    path = folder / "snapshots" / "run.json"
    record = json.loads(path.read_text())
    kept = json.loads(record["manifests"][0])
    layer = kept["units"][0]
    (record, kept, layer)[place][key] = value
    layer["file"] = f"{layer['unit']}.safetensors"
    if isinstance(layer["weights_sha256"], str):
        kept["weights_sha256"] = weights_sha256(entry["weights_sha256"] for entry in kept["units"])
    record["manifests"] = [json.dumps(kept)]
    path.write_text(json.dumps(record))
    assert main(["recover", "--from", str(folder), "--run-dir", str(tmp_path / "made")]) == 2
    assert [*tmp_path.iterdir()] == [folder]


def test_a_failed_recovery_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = states()
    ours = node_folder(tmp_path / "ours", manifest(20, files), {})
    theirs = node_folder(tmp_path / "theirs", manifest(20, files, run_id="run-2"), {})
    with pytest.raises(UserError, match=r"different runs \(run-1, run-2\)"):
        newest_record([ours, theirs])
    with pytest.raises(UserError, match="give a node's state directory"):
        newest_record([tmp_path])
    for damaged in ('{"format": 1}', "[" * 100_000):
        (ours / "snapshots" / "run.json").write_text(damaged)
        with pytest.raises(UserError, match="is damaged"):
            newest_record([ours])
    config = replace(RUN, data=replace(RUN.data, path="text.txt"))
    named = node_folder(tmp_path / "named", manifest(20, files, config), {})
    assert main(["recover", "--from", str(named), "--run-dir", str(tmp_path / "made")]) == 2
    assert "add data.path=PATH" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


# ---- settings that may change when a run is resumed: those that messages tell operators to change


@pytest.mark.parametrize("override", ["training.beta1=0.8", "training.global_batch=32", "run.seed=3"])
def test_settings_that_state_and_batches_depend_on_cannot_change(override: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot change .*training\.lr"):
        change_config(RunConfig(), [override], CHANGEABLE)


def test_what_a_service_says_again_at_each_start_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "words.json").write_text("{}")
    said = ["run.steps=500", "training.beta1=0.8", "data.path=text.txt", "data.tokenizer=words.json"]
    config = from_json(to_json(with_absolute_paths(default_config([*said, "model.vocab=300"]))))
    assert change_config(config, [*said, "training.lr=0.0005"], CHANGEABLE).training.lr == 0.0005
    with pytest.raises(ConfigError, match=r"training\.beta1 cannot change once"):
        change_config(config, [*said, "training.beta1=0.7"], CHANGEABLE)


def test_a_diverged_run_can_follow_its_own_advice() -> None:
    rules = StepRules(
        plan=lambda step, norm: (1.0, 1e-3),
        neighbours=lambda _stage, _stages: (),
        history=VoteHistory(lambda _stages: [frozenset()]),
    )
    epoch = Epoch(1, Assignment(hosts=("a",), addresses=("a:1",)), OnRecord(), rules)
    epoch.uncompressed = True
    remedy = getattr(Failures().not_finite(epoch, "a", "the loss"), "remedy", "")
    key = remedy.removeprefix("lower ").partition(",")[0]
    assert key in CHANGEABLE, remedy
