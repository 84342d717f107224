"""Spans on disk: `trace/` in the run's directory, compressed and of bounded size. Also the choice of steps to
trace.

A segment is a gzip file of JSON lines. A line has what one stage sent after a step. Lines are buffered
briefly and appended as one gzip member, so a crash loses only that member. A restarted coordinator begins a
new segment. When all segments together exceed the limit, the oldest are removed.
"""

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

from wire.errors import ConfigError, RunError
from wire.telemetry import SPAN_COLUMNS, SpanColumns, StepSpans

TRACE_DIRECTORY = "trace"
SEGMENT_BYTES = 4 * 1024 * 1024
MOST_WAITING = 16 * 1024 * 1024
"""The most bytes of lines in memory. While the disk is slow, further lines are dropped."""
_GZIP = 31  # makes zlib use a gzip header
_PLACE = re.compile(rb'\{"epoch":(\d+),"step":(\d+),"stage":(\d+),')
"""The start of a line, which is enough to find a step."""


@dataclass(frozen=True)
class Batch:
    """The spans that a node sent after a step, or a part of them."""

    node_id: str
    spans: StepSpans
    replica: int = 0
    """The node's row of the grid."""


class TraceWriter:
    """Buffers batches with `add` and `take`. `write` appends them, perhaps on another thread.

    The first failed write ends the trace: `broken` says why, and the run continues.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """
        Args:
            directory: the run's directory.
            limit_bytes: the most bytes on disk.
        """
        self._directory = directory / TRACE_DIRECTORY
        self._limit = limit_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._segment: Path | None = None
        self._writing = Lock()
        self.broken = ""
        """Why writing ended; empty while it works."""

    def add(self, node_id: str, spans: StepSpans, replica: int = 0) -> None:
        line = _to_line(Batch(node_id, spans, replica))
        if not self.broken and self._waiting_bytes + len(line) <= MOST_WAITING:
            self._waiting.append(line)
            self._waiting_bytes += len(line)

    def take(self) -> list[bytes]:
        """The lines buffered since the last call."""
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return lines

    def write(self, lines: list[bytes]) -> None:
        """Append lines. It does not raise; see `broken`."""
        if not lines or self.broken:
            return
        packer = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        member = packer.compress(b"".join(lines)) + packer.flush()
        with self._writing:
            try:
                with self._open_segment().open("ab") as file:
                    file.write(member)
                self._remove_oldest()
            except OSError as error:
                self.broken = f"{self._directory} cannot be written ({error.strerror}); the trace ends here"

    def _open_segment(self) -> Path:
        segment = self._segment
        if segment is None:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        if segment is None or segment.stat().st_size >= min(SEGMENT_BYTES, self._limit // 4):
            numbers = [int(path.name.split(".")[0].split("-")[1]) for path in segments(self._directory)]
            segment = self._directory / f"spans-{max(numbers, default=0) + 1:06}.jsonl.gz"
        self._segment = segment
        return segment

    def _remove_oldest(self) -> None:
        files = segments(self._directory)
        size = sum(path.stat().st_size for path in files)
        for path in files[:-1]:
            if size <= self._limit:
                break
            size -= path.stat().st_size
            path.unlink()


def segments(directory: Path) -> list[Path]:
    """The segments in a trace directory, oldest first."""
    return sorted(directory.glob("spans-[0-9]*.jsonl.gz"))


def read_batches(directory: Path, first: int, last: int) -> Iterator[Batch]:
    """The batches that were sent after steps `first` to `last`, counted from 0, of the run in `directory`.

    Lines that a crash cut short are skipped.

    Raises:
        RunError: a file cannot be read.
    """
    for path in segments(directory / TRACE_DIRECTORY):
        for line in _lines(path):
            try:
                batch = _from_line(line)
            except (ValueError, KeyError, TypeError, IndexError):
                continue
            if first <= batch.spans.step <= last:
                yield batch


def newest_whole_step(directory: Path) -> int | None:
    """The newest step, counted from 0, with spans from every stage; None if there is none.

    Newest means run last: a rollback may leave steps with higher numbers.

    Raises:
        RunError: a file cannot be read.
    """
    stages: dict[int, dict[int, set[int]]] = {}
    for path in reversed(segments(directory / TRACE_DIRECTORY)):
        for line in _lines(path):
            if place := _PLACE.match(line):
                epoch, step, stage = map(int, place.groups())
                stages.setdefault(epoch, {}).setdefault(step, set()).add(stage)
        # The newest segment may have just begun, and a single step does not show how many stages there are.
        if sum(map(len, stages.values())) > 1:
            break
    for epoch, steps in sorted(stages.items(), reverse=True):
        known = [*steps.values(), *(stages.get(epoch - 1, {}).values() if len(steps) == 1 else ())]
        every = set[int]().union(*known)
        if whole := [step for step, written in steps.items() if written == every]:
            return max(whole)
    return None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # the oldest segments are removed during a run
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    for member in _members(data):
        yield from member.splitlines()


def _members(data: bytes) -> Iterator[bytes]:
    """The contents of the concatenated gzip members, up to the first damaged one."""
    while data:
        unpacker = zlib.decompressobj(_GZIP)
        try:
            content = unpacker.decompress(data)
        except zlib.error:
            break
        if not unpacker.eof:
            break
        yield content
        data = unpacker.unused_data


def _to_line(batch: Batch) -> bytes:
    spans = batch.spans
    columns = SpanColumns.of(spans.epoch, spans.spans)
    fields: dict[str, Any] = {
        **vars(spans),
        "node": batch.node_id,
        "names": columns.names,
        "spans": dict(zip(SPAN_COLUMNS, columns.columns, strict=True)),
    }
    if batch.replica:
        fields["replica"] = batch.replica
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _from_line(line: bytes) -> Batch:
    raw = json.loads(line)
    node_id, names, kept, epoch = raw.pop("node"), raw.pop("names"), raw.pop("spans"), raw["epoch"]
    replica = raw.pop("replica", 0)
    spans = SpanColumns(epoch, names, [kept[column] for column in SPAN_COLUMNS])
    return Batch(node_id, StepSpans(spans=spans, **raw), replica)


@dataclass(frozen=True)
class TracedSteps:
    """The steps to trace: `off`, `all`, or `a:b` with the first and last step counted from 1.

    `step in traced` takes steps counted from 0, as in messages. The object is false if it contains no steps.
    """

    first: int
    last: int | None
    """The last step; None for no end."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text. Raises ConfigError if it names no steps."""
        if text == "off":
            return cls(0, 0)
        if text == "all":
            return cls(1, None)
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"{text!r} names no steps: write off, all, or the first and last step as in 3:5"
            )
        return cls(int(match[1]), int(match[2]))

    def __contains__(self, step: int) -> bool:
        return self.first <= step + 1 and (self.last is None or step + 1 <= self.last)

    def __bool__(self) -> bool:
        return self.last is None or self.last >= 1
