"""The history: all events of a run, in its directory.

Each line is one JSON object: an event as `Event.to_json` writes it, with `at` (Unix seconds) and, for
replayed steps, `"replayed": true`. Lines are only appended, and a resumed run continues them. Readers skip a
line that a crash cut short; the next writer ends it with a newline.

**Files.** `history.jsonl` is being written. At `SEGMENT_BYTES` it becomes `history-FIRST-END.jsonl`, which a
thread compresses to `.jsonl.gz`. FIRST and END are byte positions in the whole uncompressed history. A
*position* counts these bytes, so it stays valid when files are renamed or compressed.

**Growth.** A step takes about 0.4 kB, plus 0.8 kB for each stage with its links. The costs of steps shorter
than `COSTS_SECONDS` are summed and written together, so a stage adds at most 0.8 kB in that time: 70 MB a day
before compression. That time grows with the number of stages: together they add at most `COSTS_STAGES` times
that.

Join lines contain a secret and are never written.
"""

import contextlib
import gzip
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO, TypeVar, cast

from node.telemetry import events
from node.telemetry.costs import summed
from wire.errors import ProtocolViolationError, RunError

HISTORY_FILE = "history.jsonl"
COSTS_SECONDS = 1.0
"""The least time between two lines of costs, for up to `COSTS_STAGES` stages in all. It grows with more
stages."""
COSTS_STAGES = 100
"""With more stages, `COSTS_SECONDS` grows in proportion."""
_BLOCK_BYTES = 1 << 16
MOST_BYTES = 4 << 20
"""A tail reads at most this much at a time, whatever the length of the history."""
MOST_WAITING = 10_000
"""The lines kept in memory while the disk is full. Beyond that, the oldest are lost."""
SEGMENT_BYTES = 32 << 20
"""The size at which a file becomes a segment."""
INDEX_BYTES = 1 << 20
"""The least number of bytes between two calls of a writer's `index`."""
INDEX_TIMES = 4
"""The least number of bytes between two calls, as a multiple of the last index's size: an index of many
stages is large."""
CLOSE_SECONDS = 10.0
"""The longest that `HistoryWriter.close` waits for its thread."""
_SEGMENT = re.compile(r"history-(\d{15})-(\d{15})\.jsonl(\.gz)?")
_END = 1 << 62
"""A position after every history."""
_DAMAGED: set[Path] = set()
"""Directories with a history whose damage has been reported."""

EVICTED = "it was evicted"
"""The reason in the `NodeLeft` of a node that the operator shut out."""

Cancelled = Callable[[], bool]

log = logging.getLogger(__name__)


E = TypeVar("E", bound=events.Event)


@dataclass(frozen=True, kw_only=True)
class Entry:
    at: float
    """Unix seconds."""
    event: events.Event
    replayed: bool = False
    """Whether the step was committed before and ran again after a rollback."""


class HistoryWriter:
    """Appends each event with which it is called to the history in the run's directory.

    `RunStarted` comes first and names the directory. The run does not depend on its history. While the disk
    is full, lines wait in memory, and the trouble is reported once through `warn`.
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        index: Callable[[Path, Cancelled], int] | None = None,
    ) -> None:
        """
        Args:
            index: called on a thread with the run's directory, whenever at least `INDEX_BYTES` were added, so
                that readers need not read the whole history. It returns its size in bytes, and returns early
                once its second argument returns true.
        """
        self._warn = warn
        self._clock = clock
        self._index = index
        self._unindexed = 0
        self._index_bytes = 0
        """The size of the newest index."""
        self._worker: threading.Thread | None = None
        self._closing = threading.Event()
        self._path: Path | None = None
        self._highest_step = 0
        self._file: TextIO | None = None
        self._broken = False
        self._told = False
        self._lines: deque[str] = deque(maxlen=MOST_WAITING)
        """Lines that are not written yet, because the disk is full."""
        self._pending: events.StepCosts | None = None
        self._costs_at = 0.0

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            self.begin(Path(event.directory))
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
        """Write pending costs and close the file. A later event reopens it."""
        self._flush_costs(self._clock())
        self._drop_file()
        self._closing.set()
        if self._worker is not None:
            self._worker.join(CLOSE_SECONDS)
        self._closing.clear()

    def begin(self, directory: Path) -> None:
        """Continue a run's history: find the highest step of earlier coordinators, to recognize replays."""
        try:
            self._highest_step = highest_step(directory)
        except RunError as error:
            self._broken = True
            self._warn(f"{error}; events from now on are not recorded, and the run continues")
        self._path = directory / HISTORY_FILE

    def _add_costs(self, costs: events.StepCosts, now: float) -> None:
        """Sum the costs of fast steps."""
        both = summed(self._pending, costs) if self._pending is not None else None
        if both is None:
            self._flush_costs(now)
        self._pending = both or costs
        pause = COSTS_SECONDS * max(1.0, len(costs.stages) / COSTS_STAGES)
        if not 0 <= now - self._costs_at < pause:
            self._flush_costs(now)

    def _flush_costs(self, now: float) -> None:
        if self._pending is not None:
            pending, self._pending, self._costs_at = self._pending, None, now
            self._append(pending, now)

    def _append(self, event: events.Event, now: float, *, replayed: bool = False) -> None:
        if self._broken or self._path is None:
            return
        self._lines.append(self._line(event, now, replayed))
        try:
            self._write_lines()
        except OSError as error:
            self._drop_file()
            if not self._told:
                self._told = True
                self._warn(
                    f"{self._path} cannot be written ({error.strerror}); the run continues, and its history "
                    "when it can"
                )
            return
        self._told = False
        if self._unindexed >= self._index_after and (self._worker is None or not self._worker.is_alive()):
            self._unindexed = 0
            self._worker = threading.Thread(target=self._tidy, args=(self._path.parent,), daemon=True)
            self._worker.start()

    @property
    def _index_after(self) -> int:
        """The number of bytes to add before the next index."""
        return max(INDEX_BYTES, INDEX_TIMES * self._index_bytes)

    @staticmethod
    def _line(event: events.Event, now: float, replayed: bool) -> str:
        return event.to_line(at=round(now, 3), **({"replayed": True} if replayed else {})) + "\n"

    def _write_lines(self) -> None:
        assert self._path is not None
        if self._file is None:
            self._file = _open(self._path)
        while self._lines:
            self._file.write(self._lines[0])
            self._file.flush()
            self._unindexed += len(self._lines.popleft())
        if os.fstat(self._file.fileno()).st_size >= SEGMENT_BYTES:
            self._drop_file()
            _rotate(self._path.parent)
            self._unindexed = self._index_after

    def _tidy(self, directory: Path) -> None:
        """On a thread: index what was added, and compress whole segments. If it fails, only reading takes
        longer."""
        try:
            if self._index is not None:
                self._index_bytes = self._index(directory, self._closing.is_set)
            for segment in _segments(directory):
                if not segment.compressed and not self._closing.is_set():
                    _compress(segment.path)
        except (OSError, RunError) as error:
            log.warning("the history in %s stays as it is: %s", directory, error)

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        # Every line was flushed. What could not be written fails again here.
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()


def append_event(directory: Path, event: events.Event) -> None:
    """Append an event to the history of a run whose coordinator is not running. Raises RunError if it cannot
    be written."""
    troubles: list[str] = []
    writer = HistoryWriter(troubles.append)
    writer.begin(directory)
    writer(event)
    writer.close()
    if troubles:
        raise RunError(troubles[0])


def read_history(directory: Path) -> Iterator[Entry]:
    """The history of the run in `directory`, oldest first; empty if there is none.

    Lines that were cut short or are of unknown kinds are skipped.

    Raises:
        RunError: a file cannot be read.
    """
    for position, line in _lines(directory, 0, None):
        if (entry := _entry(directory, position, line)) is not None:
            yield entry


def read_whole_lines(
    directory: Path, start: int, end: int | None = None
) -> Iterator[tuple[int, Entry | None]]:
    """`read_history` from the position `start`: each line's entry and the position after it.

    Entries are None for lines that are skipped. Reading stops at a line that is not finished yet.

    Args:
        end: stop at lines that begin at this position (from `history_size`) or later.
    """
    for position, line in _lines(directory, start, end):
        entry = _entry(directory, position, line)
        if not line.endswith(b"\n"):
            return
        yield position, entry


def _lines(directory: Path, position: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Each line with the position after it."""
    last: int | None = position
    while last is not None:
        with _opened(directory, last) as (file, first, stop):
            position, last = max(last, first), stop
            if file is not None:
                file.seek(position - first)
            for line in file or ():
                if end is not None and position >= end:
                    return
                position += len(line)
                # The last line of a whole segment stays unfinished.
                yield position, line if stop is None or line.endswith(b"\n") else line + b"\n"


class HistoryTail:
    """Reads what was appended to the history of the run in `directory` since the last call."""

    def __init__(self, directory: Path, position: int = 0) -> None:
        """`position` is where to begin, at the start of a line."""
        self.directory = directory
        self._position = position

    def read(self) -> list[Entry]:
        """The next entries in order; empty when all were read. An unfinished line is left for later.

        Raises:
            RunError: a file cannot be read.
        """
        entries: list[Entry] = []
        began = self._position
        for position, entry in read_whole_lines(self.directory, began):
            self._position = position
            if entry is not None:
                entries.append(entry)
            if entries and self._position - began >= MOST_BYTES:
                break
        return entries


def history_size(directory: Path) -> int:
    """The position at the end of the history of the run in `directory`; 0 if there is none."""
    with contextlib.suppress(RunError), _opened(directory, _END) as (file, first, _):
        return first + (0 if file is None else file.seek(0, os.SEEK_END))
    return 0


def first_line(directory: Path) -> bytes:
    """The first line of the history of the run in `directory`; empty if there is none. Raises RunError if it
    cannot be read."""
    return next((line for _, line in _lines(directory, 0, None)), b"")


def history_files(directory: Path) -> list[Path]:
    """The files of the history of the run in `directory`, oldest first."""
    current = directory / HISTORY_FILE
    return [*(segment.path for segment in _segments(directory)), *([current] if current.exists() else [])]


def highest_step(directory: Path) -> int:
    """The highest step in the history of the run in `directory`; 0 if there is none.

    The newest step that is not a replay is the highest, so only a few lines at the end are read.

    Raises:
        RunError: a file cannot be read.
    """
    steps = _of_kind(_lines_from_the_end(directory), events.StepDone)
    return next((done.step for entry, done in steps if not entry.replayed), 0)


def last_start(directory: Path) -> events.RunStarted | None:
    """The start of the run's newest coordinator in the history of the run in `directory`; None if there is
    none, or if that coordinator ended the run. Raises RunError if a file cannot be read."""
    newest = _of_kind(_lines_from_the_end(directory), events.RunStarted, events.RunFinished)
    event = next((event for _, event in newest), None)
    return event if isinstance(event, events.RunStarted) else None


def step_done(directory: Path, step: int) -> events.StepDone | None:
    """The last run of a step in the history of the run in `directory`; None if it is not there. Raises
    RunError if a file cannot be read."""
    steps = _of_kind(_lines_from_the_end(directory), events.StepDone)
    return next((done for _, done in steps if done.step == step), None)


def evicted_nodes(directory: Path) -> dict[str, float]:
    """The nodes that left the run in `directory` because they were evicted, and when. Raises RunError if a
    file cannot be read."""
    lines = (line for _, line in _lines(directory, 0, None))
    return {
        left.node_id: entry.at for entry, left in _of_kind(lines, events.NodeLeft) if left.reason == EVICTED
    }


def plans_made(directory: Path, kind: type[E]) -> list[E]:
    """The plans of this kind that the run in `directory` had, oldest first. Raises RunError if a file cannot
    be read."""
    return [plan for _, plan in _of_kind((line for _, line in _lines(directory, 0, None)), kind)]


def _of_kind(lines: Iterable[bytes], *kinds: type[E]) -> Iterator[tuple[Entry, E]]:
    """The lines with an event of these kinds. The others, which are most lines, are not parsed."""
    marks = [f'"{kind.event}"'.encode() for kind in kinds]
    for line in lines:
        if any(mark in line for mark in marks):
            entry = parse_line(line)
            if entry is not None and isinstance(entry.event, kinds):
                yield entry, entry.event


def _lines_from_the_end(directory: Path) -> Iterator[bytes]:
    before: int | None = None
    while before is None or before > 0:
        with _opened(directory, _END if before is None else before - 1) as (file, first, _):
            if before is not None and first >= before:
                return  # the earlier segments were deleted
            before = first
            # Seeking backwards in a compressed file is slow, so it is read as a whole.
            block = _BLOCK_BYTES if file is None or not isinstance(file, gzip.GzipFile) else SEGMENT_BYTES
            position = 0 if file is None else file.seek(0, os.SEEK_END)
            rest = b""
            while file is not None and position > 0:
                size = min(block, position)
                position -= size
                file.seek(position)
                rest, *lines = (file.read(size) + rest).split(b"\n")
                yield from reversed(lines)
            yield rest


# ---- files


@dataclass(frozen=True)
class _Segment:
    """A complete file of the history, from the position `first` to `end`."""

    path: Path
    first: int
    end: int
    compressed: bool


def _segments(directory: Path) -> list[_Segment]:
    """The segments, oldest first. While one is being compressed it exists twice; the plain file counts."""
    by_start: dict[int, _Segment] = {}
    for path in directory.glob("history-*"):
        if (name := _SEGMENT.fullmatch(path.name)) is None:
            continue
        segment = _Segment(path, int(name[1]), int(name[2]), name[3] is not None)
        if segment.first not in by_start or not segment.compressed:
            by_start[segment.first] = segment
    return [by_start[first] for first in sorted(by_start)]


@contextlib.contextmanager
def _opened(directory: Path, position: int) -> Iterator[tuple[BinaryIO | None, int, int | None]]:
    """The file with `position`, or after all segments the one being written; None if that does not exist.

    Also the positions of its first byte and of its end, which is None for the file being written.

    Raises:
        RunError: it cannot be read.
    """
    try:
        file, first, end = _open_at(directory, position)
    except OSError as error:
        raise RunError(f"{error.filename} cannot be read: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        if file is not None:
            stack.enter_context(file)
        try:
            yield file, first, end
        except (gzip.BadGzipFile, EOFError) as error:
            raise RunError(f"a file of the history in {directory} is damaged ({error})") from error
        except OSError as error:
            raise RunError(f"the history in {directory} cannot be read: {error.strerror}") from error


def _open_at(directory: Path, position: int) -> tuple[BinaryIO | None, int, int | None]:
    path = directory / HISTORY_FILE
    while True:
        try:
            current: BinaryIO | None = path.open("rb")
        except FileNotFoundError:
            current = None
        segments = _segments(directory)
        for segment in segments:
            if segment.end > position:
                if current is not None:
                    current.close()
                try:
                    opened = (gzip.open if segment.compressed else open)(segment.path, "rb")
                except FileNotFoundError:
                    break  # it was compressed in the meantime, so look again
                return cast(BinaryIO, opened), segment.first, segment.end
        else:
            # A file that was renamed between the two looks appears in neither.
            if current is None or _is_still(current, path):
                return current, segments[-1].end if segments else 0, None
            current.close()


def _is_still(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _rotate(directory: Path) -> None:
    """Rename the file being written, which ends with a complete line, to a segment."""
    path = directory / HISTORY_FILE
    segments = _segments(directory)
    first = segments[-1].end if segments else 0
    path.rename(directory / f"history-{first:015}-{first + path.stat().st_size:015}.jsonl")


def _compress(path: Path) -> None:
    """Replace a segment by its compressed form."""
    target = path.with_name(path.name + ".gz")
    partial = target.with_name(target.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with path.open("rb") as plain, os.fdopen(descriptor, "wb") as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, filename="", mtime=0) as packed:
            shutil.copyfileobj(plain, packed)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target)
    path.unlink()


def parse_line(line: bytes) -> Entry | None:
    """One line of a history; None if it cannot be read."""
    try:
        raw = json.loads(line)
        at, replayed = float(raw.pop("at")), bool(raw.pop("replayed", False))
        return Entry(at=at, event=events.from_fields(raw), replayed=replayed)
    except (ProtocolViolationError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _entry(directory: Path, position: int, line: bytes) -> Entry | None:
    """Like `parse_line`, for a line before `position`. Raises RunError if a history does not begin with an
    event; later damage is reported."""
    entry = parse_line(line)
    if entry is None and line.strip() and not _is_cut_or_unknown(line):
        if position == len(line):
            raise RunError(
                f"the history in {directory} is damaged at its first line, which has no event: restore "
                f"{HISTORY_FILE}, or remove it and lose the earlier events"
            )
        if directory not in _DAMAGED:
            _DAMAGED.add(directory)
            log.warning(
                "the history in %s is damaged at byte %d: unreadable lines are left out",
                directory,
                position - len(line),
            )
    return entry


def _is_cut_or_unknown(line: bytes) -> bool:
    """Whether a line may be an event that a crash cut short, or one of another version."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(b"{")
    return isinstance(raw, dict) and {"at", "event"} <= raw.keys()


def _open(path: Path) -> TextIO:
    """Open for appending at the start of a line, readable only by its owner."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    file = os.fdopen(descriptor, "a", encoding="utf-8")
    size = os.fstat(descriptor).st_size
    if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
        file.write("\n")
    return file
