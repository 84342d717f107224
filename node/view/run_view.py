"""A run's state for display: one value that the page, `thinwire top` and `thinwire status` show.

`view_builder.py` makes it from events. Times are Unix seconds. Addresses of nodes are left out, as a page may
be public.

Reader and writer may be of different versions. Readers ignore unknown fields; a missing field takes its
default, which means unknown. So a new field needs a default. A missing field without default is an error: it
must not be shown as 0.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, cast

from node.telemetry import events
from wire.errors import ProtocolViolationError

MOST_POINTS = 512
"""Most points of a curve; once full, it has at least half as many."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve over steps; columns of equal length. A point stands for `stride` steps, the last for fewer."""

    stride: int
    steps: tuple[int, ...]
    """The last step of each point; the first step of a run is 1."""
    times: tuple[float, ...]
    """Unix seconds when that step was done."""
    values: tuple[float, ...]
    """Mean over the point's steps."""


@dataclass
class _Point:
    first: int
    last: int
    at: float
    total: float
    count: int


@dataclass(frozen=True)
class SeriesState:
    """All that a `Series` knows."""

    most: int
    stride: int
    points: tuple[tuple[float, ...], ...]
    """First and last step, Unix time, sum and number of values of each point."""


class Series:
    """Builds a curve of bounded length by merging neighbouring points. A replayed step replaces its value."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        """`most_points` is even and at least 2."""
        self._most = most_points
        self._stride = 1
        self._points: list[_Point] = []

    def state(self) -> SeriesState:
        """What `restored` needs to go on from here."""
        points = tuple((one.first, one.last, one.at, one.total, one.count) for one in self._points)
        return SeriesState(self._most, self._stride, points)

    @classmethod
    def restored(cls, state: SeriesState) -> "Series":
        """A series that goes on as the one with this state. Raises ValueError for points of another form."""
        made = cls(state.most)
        made._stride = state.stride
        for first, last, at, total, count in state.points:
            made._points.append(_Point(int(first), int(last), at, total, int(count)))
        return made

    def add(self, step: int, at: float, value: float) -> None:
        points = self._points
        while points and points[-1].first >= step:
            points.pop()
        if points and points[-1].last >= step:
            # The run went back to the middle of a merged point: its mean stays.
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
        """Merge points in pairs; an odd last one is filled up later."""
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
    """One stage of the newest placement. Shares are of wall time over the recent steps, 0 to 1."""

    stage: int
    replica: int = 0
    """The row of the grid."""
    node_id: str
    device: str = ""
    name: str = ""
    """What its owner calls the node; it may hold anything: escape it."""
    blocks: int = 0
    """Transformer blocks; 0 if unknown."""
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
    """`activation`, `gradient`, `tied_share`, `tied_sum`, `sync_share` or `sync_sum`."""
    codec: str
    bits_per_element: float
    """On the socket over the recent steps, headers and frames included."""
    mbit: float
    """Mbit/s over the recent steps."""
    bytes: int
    """Since the run began."""
    elements: int


@dataclass(frozen=True, kw_only=True)
class LinkView:
    """One direction of a link, from stage `source` to stage `target`."""

    source: int
    target: int
    source_replica: int = 0
    """The row of the stage that sends."""
    target_replica: int = 0
    bytes: int
    """Since the run began."""
    mbit: float
    """Mbit/s over the recent steps."""
    capacity_mbit: float = 0.0
    """Measured; 0 while unknown."""
    use: float | None = None
    """`mbit` over `capacity_mbit`, 0 to 1; None while the capacity is unknown."""
    busy: float
    """Share of the recent steps with data waiting to be sent or acknowledged."""
    flows: tuple[FlowView, ...]
    round_trip_seconds: float = 0.0
    retransmits: int
    """Frames sent again since the run began."""
    rejects: int
    """Damaged frames since the run began."""
    queued_bytes: int
    full: bool = False
    """At its capacity, alone or with links that share its upload (`step_model.py`)."""
    little_used: bool = False
    """Traffic is so low that `capacity_mbit` is unreliable and not shown: too high, as short bursts pass a
    rate limit, or too low, as few bytes do not bring a link to its speed."""
    path: str = ""
    """`direct`, `simultaneous open`, `relay` (the coordinator's) or `relay NODE`; empty while unknown."""
    why_not_direct: str = ""
    why_not_together: str = ""
    """Of a relayed link: why both ends could not dial at the same moment, in words; empty while unknown."""
    """For a relayed link, in words."""


@dataclass(frozen=True, kw_only=True)
class MemberView:
    """A connected node."""

    node_id: str
    device: str
    name: str = ""
    """What its owner calls it; escape it."""
    stage: int | None
    """None for a spare."""
    replica: int = 0
    joined: float


@dataclass(frozen=True, kw_only=True)
class EventView:
    """An event in one line of plain text. It may quote a node: escape it."""

    at: float
    kind: str
    """`started`, `joined`, `left`, `placed`, `aborted`, `planned`, `recovered`, `snapshot`, `notice` or
    `finished`."""
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
class HeldOutView:
    """The newest held-out loss, and the best; nats a token."""

    step: int
    loss: float | None = None
    """With the run's codecs on the links; None if they cannot carry such samples."""
    uncompressed: float | None
    """With fp32 on every link; None if it is not finite, or no token counts as a label."""
    samples: int
    """Those with labels."""
    best_step: int
    """0 if there is no best one."""
    best: float | None
    """The least uncompressed loss."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The state of a run."""

    run_id: str
    name: str
    state: str
    """`starting`, `waiting for nodes`, `restoring`, `training`, `stopped`, `finished` or `failed`."""
    ended: str = ""
    """Why the run is over; empty while it is not."""
    started: float
    """0 before the run began."""
    updated: float
    """Time of the newest event."""
    coordinator_starts: int
    """Coordinators started for this run: 1, plus one for each resume or crash."""
    step: int
    """Steps done."""
    steps: int
    stages_wanted: int
    tokens_per_step: int
    microbatches: int
    chunks: int
    """Model chunks a stage."""
    head_share: float | None
    """The share of the first stage's compute that the head takes there; None: it is on the last stage."""
    forward_codec: str
    backward_codec: str
    loss: float | None = None
    """Of the newest step, nats a token; None before the first, and if none of its tokens is a label."""
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    """Over the recent steps."""
    step_seconds: float | None = None
    """Mean over the recent steps."""
    eta_seconds: float | None = None
    """From `updated` on; None if unknown."""
    loss_curve: Curve
    speed_curve: Curve
    """Tokens a second."""
    epoch: int
    stages: tuple[StageView, ...]
    """Row after row."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The gradient groups of each row; empty for a run with one group, which has one row."""
    links: tuple[LinkView, ...]
    members: tuple[MemberView, ...]
    spares: int
    """Members without a stage, once every stage has its node; else 0."""
    held_out: HeldOutView | None = None
    snapshot: SnapshotView | None = None
    """The newest one."""
    aborted: int
    """Steps aborted and run again; planned changes of placement are none."""
    recoveries: int
    replaced: tuple[str, ...] = ()
    """Who lost a stage or was shut out, and why, a line for each node; the newest last."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Documents left out of the training data, by reason, of what has been read so far."""
    replayed: int
    """Committed steps that ran again after a rollback."""
    replays_to: int = 0
    """The run repeats the steps up to this one; 0 when it has repeated them."""
    token_uses: int | None = None
    """Nodes that the run's join tokens still admit; None if unknown."""
    bottleneck: tuple[str, ...] = ()
    """What limits the speed, in sentences, the most important first."""
    events: tuple[EventView, ...] = ()
    """Oldest first."""

    @property
    def rows(self) -> int:
        """Rows of the newest placement: replicas of the pipeline."""
        return max(1, len(self.groups))

    def row(self, replica: int) -> Self:
        """The view of one row, as if it were the whole grid: its stages, links and microbatches."""
        whole = sum(map(len, self.groups)) or 1
        own = len(self.groups[replica]) if self.groups else 1
        return replace(
            self,
            stages=tuple(stage for stage in self.stages if stage.replica == replica),
            links=tuple(one for one in self.links if one.source_replica == one.target_replica == replica),
            groups=(),
            microbatches=self.microbatches * own // whole,
        )

    def to_json(self) -> str:
        """One JSON object; numbers that are not finite become null."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` of this or a similar version wrote. Raises ProtocolViolationError."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolViolationError(f"a run's view is not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ProtocolViolationError("a run's view is one JSON object")
        return cls.from_fields(raw)

    @classmethod
    def from_fields(cls, raw: Mapping[str, object]) -> Self:
        """As `from_json`, for parsed JSON."""
        return cast(Self, events.read_value(raw, cls, "view"))

    def to_fields(self) -> dict[str, object]:
        """As plain values."""
        found: dict[str, object] = events.finite(self)
        return found
