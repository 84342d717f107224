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
from typing import Any, Self, cast

from node.telemetry import events
from wire.errors import ProtocolViolationError
from wire.figures import COUNTED, FlowFigures, LinkFigures

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


_EMPTY = Curve(stride=1, steps=(), times=(), values=())


@dataclass(frozen=True)
class Series:
    """What a curve of bounded length is made from, by merging neighbouring points. A replayed step replaces
    its value."""

    most: int = MOST_POINTS
    """Points; even, and at least 2."""
    stride: int = 1
    points: tuple[tuple[float, ...], ...] = ()
    """First and last step, Unix time, sum and number of values of each point."""

    def plus(self, step: int, at: float, value: float) -> "Series":
        """With the value of a step more."""
        points = self.points
        while points and points[-1][0] >= step:
            points = points[:-1]
        if points and points[-1][1] >= step:
            # The run went back to the middle of a merged point: its mean stays.
            return replace(self, points=points)
        if points and points[-1][4] < self.stride:
            first, _, _, whole, count = points[-1]
            return replace(self, points=(*points[:-1], (first, step, at, whole + value, count + 1)))
        points = (*points, (step, step, at, value, 1))
        if len(points) <= self.most:
            return replace(self, points=points)
        stride, merged = 2 * self.stride, list(points[:1])
        for point in points[1:]:  # in pairs; an odd last one is filled up later
            first, _, _, whole, count = merged[-1]
            if count < stride:
                merged[-1] = (first, point[1], point[2], whole + point[3], count + point[4])
            else:
                merged.append(point)
        return replace(self, stride=stride, points=tuple(merged))

    def curve(self) -> Curve:
        return Curve(
            stride=self.stride,
            steps=tuple(int(last) for _, last, _, _, _ in self.points),
            times=tuple(at for _, _, at, _, _ in self.points),
            values=tuple(whole / count for _, _, _, whole, count in self.points),
        )


@dataclass(frozen=True, kw_only=True)
class StageView(events.StageCost):
    """One stage of the newest placement. Shares are of wall time over the recent steps, 0 to 1."""

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

    def json_fields(self) -> dict[str, Any]:
        """Without the seconds, which `shares` stand for."""
        return {name: value for name, value in vars(self).items() if name not in ("seconds", "wall_seconds")}


@dataclass(frozen=True, kw_only=True)
class FlowView(FlowFigures):
    """Tensors of one kind in one direction of a link, since the run began."""

    bits_per_element: float
    """On the socket over the recent steps, headers and frames included."""
    mbit: float
    """Mbit/s over the recent steps."""


@dataclass(frozen=True, kw_only=True)
class LinkView(LinkFigures):
    """One direction of a link since the run began, and over the recent steps."""

    flows: tuple[FlowView, ...] = field(default=(), metadata=COUNTED)
    mbit: float
    """Mbit/s over the recent steps."""
    capacity_mbit: float = 0.0
    """Measured; 0 while unknown."""
    use: float | None = None
    """`mbit` over `capacity_mbit`, 0 to 1; None while the capacity is unknown."""
    busy: float
    """Share of the recent steps with data waiting to be sent or acknowledged."""
    processor: float = 0.0
    """Share of the time with data waiting in which the sender's thread was computing, 0 to 1."""
    full: bool = False
    """At its capacity, alone or with links that share its upload (`step_model.py`)."""
    program_limits: bool = False
    """It is full because of the sender's processor, not of the line."""
    little_used: bool = False
    """Traffic is so low that `capacity_mbit` is unreliable and not shown: too high, as short bursts pass a
    rate limit, or too low, as few bytes do not bring a link to its speed."""
    why_not_direct: str = ""
    """For a relayed link, in words."""
    why_not_together: str = ""
    """Of a relayed link: why both ends could not dial at the same moment, in words; empty while unknown."""


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
class SampleView:
    """What the model of a snapshot added to one of `data.prompts`. It is any text at all: escape it."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ScoreView:
    """What lm-eval found of a snapshot's model."""

    at: float
    step: int
    limit: int
    """Most questions of each task; 0 for all."""
    scores: Mapping[str, Mapping[str, float]]
    """Metrics by task."""


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
    slices: int = 1
    """Of each microbatch, along the sequence."""
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
    held_out_curve: Curve = _EMPTY
    """The uncompressed held-out losses; here `stride` counts measurements."""
    lr_curve: Curve = _EMPTY
    grad_norm_curve: Curve = _EMPTY
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
    samples: tuple[SampleView, ...] = ()
    """Those of the newest sampled snapshots, oldest first."""
    scores: tuple[ScoreView, ...] = ()
    """Oldest first."""
    aborted: int
    """Steps aborted and run again; planned changes of placement are none."""
    lost: int = 0
    """Nodes that were lost while their step went on."""
    goodput: float | None = None
    """The share of nodes' work in steps that deaths, aborts and rollbacks did not undo; None before any."""
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
            links=tuple(link for link in self.links if link.source_replica == link.target_replica == replica),
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
