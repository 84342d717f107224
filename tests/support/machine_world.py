"""An invented world for the run's state machine: nodes, sessions, a disk, a clock, and all that goes wrong.

    Disk          what the coordinator's database and snapshot folder hold; survives everything
    SimNode       a small model of `node.stage.runtime` and `node.stage.epoch_task`
    Session       one control connection: two queues that lose nothing and reorder nothing until it breaks
    World         the coordinator around a real `RunMachine`, and the faults

Arithmetic is replaced by numbers that depend on everything that matters: the state of step s is a chain of
all commits applied so far, a vote's norm depends on the state it was computed from, and the commit on the
votes. So a stage that applied something twice, or late, or on the wrong state, holds a number that is not
`chain(s)`, and its next vote spoils the next commit. Invariants are asserted where things happen.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from node.coordinator.actions import (
    Aborted,
    Action,
    Announce,
    OpenSnapshot,
    RecordCommit,
    RecordPlacement,
    RecordRestored,
    Released,
    Send,
    StepDone,
    Stop,
)
from node.coordinator.epoch import Committed, Phase
from node.coordinator.machine import MAX_ASKED_SNAPSHOTS, MAX_RETRIES, RunMachine
from node.coordinator.plan import Past, RunPlan
from node.training.schedule import global_norm
from wire.messages import (
    Abort,
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Leave,
    NodeMessage,
    Placed,
    Placement,
    Prefetch,
    Ready,
    Restore,
    StepFailed,
    TakeSnapshot,
    Telemetry,
    Vote,
)

UNITS = ("embed", "block.0", "block.1", "block.2", "block.3", "head")
SILENT, RECONNECT, REGROUP = 15.0, 1.0, 10.0
KEPT_SNAPSHOTS = 2


def units_of(stages: int) -> list[tuple[str, ...]]:
    """An even split of `UNITS`."""
    return [UNITS[s * len(UNITS) // stages : (s + 1) * len(UNITS) // stages] for s in range(stages)]


def step_plan(step: int, norm: float) -> tuple[float, float]:
    return 1.0 / (1.0 + norm), 0.1 / (step + 1)


def norms_of(state: int, units: Sequence[str]) -> dict[int, float]:
    """What a stage with these units votes, from the state that it holds."""
    return {UNITS.index(unit): float((state >> UNITS.index(unit)) % 97) for unit in units}


def applied_to(state: int, clip: float, lr: float) -> int:
    return hash((state, clip, lr))


@cache
def outcome(step: int) -> tuple[float, float]:
    """The one right (clip coefficient, learning rate) of a step."""
    norms = norms_of(chain(step), UNITS)
    return step_plan(step, global_norm(norms[index] for index in sorted(norms)))


@cache
def chain(step: int) -> int:
    """The one right state of a step."""
    return 12345 if step == 0 else applied_to(chain(step - 1), *outcome(step - 1))


@dataclass
class Disk:
    last_epoch: int = 0
    seats: tuple[str, ...] = ()
    commits: dict[int, tuple[float, float]] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    pruned: set[int] = field(default_factory=set)
    """Snapshots that were there and made room for newer ones."""

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
            seats=self.seats,
        )


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
    """Nothing passes, and neither end is told."""


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
    snapshot: int = -1


@dataclass
class Upload:
    epoch: int
    step: int
    state: int
    units: deque[str]


class SimNode:
    """One node; `start` makes a new process of it, without the memory of the one before."""

    def __init__(self, node_id: str, world: "World") -> None:
        self.node_id = node_id
        self.world = world
        self.nonce = 0
        self.alive = False
        self.frozen = False
        self.farewell: Finish | None = None
        self.start()

    def start(self) -> None:
        self.nonce += 1
        self.alive, self.frozen, self.farewell = True, False, None
        self.session: Session | None = None
        self.outbox: deque[NodeMessage] = deque()
        self.stage, self.stages = -1, 0
        self.state_step, self.state, self.voted = -1, 0, False
        self.epoch: SimEpoch | None = None
        self.uploads: dict[int, Upload] = {}
        self.leaving = False
        self.fetched_ahead: Prefetch | None = None

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
        if self.leaving:
            self.outbox.append(Leave(reason="said before, perhaps unheard"))

    def write(self) -> None:
        assert self.session is not None
        self.session.to_coordinator.append(self.outbox.popleft())

    def leave(self) -> None:
        self.leaving = True
        self.outbox.append(Leave(reason="asked to"))

    # ---- messages, as `NodeRuntime._handle` takes them

    def handle(self, message: CoordinatorMessage) -> None:
        epoch = self.epoch
        number = epoch.placement.epoch if epoch is not None else 0
        match message:
            case Placement():
                if number != message.epoch:
                    self.epoch = epoch = SimEpoch(message)
                assert epoch is not None
                epoch.commands.append(message)
            case Abort():
                if number == message.epoch:
                    self.epoch = None
            case Finish():
                self.farewell = message
                self.die()
            case Prefetch():
                self.fetched_ahead = message
            case Restore() | Begin() | Commit() | TakeSnapshot():
                if epoch is not None and number == message.epoch:
                    epoch.commands.append(message)
            case _:
                raise AssertionError(f"the state machine sent {message}")

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
                if epoch.vote is None or epoch.vote.step != command.step:
                    assert self.state_step == command.step, "a step begins on its own state"
                    assert epoch.ready
                    self.voted = True
                    epoch.vote = self._vote(epoch, command.step)
                self.outbox.append(epoch.vote)
            case Commit():
                if self.state_step == command.step:
                    self._apply(command)
                assert self.state_step == command.step + 1
                self.outbox.append(Applied(epoch=command.epoch, step=command.step, telemetry=Telemetry()))
            case TakeSnapshot():
                if self.state_step == command.step and epoch.snapshot != command.step:
                    epoch.snapshot = command.step
                    self._upload(epoch, command.step)
            case _:
                raise AssertionError(f"no command: {command}")

    def fail(self, kind: FailureKind, peer_stage: int = -1) -> None:
        """Whatever runs in this epoch fails."""
        assert self.epoch is not None
        self.epoch.failure = StepFailed(
            epoch=self.epoch.placement.epoch,
            step=max(self.state_step, 0),
            kind=kind,
            message="invented",
            peer_stage=peer_stage,
        )
        self.voted = self.voted and self.epoch.vote is not None
        self.outbox.append(self.epoch.failure)

    def _place(self, epoch: SimEpoch) -> None:
        if epoch.placed is None:
            place = epoch.placement.stage, len(epoch.placement.stages)
            if place != (self.stage, self.stages):
                self.stage, self.stages = place
                self.state_step, self.voted = -1, False
            epoch.placed = Placed(epoch=epoch.placement.epoch, held_step=self.state_step, voted=self.voted)
        self.outbox.append(epoch.placed)

    def _restore(self, epoch: SimEpoch, restore: Restore) -> None:
        if not epoch.ready:
            missed = restore.missed
            if missed is not None and self.state_step == missed.step == restore.step - 1 and self.voted:
                self._apply(missed)
            if self.state_step != restore.step:
                self.voted = False
                if restore.step > 0 and restore.step not in self.world.disk.snapshots:
                    assert restore.step in self.world.disk.pruned, "a state is fetched that was once on disk"
                    self.world.failures += 1
                    self.fail(FailureKind.INTERNAL)
                    return
                self.state_step, self.state = restore.step, chain(restore.step)
            epoch.uncompressed = restore.uncompressed
            epoch.ready = True
        self.outbox.append(Ready(epoch=restore.epoch, telemetry=Telemetry()))

    def _vote(self, epoch: SimEpoch, step: int) -> Vote:
        norms = norms_of(self.state, units_of(self.stages)[self.stage])
        world = self.world
        if step == world.poisoned_step and (not epoch.uncompressed or world.poisoned_always):
            norms[min(norms)] = math.nan
        loss = float(self.state % 1000) if self.stage == self.stages - 1 else None
        vote = Vote(epoch=epoch.placement.epoch, step=step, norms=norms, loss=loss)
        world.cast.setdefault((vote.epoch, step), set()).add(self.node_id)
        return vote

    def _apply(self, commit: Commit) -> None:
        recorded = self.world.disk.commits.get(commit.step)
        assert recorded == (commit.clip_coefficient, commit.lr), "what is applied is what is on record"
        assert self.voted, "only a step that was voted for is applied"
        self.state = applied_to(self.state, commit.clip_coefficient, commit.lr)
        self.state_step += 1
        self.voted = False
        assert self.state == chain(self.state_step), "applied once, on the state before it"

    def _upload(self, epoch: SimEpoch, step: int) -> None:
        units = deque(units_of(self.stages)[self.stage])
        older = sorted(self.uploads.keys() - {step})
        for stale in (*older[:-1], step):
            self.uploads.pop(stale, None)
        self.uploads[step] = Upload(epoch.placement.epoch, step, self.state, units)


class World:
    """Everything around the state machine. Methods are events; each returns when it is dealt with."""

    def __init__(
        self,
        *,
        stages: int = 3,
        min_stages: int = 1,
        total_steps: int = 7,
        snapshot_every: int = 2,
        poisoned_step: int | None = None,
        poisoned_always: bool = False,
    ) -> None:
        self.plan = RunPlan(
            stages=stages,
            min_stages=min_stages,
            total_steps=total_steps,
            snapshot_every=snapshot_every,
            silent_seconds=SILENT,
            reconnect_seconds=RECONNECT,
            regroup_seconds=REGROUP,
            units=units_of,
            stage_bytes=lambda count: [len(units) for units in units_of(count)],
        )
        self.poisoned_step, self.poisoned_always = poisoned_step, poisoned_always
        self.now = 0.0
        self.disk = Disk()
        self.nodes: list[SimNode] = []
        self.sessions: list[Session] = []
        self.cast: dict[tuple[int, int], set[str]] = {}
        """Who has voted for a step of an epoch."""
        self.restored: dict[int, int] = {}
        self.begun: set[tuple[int, int]] = set()
        self.failures = 0
        """Failures that nodes may have told of since a step was last done."""
        self.crash_after: int | None = None
        """Kill the coordinator after this many more actions."""
        self.stopped: Stop | None = None
        self.events = 0
        self.machine: RunMachine | None = None
        self.start_coordinator()

    # ---- the coordinator

    def start_coordinator(self) -> None:
        assert self.machine is None
        self.machine = RunMachine(self.plan, step_plan, self.disk.past())
        self.open: dict[str, Session] = {}
        self.wanted: set[int] = set()
        self.parts: dict[int, set[str]] = {}
        self.stopped = None

    def crash_coordinator(self) -> None:
        self.machine = None
        self.crash_after = None
        self.failures = 0
        for session in self.sessions:
            session.broken = True
        self.sessions.clear()

    def dial(self, session: Session) -> Session:
        self.sessions.append(session)
        return session

    def happen(self, event: Callable[[RunMachine], list[Action]]) -> None:
        """Enter the machine and carry out what it says, in order; perhaps die halfway."""
        machine = self.machine
        if machine is None or self.stopped is not None:
            return
        self.events += 1
        actions = event(machine)
        assert len(actions) <= 6 * len(self.nodes) + 12
        for action in actions:
            if self.crash_after is not None:
                if self.crash_after == 0:
                    self.crash_coordinator()
                    return
                self.crash_after -= 1
            self._carry_out(machine, action)
        self.check_machine(machine)

    def _carry_out(self, machine: RunMachine, action: Action) -> None:
        match action:
            case Send():
                self._check_send(machine, action.message)
                session = self.open.get(action.node_id)
                if session is not None and not session.closing:
                    session.to_node.append(action.message)
            case RecordPlacement():
                self._record_placement(machine, action)
            case RecordCommit():
                self._record_commit(action)
            case RecordRestored():
                assert action.epoch == self.disk.last_epoch and action.nodes == self.disk.seats
                for node in self.nodes:
                    if node.node_id in action.nodes and self._is_in(node, action.epoch):
                        assert node.state_step == action.step, "an epoch begins with one state on all stages"
                self.restored[action.epoch] = action.step
            case StepDone():
                self.failures = 0
                assert action.step in self.disk.commits
                for node in self.nodes:
                    if node.node_id in action.nodes and self._is_in(node, action.epoch):
                        assert node.state_step > action.step, "a step is done when all have applied it"
            case OpenSnapshot():
                assert action.step not in self.disk.snapshots
                self.wanted.add(action.step)
            case Released():
                assert action.node_id not in machine.members
                if (session := self.open.get(action.node_id)) is not None:
                    session.closing = True
            case Stop():
                self.stopped = action
                self.failures = 0
            case Aborted() | Announce():
                pass

    def _check_send(self, machine: RunMachine, message: CoordinatorMessage) -> None:
        match message:
            case Placement():
                assert message.epoch == self.disk.last_epoch, "a placement is on record before it is heard of"
            case Commit():
                recorded = self.disk.commits.get(message.step)
                assert recorded == (message.clip_coefficient, message.lr), "so is a commit"
            case Begin() if (message.epoch, message.step) not in self.begun:
                self.begun.add((message.epoch, message.step))
                assert self.restored[message.epoch] <= message.step
                assert not any(machine.members[node].leaving for node in self.disk.seats)
            case _:
                pass

    def _is_in(self, node: SimNode, epoch: int) -> bool:
        return node.alive and node.epoch is not None and node.epoch.placement.epoch == epoch

    def _record_placement(self, machine: RunMachine, placement: RecordPlacement) -> None:
        assert placement.epoch > self.disk.last_epoch, "epoch numbers only grow"
        assert len(set(placement.nodes)) == len(placement.nodes), "a node has one stage"
        assert self.plan.min_stages <= len(placement.nodes) <= self.plan.stages
        for node_id in placement.nodes:
            assert node_id in machine.members and node_id not in machine.quarantined
            assert not machine.members[node_id].leaving
        self.disk.last_epoch, self.disk.seats = placement.epoch, placement.nodes

    def _record_commit(self, commit: RecordCommit) -> None:
        assert commit.epoch == self.disk.last_epoch, "only the newest epoch commits"
        assert commit.epoch in self.restored
        voters = self.cast.get((commit.epoch, commit.step), set())
        assert voters == set(self.disk.seats), "a commit comes after every stage's vote"
        assert commit.step <= len(self.disk.commits), "steps are committed in order, without a gap"
        assert commit.step != self.poisoned_step
        content = commit.clip_coefficient, commit.lr
        assert content == outcome(commit.step), "votes were computed on the right state"
        assert self.disk.commits.setdefault(commit.step, content) == content, "a replay ends the same"

    def check_machine(self, machine: RunMachine) -> None:
        """What holds between any two events."""
        epoch = machine.epoch
        assert len(machine._asked) <= MAX_ASKED_SNAPSHOTS + 1, "the due ones, and one that the run waits for"
        assert machine.newest_snapshot == max(self.disk.snapshots, default=0)
        if self.stopped is None and epoch is not None:
            assert epoch.number == self.disk.last_epoch and epoch.seats == self.disk.seats
            assert set(epoch.seats) <= machine.members.keys()
            for node_id, member in machine.members.items():
                assert not member.leaving or node_id in epoch.seats, "only a stage keeps who wants to leave"

    def check_nodes(self) -> None:
        for node in self.nodes:
            if node.alive and node.state_step >= 0:
                assert node.state == chain(node.state_step)
                assert node.state_step <= len(self.disk.commits), "no state without its commits on record"

    # ---- what can happen next

    def possible(self) -> list[Callable[[], None]]:
        """The small events that a working world has at this moment."""
        events: list[Callable[[], None]] = []
        for session in self.sessions:
            node = session.node
            if session.broken:
                events.append(partial(self._notice, session))
            if session.stalled:
                continue
            if not session.greeted:
                events.append(partial(self._greet, session))
            elif session.to_coordinator:
                # What was sent before the connection broke may still arrive.
                events.append(partial(self._hear, session))
            if node.running and node.session is session and (session.to_node or session.closing):
                events.append(partial(self._deliver, session))
        for node in self.nodes:
            if not node.running:
                continue
            if node.session is None or node.session.broken:
                if self.machine is not None:
                    events.append(node.connect)
            elif node.outbox and not node.session.stalled:
                events.append(node.write)
            if node.epoch is not None and node.epoch.commands:
                events.append(node.work)
            if node.uploads and self.machine is not None:
                events.append(partial(self._store_part, node))
        return events

    def run(self, count: int, rng: random.Random) -> None:
        """Up to `count` small events in any order that the sessions allow."""
        for _ in range(count):
            events = self.possible()
            if not events:
                return
            rng.choice(events)()

    def run_until(self, phase: Phase, rng: random.Random) -> None:
        """Until an epoch is in this phase, if that comes soon."""
        ticks = 0
        while ticks < 3:
            epoch = self.machine.epoch if self.machine is not None else None
            if epoch is not None and epoch.phase is phase:
                return
            if events := self.possible():
                rng.choice(events)()
            else:
                self.tick(0.5)
                ticks += 1

    def _notice(self, session: Session) -> None:
        """The coordinator finds out that a connection is gone."""
        self.sessions.remove(session)
        node_id = session.node.node_id
        if self.open.get(node_id) is session:
            del self.open[node_id]
            self.happen(lambda machine: machine.disconnected(node_id, self.now))

    def _greet(self, session: Session) -> None:
        session.greeted = True
        node_id = session.node.node_id
        if (older := self.open.get(node_id)) is not None:
            if older.nonce != session.nonce:
                older.to_node.append(Finish(reason="another process has joined as this node", failed=True))
            older.closing = True
        self.open[node_id] = session
        self.happen(
            lambda machine: machine.hello(
                node_id,
                address=f"{node_id}:1",
                memory_bytes=0,
                process_nonce=session.nonce,
                epoch=session.epoch,
                now=self.now,
            )
        )

    def _hear(self, session: Session) -> None:
        message = session.to_coordinator.popleft()
        node_id = session.node.node_id
        if self.open.get(node_id) is not session:
            return
        if isinstance(message, Leave):
            self.happen(lambda machine: machine.leave(node_id, self.now))
        else:
            self.happen(lambda machine: machine.message(node_id, message, self.now))

    def _deliver(self, session: Session) -> None:
        if session.to_node:
            session.node.handle(session.to_node.popleft())
        else:
            session.broken = True

    def _store_part(self, node: SimNode) -> None:
        """One layer of a snapshot reaches the coordinator, which keeps it or refuses."""
        machine = self.machine
        assert machine is not None
        step, upload = next(iter(node.uploads.items()))
        if node.node_id not in machine.members or step not in self.wanted:
            del node.uploads[step]
            node.outbox.append(
                StepFailed(epoch=upload.epoch, step=step, kind=FailureKind.INTERNAL, message="not stored")
            )
            current = machine.epoch is not None and machine.epoch.number == upload.epoch
            assert not current, "what an epoch asked for is wanted"
            return
        parts = self.parts.setdefault(step, set())
        assert upload.state == chain(step), "a snapshot's layers are of its step"
        parts.add(upload.units.popleft())
        if not upload.units:
            del node.uploads[step]
        if len(parts) == len(UNITS):
            del self.parts[step]
            stored = sorted({*self.disk.snapshots, step})
            self.disk.snapshots = set(stored[-KEPT_SNAPSHOTS:])
            self.disk.pruned.update(stored[:-KEPT_SNAPSHOTS])
            self.happen(lambda machine: machine.snapshot_stored(step, self.now))

    # ---- faults

    def tick(self, seconds: float) -> None:
        """Time passes; nodes that can be heard are heard."""
        self.now += seconds
        machine = self.machine
        if machine is None:
            return
        for node_id, session in self.open.items():
            if session.node.running and not session.stalled and not session.broken:
                machine.heard(node_id, self.now)
        self.happen(lambda machine: machine.tick(self.now))

    def add_node(self) -> SimNode:
        node = SimNode(f"n{len(self.nodes)}", self)
        self.nodes.append(node)
        return node

    def may_fail(self) -> bool:
        """Whether one more failure is within what a run puts up with."""
        return self.failures < MAX_RETRIES - 1

    def heal(self) -> None:
        """All faults end."""
        if self.machine is None:
            self.start_coordinator()
        self.crash_after = None
        for node in self.nodes:
            node.frozen = False
            if not node.alive and node.farewell is None:
                node.start()
        for session in self.sessions:
            session.stalled = False

    def settle(self) -> Stop:
        """Faults end, and nodes come if there are too few: the run must end in a bounded number of events."""
        self.heal()
        # A run that has begun goes on with as few nodes as it may; a new one waits for all.
        quarantined = self.machine.quarantined if self.machine is not None else {}
        usable = sum(
            node.alive and not node.leaving and node.node_id not in quarantined for node in self.nodes
        )
        enough = self.plan.min_stages if self.disk.last_epoch else self.plan.stages
        for _ in range(self.plan.stages - usable if usable < enough else 0):
            self.add_node()
        for turn in range(20_000):
            if self.stopped is not None:
                return self.stopped
            if events := self.possible():
                events[turn % len(events)]()
            else:
                self.tick(0.5)
            self.check_nodes()
        raise AssertionError("the run does not end")
