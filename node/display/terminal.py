"""What a command does about its terminal: the signals that ask it to end, and output that finds no taker.

A run does not end because the screen does: a reader like `head` leaves, a disk is full, a terminal closes.
"""

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask for an end in good order: Ctrl-C, a service manager, and a closed terminal.

    Without the last where it is ignored, as under `nohup`: then whoever started us wants us to outlive it.
    """
    asked = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return asked
    return (*asked, signal.SIGHUP)


class Screen:
    """Stdout while it takes what is written; afterwards nothing, which stderr says once."""

    def __init__(self, goes_on: str) -> None:
        """`goes_on`: what goes on without it, such as "the run"."""
        self._goes_on = goes_on
        self._lost = False

    def attempt(self, write: Callable[[], object]) -> None:
        """Call `write`, which may fail as a screen does and no other way."""
        if self._lost:
            return
        try:
            write()
        except OSError as error:
            self._lost = True
            discard(sys.stdout)
            say(f"thinwire: cannot write output ({error.strerror or error}): {self._goes_on} goes on without")


def take_any_text(*streams: TextIO) -> None:
    """Have what a stream's encoding cannot hold written with escapes.

    Names of devices and folders come from anywhere: one that is not of the user's locale ends no run.
    """
    for stream in streams:
        # What stands in for a stream in a test, or where there is no terminal, may be something else.
        if isinstance(stream, io.TextIOWrapper):
            # It looks for its place in the file, which there is not if the file has become a pipe since.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """A line on stderr, if that takes it."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send what `stream` still holds, and all that follows, nowhere.

    Python keeps what could not be written and would complain of it again in its flush at exit.
    """
    # What stands in for a stream in a test has no file, or is closed.
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


_log = logging.getLogger(__name__)


def lasting(stream: TextIO) -> TextIO:
    """`stream`, which drops all that comes after the first write that fails; that is logged once."""
    return cast(TextIO, _Lasting(stream))


class _Lasting:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        discard(self._stream)
        _log.warning("the output cannot be written (%s); the run goes on without it", error.strerror or error)
