"""Prints the output of `thinwire join`: lines of text or JSON; on a terminal, one that changes in place."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from node.display.terminal import LIVE_LINE, lasting
from node.telemetry.format import clock_text, printable

TICK_SECONDS = 1.0
FIRST_REPEAT_SECONDS = 30.0
LONGEST_REPEAT_SECONDS = 300.0
"""Without a terminal, the activity is repeated after the first time, then doubled times up to the longest."""


class VolunteerScreen:
    """Prints to stdout. Output that can no longer be written is dropped."""

    def __init__(
        self, *, json_lines: bool, clock: Callable[[], float] = time.monotonic, live: bool | None = None
    ) -> None:
        """`live`: whether a line may change in place; by default, whether stdout is a terminal."""
        self._json = json_lines
        self._clock = clock
        terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._live = (terminal if live is None else live) and not json_lines
        self._out = lasting(sys.stdout)
        self._told = ""
        self._tell_again = 0.0
        self._repeat = FIRST_REPEAT_SECONDS

    def __call__(self, text: str) -> None:
        """Print a separate line."""
        self._told = ""
        self._line(text)

    def waiting(self, activity: str, left: float) -> None:
        """Show that the node waits at most `left` more seconds. Call it about once per second."""
        limit = clock_text(left)
        if self._live:
            self._show(f"{activity}; {limit} left, press Ctrl-C to stop")
            return
        if self._is_due(activity):
            self._line(f"{activity}; {limit} left")

    def now(self, activity: str, detail: str = "") -> None:
        """Show what the node is doing until the next call. `detail` changes often. Call it about once per
        second."""
        text = f"{activity}   {detail}" if detail else activity
        if self._live:
            self._show(text)
        elif self._is_due(activity):
            self._line(text)

    @contextmanager
    def seconds_of(self, activity: str) -> Iterator[None]:
        """Show on a terminal how long the context has lasted, from a thread because the caller's is busy."""
        if not self._live:
            yield
            return
        began, over = self._clock(), threading.Event()

        def tick() -> None:
            while not over.wait(TICK_SECONDS):
                self._show(f"{activity}   {self._clock() - began:.0f} s")

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._clear()

    def _is_due(self, activity: str) -> bool:
        """Whether to print a line about the activity, because it changed or is due to be repeated."""
        now = self._clock()
        if activity != self._told:
            self._told, self._repeat = activity, FIRST_REPEAT_SECONDS
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
        self._out.write(text)
        self._out.flush()


def _columns() -> int:
    try:
        return max(20, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return 80
