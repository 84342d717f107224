"""One epoch: a fixed placement, from the first message that announces it to its end. Pure.

    PLACING     every stage says which state it holds
    RESTORING   every stage loads one common state and warms its links
    STEPPING    the step runs; stages vote
    APPLYING    the commit is recorded; stages apply the optimizer
    IDLE        between steps, when the run must not begin another yet

A message with another epoch's number never reaches this object: `RunMachine` drops it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from node.coordinator.actions import Action, RecordCommit, RecordRestored, Send, StepDone
from wire.messages import (
    Begin,
    Commit,
    CoordinatorMessage,
    PlacedStage,
    Placement,
    Restore,
    TakeSnapshot,
    Vote,
)

Plan = Callable[[int, float], tuple[float, float]]
"""(step, global gradient norm) -> (clip coefficient, learning rate)."""


class Phase(StrEnum):
    PLACING = "placing"
    RESTORING = "restoring"
    STEPPING = "stepping"
    APPLYING = "applying"
    IDLE = "idle"


@dataclass(frozen=True)
class NonFiniteVote:
    """A vote that must not be committed; `what` names the unit or the loss."""

    node_id: str
    what: str


class Epoch:
    """`seats[i]` hosts stage i; `addresses[i]` is where its neighbours reach it."""

    def __init__(
        self,
        *,
        number: int,
        seats: tuple[str, ...],
        addresses: tuple[str, ...],
        newest_snapshot: int,
        plan: Plan,
    ) -> None:
        self.number = number
        self.seats = seats
        self.step = 0
        self.phase = Phase.PLACING
        self._addresses = addresses
        self._newest_snapshot = newest_snapshot
        self._plan = plan
        self._held: dict[str, int] = {}
        self._answered: set[str] = set()
        self._votes: dict[str, Vote] = {}
        self._commit: Commit | None = None
        self._snapshot: TakeSnapshot | None = None

    # ---- what goes out

    def announce(self) -> list[Action]:
        return [Send(node_id=node, message=self._placement(node)) for node in self.seats]

    def begin(self) -> list[Action]:
        """Open the step. Call in `IDLE` only."""
        self.phase = Phase.STEPPING
        self._votes.clear()
        return self._to_all(Begin(epoch=self.number, step=self.step))

    def take_snapshot(self) -> list[Action]:
        """Ask for the state that every stage holds now. Call in `IDLE` only."""
        self._snapshot = TakeSnapshot(epoch=self.number, step=self.step)
        return self._to_all(self._snapshot)

    def outstanding(self, node_id: str) -> list[CoordinatorMessage]:
        """What a node whose control connection broke may have missed; nodes ignore what they know already."""
        if self.phase is Phase.PLACING:
            return [self._placement(node_id)]
        if self.phase is Phase.RESTORING:
            return [Restore(epoch=self.number, step=self.step)]
        missed: list[CoordinatorMessage] = []
        if self._snapshot is not None and self._snapshot.step == self.step:
            missed.append(self._snapshot)
        if self.phase is Phase.STEPPING:
            missed.append(Begin(epoch=self.number, step=self.step))
        elif self.phase is Phase.APPLYING and self._commit is not None:
            missed.append(self._commit)
        return missed

    # ---- what comes in

    def placed(self, node_id: str, held_step: int) -> list[Action]:
        if self.phase is not Phase.PLACING or node_id not in self.seats:
            return []
        self._held[node_id] = held_step
        if len(self._held) < len(self.seats):
            return []
        held = set(self._held.values())
        # Stages that agree go on from where they are; otherwise all go back to what is on disk.
        common = held.pop() if len(held) == 1 else -1
        self.step = common if common >= self._newest_snapshot else self._newest_snapshot
        self.phase = Phase.RESTORING
        self._answered.clear()
        return self._to_all(Restore(epoch=self.number, step=self.step))

    def ready(self, node_id: str) -> list[Action]:
        if self.phase is not Phase.RESTORING or node_id not in self.seats:
            return []
        self._answered.add(node_id)
        if len(self._answered) < len(self.seats):
            return []
        self.phase = Phase.IDLE
        return [RecordRestored(epoch=self.number, step=self.step)]

    def vote(self, node_id: str, vote: Vote) -> list[Action] | NonFiniteVote:
        if self.phase is not Phase.STEPPING or vote.step != self.step or node_id not in self.seats:
            return []
        for unit, norm in vote.norms.items():
            if not math.isfinite(norm):
                return NonFiniteVote(node_id, f"the gradient of layer unit {unit}")
        if vote.loss is not None and not math.isfinite(vote.loss):
            return NonFiniteVote(node_id, "the loss")
        self._votes[node_id] = vote
        if len(self._votes) < len(self.seats):
            return []
        return self._commit_step(node_id)

    def applied(self, node_id: str, step: int) -> list[Action]:
        if self.phase is not Phase.APPLYING or step != self.step or node_id not in self.seats:
            return []
        self._answered.add(node_id)
        if len(self._answered) < len(self.seats):
            return []
        self.phase = Phase.IDLE
        self.step += 1
        return [StepDone(epoch=self.number, step=step)]

    # ---- inside

    def _commit_step(self, last_voter: str) -> list[Action] | NonFiniteVote:
        norms: dict[int, float] = {}
        for vote in self._votes.values():
            norms.update(vote.norms)
        grad_norm = global_norm(norms)
        if not math.isfinite(grad_norm):
            return NonFiniteVote(last_voter, "the global gradient norm")
        loss = next((vote.loss for vote in self._votes.values() if vote.loss is not None), math.nan)
        clip, lr = self._plan(self.step, grad_norm)
        self._commit = Commit(epoch=self.number, step=self.step, clip_coefficient=clip, lr=lr)
        self.phase = Phase.APPLYING
        self._answered.clear()
        record = RecordCommit(
            epoch=self.number, step=self.step, loss=loss, grad_norm=grad_norm, lr=lr, clip_coefficient=clip
        )
        return [record, *self._to_all(self._commit)]

    def _placement(self, node_id: str) -> Placement:
        return Placement(
            epoch=self.number,
            stage=self.seats.index(node_id),
            stages=tuple(
                PlacedStage(node_id=node, address=address)
                for node, address in zip(self.seats, self._addresses, strict=True)
            ),
        )

    def _to_all(self, message: CoordinatorMessage) -> list[Action]:
        return [Send(node_id=node, message=message) for node in self.seats]


def global_norm(squared_norms: Mapping[int, float]) -> float:
    """The norm over all units, summed in model order so that it does not depend on the split."""
    total = 0.0
    for unit in sorted(squared_norms):
        total += squared_norms[unit]
    return math.sqrt(total)
