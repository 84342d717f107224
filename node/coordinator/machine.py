"""The run as a pure state machine: who is in it, which epoch is on, and when it is over.

Events come in as method calls with the time as an argument (seconds on any monotonic clock); what must be
done comes out as a list of actions. No I/O, no clock, no randomness: the same events give the same actions.

Invariants (tested): at most one node a stage an epoch; epoch numbers only grow; a step is committed at most
once an epoch, after every stage voted, and never before the commit is recorded; steps are committed in order.
"""

from dataclasses import dataclass

from node.coordinator.actions import (
    Aborted,
    Action,
    OpenSnapshot,
    RecordPlacement,
    Released,
    Send,
    StepDone,
    Stop,
)
from node.coordinator.epoch import Epoch, NonFiniteVote, Phase, Plan
from wire.messages import Abort, Applied, FailureKind, Finish, NodeMessage, Placed, Ready, StepFailed, Vote

MAX_RETRIES = 3
"""Attempts at one step that may fail, with nobody dead, before the run stops."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What the run file says, as far as the state machine needs it. Times in seconds."""

    stages: int
    total_steps: int
    snapshot_every: int
    silent_seconds: float
    reconnect_seconds: float
    """How long a node whose connection broke may take to come back before it counts as dead."""


@dataclass
class Member:
    """A node that is connected, or was a moment ago."""

    address: str
    process_nonce: int
    last_heard: float
    disconnected_at: float | None = None
    leaving: bool = False


class RunMachine:
    """`last_epoch` and `newest_snapshot` come from the database (0 and 0 for a new run)."""

    def __init__(
        self, plan: RunPlan, step_plan: Plan, *, last_epoch: int = 0, newest_snapshot: int = 0
    ) -> None:
        self.plan = plan
        self.newest_snapshot = newest_snapshot
        self.members: dict[str, Member] = {}
        self.epoch: Epoch | None = None
        self.stopped = False
        self._step_plan = step_plan
        self._last_epoch = last_epoch
        self._seats: list[str | None] = [None] * plan.stages
        self._retries = 0
        self._stopping: str | None = None
        self._saving = False

    # ---- who is here

    def hello(self, node_id: str, address: str, process_nonce: int, now: float) -> list[Action]:
        """A node opened its control connection: for the first time, again, or as a new process."""
        if self.stopped:
            return [Send(node_id=node_id, message=Finish(reason="the run is over", failed=False))]
        member = self.members.get(node_id)
        actions: list[Action] = []
        if member is not None and member.process_nonce == process_nonce:
            member.disconnected_at = None
            member.last_heard = now
            member.address = address
            if self.epoch is not None and node_id in self.epoch.seats:
                return [Send(node_id=node_id, message=m) for m in self.epoch.outstanding(node_id)]
            return self._try_place(now)
        if member is not None:
            actions += self.lost(node_id, "it was started again", now)
        self.members[node_id] = Member(address=address, process_nonce=process_nonce, last_heard=now)
        return actions + self._try_place(now)

    def heard(self, node_id: str, now: float) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.last_heard = now

    def disconnected(self, node_id: str, now: float) -> list[Action]:
        """The control connection broke. Death is declared by `tick` if the node does not come back."""
        if (member := self.members.get(node_id)) is not None:
            member.disconnected_at = now
        return []

    def tick(self, now: float) -> list[Action]:
        """Call about once a second: declares silent and vanished nodes dead."""
        actions: list[Action] = []
        for node_id, member in list(self.members.items()):
            if self.stopped:
                break
            gone = member.disconnected_at
            if gone is not None and now - gone > self.plan.reconnect_seconds:
                actions += self.lost(node_id, "its connection closed and did not come back", now)
            elif gone is None and now - member.last_heard > self.plan.silent_seconds:
                actions += self.lost(
                    node_id, f"it has been silent for more than {self.plan.silent_seconds:g} s", now
                )
        return actions

    def lost(self, node_id: str, reason: str, now: float) -> list[Action]:
        """The node is dead, or was evicted."""
        if self.members.pop(node_id, None) is None:
            return []
        actions: list[Action] = [Released(node_id=node_id, reason=reason)]
        actions += self._end_epoch_without(node_id, f"node {node_id} is gone: {reason}")
        if self._stopping is not None and self.epoch is None:
            return actions + self._stop(self._stopping, failed=False)
        return actions + self._try_place(now)

    def leave(self, node_id: str, now: float) -> list[Action]:
        """The node asks to go. It is released once the state it holds is on disk."""
        member = self.members.get(node_id)
        if member is None:
            return []
        member.leaving = True
        epoch = self.epoch
        if epoch is not None and node_id in epoch.seats and epoch.phase in (Phase.STEPPING, Phase.APPLYING):
            return []  # the step ends first, then `_between_steps` sees the flag
        if epoch is not None and node_id in epoch.seats and self._saving:
            return []
        return self._release(node_id, now)

    def stop(self, reason: str, now: float) -> list[Action]:
        """The operator wants the run to end: after this step and a snapshot; a second call ends it at once."""
        if self.stopped:
            return []
        epoch = self.epoch
        running = epoch is not None and (
            epoch.phase in (Phase.STEPPING, Phase.APPLYING) or (epoch.phase is Phase.IDLE and self._saving)
        )
        if self._stopping is not None or not running:
            return self._stop(reason, failed=False)
        self._stopping = reason
        return []

    # ---- what nodes say

    def message(self, node_id: str, message: NodeMessage, now: float) -> list[Action]:
        """Handle one control message; anything of another epoch, or from a node without a seat, is dropped."""
        self.heard(node_id, now)
        epoch = self.epoch
        if self.stopped or epoch is None or node_id not in epoch.seats:
            return []
        match message:
            case Placed() if message.epoch == epoch.number:
                return epoch.placed(node_id, message.held_step)
            case Ready() if message.epoch == epoch.number:
                return self._progress(epoch.ready(node_id), now)
            case Vote() if message.epoch == epoch.number:
                outcome = epoch.vote(node_id, message)
                if isinstance(outcome, NonFiniteVote):
                    return self._stop(self._non_finite(epoch, outcome.node_id, outcome.what), failed=True)
                return outcome
            case Applied() if message.epoch == epoch.number:
                return self._progress(epoch.applied(node_id, message.step), now)
            case StepFailed() if message.epoch == epoch.number:
                return self._failed(epoch, node_id, message, now)
            case _:
                return []

    def snapshot_stored(self, step: int, now: float) -> list[Action]:
        """The snapshot of `step` is complete and on disk."""
        self.newest_snapshot = max(self.newest_snapshot, step)
        epoch = self.epoch
        if self.stopped or epoch is None or not self._saving or epoch.step != step:
            return []
        self._saving = False
        return self._between_steps(epoch, now)

    def snapshot_failed(self, reason: str) -> list[Action]:
        """A snapshot cannot be written; the ones before it are intact."""
        return self._stop(reason, failed=True)

    # ---- inside

    def _progress(self, actions: list[Action], now: float) -> list[Action]:
        """After a restore or a step is complete, decide what comes next."""
        epoch = self.epoch
        if epoch is None or not actions or epoch.phase is not Phase.IDLE:
            return actions
        if isinstance(actions[-1], StepDone):
            self._retries = 0
            due = epoch.step % self.plan.snapshot_every == 0
            if due and self._may_go_on(epoch):
                actions = [*actions, *self._snapshot(epoch)]
        return actions + self._between_steps(epoch, now)

    def _may_go_on(self, epoch: Epoch) -> bool:
        leaving = any(self.members[node].leaving for node in epoch.seats if node in self.members)
        return epoch.step < self.plan.total_steps and self._stopping is None and not leaving

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
        actions: list[Action] = []
        for node in epoch.seats:
            if self.members[node].leaving:
                actions += self._release(node, now)
        return actions

    def _snapshot(self, epoch: Epoch) -> list[Action]:
        return [OpenSnapshot(step=epoch.step), *epoch.take_snapshot()]

    def _release(self, node_id: str, now: float) -> list[Action]:
        self.members.pop(node_id, None)
        actions: list[Action] = [
            Send(node_id=node_id, message=Finish(reason="you have left the run", failed=False)),
            Released(node_id=node_id, reason="it left"),
        ]
        return actions + self._end_epoch_without(node_id, f"node {node_id} left") + self._try_place(now)

    def _failed(self, epoch: Epoch, node_id: str, message: StepFailed, now: float) -> list[Action]:
        stage = epoch.seats.index(node_id)
        if message.kind is FailureKind.NON_FINITE:
            return self._stop(self._non_finite(epoch, node_id, message.message), failed=True)
        self._retries += 1
        reason = f"stage {stage}: {message.message}"
        if self._retries > MAX_RETRIES:
            return self._stop(
                f"step {epoch.step} failed {self._retries} times in a row, last at {reason}", failed=True
            )
        return self._end_epoch(reason) + self._try_place(now)

    def _non_finite(self, epoch: Epoch, node_id: str, what: str) -> str:
        stage = epoch.seats.index(node_id)
        return (
            f"step {epoch.step} was not committed: {what} at stage {stage} is not finite; the snapshot of "
            f"step {self.newest_snapshot} is intact: lower training.lr or use wider codecs, then resume"
        )

    def _end_epoch_without(self, node_id: str, reason: str) -> list[Action]:
        self._seats = [None if seat == node_id else seat for seat in self._seats]
        if self.epoch is None or node_id not in self.epoch.seats:
            return []
        return self._end_epoch(reason)

    def _end_epoch(self, reason: str) -> list[Action]:
        epoch = self.epoch
        if epoch is None:
            return []
        self.epoch = None
        self._saving = False
        aborts: list[Action] = [
            Send(node_id=node, message=Abort(epoch=epoch.number, reason=reason))
            for node in epoch.seats
            if node in self.members
        ]
        return [*aborts, Aborted(epoch=epoch.number, step=epoch.step, reason=reason)]

    def _try_place(self, now: float) -> list[Action]:
        """Start an epoch if every stage has somebody; nodes keep their seats, newcomers fill the gaps."""
        if self.stopped or self.epoch is not None or self._stopping is not None:
            return []
        present = [n for n, m in self.members.items() if m.disconnected_at is None and not m.leaving]
        seats = [seat if seat in present else None for seat in self._seats]
        waiting = [node for node in present if node not in seats]
        filled = [seat if seat is not None else (waiting.pop(0) if waiting else None) for seat in seats]
        if any(seat is None for seat in filled):
            return []
        nodes = tuple(seat for seat in filled if seat is not None)
        self._seats = list(nodes)
        self._last_epoch += 1
        self.epoch = Epoch(
            number=self._last_epoch,
            seats=nodes,
            addresses=tuple(self.members[node].address for node in nodes),
            newest_snapshot=self.newest_snapshot,
            plan=self._step_plan,
        )
        return [RecordPlacement(epoch=self._last_epoch, nodes=nodes), *self.epoch.announce()]

    def _stop(self, reason: str, *, failed: bool) -> list[Action]:
        if self.stopped:
            return []
        self.stopped = True
        self.epoch = None
        finishes: list[Action] = [
            Send(node_id=node, message=Finish(reason=reason, failed=failed)) for node in self.members
        ]
        return [*finishes, Stop(reason=reason, failed=failed)]
