"""The run as a pure state machine: who is in it, which epoch is on, and when it is over.

Events come in as method calls with the time as an argument (seconds on any monotonic clock); what must be
done comes out as a list of actions. No I/O, no clock, no randomness: the same events give the same actions.

Invariants (tested): at most one node a stage an epoch; epoch numbers only grow; a step is committed at most
once an epoch, after every stage voted, and never before the commit is recorded; steps are committed in order;
a node that is gone, leaving or quarantined never gets a seat.
"""

from collections.abc import Mapping

from node.coordinator.actions import (
    Aborted,
    AbortKind,
    Action,
    Announce,
    OpenSnapshot,
    RecordPlacement,
    Released,
    Send,
    StepDone,
    Stop,
)
from node.coordinator.complaints import Complaints
from node.coordinator.epoch import Epoch, FiniteUncompressed, NonFinite, Phase, StepPlan
from node.coordinator.plan import Member, Past, RunPlan
from node.coordinator.seating import ONE, Candidate, Seating, prefetch_order
from node.model.memory import Devices
from wire.messages import (
    Abort,
    Applied,
    FailureKind,
    Finish,
    NodeMessage,
    Placed,
    Prefetch,
    Ready,
    StepFailed,
    Vote,
)

MAX_RETRIES = 3
"""Attempts at one step that may fail, with nobody dead, before the run stops."""
PLACING_SECONDS = 90.0
"""A node that lives but does not say within this time what it holds is stuck. It exceeds what a node allows
itself to end the epoch before."""
MAX_ASKED_SNAPSHOTS = 2
"""Snapshots being uploaded at a time; where links are slower than that, some are left out. Each costs its
nodes a copy of their state."""


class RunMachine:
    """One run, from the first hello to `Stop`."""

    def __init__(self, plan: RunPlan, step_plan: StepPlan, past: Past) -> None:
        self.plan = plan
        self.newest_snapshot = past.newest_snapshot
        self.members: dict[str, Member] = {}
        self.epoch: Epoch | None = None
        self.stopped = False
        self._step_plan = step_plan
        self._last_epoch = past.last_epoch
        self._committed = past.committed
        self._newest_state = past.committed.step + 1 if past.committed is not None else 0
        self._seating = Seating(
            stages=plan.stages,
            min_stages=plan.min_stages,
            regroup_seconds=plan.regroup_seconds,
            stage_bytes=plan.stage_bytes,
            previous=past.seats,
        )
        self._told: str | None = None
        self._retries = 0
        self._complaints = Complaints()
        self._ended: Epoch | None = None
        """The epoch before this one."""
        self._suspect: tuple[int, str] | None = None
        self._stopping: str | None = None
        self._saving = False
        self._save_asked = False
        self._growing = False
        self._placed_at = 0.0
        """When the epoch's nodes were told their places."""
        self._windows: tuple[int, ...] = ()
        """The newest plan for the links; empty before there is one."""
        self._asked: list[int] = []
        """Snapshots that this epoch asked for and that are not stored yet."""

    # ---- who is here

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Nodes that are shut out for what their neighbours said, and what that was."""
        return self._complaints.quarantined

    def hello(
        self,
        node_id: str,
        *,
        address: str,
        memory_bytes: int,
        process_nonce: int,
        epoch: int,
        now: float,
        devices: Devices = ONE,
    ) -> list[Action]:
        """A node opened its control connection: for the first time, again, or as a new process.

        `epoch` is the one it believes to be in, 0 for none. `memory_bytes` is that of the smallest device.
        One that no stage fits is sent away.
        """
        if self.stopped:
            return [Send(node_id=node_id, message=Finish(reason="the run is over", failed=False))]
        if node_id in self.quarantined:
            return _send_away(node_id, f"quarantined: {self.quarantined[node_id]}")
        actions: list[Action] = []
        member = self.members.get(node_id)
        if member is not None and member.process_nonce != process_nonce:
            # Not `lost`: its session is the new process's already, and must stay open.
            del self.members[node_id]
            again = f"node {node_id} was started again"
            actions += [Announce(text=again), *self._unseat(node_id, again, now)]
            member = None
        offer = Candidate(node_id=node_id, memory_bytes=memory_bytes, devices=devices)
        if member is None and (line := self._seating.too_small(offer)) is not None:
            return [*actions, *_send_away(node_id, line), *self._try_place(now)]
        if member is None:
            member = self.members[node_id] = Member(
                address=address, offer=offer, process_nonce=process_nonce, last_heard=now
            )
        member.disconnected_at = None
        member.last_heard = now
        member.address = address
        seated = self.epoch is not None and node_id in self.epoch.seats
        if epoch and not (seated and self.epoch is not None and self.epoch.number == epoch):
            actions.append(Send(node_id=node_id, message=Abort(epoch=epoch, reason="that epoch is over")))
        if seated and self.epoch is not None:
            return [*actions, *(Send(node_id=node_id, message=m) for m in self.epoch.outstanding(node_id))]
        actions += self._try_place(now)
        if self.epoch is not None and node_id not in self.epoch.seats:
            actions += self._prefetch(node_id)
        return actions

    def heard(self, node_id: str, now: float) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.last_heard = now

    def disconnected(self, node_id: str, now: float) -> list[Action]:
        """The control connection broke. Death is declared by `tick` if the node does not come back."""
        if (member := self.members.get(node_id)) is not None:
            member.disconnected_at = now
        return []

    def tick(self, now: float) -> list[Action]:
        """Call about twice a second: declares silent and vanished nodes dead, regroups when it is time."""
        actions: list[Action] = []
        for node_id, member in list(self.members.items()):
            gone = member.disconnected_at
            if gone is not None and now - gone > self.plan.reconnect_seconds:
                actions += self._gone(node_id, "its connection closed and did not come back", now)
            elif gone is None and now - member.last_heard > self.plan.silent_seconds:
                actions += self._gone(
                    node_id, f"it has been silent for more than {self.plan.silent_seconds:g} s", now
                )
        if self.epoch is not None and now - self._placed_at > PLACING_SECONDS:
            stuck = f"it did not take its place within {PLACING_SECONDS:g} s: start it again"
            for node_id in self.epoch.unplaced:
                actions.append(Send(node_id=node_id, message=Finish(reason=stuck, failed=True)))
                actions += self._gone(node_id, stuck, now)
        return actions + self._try_place(now)

    def lost(self, node_id: str, reason: str, now: float) -> list[Action]:
        """The node is dead, or was evicted."""
        return self._gone(node_id, reason, now) + self._try_place(now)

    def leave(self, node_id: str, now: float) -> list[Action]:
        """The node asks to go. It is released once the state it holds is on disk."""
        member = self.members.get(node_id)
        if member is None or self.stopped:
            return []
        member.leaving = True
        epoch = self.epoch
        if epoch is not None and node_id in epoch.seats and self._holds_progress(epoch):
            return []  # the step ends first, and `_between_steps` sees the flag
        return self._release(node_id, now) + self._try_place(now)

    def stop(self, reason: str, now: float) -> list[Action]:
        """The operator ends the run: after this step and a snapshot; asked again, at once."""
        if self.stopped:
            return []
        if self._stopping is not None or self.epoch is None or not self._holds_progress(self.epoch):
            return self._stop(reason, failed=False)
        self._stopping = reason
        return []

    # ---- what nodes say

    def message(self, node_id: str, message: NodeMessage, now: float) -> list[Action]:
        """Handle one control message; what is of another epoch, or from a node without a seat, is dropped.

        But for complaints: the node at fault may have told of its broken link first.
        """
        self.heard(node_id, now)
        epoch, ended = self.epoch, self._ended
        if isinstance(message, StepFailed) and ended is not None and message.epoch == ended.number:
            return self._complaint(ended, node_id, message, now)
        if self.stopped or epoch is None or node_id not in epoch.seats:
            return []
        match message:
            case Placed() if message.epoch == epoch.number:
                return epoch.placed(node_id, message)
            case Ready() if message.epoch == epoch.number:
                return self._progress(epoch, epoch.ready(node_id), now)
            case Vote() if message.epoch == epoch.number:
                return self._voted(epoch, epoch.vote(node_id, message), now)
            case Applied() if message.epoch == epoch.number:
                return self._progress(epoch, epoch.applied(node_id, message.step), now)
            case StepFailed() if message.epoch == epoch.number:
                return self._failed(epoch, node_id, message, now)
            case _:
                return []

    def snapshot_stored(self, step: int, now: float) -> list[Action]:
        """The snapshot of `step` is complete and on disk."""
        self.newest_snapshot = max(self.newest_snapshot, step)
        self._asked = [asked for asked in self._asked if asked > self.newest_snapshot]
        epoch = self.epoch
        if self.stopped or epoch is None:
            return []
        actions = [action for node in self._spares(epoch) for action in self._prefetch(node)]
        if self._saving and epoch.step == step:
            self._saving = False
            actions += self._between_steps(epoch, now)
        return actions

    def plan_windows(self, epoch: int, windows: tuple[int, ...]) -> list[Action]:
        """From this epoch's next step on, links have these windows; in later epochs of as many stages too."""
        if self.epoch is not None and self.epoch.number == epoch:
            self._windows = self.epoch.planned_windows = windows
        return []

    def save(self) -> list[Action]:
        """The operator asks for a snapshot: the next step that ends has one, due or not."""
        self._save_asked = True
        return []

    def fail(self, reason: str) -> list[Action]:
        """Something that the run cannot do without has failed; snapshots on disk are intact."""
        return self._stop(reason, failed=True)

    # ---- inside: steps

    def _voted(
        self, epoch: Epoch, outcome: list[Action] | NonFinite | FiniteUncompressed, now: float
    ) -> list[Action]:
        match outcome:
            case NonFinite():
                return self._not_finite(epoch, outcome.node_id, outcome.what, now)
            case FiniteUncompressed():
                _, what = self._suspect or (epoch.step, "a tensor")
                return self._stop(
                    f"step {epoch.step + 1} was not committed: {what}; with uncompressed links it is finite, "
                    f"so the codecs are the cause; {self._what_is_kept()}: use wider codecs in "
                    "[pipeline], then resume",
                    failed=True,
                )
            case _:
                if outcome and epoch.committed is not None:
                    self._committed = epoch.committed
                    self._newest_state = max(self._newest_state, epoch.committed.step + 1)
                    if self._suspect is not None and self._suspect[0] == epoch.committed.step:
                        self._suspect = None
                return outcome

    def _progress(self, epoch: Epoch, actions: list[Action], now: float) -> list[Action]:
        """After a restore or a step is complete, decide what comes next."""
        if not actions:
            return []
        if isinstance(actions[-1], StepDone):
            self._retries = 0
        due = epoch.step % self.plan.snapshot_every == 0
        if (due or self._save_asked) and epoch.step < self.plan.total_steps:
            if due:
                # Also after a restore: the epoch that should have taken this snapshot may have ended badly.
                self._growing = self._can_grow(epoch)
            wanted = self.newest_snapshot < epoch.step and len(self._asked) < MAX_ASKED_SNAPSHOTS
            if wanted and self._may_go_on(epoch):
                self._save_asked = False
                actions = [*actions, *self._snapshot(epoch)]
        return actions + self._between_steps(epoch, now)

    def _between_steps(self, epoch: Epoch, now: float) -> list[Action]:
        if self._may_go_on(epoch):
            return epoch.begin()
        if self.newest_snapshot < epoch.step:
            self._saving = True
            return self._snapshot(epoch)
        if epoch.step >= self.plan.total_steps:
            return self._stop("all steps are done", failed=False)
        if self._stopping is not None:
            return self._stop(self._stopping, failed=False)
        if self._growing:
            self._seating.regroup(now)
        return self._end_epoch(AbortKind.PLACEMENT, "the placement changes") + self._try_place(now)

    def _may_go_on(self, epoch: Epoch) -> bool:
        leaving = any(self.members[node].leaving for node in epoch.seats)
        return (
            epoch.step < self.plan.total_steps
            and self._stopping is None
            and not leaving
            and not self._growing
        )

    def _holds_progress(self, epoch: Epoch) -> bool:
        """Whether the epoch may be past the newest snapshot, so that ending it now would lose work."""
        return epoch.phase in (Phase.STEPPING, Phase.APPLYING) or self._saving

    def _snapshot(self, epoch: Epoch) -> list[Action]:
        self._asked.append(epoch.step)
        return [OpenSnapshot(step=epoch.step), *epoch.take_snapshot()]

    def _can_grow(self, epoch: Epoch) -> bool:
        if any(self.members[node].disconnected_at is not None for node in epoch.seats):
            return False
        return self._seating.can_grow(len(epoch.seats), self._candidates())

    # ---- inside: failures

    def _failed(self, epoch: Epoch, node_id: str, message: StepFailed, now: float) -> list[Action]:
        if message.kind is FailureKind.NON_FINITE:
            return self._not_finite(epoch, node_id, message.message, now)
        actions = self._complaint(epoch, node_id, message, now)
        if self.epoch is not epoch:
            return actions
        self._retries += 1
        reason = f"stage {epoch.seats.index(node_id)}: {message.message}"
        if self._retries > MAX_RETRIES:
            return actions + self._stop(
                f"step {epoch.step + 1} failed {self._retries} times in a row, last at {reason}; "
                f"{self._what_is_kept()}: mend that, then resume",
                failed=True,
            )
        return actions + self._end_epoch(AbortKind.FAILED, reason) + self._try_place(now)

    def _not_finite(self, epoch: Epoch, node_id: str, what: str, now: float) -> list[Action]:
        """First time: the same step again without compression. Second time: the run diverges."""
        what = f"{what} at stage {epoch.seats.index(node_id)} is not finite"
        if not epoch.uncompressed:
            self._suspect = (epoch.step, what)
            note = f"step {epoch.step + 1} is not committed: {what}; running it again with uncompressed links"
            ended = self._end_epoch(AbortKind.NOT_FINITE, what)
            return [Announce(text=note), *ended, *self._try_place(now)]
        return self._stop(
            f"step {epoch.step + 1} was not committed: {what}, with uncompressed links too, so the run "
            f"diverges; {self._what_is_kept()}: lower training.lr, then resume",
            failed=True,
        )

    def _complaint(self, epoch: Epoch, node_id: str, message: StepFailed, now: float) -> list[Action]:
        """What a stage says against a neighbour."""
        if self.stopped or (culprit := self._complaints.hear(epoch, node_id, message)) is None:
            return []
        why = f"quarantined: {message.message}"
        return [
            Send(node_id=culprit, message=Finish(reason=why, failed=True)),
            *self.lost(culprit, why, now),
        ]

    # ---- inside: seats

    def _release(self, node_id: str, now: float) -> list[Action]:
        """Let a node go that asked to."""
        del self.members[node_id]
        return [
            *self._unseat(node_id, f"node {node_id} left", now),
            Send(node_id=node_id, message=Finish(reason="you have left the run", failed=False)),
            Released(node_id=node_id, reason="it left"),
        ]

    def _gone(self, node_id: str, reason: str, now: float) -> list[Action]:
        if self.stopped or self.members.pop(node_id, None) is None:
            return []
        lost = self._unseat(node_id, f"node {node_id} is gone: {reason}", now)
        return [Released(node_id=node_id, reason=reason), *lost]

    def _unseat(self, node_id: str, reason: str, now: float) -> list[Action]:
        if self._seating.vacate(node_id, now):
            # Failures that its neighbours told of were its own end.
            self._retries = 0
        if self.epoch is None or node_id not in self.epoch.seats:
            return []
        return self._end_epoch(AbortKind.LOST, reason)

    def _end_epoch(self, kind: AbortKind, reason: str) -> list[Action]:
        epoch = self.epoch
        if epoch is None:
            return []
        self.epoch, self._ended = None, epoch
        self._saving = False
        self._growing = False
        self._asked.clear()
        aborts: list[Action] = [
            Send(node_id=node, message=Abort(epoch=epoch.number, reason=reason))
            for node in epoch.seats
            if node in self.members
        ]
        return [*aborts, Aborted(epoch=epoch.number, step=epoch.step, kind=kind, reason=reason)]

    def _try_place(self, now: float) -> list[Action]:
        """Between epochs: end the run if it is to stop, let go who wants to, start an epoch if it can be."""
        if self.stopped or self.epoch is not None:
            return []
        if self._stopping is not None:
            return self._stop(self._stopping, failed=False)
        actions: list[Action] = []
        for node_id in [node for node, member in self.members.items() if member.leaving]:
            actions += self._release(node_id, now)
        nodes = self._seating.choose(self._candidates(), now)
        if nodes is None:
            return actions + self._explain_wait()
        self._told = None
        self._last_epoch += 1
        self._placed_at = now
        self.epoch = Epoch(
            number=self._last_epoch,
            seats=nodes,
            addresses=tuple(self.members[node].address for node in nodes),
            newest_snapshot=self.newest_snapshot,
            newest_state=self._newest_state,
            committed=self._committed,
            suspect_step=self._suspect[0] if self._suspect is not None else None,
            plan=self._step_plan,
        )
        if len(self._windows) == len(nodes) - 1:
            self.epoch.planned_windows = self._windows
        placement = RecordPlacement(epoch=self._last_epoch, nodes=nodes, addresses=self.epoch.addresses)
        return [*actions, placement, *self.epoch.announce()]

    def _candidates(self) -> list[Candidate]:
        return [
            member.offer
            for member in self.members.values()
            if member.disconnected_at is None and not member.leaving
        ]

    def _explain_wait(self) -> list[Action]:
        line = self._seating.shortage(self._candidates())
        if line is None or line == self._told:
            return []
        self._told = line
        return [Announce(text=line)]

    def _spares(self, epoch: Epoch) -> list[str]:
        return [
            node
            for node, member in self.members.items()
            if node not in epoch.seats and member.disconnected_at is None and not member.leaving
        ]

    def _prefetch(self, node_id: str) -> list[Action]:
        """Keep a spare warm: the newest snapshot, the stage that it would most likely take first."""
        epoch = self.epoch
        if epoch is None or self.newest_snapshot == 0 or node_id not in self._spares(epoch):
            return []
        order = prefetch_order(self._spares(epoch).index(node_id), self.plan.units(len(epoch.seats)))
        return [Send(node_id=node_id, message=Prefetch(step=self.newest_snapshot, units=order))]

    def _what_is_kept(self) -> str:
        if self.newest_snapshot == 0:
            return "no snapshot was due yet"
        return f"the snapshot of step {self.newest_snapshot} is intact"

    def _stop(self, reason: str, *, failed: bool) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = True
        self.epoch = None
        finishes: list[Action] = [
            Send(node_id=node, message=Finish(reason=reason, failed=failed)) for node in self.members
        ]
        return [*finishes, Stop(reason=reason, failed=failed)]


def _send_away(node_id: str, reason: str) -> list[Action]:
    finish = Finish(reason=reason, failed=True)
    return [Send(node_id=node_id, message=finish), Released(node_id=node_id, reason=reason)]
