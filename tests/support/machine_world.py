"""An invented world for the run's state machine: nodes, sessions, a disk, a clock, and all that goes wrong.

`World` is the coordinator around a real `RunMachine`, with its disk, which survives everything; the nodes and
what they say to it are models (`machine_nodes.py`). Invariants are asserted where things happen.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from node.run_state.actions import (
    Aborted,
    AbortKind,
    Action,
    Announce,
    OpenSnapshot,
    RecordCommit,
    RecordPlacement,
    RecordRestored,
    RefuseSnapshot,
    Released,
    SeatFilled,
    SeatLost,
    SeatOffered,
    Send,
    SnapshotAgreed,
    SnapshotDropped,
    StepDone,
    Stop,
)
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_RETRIES
from node.run_state.machine import RunMachine
from node.run_state.newcomers import MOST_STEPS
from node.run_state.run_plan import RunPlan
from node.run_state.snapshot_schedule import MAX_ASKED
from node.run_state.stage_assignment import Candidate
from node.schedule.routing import neighbours
from tests.support.machine_driver import UNITS, unit_numbers, units_of
from tests.support.machine_nodes import (
    Disk,
    Handed,
    Session,
    SimNode,
    chain,
    groups_of,
    layers_of,
    outcome,
    step_plan,
    total_loss,
)
from wire.messages import (
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    FollowStep,
    Leave,
    Placement,
    Portion,
    Seat,
    StepFailed,
    UnitHash,
    Vote,
)

SILENT, RECONNECT, REGROUP = 15.0, 1.0, 10.0
KEPT_SNAPSHOTS = 2


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
        groups: int = 1,
        most_rows: int = 1,
        follows: bool = False,
        audit_rate: float = 0.0,
        group_seconds: float = 0.0,
    ) -> None:
        """`group_seconds`: what every node is measured to take for a gradient group; 0: that is not known."""
        self.plan = RunPlan(
            stages=stages,
            groups=groups,
            most_rows=most_rows,
            follows=follows,
            audit_rate=audit_rate,
            audit_secret=b"secret",
            compares_newcomers=True,
            min_stages=min_stages,
            total_steps=total_steps,
            snapshot_every=snapshot_every,
            silent_seconds=SILENT,
            reconnect_seconds=RECONNECT,
            regroup_seconds=REGROUP,
            units=units_of,
            unit_numbers=unit_numbers,
            neighbours=lambda stage, stages: neighbours(stage, stages, 1, True),
            stage_bytes=lambda count, _devices: [len(units) for units in units_of(count)],
        )
        self.poisoned_step, self.poisoned_always = poisoned_step, poisoned_always
        self.group_seconds = group_seconds
        self.most_actions = 8.0
        """Of one event, by the number of nodes."""
        self.now = 0.0
        self.disk = Disk()
        self.nodes: list[SimNode] = []
        self.sessions: list[Session] = []
        self.cast: dict[tuple[int, int], dict[str, tuple[Placement, Begin]]] = {}
        """Who has voted for a step of an epoch, in which place, and for which work."""
        self.handed: dict[tuple[int, int], list[Handed]] = {}
        """What nodes have handed over in a step of an epoch."""
        self.seated: set[tuple[int, str, int]] = set()
        """Rows, nodes and processes of the epoch's seats before the newest event."""
        self.liars: set[str] = set()
        """Nodes whose word need not be true."""
        self.known: set[str] = set()
        """The members before the newest event."""
        self.in_step: dict[str, int] = {}
        """The stages of the nodes that the newest event found in the step from its beginning."""
        self.complete: set[tuple[int, int, int]] = set()
        """Stages whose nodes all had voted in a step when one of them was lost, by epoch and step."""
        self.kept = 0
        """Portions of rows that had lost a node which counted in commits."""
        self.restored: dict[int, int] = {}
        self.begun: set[tuple[int, int]] = set()
        self.failures = 0
        """Failures that nodes may have reported since the last completed step."""
        self.crash_after: int | None = None
        """Kill the coordinator after this many more actions."""
        self.stopped: Stop | None = None
        self.notes: list[str] = []
        """What the operator reads."""
        self.events = 0
        self.lost = self.filled = 0
        """Seats that were emptied and filled while their epoch went on."""
        self.lost_early = 0
        """Of these, seats that were emptied before the epoch had restored."""
        self.machine: RunMachine | None = None
        self.start_coordinator()

    # ---- the coordinator

    def start_coordinator(self) -> None:
        assert self.machine is None
        self.machine = RunMachine(self.plan, step_plan, self.disk.past())
        self.open: dict[str, Session] = {}
        self.wanted: set[int] = set()
        self.parts: dict[int, dict[str, int]] = {}
        self.agreed: dict[int, Mapping[int, UnitHash] | None] = {}
        """What the layers of a snapshot are; None if it is not taken."""
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
        self.known = set(machine.members)
        if (epoch := machine.epoch) is not None:
            members = machine.members
            self.seated = {
                (epoch.replica_of(node), node, members[node].process_nonce) for node in epoch.hosts
            }
            late = {
                node
                for node in epoch.hosts
                if Seat(epoch.replica_of(node), epoch.stage_of(node)) in epoch._late
            }
            self.in_step = {node: epoch.stage_of(node) for node in epoch.hosts if node not in late}
        actions = event(machine)
        # A newcomer is told at once of all steps since the snapshot that it loads.
        told = [one for one in actions if isinstance(one, Send) and isinstance(one.message, FollowStep)]
        assert len(told) <= MOST_STEPS * len(self.nodes)
        assert len(actions) - len(told) <= self.most_actions * len(self.nodes) + 12
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
                assert action.epoch == self.disk.last_epoch
                placed = zip(action.nodes, self.disk.hosts, strict=True)
                assert all(node in ("", host) for node, host in placed), "or it has died since"
                for node in self.nodes:
                    if node.node_id in action.nodes and self._is_in(node, action.epoch):
                        assert node.state_step == action.step, "an epoch begins with one state on all stages"
                self.restored[action.epoch] = action.step
            case StepDone():
                self.failures = 0
                assert action.step in self.disk.commits
                for node in self.nodes:
                    if node.node_id in action.nodes and self._is_in(node, action.epoch):
                        will_apply = node.state_step == action.step and node.voted
                        assert node.state_step > action.step or will_apply, "a step is done by all"
                if self.group_seconds:
                    speeds = dict.fromkeys(action.nodes, self.group_seconds)
                    machine.row_speeds(speeds, self.group_seconds, self.now)
            case OpenSnapshot():
                assert action.step not in self.disk.snapshots
                self.wanted.add(action.step)
                self.parts.pop(action.step, None)
                self.agreed.pop(action.step, None)
            case SnapshotAgreed():
                self.agreed[action.step] = action.units
            case SnapshotDropped():
                self.agreed[action.step] = None
            case RefuseSnapshot():
                self.disk.snapshots.discard(action.step)
                whole = max((at for at in self.disk.snapshots if at < action.step), default=0)
                machine.snapshot_damaged(action.step, whole)
            case Released():
                assert action.node_id not in machine.members
                if (session := self.open.get(action.node_id)) is not None:
                    session.closing = True
            case Stop():
                self.stopped = action
                self.failures = 0
            case Announce():
                self.notes.append(action.text)
            case SeatOffered():
                pass
            case SeatFilled():
                # The same event may lose it again, as what follows says.
                assert action.epoch == self.disk.last_epoch and action.node_id in self.known
                assert (
                    action.nodes[action.row * (len(action.nodes) // action.rows) + action.stage]
                    == action.node_id
                )
                node = next(one for one in self.nodes if one.node_id == action.node_id)
                if self._is_in(node, action.epoch):
                    assert action.step - 1 <= node.state_step <= action.step, "it holds the state, nearly"
                self.disk.hosts = action.nodes
                self.filled += 1
            case SeatLost():
                self.lost += 1
                self.lost_early += action.epoch not in self.restored
                shared = [group for _, groups in action.portions for group in groups]
                assert sorted(shared) == list(range(self.plan.groups)), "every group is somebody's"
                assert set(action.groups) <= set(shared)
                self._note_complete(action)
            case Aborted():
                ended = machine._epochs.ended
                early = action.kind is AbortKind.LOST and action.epoch not in self.restored
                if early and self.plan.follows and ended is not None and ended.number == action.epoch:
                    assert ended.uncompressed or len(ended.whole_rows) < 2, "another row was whole"

    def _check_send(self, machine: RunMachine, message: CoordinatorMessage) -> None:
        match message:
            case Placement():
                assert message.epoch == self.disk.last_epoch, "a placement is on record before it is heard of"
            case Commit():
                recorded = self.disk.commits.get(message.step)
                assert recorded == (message.clip_coefficient, message.lr), "so is a commit"
            case FollowStep():
                recorded = self.disk.commits.get(message.step)
                assert recorded == (message.clip_coefficient, message.lr), "also for those that follow"
            case Begin() if (message.epoch, message.step) not in self.begun:
                self.begun.add((message.epoch, message.step))
                assert self.restored[message.epoch] <= message.step
                epoch = machine.epoch
                assert epoch is not None
                hosts = [machine.members[node] for node in self.disk.hosts if epoch.has(node)]
                assert not any(member.leaving for member in hosts)
            case _:
                pass

    def _is_in(self, node: SimNode, epoch: int) -> bool:
        """Whether a node takes part in an epoch, as far as its word is checked."""
        return (
            node.node_id not in self.liars
            and node.alive
            and node.epoch is not None
            and node.epoch.placement.epoch == epoch
        )

    def _record_placement(self, machine: RunMachine, placement: RecordPlacement) -> None:
        assert placement.epoch > self.disk.last_epoch, "epoch numbers only grow"
        hosts = [node for node in placement.nodes if node]
        assert len(set(hosts)) == len(hosts), "a node has one stage"
        rows = len(placement.groups)
        stages, rest = divmod(len(placement.nodes), rows)
        assert rest == 0 and self.plan.min_stages <= stages <= self.plan.stages
        assert rows <= self.plan.most_rows and all(placement.groups)
        shared = [group for groups in placement.groups for group in groups]
        assert shared == list(range(self.plan.groups)), "every group is in one row"
        if not self.plan.follows:
            assert len(hosts) == len(placement.nodes), "no seat is empty as an epoch begins"
        # The same event may have ended it again, or emptied seats of it: what follows says so.
        if machine.epoch is not None and machine.epoch.number == placement.epoch:
            for node_id in machine.epoch.hosts:
                assert node_id in machine.members and node_id not in machine.quarantined
                assert not machine.members[node_id].leaving
        self.disk.last_epoch, self.disk.hosts = placement.epoch, placement.nodes
        self.disk.groups = placement.groups

    def _record_commit(self, commit: RecordCommit) -> None:
        assert commit.epoch == self.disk.last_epoch, "only the newest epoch commits"
        assert commit.epoch in self.restored
        assert self.machine is not None
        epoch = self.machine.epoch
        if epoch is None or epoch.number != commit.epoch:
            epoch = self.machine._epochs.ended  # the same event has ended it
        assert epoch is not None and epoch.number == commit.epoch
        cast = self.cast.get((commit.epoch, commit.step), {})
        # The next step may have begun already, with nodes that were none of this one's.
        new = epoch.fresh if epoch.step > commit.step else ()
        hosts = [node for node in epoch.hosts if node not in new]
        assert cast.keys() >= set(hosts), "a commit comes after every stage's vote"
        assert set(self.disk.hosts) >= set(hosts)
        voters = [cast[node] for node in hosts]
        # Who computes what, as the newest that all have answered says. Votes before it count, too, as long as
        # no row's groups have changed.
        place, newest = max(voters, key=lambda voter: voter[1].generation)
        shared = newest.portions or tuple(Portion(row, of.groups) for row, of in enumerate(place.rows))
        counted: dict[int, Counter[int]] = {stage: Counter() for stage in range(epoch.stages)}
        for place, begin in voters:
            assert begin.portions == newest.portions, "it was voted on the same work"
            counted[place.stage].update(groups_of(place, begin) if place.rows else (0,))
        # Of a node that is gone since its vote the sums had come already, or the others' votes would not be
        # there.
        voted = {
            (place.replica, place.stage)
            for place, begin in cast.values()
            if begin.portions == newest.portions
        }
        empty = [at for at, node in enumerate(epoch.grid) if not node or node in new]
        for row, stage in (divmod(at, epoch.stages) for at in empty):
            groups = {group for of, groups in shared if of == row for group in groups}
            if groups and ((row, stage) not in voted or Seat(row, stage) in newest.absent):
                self._check_kept(commit, Seat(row, stage), groups)
            counted[stage].update(groups)
        for stage in range(epoch.stages):
            assert sorted(counted[stage].elements()) == [*range(self.plan.groups)], "each counts once"
        assert commit.loss == total_loss(commit.step, self.plan.groups)
        assert commit.step <= len(self.disk.commits), "steps are committed in order, without a gap"
        assert commit.step != self.poisoned_step
        content = commit.clip_coefficient, commit.lr
        assert content == outcome(commit.step), "votes were computed on the right state"
        assert self.disk.commits.setdefault(commit.step, content) == content, "a replay ends the same"

    def _note_complete(self, lost: SeatLost) -> None:
        # The same event may have begun the next step, with other nodes.
        self.in_step.pop(lost.node_id, None)
        column = {node for node, stage in self.in_step.items() if stage == lost.stage}
        if column and self.cast.get((lost.epoch, lost.step), {}).keys() >= column:
            self.complete.add((lost.epoch, lost.step, lost.stage))

    def _check_kept(self, commit: RecordCommit, seat: Seat, groups: set[int]) -> None:
        """Groups that a broken row has kept count where the seat is empty, too: what its node computed is at
        all nodes that had got it."""
        found = {
            group
            for of, handed, parts in self.handed.get((commit.epoch, commit.step), ())
            for group in handed
            if of == seat and all(any(some <= self.seated for some in part) for part in parts)
        }
        has_all = (commit.epoch, commit.step, seat.stage) in self.complete
        assert has_all or found >= groups, "a row keeps only what others have"
        self.kept += 1

    def check_machine(self, machine: RunMachine) -> None:
        """Check the invariants that hold between any two events."""
        epoch = machine.epoch
        assert len(machine._snapshots._asked) <= MAX_ASKED + 1, "the due ones, and one that the run waits for"
        assert machine.newest_snapshot == max(self.disk.snapshots, default=0)
        if self.stopped is None and epoch is not None:
            assert epoch.number == self.disk.last_epoch and set(epoch.hosts) <= set(self.disk.hosts)
            assert set(epoch.hosts) <= machine.members.keys()
            assert epoch.whole_rows, "every stage has a node"
            if not self.plan.follows:
                assert epoch.hosts == self.disk.hosts
            for node_id, member in machine.members.items():
                assert not member.leaving or node_id in epoch.hosts, "only a stage keeps who wants to leave"

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
            # An upload waits until it is known what its layers are.
            if node.uploads and self.machine is not None and self._may_store(node):
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
                Candidate(node_id=node_id, memory_bytes=0),
                address=f"{node_id}:1",
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
        if isinstance(message, Vote) and min(message.norms.values()) < 0:
            # As `wire.messages_proto` refuses it: the session closes, and the node dials again.
            session.broken = True
            self.happen(lambda machine: machine.refused(node_id, "a norm below 0", self.now))
        elif isinstance(message, Leave) and message.failed:
            self.happen(lambda machine: machine.lost(node_id, message.reason, self.now))
        elif isinstance(message, Leave):
            self.happen(lambda machine: machine.leave(node_id, self.now))
        else:
            self.happen(lambda machine: machine.message(node_id, message, self.now))

    def _deliver(self, session: Session) -> None:
        if session.to_node:
            session.node.handle(session.to_node.popleft())
        else:
            session.broken = True

    def _may_store(self, node: SimNode) -> bool:
        step = next(iter(node.uploads))
        return step not in self.wanted or step in self.agreed

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
            current = machine.epoch if machine.epoch and machine.epoch.number == upload.epoch else None
            assert current is None or not current.has(node.node_id), "what an epoch asked for is wanted"
            return
        unit = upload.units[0]
        self.happen(lambda machine: machine.layer_received(step, unit, self.now))
        agreed = self.agreed[step]
        if agreed is None:
            del node.uploads[step]
            return
        upload.units.popleft()
        if not upload.units:
            del node.uploads[step]
        if layers_of(upload.layers, [unit]) != {UNITS.index(unit): agreed[UNITS.index(unit)]}:
            self.happen(lambda machine: machine.wrong_layer(node.node_id, step, unit, self.now))
            return
        parts = self.parts.setdefault(step, {})
        parts[unit] = upload.layers
        if len(parts) == len(UNITS):
            del self.parts[step]
            assert set(parts.values()) == {chain(step)}, "a snapshot's layers are of its step"
            self.disk.layers[step] = parts
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
