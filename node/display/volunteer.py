"""What `thinwire join` shows: lines of text or of JSON, and one line that changes in place on a terminal."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from node.display.terminal import LIVE_LINE, Screen
from node.telemetry.format import clock_text, printable

TICK_SECONDS = 1.0
FIRST_REPEAT_SECONDS = 30.0
LONGEST_REPEAT_SECONDS = 300.0
"""Without a terminal, what goes on is reported again after these times: doubled, up to the longest."""


class VolunteerScreen:
    """Prints on stdout; output that can no longer be written is dropped."""

    def __init__(
        self, *, json_lines: bool, clock: Callable[[], float] = time.monotonic, live: bool | None = None
    ) -> None:
        """`live`: whether a line can change in place; by default whether stdout is a terminal."""
        self._json = json_lines
        self._clock = clock
        terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._live = (terminal if live is None else live) and not json_lines
        self._screen = Screen("this node")
        self._told = ""
        self._tell_again = 0.0
        self._repeat = FIRST_REPEAT_SECONDS

    def __call__(self, text: str) -> None:
        """A line of its own."""
        self._told = ""
        self._line(text)

    def waiting(self, what: str, left: float) -> None:
        """Something is waited for, at most `left` seconds more. Call it about once a second."""
        limit = clock_text(left)
        if self._live:
            self._show(f"{what}; {limit} left, Ctrl-C ends")
            return
        if self._is_due(what):
            self._line(f"{what}; {limit} left")

    def now(self, what: str, detail: str = "") -> None:
        """What the node is doing, until the next call; `detail` changes often. Call it about once a
        second."""
        text = f"{what}   {detail}" if detail else what
        if self._live:
            self._show(text)
        elif self._is_due(what):
            self._line(text)

    @contextmanager
    def seconds_of(self, what: str) -> Iterator[None]:
        """Inside the block, on a terminal, show for how many seconds it has gone on: from a thread, as the
        caller's is busy."""
        if not self._live:
            yield
            return
        began, over = self._clock(), threading.Event()

        def tick() -> None:
            while not over.wait(TICK_SECONDS):
                self._show(f"{what}   {self._clock() - began:.0f} s")

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._clear()

    def _is_due(self, what: str) -> bool:
        """Whether a line of what goes on is to be printed: something else goes on, or it is time again."""
        now = self._clock()
        if what != self._told:
            self._told, self._repeat = what, FIRST_REPEAT_SECONDS
        elif now < self._tell_again:
            return False
        else:
            self._repeat = min(2 * self._repeat, LONGEST_REPEAT_SECONDS)
        self._tell_again = now + self._repeat
        return True

    def _line(self, text: str) -> None:
        line = json.dumps({"event": "node", "text": text}) if self._json else printable(text)
        self._clear()
        self._write(line + "\n")

    def _show(self, text: str) -> None:
        columns = _columns()
        self._write("\r\x1b[K" + printable(text)[: columns - 1])
        LIVE_LINE.shown = True

    def _clear(self) -> None:
        if LIVE_LINE.shown:
            self._write("\r\x1b[K")
            LIVE_LINE.shown = False

    def _write(self, text: str) -> None:
        def attempt() -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        self._screen.attempt(attempt)


def _columns() -> int:
    try:
        return max(20, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return 80
