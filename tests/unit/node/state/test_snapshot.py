"""Snapshots: whole or not there at all, verified when read, one weights hash on any split."""

import contextlib
import errno
import json
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.model.chunk import build_chunk
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.state import snapshot as snapshot_check
from node.state.manifest import (
    DAMAGED_NAME,
    MANIFEST_NAME,
    SnapshotDamagedError,
    weights_sha256,
)
from node.state.serialization import deserialize_unit, load_unit, serialize_unit
from node.state.snapshot import (
    Checked,
    SnapshotFolder,
    check_snapshot,
    discard_incomplete,
    held_by_nodes,
    list_snapshots,
    read_manifest,
    read_unit,
    set_damaged_aside,
    snapshot_directory,
)
from tests.support.snapshots import CONFIG, MODEL, put, unit_states, unit_weights_sha256, write_snapshot
from wire import descriptors
from wire.errors import DiskFullError, ProtocolViolationError, RunError

UNITS = unit_names(MODEL)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_written_and_read_back(tmp_path: Path) -> None:
    states = unit_states()
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    for unit in reversed(UNITS[1:]):
        assert put(writer, 100, unit, states[unit]) is None
    assert writer.missing(100) == ("embed",)
    assert list_snapshots(tmp_path) == ()
    manifest = put(writer, 100, "embed", states["embed"])
    assert manifest is not None
    assert list_snapshots(tmp_path) == (100,)
    directory = snapshot_directory(tmp_path, 100)
    assert directory.name == "step-00000100"
    assert files_below(directory) == sorted(
        ["manifest.json", "embed.safetensors", "head.safetensors"]
        + [f"block.000{index}.safetensors" for index in range(2)]
    )
    assert read_manifest(directory) == manifest
    assert (manifest.run_id, manifest.step) == ("run-1", 100)
    assert manifest.config["model"]["hidden"] == 16
    assert tuple(entry.unit for entry in manifest.units) == UNITS
    assert manifest.total_bytes == sum((directory / f"{unit}.safetensors").stat().st_size for unit in UNITS)
    for unit in UNITS:
        loaded = load_unit(directory, unit)
        assert loaded.keys() == states[unit].keys()
        assert all(torch.equal(loaded[name], states[unit][name]) for name in loaded)
        assert sha256(read_unit(directory, unit)).hexdigest() == manifest.entry(unit).sha256


def test_weights_hash_ignores_split_and_optimizer_but_no_weight(tmp_path: Path) -> None:
    manifest = write_snapshot(tmp_path, 1)
    expected = manifest.weights_sha256
    chunks = [build_chunk(MODEL, units, 0, torch.device("cpu")) for units in split_units(MODEL, 2)]
    from_memory = weights_sha256(
        unit_weights_sha256({name: value.detach().numpy() for name, value in parameters.items()})
        for chunk in chunks
        for _, parameters in chunk.named_units()
    )
    assert from_memory == expected

    def hash_with(unit: str, name: str) -> str:
        states = unit_states(chunks=2)
        states[unit][name].view(-1)[-1] += 1
        writer = SnapshotFolder(tmp_path / f"{unit}-{name}", CONFIG, "other-run")
        manifests = [put(writer, 7, each, tensors) for each, tensors in states.items()]
        assert manifests[-1] is not None
        return manifests[-1].weights_sha256

    assert hash_with("head", "exp_avg.norm.weight") == expected
    assert hash_with("head", "parameter.norm.weight") != expected
    assert hash_with("block.0001", "parameter.down.weight") != expected


def test_serialization_is_deterministic_and_independent_of_order() -> None:
    state = unit_states()["block.0000"]
    data = serialize_unit(state)
    assert serialize_unit(dict(reversed(state.items()))) == data
    assert serialize_unit(deserialize_unit(data)) == data


def test_damaged_bytes_are_refused_whatever_they_are() -> None:
    data = serialize_unit(unit_states()["head"])
    huge_header = (1 << 62).to_bytes(8, "little") + data[8:]
    for damaged in (b"", b"short", data[:-1], data + b"x", huge_header, b"\0" * 64, b"\x80\x04K\x01."):
        with pytest.raises(RunError, match="cannot be read"):
            deserialize_unit(damaged)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write_snapshot(tmp_path, 5)
    directory = snapshot_directory(tmp_path, 5)
    path = directory / "block.0001.safetensors"
    good = path.read_bytes()
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), good[:100], good + b"x", b""):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"block.0001.safetensors is damaged"):
            load_unit(directory, "block.0001")
    path.unlink()
    with pytest.raises(RunError, match=r"cannot read .*block.0001.safetensors"):
        read_unit(directory, "block.0001")
    assert read_unit(directory, "head")
    with pytest.raises(RunError, match=r"has no unit 'block.0009'"):
        read_unit(directory, "block.0009")


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    write_snapshot(tmp_path, 5)
    path = snapshot_directory(tmp_path, 5) / "head.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=r"head.safetensors is damaged"):
        read_unit(path.parent, "head")


def test_a_torn_or_strange_manifest_is_refused(tmp_path: Path) -> None:
    write_snapshot(tmp_path, 5)
    directory = snapshot_directory(tmp_path, 5)
    path = directory / MANIFEST_NAME
    good = path.read_text()
    fields = json.loads(good)
    other_format = json.dumps({**fields, "format": 2})
    lacks_step = json.dumps({key: value for key, value in fields.items() if key != "step"})
    elsewhere = json.loads(good)
    elsewhere["units"][0]["file"] = "../../secret"
    fewer = json.dumps({**fields, "units": fields["units"][:-1]})
    cases = [
        (good[: len(good) // 2], "is damaged"),
        ("", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "is damaged"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "is damaged"),
        (lacks_step, "is damaged"),
        (other_format, "has format 2, expected 1"),
        (json.dumps(elsewhere), "names files that are not units"),
        (fewer, "inconsistent hashes"),
        (json.dumps({**fields, "step": 6}), "contains the snapshot of step 6"),
    ]
    for text, message in cases:
        path.write_text(text)
        with pytest.raises(RunError, match=message):
            read_unit(directory, "head")
    path.unlink()
    with pytest.raises(RunError, match="no complete snapshot in"):
        read_manifest(directory)


def test_bad_uploads_leave_nothing(tmp_path: Path) -> None:
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    states = unit_states()
    data = serialize_unit(states["head"])
    wider = {**states["head"], "parameter.norm.weight": torch.ones(17)}
    fewer = {name: value for name, value in states["head"].items() if name != "parameter.norm.weight"}
    with pytest.raises(ProtocolViolationError, match="this model does not have"):
        writer.put(1, "../../etc/x", data)
    with pytest.raises(ProtocolViolationError, match="cannot be read"):
        writer.put(1, "head", b"junk")
    for tensors in (wider, fewer, states["embed"]):
        with pytest.raises(ProtocolViolationError, match="does not fit this model"):
            put(writer, 1, "head", tensors)
    assert list(tmp_path.iterdir()) == []
    assert writer.missing(1) == UNITS


def test_repeated_uploads(tmp_path: Path) -> None:
    manifest = write_snapshot(tmp_path, 3)
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    # The reply was lost, so the stage sends again.
    assert put(writer, 3, "head", unit_states()["head"]) == manifest
    with pytest.raises(ProtocolViolationError, match="differs from the complete snapshot"):
        put(writer, 3, "head", unit_states(seed=1)["head"])
    assert read_unit(snapshot_directory(tmp_path, 3), "head")

    # Before completion a later upload replaces the earlier one.
    put(writer, 4, "head", unit_states(seed=1)["head"])
    for unit in reversed(UNITS):
        result = put(writer, 4, unit, unit_states()[unit])
    assert result is not None and result.weights_sha256 == manifest.weights_sha256


def test_uploads_from_many_threads(tmp_path: Path) -> None:
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    work = [(step, unit, tensors) for step in (1, 2) for unit, tensors in unit_states().items()]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda item: put(writer, *item), work))
    assert sum(result is not None for result in results) == 2
    assert list_snapshots(tmp_path) == (1, 2)


def test_half_written_snapshots_are_ignored_and_removed(tmp_path: Path) -> None:
    write_snapshot(tmp_path, 10)
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    put(writer, 20, "head", unit_states()["head"])
    (snapshot_directory(tmp_path, 10) / ".head.safetensors.abc.tmp").write_text("left by a crash")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-30").write_text("a file of the user's")
    assert list_snapshots(tmp_path) == (10,)
    assert discard_incomplete(tmp_path) == (20,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000010", "step-30"]
    assert not list(snapshot_directory(tmp_path, 10).glob(".*"))
    assert list_snapshots(tmp_path / "missing") == ()
    assert discard_incomplete(tmp_path / "missing") == ()


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (100, 5, 30, 40):
        write_snapshot(tmp_path, step)
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    put(writer, 200, "head", unit_states()["head"])
    writer.hold((40, 100))
    assert list_snapshots(tmp_path) == (40, 100)
    assert writer.missing(200) != UNITS  # one that is being written is left alone
    assert snapshot_directory(tmp_path, 200).is_dir()
    writer.hold(writer.steps()[-1:])
    assert writer.steps() == (100,)


def test_a_full_disk_is_one_line_and_leaves_nothing_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own error at fsync, where a full disk may first be noticed."""
    write_snapshot(tmp_path, 1)
    writer = SnapshotFolder(tmp_path, CONFIG, "run-1")
    states = unit_states()
    put(writer, 2, "embed", states["embed"])
    before = files_below(tmp_path)
    size = len(serialize_unit(states["head"]))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(RunError) as caught:
            put(writer, 2, "head", states["head"])
    message = str(caught.value)
    assert message.startswith(f"disk full: head.safetensors needs {size} bytes in {tmp_path}/step-00000002")
    assert "\n" not in message
    assert files_below(tmp_path) == before
    assert list_snapshots(tmp_path) == (1,)
    # Once there is room, the same upload goes through.
    for unit in UNITS[1:]:
        manifest = put(writer, 2, unit, states[unit])
    assert manifest is not None


def test_files_wait_until_there_are_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may hold them all for a while. A snapshot that cannot be read then is not a damaged one."""
    writer, states = SnapshotFolder(tmp_path, CONFIG, "run-1"), unit_states()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    pauses = 0

    def take_all() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        while pauses % 2 == 0 and taken:
            os.close(taken.pop())

    monkeypatch.setattr(descriptors, "_never", SimpleNamespace(wait=pause))
    try:
        for unit in UNITS:
            take_all()
            manifest = put(writer, 1, unit, states[unit])
        assert manifest is not None and pauses == 2 * len(UNITS)
        take_all()
        assert read_unit(snapshot_directory(tmp_path, 1), UNITS[0]) == serialize_unit(states[UNITS[0]])
        take_all()
        assert set_damaged_aside(tmp_path).whole == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while taken:
            os.close(taken.pop())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file, not a directory")
    writer = SnapshotFolder(tmp_path / "root", CONFIG, "run-1")
    with pytest.raises(RunError, match=r"cannot write .*head.safetensors \(File exists\)"):
        put(writer, 1, "head", unit_states()["head"])


def test_a_snapshot_that_nodes_hold_is_named_with_the_way_to_get_one(tmp_path: Path) -> None:
    assert held_by_nodes(tmp_path) == ""
    (tmp_path / "kept").mkdir()
    for step in (20, 100):
        (tmp_path / "kept" / f"step-{step:08d}.json").write_text("{}")
    assert "snapshot of step 100" in held_by_nodes(tmp_path)
    assert f"thinwire resume {tmp_path} snapshots.keep=coordinator" in held_by_nodes(tmp_path)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, 0])
def test_room_is_checked_where_a_file_system_or_a_system_reserves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, "not supported")

    if number:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    folder, data = SnapshotFolder(tmp_path, CONFIG, "run-1"), bytes(range(100))
    with contextlib.closing(folder.arriving(3, "head", len(data))) as file:
        file.take(data[:60])
        file.take(memoryview(data)[60:])
        assert file.read(0, 1000) == data == file.path.read_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99))
    with pytest.raises(DiskFullError):
        folder.arriving(3, "head", len(data))
    assert [*tmp_path.iterdir()] == []


# ---- the snapshot from which a run continues: the newest intact one


def write_snapshots(root: Path, *steps: int) -> None:
    for step in steps:
        write_snapshot(root, step)


def damage(root: Path, step: int, name: str = "head.safetensors") -> Path:
    """Four other bytes in the middle of a file."""
    path = snapshot_directory(root, step) / name
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        old = file.read(4)
        file.seek(-4, os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in old))
    return path


def test_the_newest_complete_snapshot_counts_and_nothing_is_changed(tmp_path: Path) -> None:
    write_snapshots(tmp_path, 40, 80)
    before = sorted(tmp_path.rglob("*"))
    assert set_damaged_aside(tmp_path) == Checked(whole=80, damaged=())
    assert set_damaged_aside(tmp_path / "nowhere") == Checked(whole=0, damaged=())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("how", ["bytes", "longer", "missing", "manifest"])
def test_a_damaged_one_is_set_aside_with_its_files(how: str, tmp_path: Path) -> None:
    write_snapshots(tmp_path, 40, 80, 120)
    directory = snapshot_directory(tmp_path, 120)
    path = directory / "head.safetensors"
    match how:
        case "bytes":
            damage(tmp_path, 120)
        case "longer":
            path.write_bytes(path.read_bytes() + b"x")
        case "missing":
            path.unlink()
        case _:
            path = directory / MANIFEST_NAME
            path.write_text(path.read_text()[:100])
    files = {file.name for file in directory.iterdir()}
    checked = set_damaged_aside(tmp_path)
    assert checked.whole == 80 and [step for step, _ in checked.damaged] == [120]
    assert str(path if how != "manifest" else directory) in checked.news()
    assert "step 120 is set aside" in checked.news()
    assert checked.news().endswith("of step 80")
    assert "\n" not in checked.news()
    assert list_snapshots(tmp_path) == (40, 80)
    assert {file.name for file in directory.iterdir()} == files - {MANIFEST_NAME} | {DAMAGED_NAME}
    assert set_damaged_aside(tmp_path) == Checked(whole=80, damaged=()), "told of once"


def test_two_damaged_ones(tmp_path: Path) -> None:
    write_snapshots(tmp_path, 40, 80, 120)
    damage(tmp_path, 120)
    damage(tmp_path, 80, "block.0001.safetensors")
    checked = set_damaged_aside(tmp_path)
    assert checked.whole == 40
    assert "120, 80 are set aside" in checked.news()


def test_without_a_whole_one_all_stay_as_they_are(tmp_path: Path) -> None:
    """Else the next start would find a run without snapshots, and start it again."""
    write_snapshots(tmp_path, 40, 80)
    damage(tmp_path, 40)
    damage(tmp_path, 80)
    checked = set_damaged_aside(tmp_path)
    assert checked.whole == 0 and [step for step, _ in checked.damaged] == [80, 40]
    assert list_snapshots(tmp_path) == (40, 80)


def test_one_of_another_version_is_not_damaged(tmp_path: Path) -> None:
    write_snapshots(tmp_path, 40, 80)
    (snapshot_directory(tmp_path, 80) / MANIFEST_NAME).write_text('{"format": 2, "all": "else"}')
    with pytest.raises(RunError, match="has format 2, expected 1"):
        set_damaged_aside(tmp_path)
    assert list_snapshots(tmp_path) == (40, 80)


def test_a_file_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshots(tmp_path, 40, 80)

    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RunError, match="make it readable for this user") as caught:
        check_snapshot(snapshot_directory(tmp_path, 80))
    assert not isinstance(caught.value, SnapshotDamagedError)


def test_a_check_that_takes_longer_than_a_moment_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshots(tmp_path, 40)
    told: list[str] = []
    check_snapshot(snapshot_directory(tmp_path, 40), told.append)
    assert told == []
    monkeypatch.setattr(snapshot_check, "MOMENT_SECONDS", -1.0)
    check_snapshot(snapshot_directory(tmp_path, 40), told.append)
    assert len(told) == 1 and told[0].startswith("checking the snapshot of step 40: ")


def test_a_damaged_snapshot_stays_aside_until_its_peers_are_pruned(tmp_path: Path) -> None:
    write_snapshots(tmp_path, 40, 80, 120)
    damage(tmp_path, 80)
    damage(tmp_path, 120)
    assert set_damaged_aside(tmp_path).whole == 40
    (snapshot_directory(tmp_path, 80) / ".head.safetensors.abc.tmp").write_text("left by a crash")
    assert discard_incomplete(tmp_path) == ()
    assert not list(tmp_path.rglob("*.tmp"))
    folder = SnapshotFolder(tmp_path, CONFIG, "run-1")
    folder.hold(folder.steps())
    write_snapshots(tmp_path, 100)
    folder.hold((40, 100))
    assert snapshot_directory(tmp_path, 80).is_dir()
    folder.hold((100,))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000100", "step-00000120"]


def test_the_run_makes_it_anew(tmp_path: Path) -> None:
    write_snapshots(tmp_path, 40, 80)
    damage(tmp_path, 80)
    set_damaged_aside(tmp_path)
    write_snapshots(tmp_path, 80)
    assert list_snapshots(tmp_path) == (40, 80)
    directory = snapshot_directory(tmp_path, 80)
    check_snapshot(directory)
    assert read_unit(directory, "head")
    assert not (directory / DAMAGED_NAME).exists()
