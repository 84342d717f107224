"""A run as people look at it: one value that the page, `thinwire top` and `thinwire status` all show.

`node.analysis.view_builder` makes it from events. Times are Unix seconds. Where nodes can be reached is left out: a
page may be public, and a volunteer's address is nobody's business.

Its readers may be of another version than its writer. They leave out fields that they do not know, and take
the default of one that is missing, which says that nothing is known. So a new field needs a default; a view
without one of the others is refused, as a number that is not there must not be shown as 0.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self, cast

from node.telemetry import events
from wire.errors import ProtocolViolationError

MOST_POINTS = 512
"""A curve has at most so many points, and at least half as many once it was full."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Columns of equal length. A point stands for `stride` steps, the last one perhaps for fewer."""

    stride: int
    steps: tuple[int, ...]
    """The last step of each point; the first step of a run is 1."""
    times: tuple[float, ...]
    """Unix seconds at which that step was done."""
    values: tuple[float, ...]
    """Mean over the point's steps."""


@dataclass
class _Point:
    first: int
    last: int
    at: float
    total: float
    count: int


class Series:
    """Collects a curve step by step. A step that comes again, after a rollback, replaces what it gave."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        """`most_points` is even and at least 2."""
        self._most = most_points
        self._stride = 1
        self._points: list[_Point] = []

    def add(self, step: int, at: float, value: float) -> None:
        points = self._points
        while points and points[-1].first >= step:
            points.pop()
        if points and points[-1].last >= step:
            # A merged point in whose middle the run went back: its mean stays, its later steps are counted
            # once.
            return
        newest = points[-1] if points else None
        if newest is not None and newest.count < self._stride:
            newest.last, newest.at = step, at
            newest.total += value
            newest.count += 1
            return
        points.append(_Point(step, step, at, value, 1))
        if len(points) > self._most:
            self._merge()

    def curve(self) -> Curve:
        return Curve(
            stride=self._stride,
            steps=tuple(point.last for point in self._points),
            times=tuple(point.at for point in self._points),
            values=tuple(point.total / point.count for point in self._points),
        )

    def _merge(self) -> None:
        """Join points two by two; one may be left over at the end, to be filled up."""
        self._stride *= 2
        merged: list[_Point] = []
        for point in self._points:
            if merged and merged[-1].count < self._stride:
                into = merged[-1]
                into.last, into.at = point.last, point.at
                into.total += point.total
                into.count += point.count
            else:
                merged.append(point)
        self._points = merged


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage of the newest placement; shares are of wall time over the recent steps, 0 to 1."""

    stage: int
    node_id: str
    device: str = ""
    blocks: int = 0
    """Transformer blocks of the stage; 0 is not known."""
    present: bool
    """Whether its node is connected."""
    shares: Mapping[str, float]
    """By kind of time; they sum to 1, or are empty before the first step."""
    busy: float
    waiting: float
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    gpu_peak_memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FlowView:
    """Tensors of one kind in one direction of a link."""

    direction: str
    """`activation`, `gradient`, `tied_share` or `tied_sum`."""
    codec: str
    bits_per_element: float
    """As they crossed the socket over the recent steps, headers and frames included."""
    mbit: float
    """Mbit/s over the recent steps."""
    bytes: int
    """Since the run began."""
    elements: int


@dataclass(frozen=True, kw_only=True)
class LinkView:
    """One direction of a link: from stage `source` to stage `target`. The other direction is another one."""

    source: int
    target: int
    bytes: int
    """Since the run began."""
    mbit: float
    """Mbit/s over the recent steps."""
    capacity_mbit: float = 0.0
    """Measured; 0 while not known."""
    use: float | None = None
    """`mbit` over `capacity_mbit`, 0 to 1; None while the capacity is not known."""
    busy: float
    """Share of the recent steps in which something waited to be sent or acknowledged."""
    flows: tuple[FlowView, ...]
    round_trip_seconds: float = 0.0
    retransmits: int
    """Frames sent again since the run began."""
    rejects: int
    """Damaged frames since the run began."""
    queued_bytes: int
    full: bool = False
    """It carries what it can, alone or with others that share its upload (`node.analysis.step_model`)."""
    little_used: bool = False
    """It carries so little of `capacity_mbit` that this may be far off, and is shown to nobody: too high, as
    bursts pass a limit that a steady stream meets, or too low, as few bytes bring no link to its speed."""


@dataclass(frozen=True, kw_only=True)
class MemberView:
    """A node that is connected."""

    node_id: str
    device: str
    stage: int | None
    """None for a spare."""
    joined: float


@dataclass(frozen=True, kw_only=True)
class EventView:
    """Something that happened, in one line of plain text that may quote a node: escape it."""

    at: float
    kind: str
    """`started`, `joined`, `left`, `placed`, `aborted`, `recovered`, `snapshot`, `notice` or `finished`."""
    level: str
    """`info`, `warning` or `error`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class SnapshotView:
    """The newest snapshot."""

    step: int
    bytes: int
    at: float


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Where a run stands."""

    run_id: str
    name: str
    state: str
    """`starting`, `waiting for nodes`, `restoring`, `training`, `stopped`, `finished` or `failed`."""
    ended: str = ""
    """Why the run is over; empty while it is not."""
    started: float
    """When the run began; 0 before it has."""
    updated: float
    """When the newest event happened."""
    coordinator_starts: int
    """How often a coordinator was started for this run: 1, and one for each resume or crash."""
    step: int
    """Steps done."""
    steps: int
    stages_wanted: int
    tokens_per_step: int
    microbatches: int
    chunks: int
    """Model chunks a stage."""
    forward_codec: str
    backward_codec: str
    loss: float | None = None
    """Of the newest step, nats a token."""
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    """Over the recent steps."""
    step_seconds: float | None = None
    """Mean over the recent steps."""
    eta_seconds: float | None = None
    """From `updated` on; None while it cannot be told."""
    loss_curve: Curve
    speed_curve: Curve
    """Tokens a second."""
    epoch: int
    stages: tuple[StageView, ...]
    links: tuple[LinkView, ...]
    members: tuple[MemberView, ...]
    spares: int
    """Members without a stage while every stage has its node; 0 while one has none."""
    snapshot: SnapshotView | None = None
    """Its age is the reader's clock minus `at`."""
    aborted: int
    """Steps that were aborted and ran again."""
    recoveries: int
    replayed: int
    """Steps that ran again after a rollback, though they had been committed."""
    token_uses: int | None = None
    """Nodes that the run's join tokens still admit; None is not known."""
    bottleneck: tuple[str, ...] = ()
    """What holds the run back, in words, the most important first."""
    events: tuple[EventView, ...] = ()
    """Oldest first."""

    def to_json(self) -> str:
        """One JSON object; numbers that are not finite become null."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote, in this version or one like it. Raises ProtocolViolationError for others."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise ProtocolViolationError(f"a run's view is not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ProtocolViolationError("a run's view is one JSON object")
        return cls.from_fields(raw)

    @classmethod
    def from_fields(cls, raw: Mapping[str, object]) -> Self:
        """What `to_fields` gave, read from JSON; as `from_json`."""
        return cast(Self, events.read_value(raw, cls, "view"))

    def to_fields(self) -> dict[str, object]:
        """The same as plain values."""
        fields: dict[str, object] = events.finite(asdict(self))
        return fields
