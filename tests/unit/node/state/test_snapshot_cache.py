"""A node's own copies of snapshots: whole or absent, the newest two steps, within a limit, of one config."""

import contextlib
import os
from hashlib import sha256
from pathlib import Path

import pytest

from node.state.snapshot_cache import SnapshotCache
from wire.errors import RunError

ROOM = 10**6
SUM = 32


def files(directory: Path) -> list[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(directory)) for path in found)


def held(cache: SnapshotCache, step: int, unit: str) -> bytes | None:
    file = cache.get(step, unit)
    assert file is None or file.sha256 == sha256(file.data).hexdigest()
    return file.data if file is not None else None


def test_stored_layers_are_returned(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path / "cache", ROOM)
    assert cache.get(3, "embed") is None
    cache.put(3, "embed", b"weights")
    cache.put(3, "block.0001", b"")
    assert held(cache, 3, "embed") == b"weights"
    assert held(cache, 3, "block.0001") == b""
    assert cache.get(3, "head") is None
    assert cache.get(4, "embed") is None


def test_a_later_process_finds_the_files(tmp_path: Path) -> None:
    SnapshotCache(tmp_path, ROOM).put(3, "embed", b"weights")
    assert held(SnapshotCache(tmp_path, ROOM), 3, "embed") == b"weights"


def test_a_file_put_again_replaces_the_first(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, 100 + SUM)
    cache.put(3, "embed", b"a" * 100)
    cache.put(3, "embed", b"b" * 100)
    assert held(cache, 3, "embed") == b"b" * 100


@pytest.mark.parametrize("keep", [0, 1, 31, 32, 40])
def test_a_torn_file_counts_as_absent(tmp_path: Path, keep: int) -> None:
    cache = SnapshotCache(tmp_path, ROOM)
    cache.put(3, "embed", b"weights and moments")
    (path,) = tmp_path.rglob("*.layer")
    path.write_bytes(path.read_bytes()[:keep])
    assert cache.get(3, "embed") is None


def test_a_damaged_file_counts_as_absent(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, ROOM)
    cache.put(3, "embed", b"weights")
    (path,) = tmp_path.rglob("*.layer")
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert cache.get(3, "embed") is None
        assert not path.exists()


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, ROOM)
    for step in (10, 20, 30, 100):
        cache.put(step, "embed", b"x")
        cache.put(step, "head", b"y")
    assert files(tmp_path) == [f"{step}/{unit}.layer" for step in (100, 30) for unit in ("embed", "head")]


def test_an_older_step_does_not_displace_newer_ones(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, ROOM)
    for step in (30, 40, 20):
        cache.put(step, "embed", b"x")
    assert [held(cache, step, "embed") for step in (20, 30, 40)] == [b"x", b"x", b"x"]


def test_older_steps_are_dropped_first_to_keep_the_limit(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, 3 * (100 + SUM))
    cache.put(10, "embed", b"a" * 100)
    cache.put(10, "head", b"b" * 100)
    cache.put(20, "embed", b"c" * 100)
    assert cache.get(10, "head") is not None
    cache.put(20, "head", b"d" * 100)
    assert files(tmp_path) == ["20/embed.layer", "20/head.layer"]
    for step, unit in ((20, "block.0000"), (10, "embed")):
        with pytest.raises(RunError, match="disk space is used up"):
            cache.put(step, unit, b"e" * 101)  # a byte too much, and nothing older to give up
    assert files(tmp_path) == ["20/embed.layer", "20/head.layer"]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.layer")) <= 3 * (100 + SUM)


def test_files_that_belong_to_no_step_are_removed(tmp_path: Path) -> None:
    (tmp_path / "old" / "20").mkdir(parents=True)
    SnapshotCache(tmp_path, ROOM).put(10, "embed", b"ours")
    assert files(tmp_path) == ["10/embed.layer"]
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_complete_snapshots_stay_until_others_are_named(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, ROOM)
    for step in (10, 20, 30):
        cache.put(step, "embed", b"x")
        cache.hold([10, *([step] if step > 10 else [])], record=f"step {step}")
    cache.put(40, "embed", b"x")
    assert files(tmp_path) == ["10/embed.layer", "30/embed.layer", "40/embed.layer", "run.json"]
    assert (tmp_path / "run.json").read_text() == "step 30"
    cache.hold([30, 40])
    assert files(tmp_path) == ["30/embed.layer", "40/embed.layer", "run.json"]


def test_the_newest_complete_snapshot_is_not_given_up_for_room(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, 2 * (100 + SUM))
    for step in (10, 20):
        cache.put(step, "embed", b"a" * 100)
    cache.hold([10, 20])
    cache.put(30, "embed", b"b" * 100)
    assert files(tmp_path) == ["20/embed.layer", "30/embed.layer"]
    with pytest.raises(RunError, match="disk space is used up"):
        cache.put(30, "head", b"c" * 100)
    assert files(tmp_path) == ["20/embed.layer", "30/embed.layer"]


def test_files_are_named_with_their_expected_kind(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, ROOM)
    cache.put(10, "embed", b"a")
    cache.put(20, "head", b"bc")
    assert cache.names() == [
        (20, "head", 2, sha256(b"bc").hexdigest()),
        (10, "embed", 1, sha256(b"a").hexdigest()),
    ]
    cache.drop(20, "head")
    assert [name.unit for name in cache.names()] == ["embed"]


@pytest.mark.parametrize("unit", ["../../escaped", "/tmp/escaped", "a/b", "..", ".", "", "nul\0"])
def test_a_unit_whose_name_is_no_file_name_is_not_kept(tmp_path: Path, unit: str) -> None:
    cache = SnapshotCache(tmp_path / "cache", ROOM)
    with pytest.raises(RunError, match="not a layer unit"):
        cache.put(1, unit, b"x")
    assert cache.get(1, unit) is None
    assert files(tmp_path) == []


def test_a_disk_that_refuses_writes_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file where the directory should be")
    cache = SnapshotCache(tmp_path / "cache", ROOM)
    with pytest.raises(RunError, match="cannot be written"):
        cache.put(3, "embed", b"x")
    assert cache.get(3, "embed") is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(RunError, match="cannot be written"):
        SnapshotCache(tmp_path, ROOM).put(3, "embed", b"x")
    assert files(tmp_path) == []


def test_a_file_of_which_one_call_reads_a_part_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads less than 2 GiB in one call."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, offset: pread(handle, min(size, 7), offset))
    with SnapshotCache(tmp_path, 1000).writing(3, "head", 20) as file:
        file.write(bytes(range(20)))
        with contextlib.closing(file.keep("00" * 32)) as kept:
            assert kept.read(0, 20) == bytes(range(20)) and kept.read(15, 20) == bytes(range(15, 20))
