"""A run's directory made again from the disks of its nodes."""

import json
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from node.cli.main import main
from node.config.schema import ModelSection, RunConfig
from node.coordinator.kept_snapshots import RECORD_FORMAT, kept_manifests
from node.coordinator.rebuild import newest_record
from node.coordinator.store import Store
from node.model.chunk import build_chunk
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.state.manifest import FORMAT, Manifest, UnitEntry, unit_file, unit_weights_sha256, weights_sha256
from node.state.serialization import serialize_unit
from node.state.snapshot import list_snapshots
from node.state.snapshot_cache import SnapshotCache
from node.state.unit_state import parameters_of, read_tensors
from node.training.optimizer import StageOptimizer
from wire.errors import UserError

MODEL = ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=256, sequence=8)
CONFIG = replace(RunConfig(model=MODEL), pipeline=replace(RunConfig().pipeline, stages=2))
UNITS = unit_names(MODEL)


def states() -> dict[str, bytes]:
    chunks = [build_chunk(MODEL, units, 0, torch.device("cpu")) for units in split_units(MODEL, 1)]
    optimizer = StageOptimizer(chunks, CONFIG.training)
    return {unit: serialize_unit(optimizer.unit_state(unit)) for unit in UNITS}


def manifest(
    step: int, files: dict[str, bytes], config: RunConfig = CONFIG, run_id: str = "run-1"
) -> Manifest:
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
    files, other = states(), replace(CONFIG, training=replace(CONFIG.training, lr=1.0))
    folders = [
        node_folder(tmp_path / str(config.training.lr), manifest(40, files, config), {})
        for config in (CONFIG, other)
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
    config = replace(CONFIG, data=replace(CONFIG.data, path="text.txt"))
    named = node_folder(tmp_path / "named", manifest(20, files, config), {})
    assert main(["recover", "--from", str(named), "--run-dir", str(tmp_path / "made")]) == 2
    assert "add data.path=PATH" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
