"""`history.jsonl`: all events of a run, in its directory.

One JSON object a line: an event as `Event.to_json` writes it, with `at` (Unix seconds) and, for replayed
steps, `"replayed": true`. The file is append-only, and a resume continues it. Readers skip a line that a
crash cut short; the next writer ends it with a newline.

**Growth.** A step takes about 0.4 kB, plus 0.8 kB for each stage with its links. Costs of steps shorter than
`COSTS_SECONDS` are summed and written together, so a stage adds at most 0.8 kB in that time, 70 MB a day.

Join lines contain a secret and are never written.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from node.telemetry import events
from node.telemetry.costs import add_costs
from wire.errors import ProtocolViolationError, RunError

HISTORY_FILE = "history.jsonl"
COSTS_SECONDS = 1.0
"""Least time between two lines of costs."""
_BLOCK_BYTES = 1 << 16
MOST_BYTES = 4 << 20
"""A tail reads at most this much at a time, whatever the length of the history."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a history."""

    at: float
    """Unix seconds."""
    event: events.Event
    replayed: bool = False
    """A step that was committed before and ran again after a rollback."""


class HistoryWriter:
    """Called with each event of a run; appends it to the history in the run's directory.

    `RunStarted` comes first and names the directory. The history is a convenience, not state of the run: the
    first failed write turns it off and is reported once through `warn`.
    """

    def __init__(self, warn: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._warn = warn
        self._clock = clock
        self._path: Path | None = None
        self._highest_step = 0
        self._file: TextIO | None = None
        self._broken = False
        self._pending: events.StepCosts | None = None
        self._costs_at = 0.0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            self._begin(Path(event.directory))
        if self._path is None or isinstance(event, events.JoinLine):
            return
        now = self._clock()
        if isinstance(event, events.StepCosts):
            self._add_costs(event, now)
            return
        if not isinstance(event, events.StepDone):
            self._flush_costs(now)
            self._append(event, now)
            return
        replayed = event.step <= self._highest_step
        self._highest_step = max(self._highest_step, event.step)
        self._append(event, now, replayed=replayed)

    def close(self) -> None:
        """Write pending costs and close the file; a later event reopens it."""
        self._flush_costs(self._clock())
        self._drop_file()

    def _begin(self, directory: Path) -> None:
        """Find the highest step of earlier coordinators, to recognise replays."""
        try:
            self._highest_step = highest_step(directory)
        except RunError as error:
            self._broken = True
            self._warn(f"{error}; events from now on are not recorded, the run goes on")
        self._path = directory / HISTORY_FILE

    def _add_costs(self, costs: events.StepCosts, now: float) -> None:
        """Sum up the costs of fast steps."""
        pending = self._pending
        total = costs if pending is None else add_costs(pending, costs)
        if total is None:
            self._flush_costs(now)
            total = costs
        self._pending = total
        if not 0 <= now - self._costs_at < COSTS_SECONDS:
            self._flush_costs(now)

    def _flush_costs(self, now: float) -> None:
        if self._pending is not None:
            pending, self._pending, self._costs_at = self._pending, None, now
            self._append(pending, now)

    def _append(self, event: events.Event, now: float, *, replayed: bool = False) -> None:
        if self._broken or self._path is None:
            return
        fields = json.loads(event.to_json())
        record = {"at": round(now, 3), **({"replayed": True} if replayed else {}), **fields}
        try:
            if self._file is None:
                self._file = _open(self._path)
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self._broken = True
            self._drop_file()
            self._warn(
                f"{self._path} cannot be written ({error.strerror}); the run's history ends here, the run "
                "goes on"
            )

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        # Every line was flushed; what could not be written fails again here.
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()


def read_history(directory: Path, end: int | None = None) -> Iterator[Entry]:
    """The history of the run in `directory`, oldest first; empty if there is none.

    Skips lines that were cut short or are of unknown kinds. Raises RunError when the file cannot be read.

    Args:
        end: stop at lines that begin at this byte (from `history_size`) or later.
    """
    with _opened(directory) as file:
        position = 0
        for line in file or ():
            if end is not None and position >= end:
                return
            position += len(line)
            if (entry := parse_line(line)) is not None:
                yield entry


class HistoryTail:
    """Reads what was appended to the history of the run in `directory` since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offset = 0

    def read(self) -> list[Entry]:
        """The next entries in order; empty when all were read. An unfinished line waits. RunError."""
        with _opened(self._directory) as file:
            while file is not None:
                file.seek(self._offset)
                chunk = file.read(MOST_BYTES)
                whole = chunk.rfind(b"\n") + 1
                if not whole and len(chunk) == MOST_BYTES:
                    whole = len(chunk)  # no event is so long: skip it
                self._offset += whole
                entries = map(parse_line, chunk[:whole].splitlines())
                known = [entry for entry in entries if entry is not None]
                if known or not whole:
                    return known
        return []


def history_size(directory: Path) -> int:
    """Current size of the history of the run in `directory`; 0 if there is none."""
    try:
        return (directory / HISTORY_FILE).stat().st_size
    except OSError:
        return 0


def highest_step(directory: Path) -> int:
    """The highest step in the history of the run in `directory`; 0 if there is none. RunError.

    The newest step that is not a replay is the highest, so only a few lines at the end are read.
    """
    mark = f'"event":"{events.StepDone.event}"'.encode()
    for line in _lines_from_the_end(directory):
        entry = parse_line(line) if mark in line else None
        if entry is not None and not entry.replayed and isinstance(entry.event, events.StepDone):
            return entry.event.step
    return 0


def _lines_from_the_end(directory: Path) -> Iterator[bytes]:
    with _opened(directory) as file:
        position = 0 if file is None else file.seek(0, os.SEEK_END)
        rest = b""
        while file is not None and position > 0:
            size = min(_BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[BinaryIO | None]:
    """The file, or None if there is none."""
    path = directory / HISTORY_FILE
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        yield None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def parse_line(line: bytes) -> Entry | None:
    """One line of a history; None for one that cannot be read."""
    try:
        raw = json.loads(line)
        at, replayed = float(raw.pop("at")), bool(raw.pop("replayed", False))
        return Entry(at=at, event=events.from_fields(raw), replayed=replayed)
    except (ProtocolViolationError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _open(path: Path) -> TextIO:
    """Open for appending at the start of a line, readable by its owner only."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    file = os.fdopen(descriptor, "a", encoding="utf-8")
    size = os.fstat(descriptor).st_size
    if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
        file.write("\n")
    return file
