"""Builds a `RunView` from a run's events, one at a time.

A view depends on events only, so a run that is over looks as it did while it ran.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar

from node.telemetry import events
from node.telemetry.clock import WAITS, TimeKind
from node.telemetry.costs import Work
from node.telemetry.format import named, printable, without_addresses
from node.view.bottleneck import Evidence, bottleneck
from node.view.link_views import NOT_LISTENING, NOT_REACHED, alike, link_views
from node.view.run_view import (
    EventView,
    HeldOutView,
    LinkView,
    MemberView,
    RunView,
    ScoreView,
    Series,
    SnapshotView,
    StageView,
)
from node.view.step_model import BY_PROGRAM, FULL, full_links
from wire.errors import without_folders
from wire.figures import LinkFigures, total

__all__ = ["RunView", "RunViewBuilder", "view"]

_KINDS, _WAITS = [kind.value for kind in TimeKind], [kind.value for kind in WAITS]
RECENT_STEPS = 10
"""The number of steps over which shares, rates and the bottleneck are measured."""
ADVICE_STEPS = 40
"""The most steps on which advice is based. They are steps since the placement and the codecs last changed."""
LEAST_ADVICE_STEPS = 10
"""With fewer steps no advice is given."""
MOST_EVENTS = 200
"""The number of newest events that the view keeps."""
MOST_REPLACED = 16
"""The number of newest nodes kept that lost their stage or were shut out."""
MOST_SAMPLES = 32
"""The number of newest text samples kept."""
MOST_SCORES = 16
"""The number of newest lm-eval results kept."""
MOST_SNAPSHOTS = 1000
"""The number of newest snapshots remembered, including pruned ones."""
MOST_LEFT = 3
"""The number of newest nodes kept that left and have not come back."""


@dataclass(kw_only=True)
class RunViewBuilder:
    """Takes a run's events in order, from all its coordinators.

    Its size is bounded, whatever the length of the run. Values are only replaced, never changed, so a copy
    stays unchanged while events arrive.
    """

    started: events.RunStarted | None = None
    began: float = 0.0
    updated: float = 0.0
    """The Unix time of the newest event."""
    starts: int = 0
    known: Mapping[str, events.NodeJoined] = field(default_factory=dict)
    """All nodes that ever joined, by id."""
    members: Mapping[str, float] = field(default_factory=dict)
    """When each connected node joined. Those that were connected at the end of the run stay."""
    left: tuple[events.NodeLeft, ...] = ()
    """The last nodes that left and have not come back."""
    placement: events.PlacementMade | None = None
    restoring: bool = False
    step: events.StepDone | None = None
    steps_done: int = 0
    highest_step: int = 0
    replayed: int = 0
    aborted: int = 0
    planned: int = 0
    """Planned changes of placement."""
    lost: int = 0
    work: Work = field(default_factory=Work)
    recoveries: int = 0
    snapshots: tuple[SnapshotView, ...] = ()
    """The snapshots by step, including pruned ones. If later ones are damaged, the newest of the others
    counts."""
    held_out: tuple[events.HeldOutLoss, ...] = ()
    """The newest measurement of each step."""
    samples: tuple[events.SampleMade, ...] = ()
    scores: tuple[ScoreView, ...] = ()
    stored: events.SnapshotStored | None = None
    """The newest snapshot, unless it was set aside."""
    page: events.PageServed | None = None
    paused: str = ""
    """Why the run stands still until somebody does something; empty if it does not."""
    finished: events.RunFinished | None = None
    token_uses: int | None = None
    loss: Series = field(default_factory=Series)
    speed: Series = field(default_factory=Series)
    held_out_loss: Series = field(default_factory=Series)
    lr: Series = field(default_factory=Series)
    grad_norm: Series = field(default_factory=Series)
    recent: tuple[events.StepCosts, ...] = ()
    paces: tuple[float, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    listed: tuple[EventView, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    """For each node that lost its stage or was shut out, the newest line that says why."""
    dropped: Mapping[str, int] = field(default_factory=dict)

    def apply(self, event: events.Event, at: float) -> None:
        """Apply an event of Unix time `at`. Kinds that a view does not show are ignored."""
        self.updated = max(self.updated, at)
        self.work = self.work.after(event)
        match event:
            case events.RunStarted():
                self._start(event, at)
            case events.NodeJoined():
                self.members = {**self.members, event.node_id: at}
                self.known = {**self.known, event.node_id: event}
                self.left = tuple(left for left in self.left if left.node_id != event.node_id)
            case events.NodeLeft():
                self.members = _without(self.members, event.node_id)
                others = (left for left in self.left if left.node_id != event.node_id)
                self.left = (*others, event)[-MOST_LEFT:]
            case events.PageServed():
                self.page = event
            case events.PlacementMade():
                self._place(event)
            case events.StepCosts():
                self._count(event)
            case events.StepDone():
                self._done(event, at)
            case events.StepAborted():
                self.aborted += not event.is_planned
                self.planned += event.is_planned
                self.restoring = True
            case events.SeatLost():
                self.lost += 1
                self._seat(event, "")
            case events.SeatFilled():
                self._seat(event, event.node_id)
            case events.Recovered():
                self.recoveries += 1
            case events.TokenUses():
                self.token_uses = event.left
            case events.HeldOutLoss():
                self.held_out = (*(loss for loss in self.held_out if loss.step != event.step), event)
                if math.isfinite(event.uncompressed):
                    self.held_out_loss = self.held_out_loss.plus(event.step, at, event.uncompressed)
            case events.SampleMade():
                self.samples = (*self.samples, event)[-MOST_SAMPLES:]
            case events.TaskScores():
                score = ScoreView(at=at, step=event.step, limit=event.limit, scores=event.scores)
                self.scores = (*self.scores, score)[-MOST_SCORES:]
            case events.SnapshotStored():
                self._forget_snapshots(event.step - 1)
                self.stored = event
                snapshot = SnapshotView(step=event.step, bytes=event.bytes, at=at)
                self.snapshots = (*self.snapshots, snapshot)[-MOST_SNAPSHOTS:]
            case events.SnapshotSetAside():
                self._forget_snapshots(event.whole)
            case events.DataDropped():
                self.dropped = event.reasons
            case events.DiskRoom():
                self.paused = event.text if event.full else ""
            case events.RunFinished():
                self.finished = event
            case _:
                pass
        if (listed := _listed(event, self.name_of)) is not None:
            kind, level, text = listed
            line = _for_others(text)
            self.listed = (*self.listed, EventView(at=at, kind=kind, level=level, text=line))[-MOST_EVENTS:]
            if isinstance(event, events.NodeReplaced) or self._leaves_stage(event):
                replaced = {**_without(self.replaced, event.node_id), event.node_id: line}
                self.replaced = dict(list(replaced.items())[-MOST_REPLACED:])

    def _leaves_stage(self, event: events.Event) -> TypeGuard[events.NodeLeft]:
        """Whether a node has left its stage unintentionally, and no earlier line said so."""
        if not isinstance(event, events.NodeLeft) or event.reason == events.LEFT or self.placement is None:
            return False
        known = self.replaced.get(event.node_id, "")
        return (
            event.node_id in self.placement.nodes
            and event.reason.removeprefix(events.QUARANTINED) not in known
        )

    @property
    def placed(self) -> bool:
        """Whether every node that has a stage is connected."""
        hosts = set(self.placement.nodes if self.placement is not None else ()) - {""}
        return bool(hosts) and hosts <= self.members.keys()

    def name_of(self, node_id: str) -> str:
        """What the owner calls a node; may be empty."""
        return self.known[node_id].name if node_id in self.known else ""

    @property
    def over(self) -> bool:
        """Whether the newest coordinator has finished."""
        return self.finished is not None

    def view(self) -> RunView:
        """The view after the events so far."""
        started, step = self.started, self.step
        finished_text = _for_others(self.finished.reason) if self.finished else ""
        recent = self.recent[-RECENT_STEPS:]
        stages = self._stage_views(recent)
        links = self._link_views(recent)
        pace = sum(self.paces) / len(self.paces) if self.paces else None
        steps = started.steps if started else 0
        done = self.steps_done
        tokens = started.tokens_per_step if started else 0
        state = self._state(done, steps)
        nodes = self.placement.nodes if self.placement is not None else ()
        placed = {node: seat for seat, node in enumerate(nodes) if node}
        across = max(1, self.placement.stages if self.placement else 1)
        members = tuple(
            MemberView(
                node_id=node_id,
                device=self.known[node_id].device,
                name=self.known[node_id].name,
                stage=placed[node_id] % across if node_id in placed else None,
                replica=placed.get(node_id, 0) // across,
                joined=joined,
            )
            for node_id, joined in self._present.items()
        )
        so_far = RunView(
            run_id=started.run_id if started else "",
            name=started.name if started else "",
            state=state,
            ended=finished_text,
            started=self.began,
            updated=self.updated,
            coordinator_starts=self.starts,
            step=done,
            steps=steps,
            stages_wanted=started.stages if started else 0,
            tokens_per_step=tokens,
            microbatches=started.microbatches if started else 0,
            chunks=started.chunks if started else 1,
            slices=started.slices if started else 1,
            head_share=started.head_share if started else None,
            forward_codec=started.forward_codec if started else "",
            backward_codec=started.backward_codec if started else "",
            loss=step.loss if step and math.isfinite(step.loss) else None,
            lr=step.lr if step else None,
            grad_norm=step.grad_norm if step else None,
            tokens_per_second=tokens / pace if pace else None,
            step_seconds=pace,
            eta_seconds=(steps - done) * pace if pace and state in ("training", "restoring") else None,
            loss_curve=self.loss.curve(),
            speed_curve=self.speed.curve(),
            held_out_curve=self.held_out_loss.curve(),
            lr_curve=self.lr.curve(),
            grad_norm_curve=self.grad_norm.curve(),
            epoch=self.placement.epoch if self.placement else 0,
            stages=stages,
            groups=self.placement.groups if self.placement else (),
            links=links,
            members=members,
            # While a stage has no node, every node is needed.
            spares=0 if state == "waiting for nodes" else sum(member.stage is None for member in members),
            held_out=self._held_out_view(),
            snapshot=self.snapshots[-1] if self.snapshots else None,
            samples=self.samples,
            scores=self.scores,
            aborted=self.aborted,
            lost=self.lost,
            goodput=self.work.goodput,
            recoveries=self.recoveries,
            replaced=tuple(self.replaced.values()),
            dropped=self.dropped,
            replayed=self.replayed,
            replays_to=self.highest_step if self.highest_step > done else 0,
            token_uses=self.token_uses,
            bottleneck=(),
            events=self.listed,
        )
        if self.paused and not self.over:
            return replace(so_far, bottleneck=(_for_others(self.paused),), eta_seconds=None)
        full = {replica: full_links(so_far.row(replica)) for replica in range(so_far.rows)}

        def is_full(link: LinkView) -> bool:
            if link.source_replica != link.target_replica:
                return (link.use or 0.0) >= FULL
            return (link.source, link.target) in full[link.source_replica]

        # Only few of a thousand nodes' links are full, and a copy takes ten microseconds.
        links = tuple(
            replace(link, full=True, program_limits=link.processor >= BY_PROGRAM) if is_full(link) else link
            for link in so_far.links
        )
        so_far = replace(so_far, links=links)
        if started is None:
            return replace(so_far, bottleneck=bottleneck(so_far, {}))
        steps_alike = alike(self.recent)
        evidence = self._evidence(so_far, steps_alike)
        words = bottleneck(
            so_far,
            started.codec_bits,
            started.ends_in_blocks,
            evidence,
            advises=len(steps_alike) >= LEAST_ADVICE_STEPS,
        )
        return replace(so_far, bottleneck=words)

    # ---- inside

    @property
    def _present(self) -> Mapping[str, float]:
        """When each node joined that is connected now."""
        return {} if self.over else self.members

    def _evidence(self, view: RunView, steps: tuple[events.StepCosts, ...]) -> Evidence | None:
        """The view over the steps on which advice is based, and over each half of them."""
        if len(steps) < LEAST_ADVICE_STEPS:
            return None

        def over(part: tuple[events.StepCosts, ...]) -> RunView:
            return replace(
                view,
                stages=self._stage_views(part),
                links=self._link_views(part),
                step_seconds=sum(costs.seconds for costs in part) / sum(costs.steps for costs in part),
            )

        half = len(steps) // 2
        early, late = over(steps[:half]), over(steps[half:])
        return Evidence(whole=over(steps), parts=(early, late))

    def _start(self, event: events.RunStarted, at: float) -> None:
        self.starts += 1
        self.began = self.began or at
        self.steps_done = self.steps_done or event.first_step
        self.started = event
        # Nodes of the previous coordinator reconnect on their own.
        self.members, self.left = {}, ()
        self.placement = self.finished = self.page = None
        self.restoring, self.paused = False, ""
        # The run continues from the newest undamaged snapshot. Later ones are damaged or missing.
        self._forget_snapshots(event.first_step)
        self.recent = self.paces = ()

    def _forget_snapshots(self, newest: int) -> None:
        """Drop snapshots of steps after `newest`."""
        while self.snapshots and self.snapshots[-1].step > newest:
            self.snapshots = self.snapshots[:-1]
        if self.stored is not None and self.stored.step > newest:
            self.stored = None

    def _place(self, event: events.PlacementMade) -> None:
        before = self.placement
        if before is None or (before.nodes, before.groups) != (event.nodes, event.groups):
            self.recent = self.paces = ()
        self.placement = event
        self.steps_done = event.resume_step
        self.restoring = False

    def _seat(self, event: events.SeatFilled | events.SeatLost, node_id: str) -> None:
        """Put another node into a seat of the placement; "" empties it."""
        if self.placement is not None and self.placement.epoch == event.epoch:
            nodes = list(self.placement.nodes)
            nodes[event.row * self.placement.stages + event.stage] = node_id
            self.placement = replace(self.placement, nodes=tuple(nodes))

    def _count(self, costs: events.StepCosts) -> None:
        sums = {link.ends: link for link in self.links}
        for link in costs.links:
            ends = link.ends
            sums[ends] = sums[ends] + link if ends in sums else link
        self.links = tuple(sums.values())
        if not costs.aborted:
            self.recent = (*self.recent, costs)[-ADVICE_STEPS:]

    def _done(self, event: events.StepDone, at: float) -> None:
        self.replayed += event.step <= self.highest_step
        self.highest_step = max(self.highest_step, event.step)
        self.step = event
        self.steps_done = event.step
        self.restoring = False
        self.paces = (*self.paces, event.seconds)[-RECENT_STEPS:]
        if math.isfinite(event.loss):
            self.loss = self.loss.plus(event.step, at, event.loss)
        self.speed = self.speed.plus(event.step, at, event.tokens_per_second)
        self.lr = self.lr.plus(event.step, at, event.lr)
        if math.isfinite(event.grad_norm):
            self.grad_norm = self.grad_norm.plus(event.step, at, event.grad_norm)

    def _held_out_view(self) -> HeldOutView | None:
        if not self.held_out:
            return None
        losses = self.held_out
        newest = losses[-1]
        finite = {loss.step: loss.uncompressed for loss in losses if math.isfinite(loss.uncompressed)}
        best = min(finite, key=finite.__getitem__, default=0)
        return HeldOutView(
            step=newest.step,
            loss=newest.loss,
            uncompressed=finite.get(newest.step),
            samples=newest.samples,
            best_step=best,
            best=finite.get(best),
        )

    def _state(self, done: int, steps: int) -> str:
        if self.finished is not None:
            if self.finished.failed:
                return "failed"
            return "finished" if done >= steps else "stopped"
        if self.started is None:
            return "starting"
        if not self.placed:
            return "waiting for nodes"
        return "restoring" if self.restoring else "training"

    def _stage_views(self, steps: tuple[events.StepCosts, ...]) -> tuple[StageView, ...]:
        placement = self.placement
        if placement is None:
            return ()
        blocks = dict(enumerate(placement.blocks))
        by_place: dict[tuple[int, int], list[events.StageCost]] = {}
        for costs in steps:
            for cost in costs.stages:
                by_place.setdefault((cost.replica, cost.stage), []).append(cost)
        views = []
        for index, node_id in enumerate(placement.nodes):
            replica, stage = divmod(index, placement.stages)
            place: dict[str, Any] = {"stage": stage, "replica": replica, "node_id": node_id}
            recent = total(by_place.get((replica, stage)) or [events.StageCost(**place)])
            shares = recent.time_shares(_KINDS)
            waiting = sum([shares.get(kind, 0.0) for kind in _WAITS])
            views.append(
                StageView(
                    **{**vars(recent), "seconds": {}, "wall_seconds": 0.0, **place},
                    device=self.known[node_id].device if node_id in self.known else "",
                    name=self.name_of(node_id),
                    blocks=blocks.get(stage, 0),
                    present=node_id in self._present,
                    shares=shares,
                    busy=max(0.0, sum(shares.values()) - waiting),
                    waiting=waiting,
                )
            )
        return tuple(views)

    def _link_views(self, steps: tuple[events.StepCosts, ...]) -> tuple[LinkView, ...]:
        totals = {link.ends: link for link in self.links}
        undialled = {
            node_id: NOT_REACHED if joined.listens else NOT_LISTENING
            for node_id, joined in self.known.items()
            if not joined.address
        }
        return link_views(totals, steps, self.placement, undialled)


Value = TypeVar("Value")


def _without(mapping: Mapping[str, Value], key: str) -> dict[str, Value]:
    return {other: value for other, value in mapping.items() if other != key}


def view(history: Iterable[tuple[float, events.Event]]) -> RunView:
    """The view after a whole history of (Unix time, event)."""
    builder = RunViewBuilder()
    for at, event in history:
        builder.apply(event, at)
    return builder.view()


def _for_others(text: str) -> str:
    """A line for anyone who sees the page, without addresses and without this machine's folders."""
    return without_folders(without_addresses(printable(text)))


_LISTED: Mapping[type[events.Event], tuple[str, str]] = {
    events.RunStarted: ("started", "info"),
    events.NodeJoined: ("joined", "info"),
    events.NodeLeft: ("left", "warning"),
    events.PlacementMade: ("placed", "info"),
    events.StepAborted: ("aborted", "warning"),
    events.SeatLost: ("lost", "warning"),
    events.SeatFilled: ("filled", "info"),
    events.Recovered: ("recovered", "info"),
    events.HeldOutLoss: ("held-out", "info"),
    events.TaskScores: ("scores", "info"),
    events.SnapshotStored: ("snapshot", "info"),
    events.SnapshotSetAside: ("snapshot", "warning"),
    events.NodeReplaced: ("replaced", "warning"),
    events.RunFinished: ("finished", "info"),
}
"""The kind and level under which events are listed. Other notices are listed as `notice`."""


def _listed(event: events.Event, name_of: Callable[[str], str]) -> tuple[str, str, str] | None:
    """The kind, level and text of an event that is listed; None for others.

    Args:
        name_of: gives the name of a node by its id.
    """
    notice = ("notice", "info") if isinstance(event, events.Notice) else None
    if (listed := _LISTED.get(type(event), notice)) is None:
        return None
    kind, level = listed
    if isinstance(event, events.StepAborted) and event.is_planned:
        kind, level = "planned", "info"
    if isinstance(event, events.RunFinished) and event.failed:
        level = "error"
    if isinstance(event, events.RunStarted):
        resumed = f", from step {event.first_step}" if event.first_step else ""
        return kind, level, f"the coordinator started: {event.steps} steps{resumed}"
    text = events.text_of(event, lambda node: named(node, name_of(node)))
    return kind, level, text or ""
