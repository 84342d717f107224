"""Converts a run's spans into a trace for Perfetto and Chrome (Trace Event Format, JSON object form). All
functions are pure.

A stage is a process. Its lanes are threads: compute, encode, decode, wait, and send and receive for each
neighbour. An arrow follows a tensor from its encoding over its link to its decoding. Times are microseconds
on the coordinator's clock, from the first span.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from node.telemetry.clock import WAITS, TimeKind, WorkKind
from node.telemetry.trace_files import Batch
from wire.spec import Direction, TensorKey
from wire.telemetry import Span
from wire.transfers import TransferKind

_MICRO = 1e6
_COMPUTE, _ENCODE, _DECODE, _WAIT = 1, 2, 3, 4
_SEND, _RECEIVE = 100, 200  # and the neighbour's stage
_ROW = 10_000  # stages of a row at most
_LANES = {_COMPUTE: "compute", _ENCODE: "encode", _DECODE: "decode", _WAIT: "wait"}
_WAIT_NAMES = {kind.value for kind in (*WAITS, TimeKind.ENCODE, TimeKind.DECODE)}
"""The kinds in which the compute thread waits. Packing and unpacking run beside it."""


@dataclass(frozen=True)
class PlacedSpan:
    """A span on the coordinator's clock."""

    stage: int
    node_id: str
    start: float
    """Unix seconds."""
    span: Span
    replica: int = 0
    """The node's row of the grid."""

    @property
    def end(self) -> float:
        return self.start + self.span.seconds

    @property
    def process(self) -> int:
        return _ROW * self.replica + self.stage

    @property
    def lane(self) -> int:
        kind, peer = self.span.kind, self.span.peer_stage
        match kind:
            case TransferKind.SEND:
                return _SEND + peer
            case TransferKind.RECEIVE:
                return _RECEIVE + peer
            case WorkKind.PACK:
                return _ENCODE
            case WorkKind.UNPACK:
                return _DECODE
            case _:
                return _WAIT if kind in _WAIT_NAMES else _COMPUTE


@dataclass(frozen=True)
class Aligned:
    """The spans of some steps on one clock."""

    spans: tuple[PlacedSpan, ...]
    clock_error: float
    """A bound on the error of any node's clock, in seconds."""
    dropped: int


def align(batches: Iterable[Batch], first: int, last: int) -> Aligned:
    """The spans of steps `first` to `last`, counted from 0, in the order of time.

    Each node uses its clock offset with the least error, so the distances between its spans are kept. Of a
    step that ran more than once, the last epoch is shown.
    """
    batches = list(batches)
    clocks: dict[str, tuple[float, float]] = {}
    for batch in batches:
        error, offset = clocks.get(batch.node_id, (float("inf"), 0.0))
        if 0 < batch.spans.clock_error < error:
            clocks[batch.node_id] = batch.spans.clock_error, batch.spans.clock_offset
        else:
            clocks.setdefault(batch.node_id, (error, batch.spans.clock_offset or offset))
    epochs: dict[int, int] = {}
    for batch in batches:
        epochs[batch.spans.step] = max(epochs.get(batch.spans.step, 0), batch.spans.epoch)
    placed = []
    for batch in batches:
        for span in batch.spans.spans:
            step = span.key.step if span.key is not None else batch.spans.step
            if first <= step <= last and batch.spans.epoch == epochs.get(step, batch.spans.epoch):
                start = span.start + clocks[batch.node_id][1]
                placed.append(PlacedSpan(batch.spans.stage, batch.node_id, start, span, batch.replica))
    return Aligned(
        spans=tuple(sorted(placed, key=lambda placed_span: (placed_span.start, placed_span.process))),
        clock_error=max((error for error, _ in clocks.values() if error < float("inf")), default=0.0),
        dropped=sum(batch.spans.dropped for batch in batches),
    )


def chrome_trace(aligned: Aligned, name: str, slices: int = 1) -> dict[str, Any]:
    """The trace as one JSON object. `name` is the run's, `slices` are those of each microbatch."""
    # In-flight spans are drawn by their tensor, which correct nodes always name.
    spans = [item for item in aligned.spans if item.span.kind != TransferKind.IN_FLIGHT or item.span.key]
    origin = spans[0].start if spans else 0.0
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": name,
            "began": origin,
            "clock_error_microseconds": round(_MICRO * aligned.clock_error, 1),
            "dropped_spans": aligned.dropped,
        },
        "traceEvents": [
            *_names(spans),
            *(_bar(placed, origin, slices) for placed in spans if placed.span.kind != TransferKind.IN_FLIGHT),
            *(
                event
                for placed in spans
                if placed.span.kind == TransferKind.IN_FLIGHT and placed.span.key is not None
                for event in _flight(placed, placed.span.key, origin, slices)
            ),
            *_arrows(spans, origin),
        ],
    }


def _names(spans: Sequence[PlacedSpan]) -> list[dict[str, Any]]:
    nodes: dict[int, dict[str, None]] = {}
    lanes: dict[tuple[int, int], None] = {}
    for placed in spans:
        nodes.setdefault(placed.process, {})[placed.node_id] = None
        if placed.span.kind != TransferKind.IN_FLIGHT:
            lanes[placed.process, placed.lane] = None
    events = []
    for process, ids in sorted(nodes.items()):
        replica, stage = divmod(process, _ROW)
        row = f"row {replica}, " if max(nodes) >= _ROW else ""
        events.append(_meta("process_name", process, 0, name=f"{row}stage {stage}: {', '.join(ids)}"))
        events.append(_meta("process_sort_index", process, 0, sort_index=process))
    for process, lane in sorted(lanes):
        way = f"receive from {lane - _RECEIVE}" if lane >= _RECEIVE else f"send to {lane - _SEND}"
        events.append(_meta("thread_name", process, lane, name=_LANES.get(lane, way)))
        events.append(_meta("thread_sort_index", process, lane, sort_index=lane))
    return events


def _meta(what: str, process: int, lane: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": arguments}


def _bar(placed: PlacedSpan, origin: float, slices: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": _title(placed.span, slices),
        "cat": placed.span.kind,
        "pid": placed.process,
        "tid": placed.lane,
        "ts": _micro(placed.start - origin),
        "dur": _micro(placed.span.seconds),
        "args": _arguments(placed.span, slices),
    }


def _flight(placed: PlacedSpan, key: TensorKey, origin: float, slices: int) -> list[dict[str, Any]]:
    """The time from the last frame to its acknowledgement. Such spans may overlap."""
    shared = {
        "cat": placed.span.kind,
        "name": f"in flight to {placed.span.peer_stage}",
        "id": _identity(key),
        "pid": placed.process,
        "tid": _SEND + placed.span.peer_stage,
    }
    return [
        {**shared, "ph": "b", "ts": _micro(placed.start - origin), "args": _arguments(placed.span, slices)},
        {**shared, "ph": "e", "ts": _micro(placed.end - origin)},
    ]


def _arrows(spans: Sequence[PlacedSpan], origin: float) -> list[dict[str, Any]]:
    """An arrow over its link for every tensor that was packed and unpacked."""
    parts: dict[TensorKey, dict[str, PlacedSpan]] = {}
    for placed in spans:
        if placed.span.key is not None:
            parts.setdefault(placed.span.key, {})[placed.span.kind] = placed
    events = []
    for key, way in parts.items():
        ends = way.get(WorkKind.PACK), way.get(WorkKind.UNPACK)
        if ends[0] is None or ends[1] is None:
            continue
        between = [way[kind] for kind in (TransferKind.SEND, TransferKind.RECEIVE) if kind in way]
        stops = [("s", ends[0]), *(("t", stop) for stop in between), ("f", ends[1])]
        for phase, stop in stops:
            events.append(
                {
                    "ph": phase,
                    "name": _kind_of(key),
                    "cat": "tensor",
                    "id": _identity(key),
                    "pid": stop.process,
                    "tid": stop.lane,
                    "ts": _micro(stop.start - origin),
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return events


def _title(span: Span, slices: int) -> str:
    if span.key is None:
        return span.kind
    microbatch, number = divmod(span.key.microbatch, slices)
    return f"{span.kind} {microbatch}" + (f".{number}" if slices > 1 else "")


def _arguments(span: Span, slices: int) -> dict[str, object]:
    if span.key is None:
        return {}
    key = span.key
    microbatch, number = divmod(key.microbatch, slices)
    return {
        "step": key.step + 1,
        "microbatch": microbatch,
        **({"slice": number} if slices > 1 else {}),
        "boundary": key.boundary,
        "tensor": _kind_of(key),
    }


def _kind_of(key: TensorKey) -> str:
    return Direction(key.direction).name.lower()


def _identity(key: TensorKey) -> str:
    return f"{key.epoch}.{key.step}.{key.microbatch}.{key.boundary}.{int(key.direction)}"


def _micro(seconds: float) -> float:
    return round(_MICRO * seconds, 1)
