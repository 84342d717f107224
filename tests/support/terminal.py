"""Start processes whose stdout is a terminal, as people see it: also what changes in place.

    run = Run(tmp_path, config, launch=on_terminal(prefork.popen))

A line is what stands between two returns of the cursor to the left, so it is read when the next one begins.
"""

import codecs
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.process import Launch, Process
from tests.support.run_harness import Run

QUIET_SECONDS = 3.0
"""What people wait for the next visible thing at most, on a machine that has time for them."""
SILENT_SECONDS = 20 * QUIET_SECONDS
"""The same on one that runs other tests too. Whoever waits for something in silence does it for minutes."""
COLUMNS, ROWS = 160, 50
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_READ_BYTES = 1 << 14


def on_terminal(launch: Callable[..., Any]) -> Launch:
    """The same launcher, with a terminal in place of a pipe for stdout."""

    def launched(command: Any, *, stdout: object, env: dict[str, str], **rest: Any) -> Any:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        try:
            child = launch(command, stdout=theirs, env={**env, "TERM": "xterm"}, **rest)
        finally:
            os.close(theirs)
        child.stdout = _Lines(ours)
        return child

    return launched


def volunteer(run: Run, launch: Launch, name: str, *options: str) -> Process:
    """`thinwire join` at a terminal, by somebody who waits ten minutes for a run to go on."""
    words = ("join", run.coordinators[-1].token, "--name", name, "--wait", "10 min", "--device", "cpu")
    state = ("--state-dir", str(run.directory / name.replace("'", "")))
    more = ("--listen", "127.0.0.1:0", "--threads", "1", *options)
    return run.command(*words, *state, *more, launch=on_terminal(launch))


def assert_never_silent(*processes: Process) -> None:
    """Each has shown the next visible thing in time, from its start to its end."""
    for process in processes:
        silence, before = process.longest_silence()
        assert silence < SILENT_SECONDS, f"{process.name} was silent for {silence:.1f} s after {before!r}"


class _Lines:
    """What a terminal shows, line by line, without escapes; empty ones are left out."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def __iter__(self) -> Iterator[str]:
        decoder, held = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while data := self._read():
            *lines, held = re.split(r"[\r\n]+", held + decoder.decode(data))
            yield from filter(None, (_ESCAPES.sub("", line) for line in lines))
        if last := _ESCAPES.sub("", held):
            yield last

    def _read(self) -> bytes:
        try:
            return os.read(self._terminal, _READ_BYTES)
        except OSError:
            return b""  # Linux says so when the last process with the terminal has ended

    def close(self) -> None:
        os.close(self._terminal)
