"""`thinwire status`, and whether a run's coordinator lives."""

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.cli.main import main
from node.cli.status import run_state
from node.config.schema import RunConfig
from node.coordinator.changes import take_request
from node.coordinator.store import DATABASE_FILE, SnapshotRecord, StepRecord, Store
from node.display.status import coordinator_alive, process_start
from node.run_file.loader import to_json
from node.telemetry.events import (
    DiskRoom,
    Event,
    NodeJoined,
    NodeLeft,
    PageServed,
    PlacementMade,
    RunFinished,
    RunStarted,
    SnapshotStored,
    StepAborted,
    StepDone,
)
from node.telemetry.history import HistoryWriter
from node.view.view_builder import MOST_LEFT, RunViewBuilder
from tests.support.run_events import NODES as RUN_NODES
from tests.support.run_events import costs, done, joined, link_cost, placed, started


def step_done(step: int) -> StepDone:
    return replace(done(step), loss=4.5, tokens_per_second=128.0)


NODES = (
    NodeJoined(node_id="node-a", device="cpu", address="a:1"),
    NodeJoined(node_id="node-b", device="cpu", address="b:1"),
)
PLACED = PlacementMade(epoch=1, nodes=("node-a", "node-b"), resume_step=0)


def ours(directory: Path) -> RunStarted:
    """The run's start, if this process was its coordinator."""
    process = os.getpid()
    return replace(
        started(directory),
        host=socket.gethostname(),
        process_id=process,
        process_start=process_start(process),
    )


def after(*happened: Event) -> RunViewBuilder:
    run = RunViewBuilder()
    for at, event in enumerate(happened):
        run.apply(event, float(at))
    return run


def write(directory: Path, *happened: Event) -> None:
    writer = HistoryWriter(pytest.fail)
    writer.begin(directory)
    for event in happened:
        writer(event)
    writer.close()


def test_who_is_gone_stays_until_he_is_back(tmp_path: Path) -> None:
    left = [NodeLeft(node_id=f"node-{n}", reason=f"reason {n}") for n in range(MOST_LEFT + 2)]
    run = after(started(tmp_path), *NODES, *left[:2])
    assert run.left == (left[0], left[1])
    run.apply(NodeJoined(node_id="node-0", device="cpu", address=""), 1.0)
    assert run.left == (left[1],)
    for event in left:
        run.apply(event, 2.0)
    assert run.left == tuple(left[-MOST_LEFT:])
    again = NodeLeft(node_id=left[-2].node_id, reason="again")
    run.apply(again, 3.0)
    assert run.left == (left[-3], left[-1], again)


def test_whether_the_coordinator_lives(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass  # it has ended, and was waited for
    assert coordinator_alive(ours(tmp_path), tmp_path) is True
    assert coordinator_alive(replace(ours(tmp_path), process_id=child.pid), tmp_path) is False
    assert coordinator_alive(replace(ours(tmp_path), host="elsewhere"), tmp_path) is None


def test_a_later_process_of_the_same_id_is_not_the_coordinator(tmp_path: Path) -> None:
    assert ours(tmp_path).process_start
    assert coordinator_alive(replace(ours(tmp_path), process_start="1"), tmp_path) is False
    # Of a system that does not tell.
    assert coordinator_alive(replace(ours(tmp_path), process_start=""), tmp_path) is True


def test_the_coordinator_of_a_run_runs_no_copy_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator was given a path from its working directory, which is this process's."""
    monkeypatch.chdir(tmp_path)
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    copy.mkdir()
    assert coordinator_alive(ours(Path("run")), run) is True
    assert coordinator_alive(ours(Path("run")), copy) is False
    run.rename(moved)
    assert coordinator_alive(ours(Path("run")), moved) is True


def test_the_state_in_words(tmp_path: Path) -> None:
    begun = started(tmp_path)
    running = (begun, *NODES, PLACED)

    def state(alive: bool | None, *happened: Event) -> str:
        return run_state(after(*happened), alive, complete=False)

    assert state(False) == "stopped"
    assert state(True, begun) == "waiting for nodes"
    assert state(True, *running) == "training"
    assert state(True, begun, NODES[0], PLACED) == "waiting for nodes"
    assert state(False, *running) == "gone"
    assert run_state(after(*running), True, complete=False, replays_to=9) == "replaying"
    assert state(None, *running) == "not running here"
    for failed, complete, word in (
        (False, True, "finished"),
        (False, False, "stopped"),  # by Ctrl-C, before its last step
        (True, True, "failed"),
    ):
        ended = after(*running, RunFinished(reason="", failed=failed))
        assert run_state(ended, False, complete=complete) == word


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two steps, a snapshot and a usable token, whose coordinator is this process."""
    directory = tmp_path / "run"
    with Store.create(
        directory, run_id="demo-x", config_json=to_json(RunConfig()), pin=b"p" * 32, now=1.0
    ) as store:
        store.set_addresses(["127.0.0.1:7700"])
        store.create_token(4e9, timedelta(hours=1), 1)
        for step in (0, 1):
            store.record_step(StepRecord(step, 1, 5.0 - step, 1.0, 1e-3, 1.0, 64, 0.5, 2.0))
        store.record_snapshot(SnapshotRecord(1, "00", 10, True, 2.0))
        store.record_snapshot(SnapshotRecord(2, "00", 10, False, 2.0))
    write(directory, ours(directory), *NODES, PLACED, step_done(2))
    return directory


def test_the_command_reports_which_nodes_left_and_why(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "it ended: \x1b[2Jcuda:0 ran out of memory"
    write(run_dir, NodeLeft(node_id="node-b" + "x" * 40, reason=reason))
    assert main(["status", str(run_dir)]) == 0
    assert "gone      node-bxxxxxxxxx: it ended:  [2Jcuda:0 ran out of memory\n" in capsys.readouterr().out


def test_the_command_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run_dir), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["state"], whole["steps_done"], whole["steps"]) == ("training", 2, 300)
    assert whole["snapshots"] == [1] and whole["snapshot_age_seconds"] >= 0
    shown = whole["status"]
    assert (shown["host"], shown["process_id"]) == (socket.gethostname(), os.getpid())
    assert shown["started"]["run_id"] == started(run_dir).run_id
    assert [node["address"] for node in shown["nodes"]] == ["a:1", "b:1"]
    assert shown["placement"]["nodes"] == ["node-a", "node-b"] and shown["step"]["loss"] == 4.5
    nothing = {name: shown[name] for name in ("gone", "held_out", "snapshot", "finished", "page", "paused")}
    assert not any(nothing.values())
    page = PageServed(url="http://127.0.0.1:1/", key_file="")
    write(
        run_dir,
        page,
        SnapshotStored(step=3, bytes=9, path="x"),
        StepAborted(epoch=1, step=1, reason="gone"),
        StepAborted(epoch=2, step=2, reason="the placement changes", kind="placement"),
        RunFinished(reason="done", failed=False),
    )
    assert main(["status", str(run_dir), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["status"]
    assert (shown["aborted"], shown["planned"], shown["page"]["url"]) == (1, 1, page.url)
    assert shown["snapshot"] == {"step": 3, "bytes": 9, "path": "x"} and shown["finished"]["reason"] == "done"
    assert [node["node_id"] for node in shown["nodes"]] == ["node-a", "node-b"]


def test_the_command_says_which_path_each_link_takes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = tuple(replace(link_cost(*way, capacity=4e6), path="relay") for way in ((0, 1), (1, 0)))
    opened = (joined(RUN_NODES[0]), joined(RUN_NODES[1], "", listens=False), placed())
    write(run_dir, ours(run_dir), *opened, replace(costs(1), links=links))
    why = "the node of stage 0 does not answer its neighbour and the node of stage 1 opens no port"
    assert main(["status", str(run_dir)]) == 0
    assert f"path      0 and 1 (16.0 Mbit/s): relay (coordinator), because {why}\n" in capsys.readouterr().out
    assert main(["status", str(run_dir), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["links"]
    assert [(one["source"], one["target"], one["path"], one["why_not_direct"]) for one in shown] == [
        (0, 1, "relay", why),
        (1, 0, "relay", why),
    ]


def test_a_copy_of_a_run_that_goes_on_is_not_taken_for_it(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run_dir, PageServed(url="http://127.0.0.1:1/", key_file=""))
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    for directory, state, live in ((run_dir, "training", True), (copy, "gone", False)):
        assert main(["status", str(directory)]) == 0
        out = capsys.readouterr().out
        assert f": {state}, 2 of 300 steps\n" in out and "loss      4.0000 in step 2\n" in out
        assert [words in out for words in ("speed ", "connected ", "page ")] == [live] * 3
        assert (f"copy of {run_dir}" in out) is not live
        # `resume` would refuse it.
        assert "continue with" not in out
        assert main(["top", str(directory), "--once"]) == 0
        assert capsys.readouterr().out.startswith(f"run demo (demo-abc): {'training' if live else 'stopped'}")


def test_a_run_that_waits_or_is_gone_shows_no_speed_of_earlier(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir)]) == 0
    assert "speed     128 tokens/s" in capsys.readouterr().out
    write(run_dir, NodeLeft(node_id="node-b", reason="it left"))
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": waiting for nodes" in out and "speed" not in out and "snapshots 1, the newest" in out
    write(run_dir, NODES[1], DiskRoom(text="paused: disk full: block 3 needs 9 bytes", full=True))
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": paused, " in out and "\npaused: disk full: block 3" in out
    assert "speed" not in out and "slow" not in out
    assert main(["top", str(run_dir), "--once", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["bottleneck"] == ["paused: disk full: block 3 needs 9 bytes"] and seen["eta_seconds"] is None
    write(run_dir, DiskRoom(text="the disk has room again", full=False))
    assert main(["status", str(run_dir)]) == 0
    assert ": training, " in capsys.readouterr().out
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass  # it has ended, and was waited for
    paused = DiskRoom(text="paused: disk full", full=True)
    write(run_dir, replace(ours(run_dir), process_id=dead.pid), *NODES, PLACED, paused)
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": gone, " in out and "paused: disk" not in out and "speed" not in out and "snapshots 1\n" in out


@pytest.mark.parametrize(("ends", "code"), [(False, 1), (True, 2)])
def test_a_change_that_no_coordinator_takes_is_withdrawn(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, code: int
) -> None:
    """Or else the next resume would apply it. The coordinator ends after the request, or takes too long."""
    gone = iter((False, ends))
    monkeypatch.setattr("node.display.status.coordinator_is_gone", lambda *_: next(gone))
    monkeypatch.setattr("node.cli.set.TAKEN_SECONDS", 60.0 if ends else 0.0)
    assert main(["set", str(run_dir), "pipeline.window=2"]) == code
    assert take_request(run_dir) == ()


@pytest.mark.parametrize(
    ("change", "commands"),
    [
        *(
            (f"UPDATE run SET config_json = '{config}'", ("status", "compare"))
            for config in ("null", "{", "5", '{"run": 5}')
        ),
        ('UPDATE run SET config_json = \'{"run": {"steps": "x"}}\'', ("status",)),
        ("DELETE FROM run", ("status", "compare")),
        *(
            (f"UPDATE run SET {column} = {value}", ("status", "compare", "create"))
            for column, value in (("run_id", "x'ff'"), ("addresses", "'5'"), ("created", "'x'"))
        ),
        ("DROP TABLE run", ("status", "compare")),
        *((f"DROP TABLE {table}", ("status",)) for table in ("steps", "members", "snapshots")),
        *((f"DROP TABLE {table}", ("status", "list")) for table in ("tokens", "token_bindings", "unclaimed")),
        *(
            (f"ALTER TABLE {table} DROP COLUMN {column}", ("status",))
            for table, column in (("steps", "clip"), ("members", "cores"), ("snapshots", "bytes"))
        ),
        *((f"UPDATE steps SET {column} = 'x'", ("status",)) for column in ("loss", "seconds")),
        ("UPDATE snapshots SET created = x'00'", ("status",)),
        ("UPDATE tokens SET expires = 'x'", ("status", "list")),
    ],
)
def test_a_damaged_database_is_one_line(
    run_dir: Path, change: str, commands: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(sqlite3.connect(run_dir / DATABASE_FILE, isolation_level=None)) as db:
        db.execute(change)
    run = str(run_dir)
    lines = {
        "status": (["status", run], ["status", run, "--json"]),
        "compare": (["compare", run, run],),
        "list": (["token", "list", run],),
        "create": (["token", "create", run],),
    }
    for command in commands:
        for line in lines[command]:
            assert main(line) == 2, line
            out, err = capsys.readouterr()
            assert not out and err.count("\n") == 1, line
