"""`status.json` and `thinwire status`."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from node.cli.main import main
from node.cli.status import run_state
from node.config.schema import RunConfig
from node.coordinator.store import SnapshotRecord, StepRecord, Store
from node.display.status import (
    MANY,
    MOST_LEFT,
    STATUS_FILE,
    WRITE_INTERVAL,
    RunStatus,
    StatusWriter,
    after,
    coordinator_alive,
    read_status,
)
from node.run_file.loader import to_json
from node.telemetry.events import (
    DiskRoom,
    NodeJoined,
    NodeLeft,
    Notice,
    PlacementMade,
    RunFinished,
    SnapshotSetAside,
    SnapshotStored,
    StepAborted,
    StepDone,
)
from node.telemetry.history import HistoryWriter
from tests.support.run_events import NODES as RUN_NODES
from tests.support.run_events import costs, done, joined, link_cost, placed, started
from wire.errors import RunError


def step_done(step: int) -> StepDone:
    return replace(done(step), loss=4.5, tokens_per_second=128.0)


NODES = (
    NodeJoined(node_id="node-a", device="cpu", address="a:1"),
    NodeJoined(node_id="node-b", device="cpu", address="b:1"),
)
PLACED = PlacementMade(epoch=1, nodes=("node-a", "node-b"), resume_step=0)


def written(directory: Path) -> RunStatus:
    status = read_status(directory)
    assert status is not None
    return status


def test_the_file_follows_the_events(tmp_path: Path) -> None:
    now = [100.0]
    emit = StatusWriter(pytest.fail, clock=lambda: now[0])
    emit(Notice(text="before the run opens there is nowhere to write"))
    assert read_status(tmp_path) is None

    emit(started(tmp_path))
    assert written(tmp_path).updated == 100.0
    for event in (*NODES, NODES[0], PLACED):
        emit(event)
    assert written(tmp_path).nodes == (NODES[1], NODES[0])  # joining again replaces
    assert written(tmp_path).placement == PLACED
    emit(NodeLeft(node_id="node-a", reason="Ctrl-C"))
    assert written(tmp_path).nodes == (NODES[1],)
    emit(StepAborted(epoch=1, step=1, reason="gone"))
    emit(StepAborted(epoch=2, step=2, reason="the placement changes", kind="placement"))
    assert (written(tmp_path).aborted, written(tmp_path).planned) == (1, 1)
    snapshot = SnapshotStored(step=3, bytes=9, path="x")
    emit(snapshot)
    emit(SnapshotSetAside(text="", step=2, whole=1))
    assert written(tmp_path).snapshot is None
    emit(snapshot)
    emit(SnapshotSetAside(text="", step=4, whole=3))
    finished = RunFinished(reason="done", failed=False)
    emit(finished)
    assert (written(tmp_path).snapshot, written(tmp_path).finished) == (snapshot, finished)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]


def test_who_is_gone_stays_until_he_is_back(tmp_path: Path) -> None:
    emit = StatusWriter(pytest.fail)
    emit(started(tmp_path))
    left = [NodeLeft(node_id=f"node-{n}", reason=f"reason {n}") for n in range(MOST_LEFT + 2)]
    for event in (*NODES, *left[:2]):
        emit(event)
    assert written(tmp_path).gone == (left[0], left[1])
    emit(NodeJoined(node_id="node-0", device="cpu", address=""))
    assert written(tmp_path).gone == (left[1],)
    for event in left:
        emit(event)
    assert written(tmp_path).gone == tuple(left[-MOST_LEFT:])
    again = NodeLeft(node_id=left[-2].node_id, reason="again")
    emit(again)
    assert written(tmp_path).gone == (left[-3], left[-1], again)


def test_a_status_of_another_version_is_read(tmp_path: Path) -> None:
    emit = StatusWriter(pytest.fail)
    for event in (started(tmp_path), *NODES, PLACED):
        emit(event)
    known, path = written(tmp_path), tmp_path / STATUS_FILE
    fields = json.loads(path.read_text())
    del fields["gone"], fields["placement"]["blocks"]  # an older one lacks them
    fields["of_a_later_version"] = fields["nodes"][0]["of_a_later_version"] = 3
    path.write_text(json.dumps(fields))
    assert written(tmp_path) == known


def test_steps_alone_are_written_once_an_interval(tmp_path: Path) -> None:
    now = [100.0]
    emit = StatusWriter(pytest.fail, clock=lambda: now[0])
    emit(started(tmp_path))
    now[0] += WRITE_INTERVAL / 2
    emit(step_done(1))
    assert written(tmp_path).step is None
    now[0] += WRITE_INTERVAL / 2
    emit(step_done(2))
    assert written(tmp_path).step == step_done(2)
    emit(step_done(3))
    emit(Notice(text="any other event brings the newest step along"))
    assert written(tmp_path).step == step_done(3)


def test_where_many_nodes_join_the_file_is_written_once_an_interval(tmp_path: Path) -> None:
    now = [100.0]
    emit = StatusWriter(pytest.fail, clock=lambda: now[0])
    emit(started(tmp_path))
    for number in range(MANY + 5):
        now[0] += WRITE_INTERVAL / 10_000
        emit(NodeJoined(node_id=f"node-{number}", device="cpu", address=""))
    assert len(written(tmp_path).nodes) == MANY
    emit(Notice(text="any other event brings the newest nodes along"))
    assert len(written(tmp_path).nodes) == MANY + 5


def test_a_disk_failure_is_reported_once_and_the_run_continues(tmp_path: Path) -> None:
    warnings: list[str] = []
    emit = StatusWriter(warnings.append)
    emit(started(tmp_path / "absent"))
    emit(NODES[0])
    assert len(warnings) == 1
    assert "cannot be written (No such file or directory)" in warnings[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r" \(.*not JSON.*\)"),
        ("{}", r" \(.*no known kind.*\)"),
        ('{"event": "notice", "text": "x"}', ""),
        ('{"event": "status", "updated": 1, "host": "h", "process_id": 1}', r" \(status has no started\)"),
    ],
)
def test_a_file_that_is_not_a_status_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(RunError, match=rf"status\.json is not a run's status{why}; delete it; ") as caught:
        read_status(tmp_path)
    assert "\n" not in str(caught.value)


def status(directory: Path) -> RunStatus:
    host = socket.gethostname()
    return RunStatus(updated=1.0, host=host, process_id=os.getpid(), started=started(directory))


def test_whether_the_coordinator_lives(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass  # it has ended, and was waited for
    assert coordinator_alive(status(tmp_path)) is True
    assert coordinator_alive(replace(status(tmp_path), process_id=child.pid)) is False
    assert coordinator_alive(replace(status(tmp_path), host="elsewhere")) is None


def test_a_later_process_of_the_same_id_is_not_the_coordinator(tmp_path: Path) -> None:
    StatusWriter(pytest.fail)(started(tmp_path))
    ours = written(tmp_path)
    assert ours.process_start and coordinator_alive(ours) is True
    assert coordinator_alive(replace(ours, process_start="1")) is False
    # Of an older version, or of a system that does not tell.
    assert coordinator_alive(replace(ours, process_start="")) is True


def test_the_state_in_words(tmp_path: Path) -> None:
    now = status(tmp_path)
    running = replace(now, nodes=NODES, placement=PLACED)

    def state(status: RunStatus | None, alive: bool | None) -> str:
        return run_state(status, alive, complete=False)

    assert state(None, False) == "stopped"
    assert state(now, True) == "waiting for nodes"
    assert state(running, True) == "training"
    assert state(replace(running, nodes=NODES[:1]), True) == "waiting for nodes"
    assert state(running, False) == "gone"
    assert run_state(running, True, complete=False, replays_to=9) == "replaying"
    assert state(running, None) == "not seen here"
    for failed, complete, word in (
        (False, True, "finished"),
        (False, False, "stopped"),  # by Ctrl-C, before its last step
        (True, True, "failed"),
    ):
        ended = replace(running, finished=RunFinished(reason="", failed=failed))
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
    emit = StatusWriter(pytest.fail)
    for event in (started(directory), *NODES, PLACED, step_done(2), Notice(text="written")):
        emit(event)
    return directory


def test_the_command_reports_which_nodes_left_and_why(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emit = StatusWriter(pytest.fail)
    reason = "it ended: \x1b[2Jcuda:0 ran out of memory"
    for event in (started(run_dir), *NODES, PLACED, NodeLeft(node_id="node-b" + "x" * 40, reason=reason)):
        emit(event)
    assert main(["status", str(run_dir)]) == 0
    assert "gone      node-bxxxxxxxxx: it ended:  [2Jcuda:0 ran out of memory\n" in capsys.readouterr().out


def test_the_command_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run_dir), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["state"], whole["steps_done"], whole["steps"]) == ("training", 2, 300)
    assert whole["status"]["step"]["loss"] == 4.5
    assert whole["snapshots"] == [1] and whole["snapshot_age_seconds"] >= 0


def test_the_command_says_which_path_each_link_takes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = tuple(replace(link_cost(*way, capacity=4e6), path="relay") for way in ((0, 1), (1, 0)))
    writer = HistoryWriter(print)
    opened = (joined(RUN_NODES[0]), joined(RUN_NODES[1], "", listens=False), placed())
    for event in (started(run_dir), *opened, replace(costs(1), links=links)):
        writer(event)
    writer.close()
    why = "the node of stage 0 does not answer its neighbour and the node of stage 1 opens no port"
    assert main(["status", str(run_dir)]) == 0
    assert f"path      0 and 1 (16.0 Mbit/s): relay (coordinator), as {why}\n" in capsys.readouterr().out
    assert main(["status", str(run_dir), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["links"]
    assert [(one["source"], one["target"], one["path"], one["why_not_direct"]) for one in shown] == [
        (0, 1, "relay", why),
        (1, 0, "relay", why),
    ]


def test_a_run_that_waits_or_is_gone_shows_no_speed_of_earlier(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run_dir)]) == 0
    assert "speed     128 tokens/s" in capsys.readouterr().out
    status = read_status(run_dir)
    assert status is not None and status.step is not None
    (run_dir / STATUS_FILE).write_text(replace(status, nodes=NODES[:1]).to_json())
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": waiting for nodes" in out and "speed" not in out and "snapshots 1, the newest" in out
    full = after(status, DiskRoom(text="paused: disk full: block 3 needs 9 bytes", full=True))
    (run_dir / STATUS_FILE).write_text(full.to_json())
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": paused, " in out and "\npaused: disk full: block 3" in out
    assert "speed" not in out and "slow" not in out
    assert after(full, DiskRoom(text="the disk has room again", full=False)) == status
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass  # it has ended, and was waited for
    (run_dir / STATUS_FILE).write_text(replace(full, process_id=dead.pid).to_json())
    assert main(["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert ": gone, " in out and "paused" not in out and "speed" not in out and "snapshots 1\n" in out
