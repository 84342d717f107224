"""A model of a node for the tests of the run's state machine: `runtime` and `epoch_task` without arithmetic.

Arithmetic is replaced by numbers that depend on everything that matters: the state of step s is a chain of
all commits applied so far, a vote's norm depends on the state it was computed from, and the commit on the
votes. So a stage that applied something twice, or late, or on the wrong state, holds a number that is not
`chain(s)`, and its next vote spoils the next commit.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from typing import Protocol

from node.run_state.epoch import Committed
from node.run_state.grid import ONE_ROW, Groups
from node.run_state.machine import RunMachine
from node.run_state.run_plan import Past, RunPlan
from node.schedule.gradient_groups import GroupTree
from node.training.schedule import global_norm
from tests.support.machine_driver import UNITS, units_of
from wire.messages import (
    DIGEST_BYTES,
    Abort,
    Applied,
    AskHeartbeat,
    Begin,
    BoundaryEnd,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Follow,
    Following,
    FollowStep,
    GroupDigests,
    HandedOver,
    Heartbeat,
    Leave,
    NodeMessage,
    PeerSilent,
    Placed,
    Placement,
    Portion,
    Prefetch,
    Ready,
    Restore,
    Seat,
    StateHashes,
    StepFailed,
    SumsMissing,
    TakeSnapshot,
    UnitHash,
    Vote,
)
from wire.telemetry import Telemetry


def step_plan(step: int, norm: float) -> tuple[float, float]:
    return 1.0 / (1.0 + norm), 0.1 / (step + 1)


def norms_of(state: int, units: Sequence[str]) -> dict[int, float]:
    """What a stage with these units votes, from the state that it holds."""
    return {UNITS.index(unit): float((state >> UNITS.index(unit)) % 97) for unit in units}


def loss_of(state: int, group: int) -> float:
    """What a group adds to the loss; the order of the additions matters to the last bits."""
    return float((state >> group) % 1000) / 7


def layers_of(state: int, units: Sequence[str]) -> dict[int, UnitHash]:
    """What a node that holds this state says of its layers."""
    size = float(bool(state))
    return {
        UNITS.index(unit): UnitHash(f"{state & MASK:016x}{unit:0>48}", size, size, size) for unit in units
    }


def applied_to(state: int, clip: float, lr: float) -> int:
    return hash((state, clip, lr))


@cache
def outcome(step: int) -> tuple[float, float]:
    """The one right (clip coefficient, learning rate) of a step."""
    norms = norms_of(chain(step), UNITS)
    return step_plan(step, global_norm(norms[index] for index in sorted(norms)))


@cache
def total_loss(step: int, groups: int) -> float:
    """The one right loss of a step."""
    loss = 0.0
    for group in range(groups):
        loss += loss_of(chain(step), group)
    return loss


@cache
def chain(step: int) -> int:
    """The one right state of a step."""
    return 12345 if step == 0 else applied_to(chain(step - 1), *outcome(step - 1))


MASK = 2**64 - 1


def groups_of(placement: Placement, begin: Begin) -> tuple[int, ...]:
    """What a node's row computes in a step."""
    if not begin.portions:
        return placement.rows[placement.replica].groups
    portions = [groups for row, groups in begin.portions if row == placement.replica]
    return tuple(group for groups in portions for group in groups)


@dataclass
class Disk:
    last_epoch: int = 0
    hosts: tuple[str, ...] = ()
    groups: Groups = ONE_ROW
    commits: dict[int, tuple[float, float]] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    layers: dict[int, dict[str, int]] = field(default_factory=dict)
    """By snapshot and unit: the state that the layer is of."""
    pruned: set[int] = field(default_factory=set)
    """Snapshots deleted to make room for newer ones."""

    def state(self, step: int, units: Sequence[str]) -> int:
        """What a node has that loads these layers of a snapshot: one state, if they are all of it."""
        states = {self.layers[step][unit] for unit in units}
        return states.pop() if len(states) == 1 else hash(tuple(sorted(states)))

    def past(self) -> Past:
        committed = None
        if self.commits:
            newest = max(self.commits)
            clip, lr = self.commits[newest]
            committed = Committed(step=newest, clip_coefficient=clip, lr=lr)
        return Past(
            last_epoch=self.last_epoch,
            newest_snapshot=max(self.snapshots, default=0),
            committed=committed,
            hosts=self.hosts,
            rows=len(self.groups),
        )


Holder = tuple[int, str, int]
"""A row, a node and a process."""
Handed = tuple[Seat, frozenset[int], list[list[frozenset[Holder]]]]
"""A seat, groups that its node has handed over, and for each part of them the sets of those that hold it
together."""


class Surroundings(Protocol):
    """The parts of its world that a node uses."""

    disk: Disk
    plan: RunPlan
    nodes: "list[SimNode]"
    cast: dict[tuple[int, int], dict[str, tuple[Placement, Begin]]]
    handed: "dict[tuple[int, int], list[Handed]]"
    machine: RunMachine | None
    failures: int
    poisoned_step: int | None
    poisoned_always: bool

    def dial(self, session: "Session") -> "Session": ...


@dataclass(eq=False)
class Session:
    node: "SimNode"
    nonce: int
    epoch: int
    to_coordinator: deque[NodeMessage] = field(default_factory=deque)
    to_node: deque[CoordinatorMessage] = field(default_factory=deque)
    greeted: bool = False
    """The coordinator has heard its hello."""
    closing: bool = False
    """It ends once `to_node` is empty; nothing more is sent."""
    broken: bool = False
    stalled: bool = False
    """No message gets through, and neither end notices."""


@dataclass
class SimEpoch:
    """`EpochTask`, one command at a time."""

    placement: Placement
    commands: deque[CoordinatorMessage] = field(default_factory=deque)
    placed: Placed | None = None
    ready: bool = False
    uncompressed: bool = False
    vote: Vote | None = None
    failure: StepFailed | None = None
    snapshot: tuple[int, int] = (-1, 0)


@dataclass
class Upload:
    epoch: int
    step: int
    state: int
    units: deque[str]
    layers: int
    """The state that the layers are of which are handed in."""


@dataclass
class StateLie:
    """What a node says that its state is at a snapshot's step, what it hands in, and what it votes."""

    said: Callable[[int, int], int]
    """(state, step) -> the state whose hashes it says."""
    given: Callable[[int, int], int]
    """The same of the layers."""
    voted: Callable[[int, int], int]
    """The same of the norms."""


class SimNode:
    """One node; `start` makes a new process of it, without the memory of the one before."""

    def __init__(self, node_id: str, world: Surroundings) -> None:
        self.node_id = node_id
        self.world = world
        self.nonce = 0
        self.alive = False
        self.frozen = False
        self.farewell: Finish | None = None
        self.state_lie: StateLie | None = None
        self.start()

    def start(self) -> None:
        self.nonce += 1
        self.alive, self.frozen, self.farewell = True, False, None
        self.session: Session | None = None
        self.outbox: deque[NodeMessage] = deque()
        self.stage, self.stages = -1, 0
        self.state_step, self.state, self.voted = -1, 0, False
        self.lineage = 0
        self.epoch: SimEpoch | None = None
        self.uploads: dict[int, Upload] = {}
        self.leaving = False
        self.fetched_ahead: Prefetch | None = None
        self.witnessed: StateHashes | None = None
        self.followed: Follow | None = None

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen

    def die(self) -> None:
        self.alive = False
        if self.session is not None:
            self.session.broken = True

    def connect(self) -> None:
        number = self.epoch.placement.epoch if self.epoch is not None else 0
        self.session = self.world.dial(Session(self, self.nonce, number))
        if self.witnessed is not None:
            self.outbox.append(self.witnessed)
        if self.leaving:
            self.outbox.append(Leave(reason="said before, perhaps unheard"))

    def write(self) -> None:
        assert self.session is not None
        self.session.to_coordinator.append(self.outbox.popleft())

    def give_up(self) -> None:
        """It ends, and says so if it still can: as `node.stage.session` does, nothing else is said before."""
        connected = self.session is not None and not self.session.broken
        if connected and self.session is not None:
            self.session.to_coordinator.append(Leave(reason="invented", failed=True))
        self.die()

    def leave(self) -> None:
        self.leaving = True
        self.outbox.append(Leave(reason="asked to"))

    def suspect(self, other: "SimNode") -> None:
        """It does not hear another node, or says so, which is its neighbour or is not; and that it lacks what
        that row has handed over."""
        if self.epoch is not None and other.epoch is not None:
            place = other.epoch.placement
            number = self.epoch.placement.epoch
            self.outbox.append(PeerSilent(epoch=number, stage=place.stage, replica=place.replica))
            self.outbox.append(SumsMissing(epoch=number, step=self.state_step, replica=place.replica))

    # ---- messages, as `NodeRuntime._handle` takes them

    def handle(self, message: CoordinatorMessage) -> None:
        epoch = self.epoch
        number = epoch.placement.epoch if epoch is not None else 0
        match message:
            case Placement():
                if number != message.epoch:
                    self.epoch = epoch = SimEpoch(message)
                    if not message.enters:
                        self.followed = None
                    epoch.commands.append(message)
                elif epoch is not None and message.renewed:
                    epoch.placement = replace(message, enters=epoch.placement.enters)
                elif epoch is not None:
                    epoch.commands.append(message)
            case Abort():
                if number == message.epoch:
                    self.epoch = None
            case Finish():
                self.farewell = message
                self.die()
            case Prefetch():
                self.fetched_ahead = message
            case AskHeartbeat():
                self.outbox.append(Heartbeat(telemetry=Telemetry()))
            case Follow():
                if epoch is None:
                    self._follow(message)
            case FollowStep():
                self._follow_step(message)
            case Restore() | Begin() | Commit() | TakeSnapshot():
                if epoch is not None and number == message.epoch:
                    epoch.commands.append(message)
            case _:
                raise AssertionError(f"the state machine sent {message}")

    # ---- following, as `node.stage.following` does, all at once

    def _follow(self, order: Follow) -> None:
        if order == self.followed and self.followed is not None:
            return
        self.followed = order if order.sources else None
        if self.followed is None:
            return
        self.stage, self.stages, self.voted = order.stage, order.stages, False
        if order.step not in self.world.disk.snapshots:
            assert order.step in self.world.disk.pruned, "a state is fetched that was once on disk"
            self.followed, self.state_step = None, -1
            self.outbox.append(Following(snapshot=order.step, step=0, failed="pruned"))
            return
        units = units_of(order.stages)[order.stage]
        self.state_step, self.state = order.step, self.world.disk.state(order.step, units)
        self.lineage = order.lineage
        self.outbox.append(Following(snapshot=order.step, step=order.step))

    def _follow_step(self, step: FollowStep) -> None:
        if self.followed is None or self.followed.step != step.snapshot or self.state_step > step.step:
            return
        assert self.state_step == step.step, "steps are told in order"
        assert step.norms == norms_of(self.state, units_of(self.stages)[self.stage])
        self.state = applied_to(self.state, step.clip_coefficient, step.lr)
        self.state_step += 1
        assert self.state == chain(self.state_step), "who follows holds the run's state"
        self.outbox.append(Following(snapshot=step.snapshot, step=self.state_step))

    # ---- commands, as `EpochTask._obey` takes them

    def work(self) -> None:
        epoch = self.epoch
        assert epoch is not None
        command = epoch.commands.popleft()
        if epoch.failure is not None:
            self.outbox.append(epoch.failure)
            return
        match command:
            case Placement():
                self._place(epoch)
            case Restore():
                self._restore(epoch, command)
            case Begin():
                self._begin(epoch, command)
            case Commit():
                if self.state_step == command.step:
                    self._apply(command)
                if command.then is not None:
                    self._begin(epoch, command.then)
                    return
                assert self.state_step == command.step + 1
                self.outbox.append(Applied(epoch=command.epoch, step=command.step, telemetry=Telemetry()))
            case TakeSnapshot():
                asked = command.step, command.attempt
                if self.state_step == command.step and epoch.snapshot != asked:
                    epoch.snapshot = asked
                    if not command.only_hashes:
                        self._upload(epoch, command.step)
                    self._witness(epoch, command.step)
            case _:
                raise AssertionError(f"no command: {command}")

    def _begin(self, epoch: SimEpoch, begin: Begin) -> None:
        vote = epoch.vote
        if vote is None or (vote.step, vote.generation) != (begin.step, begin.generation):
            if epoch.placement.enters:
                self.followed = None
            assert self.state_step == begin.step, "a step begins on its own state"
            assert epoch.ready
            if begin.hands_over:
                self._hand_over(epoch, begin)
            if any(row == len(epoch.placement.rows) for row, _ in begin.portions):
                return  # groups wait, so that no sum is complete
            self.voted = True
            epoch.vote = self._vote(epoch, begin)
        assert epoch.vote is not None
        self.outbox.append(epoch.vote)

    def _hand_over(self, epoch: SimEpoch, begin: Begin) -> None:
        """All other nodes of its stage that it knows of get what it has computed, if they all live."""
        machine, placement = self.world.machine, epoch.placement
        current = None if machine is None else machine.epoch
        if current is None or current.number != begin.epoch:
            return
        rows = [row for row in range(len(placement.rows)) if row != placement.replica]
        absent = [row for row in rows if Seat(row, self.stage) in begin.absent]
        others = [row for row in rows if row not in absent]
        nodes = {node.node_id: node for node in self.world.nodes}
        column = {row: nodes.get(current.row(row)[self.stage]) for row in others}
        if not others or any(node is None or not node.running for node in column.values()):
            return
        holders = {(row, node.node_id, node.nonce) for row, node in column.items() if node is not None}
        self._pass_on(begin, absent, frozenset(holders), (placement.replica, self.node_id, self.nonce))
        tree = GroupTree(sum(len(row.groups) for row in placement.rows))
        portions = begin.portions or [Portion(row, of.groups) for row, of in enumerate(placement.rows)]
        own = [groups for row, groups in portions if row == placement.replica]
        for groups in (tuple(tree.span(node)) for run in own for node in tree.subtrees(run)):
            said = self.world.handed.setdefault((begin.epoch, begin.step), [])
            parts = [[frozenset({holder})] for holder in holders]
            said.append((Seat(placement.replica, self.stage), frozenset(groups), parts))
            is_last = self.stage == self.stages - 1
            self.outbox.append(
                HandedOver(
                    epoch=begin.epoch,
                    step=begin.step,
                    generation=begin.generation,
                    groups=groups,
                    group_losses={group: loss_of(self.state, group) for group in groups if is_last},
                )
            )

    def _pass_on(self, begin: Begin, absent: list[int], holders: frozenset[Holder], own: Holder) -> None:
        """Send the others what it holds for rows that have no node of its stage."""
        kept = {group for row, groups in begin.portions if row in absent for group in groups}
        for seat, groups, parts in self.world.handed.get((begin.epoch, begin.step), ()):
            if seat.stage == self.stage and seat.row in absent and groups <= kept:
                for together in parts:
                    together += [of - {own} | holders for of in together if own in of]
        if kept:
            self.outbox.append(
                HandedOver(
                    epoch=begin.epoch,
                    step=begin.step,
                    generation=begin.generation,
                    passed_on=tuple(sorted(kept)),
                )
            )

    def fail(self, kind: FailureKind, peer_stage: int = -1) -> None:
        """Whatever runs in this epoch fails."""
        assert self.epoch is not None
        self.epoch.failure = StepFailed(
            epoch=self.epoch.placement.epoch,
            step=max(self.state_step, 0),
            kind=kind,
            message="invented",
            peer_stage=peer_stage,
            peer_replica=self.epoch.placement.replica,
        )
        self.voted = self.voted and self.epoch.vote is not None
        self.outbox.append(self.epoch.failure)

    def _place(self, epoch: SimEpoch) -> None:
        if epoch.placed is None:
            place = epoch.placement.stage, len(epoch.placement.stages)
            if place != (self.stage, self.stages):
                self.stage, self.stages = place
                self.state_step, self.voted = -1, False
            epoch.placed = Placed(
                epoch=epoch.placement.epoch, held_step=self.state_step, voted=self.voted, lineage=self.lineage
            )
        self.outbox.append(epoch.placed)

    def _restore(self, epoch: SimEpoch, restore: Restore) -> None:
        if epoch.placement.enters:
            epoch.ready = True
        if not epoch.ready:
            missed = restore.missed
            if self.lineage != restore.lineage:
                self.state_step, self.voted = -1, False
            if missed is not None and self.state_step == missed.step == restore.step - 1 and self.voted:
                self._apply(missed)
            if self.state_step != restore.step:
                self.voted = False
                if restore.step > 0 and restore.step not in self.world.disk.snapshots:
                    assert restore.step in self.world.disk.pruned, "a state is fetched that was once on disk"
                    self.world.failures += 1
                    self.fail(FailureKind.INTERNAL)
                    return
                units = units_of(self.stages)[self.stage]
                loaded = self.world.disk.state(restore.step, units) if restore.step else chain(0)
                self.state_step, self.state = restore.step, loaded
            self.lineage = restore.lineage
            epoch.uncompressed = restore.uncompressed
            epoch.ready = True
        self.outbox.append(Ready(epoch=restore.epoch, telemetry=Telemetry()))

    def _vote(self, epoch: SimEpoch, begin: Begin) -> Vote:
        step = begin.step
        state = self.state_lie.voted(self.state, step) if self.state_lie is not None else self.state
        norms = norms_of(state, units_of(self.stages)[self.stage])
        world = self.world
        if step == world.poisoned_step and (not epoch.uncompressed or world.poisoned_always):
            norms[min(norms)] = math.nan
        placement = epoch.placement
        loss, losses = None, {}
        if self.stage == self.stages - 1 and not placement.rows:
            loss = loss_of(self.state, 0)
        elif self.stage == self.stages - 1:
            losses = {group: loss_of(self.state, group) for group in groups_of(placement, begin)}
        digests = {}
        if begin.digests or begin.audited or (world.plan.audit_rate > 0.0 and len(placement.rows) > 1):
            own = groups_of(placement, begin)
            digests = {
                group: self._digests(placement, step, group, group in begin.audited)
                for group in (*own, *begin.audited)
            }
        vote = Vote(
            epoch=placement.epoch,
            step=step,
            norms=norms,
            loss=loss,
            group_losses=losses,
            digests=digests,
            generation=begin.generation,
        )
        world.cast.setdefault((vote.epoch, step), {})[self.node_id] = epoch.placement, begin
        return vote

    @property
    def strays(self) -> bool:
        """Whether it holds a state that is not the run's."""
        return self.state_step >= 0 and self.state != chain(self.state_step)

    def _digests(self, placement: Placement, step: int, group: int, extra: bool) -> GroupDigests:
        """What a group's tensors are depends on the states of all stages that they have gone through."""
        nodes = {node.node_id: node for node in self.world.nodes}
        # Seats that were empty when this node was placed may have been filled since.
        machine = self.world.machine
        epoch = None if machine is None else machine.epoch
        hosts = [place.node_id for place in placement.stages]
        if epoch is not None and epoch.number == placement.epoch:
            hosts = [*epoch.row(placement.replica)]
        row = [host in nodes and nodes[host].strays for host in hosts]
        stage, last = placement.stage, len(row) - 1

        def digest(*what: object) -> bytes:
            return sha256(repr((chain(step), group, *what)).encode()).digest()[:DIGEST_BYTES]

        ends = {}
        for boundary in range(last):
            sent = digest(boundary, row[: boundary + 1]), digest(boundary, "back", row)
            for backward in (False, True):
                for received in (False, True):
                    if stage == boundary + (backward != received):
                        ends[BoundaryEnd(boundary, backward, received)] = sent[backward]
        loss = loss_of(self.state, group) if extra and stage == last else None
        return GroupDigests(gradient=digest(row, stage), boundaries=ends, loss=loss)

    def _apply(self, commit: Commit) -> None:
        recorded = self.world.disk.commits.get(commit.step)
        assert recorded == (commit.clip_coefficient, commit.lr), "what is applied is what is on record"
        assert self.voted, "only a step that was voted for is applied"
        self.state = applied_to(self.state, commit.clip_coefficient, commit.lr)
        self.state_step += 1
        self.voted = False
        assert self.state == chain(self.state_step), "applied once, on the state before it"

    def _witness(self, epoch: SimEpoch, step: int) -> None:
        state = self.state_lie.said(self.state, step) if self.state_lie is not None else self.state
        units = layers_of(state, units_of(self.stages)[self.stage])
        self.witnessed = StateHashes(epoch=epoch.placement.epoch, step=step, units=units)
        self.outbox.append(self.witnessed)

    def _upload(self, epoch: SimEpoch, step: int) -> None:
        units = deque(units_of(self.stages)[self.stage])
        older = sorted(self.uploads.keys() - {step})
        for stale in (*older[:-1], step):
            self.uploads.pop(stale, None)
        state = self.state_lie.given(self.state, step) if self.state_lie is not None else self.state
        self.uploads[step] = Upload(epoch.placement.epoch, step, self.state, units, state)
