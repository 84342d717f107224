"""The snapshot from which a run continues: the newest intact one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from node.state import snapshot as snapshot_check
from node.state.manifest import DAMAGED_NAME, MANIFEST_NAME, SnapshotDamagedError
from node.state.snapshot import (
    Checked,
    SnapshotFolder,
    check_snapshot,
    discard_incomplete,
    list_snapshots,
    read_unit,
    set_damaged_aside,
    snapshot_directory,
)
from tests.support.snapshots import CONFIG, write_snapshot
from wire.errors import RunError


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
