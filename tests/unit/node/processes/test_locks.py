"""Directories for keys: made private, ours again, or refused as they are."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from node.cli.main import main
from node.cli.run_directory import existing_run_directory, new_run_directory
from node.config.join_options import JoinOptions
from node.config.schema import RunConfig
from node.coordinator.rebuild import damage, newest_record
from node.processes.locks import claim
from tests.support.homes import without_home
from wire.errors import UserError
from wire.identity.credentials import load_or_create_key
from wire.identity.files import check_regular_files
from wire.identity.token import JoinToken

CLAIMS = {
    "--state-dir": lambda path: claim("demo-x", path).release(),
    "--run-dir": lambda path: new_run_directory(path, "demo"),
}
each_claim = pytest.mark.parametrize("option", CLAIMS)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@each_claim
def test_a_new_directory_is_private(option: str, tmp_path: Path) -> None:
    CLAIMS[option](tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700


@each_claim
@pytest.mark.parametrize("besides", [(), ("lock",), ("lost+found", "snapshots")])
@pytest.mark.parametrize("before", [0o700, 0o755, 0o1777])
def test_an_empty_directory_of_the_users_keeps_its_mode(
    option: str, besides: tuple[str, ...], before: int, tmp_path: Path
) -> None:
    """Others who share it are not locked out."""
    tmp_path.chmod(before)
    for name in besides:
        (tmp_path / name).touch()
    CLAIMS[option](tmp_path)
    assert mode(tmp_path) == before


def all_may_write(path: Path) -> None:
    path.chmod(0o777)


def hold_letters(path: Path) -> None:
    (path / "letter.txt").touch()


@each_claim
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (all_may_write, "everybody may write to {path}, so no keys are written there"),
        (hold_letters, "{path} contains other files (letter.txt), so no keys are written there"),
    ],
)
def test_a_directory_that_is_not_ours_is_refused_and_stays(
    option: str, spoil: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    spoil(tmp_path)
    before = mode(tmp_path), sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        CLAIMS[option](tmp_path)
    line = str(caught.value)
    assert words.format(path=tmp_path) in line and "\n" not in line
    assert line.endswith(f"give {option} a directory of its own, such as {tmp_path / 'thinwire'}")
    assert (mode(tmp_path), sorted(tmp_path.iterdir())) == before


@each_claim
def test_a_directory_of_another_user_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UserError, match=f"{tmp_path} belongs to another user, .* give {option} a directory"):
        CLAIMS[option](tmp_path)


def test_a_nodes_directory_is_its_own_again(tmp_path: Path) -> None:
    first = claim("demo-x", tmp_path)
    load_or_create_key(tmp_path)
    (tmp_path / "snapshots").mkdir()
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match="another node is running with"):
        claim("demo-x", tmp_path)
    first.release()
    claim("demo-x", tmp_path).release()


READERS: dict[str, Callable[[Path], object]] = {
    "a node": lambda path: claim("demo-x", path),
    "a run": existing_run_directory,
    "a run to resume": damage,
    "a run to recover": lambda path: newest_record([path]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["history.jsonl", "snapshots/step-00000006/head.safetensors"])
@pytest.mark.parametrize("target", ["", "/dev/zero", "/nowhere/file"], ids=["pipe", "device", "broken"])
def test_what_never_ends_is_not_read(reader: str, name: str, target: str, tmp_path: Path) -> None:
    for known in ("run.db", "node.key"):
        (tmp_path / known).touch()
    (tmp_path / "back").symlink_to(tmp_path)
    check_regular_files(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    if target:
        (tmp_path / name).symlink_to(target)
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError) as caught:
        READERS[reader](tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_a_run_that_did_not_begin_leaves_its_directory_usable(tmp_path: Path) -> None:
    """One that ended between its authority and its database, and a demo's, which has logs already."""
    (tmp_path / "authority").mkdir()
    (tmp_path / "run.toml").touch()
    assert new_run_directory(tmp_path, "demo") == tmp_path
    demo = tmp_path / "demo"
    (demo / "logs").mkdir(parents=True)
    assert new_run_directory(demo, "demo") == demo


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(UserError, match=r"for this node's key \(No locks available\): give --state-dir"):
        claim("demo-x", tmp_path)


def test_a_user_without_a_home_is_asked_for_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    with pytest.raises(UserError, match=r"set HOME or XDG_STATE_HOME .*; or give --state-dir"):
        claim("demo-x", None)


def test_only_its_user_can_read_a_coordinators_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it lies: others may look into a directory that the user made."""

    def run_coordinator(config: RunConfig, *, run_dir: Path, emit: object, resume: bool, **_: bool) -> int:
        (run_dir / "history.jsonl").touch()
        (run_dir / "snapshots").mkdir()
        return 0

    monkeypatch.setattr("node.processes.coordinator.run_coordinator", run_coordinator)
    (tmp_path / "run.toml").touch()
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        assert main(["coordinator", str(tmp_path / "run.toml"), "--run-dir", str(run)]) == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert (mode(run), mode(run / "history.jsonl"), mode(run / "snapshots")) == (0o755, 0o600, 0o700)


def test_only_its_user_can_read_a_nodes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_node(token: str, options: JoinOptions) -> int:
        (tmp_path / "snapshots").mkdir()
        return 0

    monkeypatch.setattr("node.processes.node.run_node", run_node)
    token = JoinToken(("127.0.0.1:1",), "demo-x", b"p" * 32, "A" * 8, b"s" * 16).encode()
    assert main(["join", token, "--state-dir", str(tmp_path)]) == 0
    assert mode(tmp_path / "snapshots") == 0o700


def test_a_run_directory_that_cannot_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(directory: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr("node.cli.run_directory.holds_run", denied)
    assert main(["coordinator", "absent.toml", "--resume", "--run-dir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--run-dir {tmp_path} cannot be read (Permission denied)" in line
