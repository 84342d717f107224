"""A run's page from its history: reading what is appended, and the command that serves it."""

import asyncio
import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.cli.main import main
from node.dashboard import pages
from node.dashboard.feed import Feed
from node.dashboard.pages import follow
from node.display.status import COORDINATOR_GONE
from node.telemetry import events, history
from node.telemetry.history import Entry, HistoryTail
from node.view.view_builder import RunViewBuilder
from tests.support.process import Process
from tests.support.recorded_run import append, step, write_run

Capture = pytest.CaptureFixture[str]


NEVER = asyncio.Event()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=150) as answer:
        return json.load(answer)


@pytest.mark.timeout(240)
def test_the_command_serves_and_follows_a_history(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    process = Process(
        "page",
        ["dashboard", str(tmp_path / "run"), "--listen", "127.0.0.1:0"],
        directory=tmp_path,
        environment={"XDG_STATE_HOME": str(tmp_path), "PATH": "/usr/bin"},
    )
    try:
        line = process.wait_line(lambda line: line.startswith("page at "))
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/", line)
        assert get(f"{url}api/view")["view"]["step"] == 268
        assert get(f"{url}api/operator")["available"] is False
        with urllib.request.urlopen(f"{url}metrics", timeout=150) as answer:
            assert b'thinwire_run_state{state="training"} 1.0' in answer.read()
        for event in step(269):
            append(tmp_path / "run", time.time(), event)
        deadline = time.monotonic() + 60
        while get(f"{url}api/view")["view"]["step"] != 269:
            assert time.monotonic() < deadline
        process.send(signal.SIGTERM)
        assert process.wait_exit() == 0 and process.complaints == []
    finally:
        process.reap()


async def test_a_coordinator_that_was_killed_is_not_shown_as_training(tmp_path: Path) -> None:
    write_run(tmp_path)
    builder = RunViewBuilder()
    feed, tail = Feed(builder), HistoryTail(tmp_path)
    await follow(builder, feed, tail, NEVER)
    assert builder.started is not None
    alive = replace(builder.started, host=socket.gethostname(), process_id=os.getpid())
    builder.started = alive
    await follow(builder, feed, tail, NEVER)
    assert builder.view().state == "training"
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    builder.started = replace(alive, process_id=dead.pid)
    seen = builder.view()
    await follow(builder, feed, tail, NEVER)
    assert (builder.view().state, builder.view().ended) == ("stopped", COORDINATOR_GONE)
    assert builder.view().updated == seen.updated
    # It is told once, and is past when another coordinator goes on with the run.
    await follow(builder, feed, tail, NEVER)
    assert [event.kind for event in builder.view().events].count("finished") == 1
    append(tmp_path, seen.updated + 1, alive)
    await follow(builder, feed, tail, NEVER)
    assert builder.view().state == "waiting for nodes"


async def test_reading_history_stops_when_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_BYTES", 10_000)
    write_run(tmp_path)
    stopped = asyncio.Event()

    class Stopping(HistoryTail):
        def read(self) -> list[Entry]:
            stopped.set()
            return super().read()

    builder = RunViewBuilder()
    await follow(builder, Feed(builder), Stopping(tmp_path), stopped)
    assert 0 < builder.view().step < 268


def test_ctrl_c_ends_the_command_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(HistoryTail):
        reads = 0

        def read(self) -> list[Entry]:
            self.reads += 1
            if self.reads == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return [Entry(at=1.0, event=events.Notice(text="more"))] if self.reads < 10_000 else []

    monkeypatch.setattr(pages, "HistoryTail", Endless)
    told: list[str] = []
    pages.serve_recorded(tmp_path, "127.0.0.1", 0, told.append)
    assert told == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "absent is not a directory"),
        (["."], "contains no run"),
        (["run", "--listen", "nowhere"], "is not host:port"),
        (["run", "--listen", "192.0.2.1:7702"], "use an address of this machine"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
