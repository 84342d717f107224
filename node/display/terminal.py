"""Handles a command's terminal: signals that end it, and output that can no longer be written.

A run does not end when its output fails because a pipe closes, a disk fills up, or a terminal goes away.
"""

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from wire.errors import escaped


def ending_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask for an orderly end: from Ctrl-C, a service manager or a closed terminal.

    SIGHUP is omitted if it is ignored, as under `nohup`.
    """
    asked = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return asked
    return (*asked, signal.SIGHUP)


@contextlib.contextmanager
def on_ending_signals(call: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Inside the block, call this on the event loop with each signal that asks for an end."""
    import asyncio  # takes long, and every command loads this module

    loop, signals = asyncio.get_running_loop(), ending_signals()
    for number in signals:
        loop.add_signal_handler(number, call, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def take_any_text(*streams: TextIO) -> None:
    """Make streams write characters that their encoding lacks as escapes instead of failing."""
    for stream in streams:
        # Tests and programs without a terminal may replace the stream.
        if isinstance(stream, io.TextIOWrapper):
            # Reconfiguring seeks, which fails on a pipe.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def open_closed_streams() -> None:
    """Open the null device in the place of standard streams that are closed. Otherwise their numbers would go
    to the next files and sockets."""
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


class LiveLine:
    """The terminal's last line while it changes in place. Other output needs a line break first."""

    shown = False

    def end(self) -> None:
        """Keep the line. Further output starts on the next line."""
        if self.shown:
            self.shown = False
            with contextlib.suppress(OSError):
                sys.stdout.write("\n")
                sys.stdout.flush()


LIVE_LINE = LiveLine()
"""The live line of the process's terminal."""


def say(line: str) -> None:
    """Write a line to stderr if possible, below a live line."""
    LIVE_LINE.end()
    try:
        sys.stderr.write(escaped(line) + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def last_words(log: Path) -> str:
    """The last line that one of our commands wrote to this file, which is its error; empty if it wrote
    nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    words = next((line for line in reversed(lines) if line.strip()), "")
    return words.removeprefix("thinwire: ").removeprefix("error: ")


def discard(stream: TextIO) -> None:
    """Redirect `stream`, including buffered output, to the null device, or Python's flush at exit would fail
    again.
    """
    # A replaced stream may have no descriptor or be closed.
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


_log = logging.getLogger(__name__)


def lasting(stream: TextIO) -> TextIO:
    """Wrap `stream` so that the first failed write is logged and later output is dropped."""
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
        _log.warning(
            "the output cannot be written (%s); the run continues without it", error.strerror or error
        )
