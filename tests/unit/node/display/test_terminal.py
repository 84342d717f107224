"""Terminals that close and outputs that take no more: what ends for it, and what goes on."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from node.display.render import make_renderer
from node.display.terminal import ending_signals, say
from node.telemetry.events import Notice
from tests.support.run_events import done

FULL = "/dev/full"


@pytest.fixture
def hangup() -> Iterator[None]:
    """What a closed terminal does is put back."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def python(program: str, **streams: int) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(words, text=True, timeout=150, check=False, **{**pipes, **streams})


def test_a_closed_terminal_ends_its_processes_except_under_nohup(hangup: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == (signal.SIGINT, signal.SIGTERM)


TELL = """
    import sys
    from node.display.volunteer import VolunteerScreen
    tell = VolunteerScreen(json_lines=False)
    tell("one")
    tell("two")
    sys.exit(5)
"""


def test_a_node_goes_on_when_its_reader_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = python(TELL, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 5
    assert done.stderr == "the output cannot be written (Broken pipe); the run continues without it\n"


def test_a_node_runs_on_without_stdout_and_stderr() -> None:
    with Path(FULL).open("w") as full:
        assert python(TELL, stdout=full.fileno(), stderr=full.fileno()).returncode == 5


class Runtime:
    """Leaves when it was asked to and the test has seen it."""

    holds_state = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.leaving = asyncio.Event()
        self.done = asyncio.Event()

    def leave(self, reason: str) -> None:
        self.asked.append(reason)
        self.leaving.set()

    async def run(self) -> str:
        await self.done.wait()
        return "left"


async def test_repeated_hangups_still_make_a_node_leave_cleanly(
    hangup: None,
) -> None:
    from node.processes.node import _until_done

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    runtime = Runtime()
    task = asyncio.create_task(_until_done(runtime))  # type: ignore[arg-type]
    await asyncio.sleep(0)  # its handlers are in place
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(runtime.leaving.wait(), 20)
    told_again = asyncio.Event()
    os.kill(os.getpid(), signal.SIGHUP)
    # A signal's handler is called in the order of signals, and this one comes after it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told_again.set)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(told_again.wait(), 20)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    runtime.done.set()
    assert await asyncio.wait_for(task, 20) == ("left", True)
    assert runtime.asked == ["the volunteer asked to leave"]


def test_a_stranger_s_name_gives_a_terminal_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    say("no file \x1b]0;x\x07 \u202egpj.\u2028 caf\u00e9 \u4e2d\ta\xa0b")
    assert capsys.readouterr().err == "no file \\x1b]0;x\\x07 \\u202egpj.\u2028 caf\u00e9 \u4e2d\ta\xa0b\n"


EVENTS = (Notice(text="first"), done(1), Notice(text="second"))


class Terminal(io.StringIO):
    """A terminal that goes away after so many writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left == 0:
            raise OSError(5, "Input/output error")
        self._left -= 1
        return super().write(text)


@pytest.fixture
def unread() -> TextIO:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("json", [True, False])
def test_a_closed_output_is_reported_once_and_ends_nothing(
    json: bool, unread: TextIO, caplog: pytest.LogCaptureFixture
) -> None:
    with make_renderer(json=json, stream=unread) as emit:
        for event in EVENTS:
            emit(event)
    unread.close()  # as the process does at its end: what is still in the buffer must not fail again
    assert [record.getMessage() for record in caplog.records] == [
        "the output cannot be written (Broken pipe); the run continues without it"
    ]


@pytest.mark.parametrize("writes", range(5))
def test_a_terminal_that_is_gone_ends_nothing(
    writes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with make_renderer(json=False, stream=Terminal(writes)) as emit:
        for event in EVENTS:
            emit(event)
    assert len(caplog.records) == 1
