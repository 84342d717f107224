"""A run's state for display: a value that the page, `thinwire top` and `thinwire status` show.

`view_builder.py` builds it from events. Times are Unix seconds. It contains no addresses of nodes, because a
page may be public.

Reader and writer may have different versions. Readers ignore unknown fields, and a missing field has its
default, which means unknown. So a new field needs a default. A missing field without a default is an error,
because it must not be shown as 0.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from node.telemetry import events
from wire.errors import ProtocolViolationError
from wire.figures import COUNTED, FlowFigures, LinkFigures

MOST_POINTS = 512
"""The most points of a curve. Once full, it has at least half as many."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve over steps, as columns of equal length. A point stands for `stride` steps, the last one perhaps
    for fewer."""

    stride: int
    steps: tuple[int, ...]
    """The last step of each point. The first step of a run is 1."""
    times: tuple[float, ...]
    """The Unix seconds at which that step was done."""
    values: tuple[float, ...]
    """The mean over the point's steps."""


_EMPTY = Curve(stride=1, steps=(), times=(), values=())


@dataclass(frozen=True)
class Series:
    """The data of a curve of bounded length, which merges neighbouring points. A replayed step replaces its
    value."""

    most: int = MOST_POINTS
    """The most points; even, and at least 2."""
    stride: int = 1
    points: tuple[tuple[float, ...], ...] = ()
    """The first and last step, the Unix time, the sum and the number of values of each point."""

    def plus(self, step: int, at: float, value: float) -> "Series":
        points = self.points
        while points and points[-1][0] >= step:
            points = points[:-1]
        if points and points[-1][1] >= step:
            # The run went back to the middle of a merged point. The point's mean stays.
            return replace(self, points=points)
        if points and points[-1][4] < self.stride:
            first, _, _, whole, count = points[-1]
            return replace(self, points=(*points[:-1], (first, step, at, whole + value, count + 1)))
        points = (*points, (step, step, at, value, 1))
        if len(points) <= self.most:
            return replace(self, points=points)
        stride, merged = 2 * self.stride, list(points[:1])
        for point in points[1:]:  # merged in pairs; an odd last one gets its partner later
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
    """One stage of the newest placement. Shares are those of wall time over the recent steps, from 0 to 1."""

    device: str = ""
    name: str = ""
    """The owner's name for the node. It may contain anything, so escape it."""
    blocks: int = 0
    """The number of transformer blocks; 0 if unknown."""
    present: bool
    """Whether its node is connected."""
    shares: Mapping[str, float]
    """Shares by kind of time. They sum to 1, or are empty before the first step."""
    busy: float
    waiting: float

    def json_fields(self) -> dict[str, Any]:
        """The fields without the seconds, which `shares` represents."""
        return {name: value for name, value in vars(self).items() if name not in ("seconds", "wall_seconds")}


@dataclass(frozen=True, kw_only=True)
class FlowView(FlowFigures):
    """The tensors of one kind in one direction of a link, since the run began."""

    bits_per_element: float
    """The bits on the socket over the recent steps, including headers and frames."""
    mbit: float
    """Mbit/s over the recent steps."""


@dataclass(frozen=True, kw_only=True)
class LinkView(LinkFigures):
    """One direction of a link since the run began, and over the recent steps."""

    flows: tuple[FlowView, ...] = field(default=(), metadata=COUNTED)
    mbit: float
    """Mbit/s over the recent steps."""
    capacity_mbit: float = 0.0
    """The measured capacity in Mbit/s; 0 while unknown."""
    use: float | None = None
    """`mbit` / `capacity_mbit`, from 0 to 1; None while the capacity is unknown."""
    busy: float
    """The share of the recent steps with data waiting to be sent or acknowledged."""
    processor: float = 0.0
    """The share of the time with data waiting in which the sender's thread was computing, from 0 to 1."""
    full: bool = False
    """Whether it is at its capacity, alone or with links that share its upload (`step_model.py`)."""
    program_limits: bool = False
    """Whether it is full because of the sender's processor rather than the line."""
    little_used: bool = False
    """Whether traffic is so low that `capacity_mbit` is unreliable and not shown. It may be too high, because
    short bursts pass a rate limit, or too low, because a few bytes do not reach a link's full speed."""
    why_not_direct: str = ""
    """For a relayed link, why it is not direct, in words."""
    why_not_together: str = ""
    """For a relayed link, why both ends could not dial at the same moment, in words; empty while unknown."""


@dataclass(frozen=True, kw_only=True)
class MemberView:
    """A connected node."""

    node_id: str
    device: str
    name: str = ""
    """The owner's name for it. Escape it."""
    stage: int | None
    """Its stage; None for a spare."""
    replica: int = 0
    joined: float


@dataclass(frozen=True, kw_only=True)
class EventView:
    """An event in one line of plain text. It may quote a node, so escape it."""

    at: float
    kind: str
    """`started`, `joined`, `left`, `placed`, `aborted`, `planned`, `lost`, `filled`, `recovered`, `held-out`,
    `scores`, `snapshot`, `replaced`, `notice` or `finished`."""
    level: str
    """`info`, `warning` or `error`."""
    text: str


@dataclass(frozen=True, kw_only=True)
class SnapshotView:
    step: int
    bytes: int
    at: float


@dataclass(frozen=True, kw_only=True)
class HeldOutView:
    """The newest held-out loss and the best one, in nats per token."""

    step: int
    loss: float | None = None
    """The loss with the run's codecs on the links; None if they cannot carry such samples."""
    uncompressed: float | None
    """The loss with fp32 on every link; None if it is not finite, or if no token counts as a label."""
    samples: int
    """The number of samples with labels."""
    best_step: int
    """The step of the best loss; 0 if there is none."""
    best: float | None
    """The least uncompressed loss."""


@dataclass(frozen=True, kw_only=True)
class ScoreView:
    """The result of lm-eval for a snapshot's model."""

    at: float
    step: int
    limit: int
    """The most questions of each task; 0 for all."""
    scores: Mapping[str, Mapping[str, float]]
    """Metrics by task."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    run_id: str
    name: str
    state: str
    """`starting`, `waiting for nodes`, `restoring`, `training`, `stopped`, `finished` or `failed`."""
    ended: str = ""
    """Why the run is over; empty while it is not."""
    started: float
    """When the run began; 0 before that."""
    updated: float
    """The time of the newest event."""
    coordinator_starts: int
    """The number of coordinators started for this run: 1, plus one for each resume or crash."""
    step: int
    """The number of steps done."""
    steps: int
    stages_wanted: int
    tokens_per_step: int
    microbatches: int
    chunks: int
    """Model chunks per stage."""
    slices: int = 1
    """The slices of each microbatch along the sequence."""
    head_share: float | None
    """The share of the first stage's compute that the head takes there; None if the head is on the last
    stage."""
    forward_codec: str
    backward_codec: str
    loss: float | None = None
    """The loss of the newest step, in nats per token; None before the first step, or if none of its tokens is
    a label."""
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    """The mean over the recent steps."""
    step_seconds: float | None = None
    """The mean over the recent steps."""
    eta_seconds: float | None = None
    """The remaining seconds, counted from `updated`; None if unknown."""
    loss_curve: Curve
    speed_curve: Curve
    """Tokens per second."""
    held_out_curve: Curve = _EMPTY
    """The uncompressed held-out losses. Here `stride` counts measurements."""
    lr_curve: Curve = _EMPTY
    grad_norm_curve: Curve = _EMPTY
    epoch: int
    stages: tuple[StageView, ...]
    """The stages, row after row."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The gradient groups of each row; empty for a run with one group, which has one row."""
    links: tuple[LinkView, ...]
    members: tuple[MemberView, ...]
    spares: int
    """The number of members without a stage, once every stage has its node; else 0."""
    held_out: HeldOutView | None = None
    snapshot: SnapshotView | None = None
    samples: tuple[events.SampleMade, ...] = ()
    """The samples of the newest sampled snapshots, oldest first."""
    scores: tuple[ScoreView, ...] = ()
    """The results of lm-eval, oldest first."""
    aborted: int
    """The number of steps that were aborted and run again, without planned changes of placement."""
    lost: int = 0
    """The number of nodes that were lost while their step continued."""
    goodput: float | None = None
    """The share of nodes' work in steps that deaths, aborts and rollbacks did not undo; None before any
    work."""
    recoveries: int
    replaced: tuple[str, ...] = ()
    """A line for each node that lost a stage or was shut out, with the reason; newest last."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """The documents left out of the training data that has been read so far, by reason."""
    replayed: int
    """The number of committed steps that ran again after a rollback."""
    replays_to: int = 0
    """The run repeats the steps up to this one; 0 if it repeats none."""
    token_uses: int | None = None
    """The number of nodes that the run's join tokens still admit; None if unknown."""
    bottleneck: tuple[str, ...] = ()
    """What limits the speed, in sentences, most important first."""
    events: tuple[EventView, ...] = ()
    """The events, oldest first."""

    @property
    def rows(self) -> int:
        """The rows of the newest placement: replicas of the pipeline."""
        return max(1, len(self.groups))

    def row(self, replica: int) -> Self:
        """The view of one row as if it were the whole grid: its stages, links and microbatches."""
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
        """The view as one JSON object. Numbers that are not finite become null."""
        return json.dumps(self.to_fields())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` of this or a similar version wrote.

        Raises:
            ProtocolViolationError: the text is no such view.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolViolationError(f"a run's view is not JSON ({error})") from error
        if not isinstance(raw, dict):
            raise ProtocolViolationError("a run's view is one JSON object")
        return cls.from_fields(raw)

    @classmethod
    def from_fields(cls, raw: Mapping[str, object]) -> Self:
        """`from_json` for parsed JSON."""
        return cast(Self, events.read_value(raw, cls, "view"))

    def to_fields(self) -> dict[str, object]:
        """The view as plain values."""
        fields: dict[str, object] = events.finite(self)
        return fields
