"""Build a `RunView` from a run's events, one at a time.

A view depends on events only, so a run that is over looks as it did while it ran.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sized
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from node.telemetry import events
from node.telemetry.clock import WAITS, TimeKind
from node.telemetry.costs import LinkKey
from node.telemetry.format import bytes_text, duration_text, named, printable, without_addresses
from node.view.bottleneck import Evidence, bottleneck
from node.view.link_views import (
    NO_TOTALS,
    NOT_LISTENING,
    NOT_REACHED,
    LinkSums,
    LinkTotals,
    alike,
    ends_of,
    link_views,
)
from node.view.run_view import (
    EventView,
    HeldOutView,
    LinkView,
    MemberView,
    RunView,
    Series,
    SeriesState,
    SnapshotView,
    StageView,
)
from node.view.slices import SLICE, Slices, ends_slice, whole
from node.view.step_model import FULL, full_links
from wire.errors import without_folders

__all__ = ["RunView", "RunViewBuilder", "view"]

_KINDS, _WAITS = [kind.value for kind in TimeKind], [kind.value for kind in WAITS]
RECENT_STEPS = 10
"""Steps over which shares, rates and the bottleneck are taken."""
ADVICE_STEPS = 40
"""Most steps that advice rests on: those since the placement and the codecs last changed."""
LEAST_ADVICE_STEPS = 10
"""Before them no advice is given."""
MOST_EVENTS = 200
"""Newest events kept in the view."""
MOST_REPLACED = 16
"""Nodes kept that lost their stage or were shut out."""
MOST_SNAPSHOTS = 1000
"""Newest snapshots remembered, pruned ones included."""


@dataclass(frozen=True)
class _Member:
    device: str
    joined: float


@dataclass(frozen=True, kw_only=True)
class BuilderState:
    """All that a `RunViewBuilder` knows, of bounded size whatever the length of the run."""

    started: events.RunStarted | None
    began: float
    updated: float
    starts: int
    members: Mapping[str, _Member]
    devices: Mapping[str, str]
    names: Mapping[str, str]
    undialled: Mapping[str, str] = field(default_factory=dict)
    placement: events.PlacementMade | None
    restoring: bool
    step: events.StepDone | None
    steps_done: int
    highest_step: int
    replayed: int
    aborted: int
    recoveries: int
    snapshots: tuple[SnapshotView, ...]
    finished: events.RunFinished | None
    token_uses: int | None
    loss: SeriesState
    speed: SeriesState
    recent: tuple[events.StepCosts, ...]
    paces: tuple[float, ...]
    links: tuple[LinkSums, ...]
    listed: tuple[EventView, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)


class RunViewBuilder:
    """Takes a run's events in order, from all its coordinators."""

    def __init__(self) -> None:
        self._started: events.RunStarted | None = None
        self._began = 0.0
        self._updated = 0.0
        self._starts = 0
        self._members: dict[str, _Member] = {}
        self._devices: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._undialled: dict[str, str] = {}
        """Why neighbours cannot dial a node, for those that they cannot."""
        self._placement: events.PlacementMade | None = None
        self._restoring = False
        self._step: events.StepDone | None = None
        self._steps_done = 0
        self._highest_step = 0
        self._replayed = 0
        self._aborted = 0
        self._recoveries = 0
        self._snapshots: deque[SnapshotView] = deque(maxlen=MOST_SNAPSHOTS)
        """By step, pruned ones included: the newest counts if later ones are damaged."""
        self._held_out: dict[int, events.HeldOutLoss] = {}
        self._finished: events.RunFinished | None = None
        self._token_uses: int | None = None
        self._loss = Series()
        self._speed = Series()
        self._recent: deque[events.StepCosts] = deque(maxlen=ADVICE_STEPS)
        self._paces: deque[float] = deque(maxlen=RECENT_STEPS)
        self._links: dict[LinkKey, LinkTotals] = {}
        self._events: deque[EventView] = deque(maxlen=MOST_EVENTS)
        self._replaced: dict[str, str] = {}
        """By node that lost its stage or was shut out: the newest line that says why."""
        self._dropped: Mapping[str, int] = {}

    def apply(self, event: events.Event, at: float) -> None:
        """Apply `event` of Unix time `at`; kinds that are not in a view are ignored."""
        self._updated = max(self._updated, at)
        match event:
            case events.RunStarted():
                self._start(event, at)
            case events.NodeJoined():
                self._members[event.node_id] = _Member(event.device, at)
                self._devices[event.node_id] = event.device
                self._names[event.node_id] = event.name
                self._undialled.pop(event.node_id, None)
                if not event.address:
                    self._undialled[event.node_id] = NOT_REACHED if event.listens else NOT_LISTENING
            case events.NodeLeft():
                self._members.pop(event.node_id, None)
            case events.PlacementMade():
                self._place(event)
            case events.StepCosts():
                self._count(event)
            case events.StepDone():
                self._done(event, at)
            case events.StepAborted():
                self._aborted += not event.is_planned
                self._restoring = True
            case events.Recovered():
                self._recoveries += 1
            case events.TokenUses():
                self._token_uses = event.left
            case events.HeldOutLoss():
                self._held_out.pop(event.step, None)
                self._held_out[event.step] = event
            case events.SnapshotStored():
                self._forget_snapshots(event.step - 1)
                self._snapshots.append(SnapshotView(step=event.step, bytes=event.bytes, at=at))
            case events.SnapshotSetAside():
                self._forget_snapshots(event.whole)
            case events.DataDropped():
                self._dropped = event.reasons
            case events.RunFinished():
                self._finished = event
                self._members.clear()
            case _:
                pass
        if (listed := _listed(event)) is not None:
            kind, level, text = listed
            line = _for_others(text)
            self._events.append(EventView(at=at, kind=kind, level=level, text=line))
            if isinstance(event, events.NodeReplaced) or self._leaves_stage(event):
                self._replaced.pop(event.node_id, None)
                self._replaced[event.node_id] = line
                if len(self._replaced) > MOST_REPLACED:
                    del self._replaced[next(iter(self._replaced))]

    def _leaves_stage(self, event: events.Event) -> TypeGuard[events.NodeLeft]:
        """Whether a node has left its stage, not by its own wish, and no line said so before."""
        if not isinstance(event, events.NodeLeft) or event.reason == events.LEFT or self._placement is None:
            return False
        known = self._replaced.get(event.node_id, "")
        return (
            event.node_id in self._placement.nodes
            and event.reason.removeprefix(events.QUARANTINED) not in known
        )

    def state(self) -> BuilderState:
        """What `restored` needs to go on from here."""
        return BuilderState(
            started=self._started,
            began=self._began,
            updated=self._updated,
            starts=self._starts,
            members=dict(self._members),
            devices=dict(self._devices),
            names=dict(self._names),
            undialled=dict(self._undialled),
            placement=self._placement,
            restoring=self._restoring,
            step=self._step,
            steps_done=self._steps_done,
            highest_step=self._highest_step,
            replayed=self._replayed,
            aborted=self._aborted,
            recoveries=self._recoveries,
            snapshots=tuple(self._snapshots),
            finished=self._finished,
            token_uses=self._token_uses,
            loss=self._loss.state(),
            speed=self._speed.state(),
            recent=tuple(self._recent),
            paces=tuple(self._paces),
            links=tuple(sums.state(ends) for ends, sums in self._links.items()),
            listed=tuple(self._events),
            replaced=dict(self._replaced),
            dropped=self._dropped,
        )

    @classmethod
    def restored(cls, state: BuilderState) -> "RunViewBuilder":
        """A builder that goes on as the one with this state."""
        made = cls()
        made._started = state.started
        made._began = state.began
        made._updated = state.updated
        made._starts = state.starts
        made._members = dict(state.members)
        made._devices = dict(state.devices)
        made._names = dict(state.names)
        made._undialled = dict(state.undialled)
        made._placement = state.placement
        made._restoring = state.restoring
        made._step = state.step
        made._steps_done = state.steps_done
        made._highest_step = state.highest_step
        made._replayed = state.replayed
        made._aborted = state.aborted
        made._recoveries = state.recoveries
        made._snapshots.extend(state.snapshots)
        made._finished = state.finished
        made._token_uses = state.token_uses
        made._loss = Series.restored(state.loss)
        made._speed = Series.restored(state.speed)
        made._recent.extend(state.recent)
        made._paces.extend(state.paces)
        made._links = {ends_of(sums): LinkTotals(sums) for sums in state.links}
        made._events.extend(state.listed)
        made._replaced = dict(state.replaced)
        made._dropped = state.dropped
        return made

    @property
    def updated(self) -> float:
        """Unix time of the newest event."""
        return self._updated

    @property
    def over(self) -> bool:
        """Whether the newest coordinator has finished."""
        return self._finished is not None

    def view(self) -> RunView:
        """The view after the events so far."""
        return whole(self.slices())

    def slices(self) -> Slices[RunView]:
        """The same in slices. Events that come in between are not in it."""
        return self._kept()._view()

    def _kept(self) -> "RunViewBuilder":
        """What this one knows now, for a view; events, placements and totals do not change."""
        kept = copy(self)
        kept._members, kept._devices, kept._names = (
            dict(self._members),
            dict(self._devices),
            dict(self._names),
        )
        kept._undialled, kept._replaced = dict(self._undialled), dict(self._replaced)
        kept._held_out, kept._links = dict(self._held_out), dict(self._links)
        kept._snapshots, kept._recent = self._snapshots.copy(), self._recent.copy()
        kept._paces, kept._events = self._paces.copy(), self._events.copy()
        kept._loss, kept._speed = Series.restored(self._loss.state()), Series.restored(self._speed.state())
        return kept

    def _view(self) -> Slices[RunView]:
        """To be called once, of what changes no more."""
        started, step = self._started, self._step
        finished_text = _for_others(self._finished.reason) if self._finished else ""
        recent = tuple(self._recent)[-RECENT_STEPS:]
        stages = yield from self._stage_views(recent)
        links = yield from link_views(self._links, recent, self._placement, self._undialled)
        pace = sum(self._paces) / len(self._paces) if self._paces else None
        steps = started.steps if started else 0
        done = self._steps_done
        tokens = started.tokens_per_step if started else 0
        state = self._state(done, steps)
        placed = {node: seat for seat, node in enumerate(self._placement.nodes)} if self._placement else {}
        across = max(1, self._placement.stages if self._placement else 1)
        members = tuple(
            MemberView(
                node_id=node_id,
                device=member.device,
                name=self._names.get(node_id, ""),
                stage=placed[node_id] % across if node_id in placed else None,
                replica=placed.get(node_id, 0) // across,
                joined=member.joined,
            )
            for node_id, member in self._members.items()
        )
        so_far = RunView(
            run_id=started.run_id if started else "",
            name=started.name if started else "",
            state=state,
            ended=finished_text,
            started=self._began,
            updated=self._updated,
            coordinator_starts=self._starts,
            step=done,
            steps=steps,
            stages_wanted=started.stages if started else 0,
            tokens_per_step=tokens,
            microbatches=started.microbatches if started else 0,
            chunks=started.chunks if started else 1,
            head_share=started.head_share if started else None,
            forward_codec=started.forward_codec if started else "",
            backward_codec=started.backward_codec if started else "",
            loss=step.loss if step and math.isfinite(step.loss) else None,
            lr=step.lr if step else None,
            grad_norm=step.grad_norm if step else None,
            tokens_per_second=tokens / pace if pace else None,
            step_seconds=pace,
            eta_seconds=(steps - done) * pace if pace and state in ("training", "restoring") else None,
            loss_curve=self._loss.curve(),
            speed_curve=self._speed.curve(),
            epoch=self._placement.epoch if self._placement else 0,
            stages=stages,
            groups=self._placement.groups if self._placement else (),
            links=links,
            members=members,
            # While a stage has no node, every node is needed.
            spares=0 if state == "waiting for nodes" else sum(member.stage is None for member in members),
            held_out=self._held_out_view(),
            snapshot=self._snapshots[-1] if self._snapshots else None,
            aborted=self._aborted,
            recoveries=self._recoveries,
            replaced=tuple(self._replaced.values()),
            dropped=self._dropped,
            replayed=self._replayed,
            replays_to=self._highest_step if self._highest_step > done else 0,
            token_uses=self._token_uses,
            bottleneck=(),
            events=tuple(self._events),
        )
        yield from _turn(stages)
        full = {replica: full_links(so_far.row(replica)) for replica in range(so_far.rows)}

        def is_full(link: LinkView) -> bool:
            if link.source_replica != link.target_replica:
                return (link.use or 0.0) >= FULL
            return (link.source, link.target) in full[link.source_replica]

        # Of a thousand nodes' links few are full; a copy takes ten microseconds.
        links = tuple(replace(link, full=True) if is_full(link) else link for link in so_far.links)
        so_far = replace(so_far, links=links)
        yield from _turn(stages)
        if started is None:
            return replace(so_far, bottleneck=bottleneck(so_far, {}))
        steps_alike = yield from alike(tuple(self._recent))
        evidence = yield from self._evidence(so_far, steps_alike)
        words = bottleneck(
            so_far,
            started.codec_bits,
            started.ends_in_blocks,
            evidence,
            advises=len(steps_alike) >= LEAST_ADVICE_STEPS,
        )
        return replace(so_far, bottleneck=words)

    # ---- inside

    def _evidence(self, view: RunView, steps: tuple[events.StepCosts, ...]) -> Slices[Evidence | None]:
        """The view over the steps that advice rests on, and over each half of them."""
        if len(steps) < LEAST_ADVICE_STEPS:
            return None

        def over(part: tuple[events.StepCosts, ...]) -> Slices[RunView]:
            return replace(
                view,
                stages=(yield from self._stage_views(part)),
                links=(yield from link_views(self._links, part, self._placement, self._undialled)),
                step_seconds=sum(costs.seconds for costs in part) / sum(costs.steps for costs in part),
            )

        half = len(steps) // 2
        early, late = (yield from over(steps[:half])), (yield from over(steps[half:]))
        return Evidence(whole=(yield from over(steps)), parts=(early, late))

    def _start(self, event: events.RunStarted, at: float) -> None:
        self._starts += 1
        self._began = self._began or at
        self._steps_done = self._steps_done or event.first_step
        self._started = event
        # Nodes of the previous coordinator reconnect by themselves.
        self._members.clear()
        self._placement = None
        self._restoring = False
        self._finished = None
        # The run goes on from the newest whole snapshot: later ones are damaged or missing.
        self._forget_snapshots(event.first_step)
        self._recent.clear()
        self._paces.clear()

    def _forget_snapshots(self, newest: int) -> None:
        """Drop snapshots of steps after `newest`."""
        while self._snapshots and self._snapshots[-1].step > newest:
            self._snapshots.pop()

    def _place(self, event: events.PlacementMade) -> None:
        before = self._placement
        moved = before is None or (before.nodes, before.groups) != (event.nodes, event.groups)
        self._placement = event
        self._steps_done = event.resume_step
        self._restoring = False
        if moved:
            self._recent.clear()
            self._paces.clear()

    def _count(self, costs: events.StepCosts) -> None:
        for link in costs.links:
            ends = ends_of(link)
            self._links[ends] = self._links.get(ends, NO_TOTALS).plus(link)
        if not costs.aborted:
            self._recent.append(costs)

    def _done(self, event: events.StepDone, at: float) -> None:
        if event.step <= self._highest_step:
            self._replayed += 1
        self._highest_step = max(self._highest_step, event.step)
        self._step = event
        self._steps_done = event.step
        self._restoring = False
        self._paces.append(event.seconds)
        if math.isfinite(event.loss):
            self._loss.add(event.step, at, event.loss)
        self._speed.add(event.step, at, event.tokens_per_second)

    def _held_out_view(self) -> HeldOutView | None:
        if not self._held_out:
            return None
        losses = list(self._held_out.values())
        newest = losses[-1]
        finite = {one.step: one.uncompressed for one in losses if math.isfinite(one.uncompressed)}
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
        if self._finished is not None:
            if self._finished.failed:
                return "failed"
            return "finished" if done >= steps else "stopped"
        if self._started is None:
            return "starting"
        if self._placement is None or not set(self._placement.nodes) <= self._members.keys():
            return "waiting for nodes"
        return "restoring" if self._restoring else "training"

    def _stage_views(self, steps: tuple[events.StepCosts, ...]) -> Slices[tuple[StageView, ...]]:
        placement = self._placement
        if placement is None:
            return ()
        blocks = dict(enumerate(placement.blocks))
        by_place: dict[tuple[int, int], list[events.StageCost]] = {}
        for one in steps:
            for cost in one.stages:
                by_place.setdefault((cost.replica, cost.stage), []).append(cost)
            yield from _turn(one.stages)
        views = []
        for index, node_id in enumerate(placement.nodes):
            replica, stage = place = divmod(index, placement.stages)
            costs = by_place.get(place, [])
            wall = sum(cost.wall_seconds for cost in costs)
            shares: dict[str, float] = {}
            if wall > 0:
                for kind in _KINDS:
                    shares[kind] = sum([cost.seconds.get(kind, 0.0) for cost in costs]) / wall
            newest = costs[-1] if costs else None
            waiting = sum([shares.get(kind, 0.0) for kind in _WAITS])
            views.append(
                StageView(
                    stage=stage,
                    replica=replica,
                    node_id=node_id,
                    device=self._devices.get(node_id, ""),
                    name=self._names.get(node_id, ""),
                    blocks=blocks.get(stage, 0),
                    present=node_id in self._members,
                    shares=shares,
                    busy=max(0.0, sum(shares.values()) - waiting),
                    waiting=waiting,
                    memory_bytes=newest.memory_bytes if newest else 0,
                    peak_memory_bytes=newest.peak_memory_bytes if newest else 0,
                    gpu_memory_bytes=newest.gpu_memory_bytes if newest else 0,
                    gpu_peak_memory_bytes=newest.gpu_peak_memory_bytes if newest else 0,
                )
            )
            if ends_slice(index):
                yield
        return tuple(views)


def _turn(handled: Sized) -> Slices[None]:
    """The event loop's turn, if as much was handled as in a slice."""
    if len(handled) >= SLICE:
        yield


def view(history: Iterable[tuple[float, events.Event]]) -> RunView:
    """The run after a whole history of (Unix time, event)."""
    builder = RunViewBuilder()
    for at, event in history:
        builder.apply(event, at)
    return builder.view()


def _for_others(text: str) -> str:
    """A line for whoever sees the page: without addresses, and without the folders of this machine."""
    return without_folders(without_addresses(printable(text)))


def _listed(event: events.Event) -> tuple[str, str, str] | None:
    """Kind, level and text of an event that is listed; None for others."""
    match event:
        case events.RunStarted():
            resumed = f", from step {event.first_step}" if event.first_step else ""
            return "started", "info", f"the coordinator started: {event.steps} steps{resumed}"
        case events.NodeJoined():
            return "joined", "info", f"{named(event.node_id, event.name)} joined ({event.device})"
        case events.NodeLeft():
            return "left", "warning", f"{event.node_id} left: {event.reason}"
        case events.PlacementMade():
            return "placed", "info", f"epoch {event.epoch} from step {event.resume_step}: {event.placed}"
        case events.StepAborted():
            if event.is_planned:
                return "planned", "info", f"planned change of placement before step {event.step}"
            return "aborted", "warning", f"step {event.step} aborted and runs again: {event.reason}"
        case events.Recovered():
            return "recovered", "info", f"back at step {event.step} in {duration_text(event.seconds)}"
        case events.HeldOutLoss():
            return "held-out", "info", event.line
        case events.SnapshotStored():
            return "snapshot", "info", f"snapshot of step {event.step}: {bytes_text(event.bytes)}"
        case events.SnapshotSetAside():
            return "snapshot", "warning", event.text
        case events.NodeReplaced():
            return "replaced", "warning", event.text
        case events.Notice():
            return "notice", "info", event.text
        case events.RunFinished():
            level = "error" if event.failed else "info"
            word = "failed" if event.failed else "stopped" if event.resume else "ended"
            return "finished", level, f"{word}: {event.reason}"
        case _:
            return None
