"""Who is to give up a stage when a step keeps failing though nobody is dead. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence

from node.coordinator.complaints import neighbours
from node.coordinator.epoch import Epoch
from node.coordinator.seating import Candidate
from wire.messages import FailureKind, StepFailed


class Blame:
    """What is held against nodes since a step was last done."""

    def __init__(self) -> None:
        self._unseated: set[str] = set()
        """They gave up a stage for it."""
        self._heeded: set[str] = set()
        """A neighbour gave up its stage on their word."""
        self._named: Counter[str] = Counter()
        """In how many failures, since the newest change of seats, each had a part."""
        self._at_work: frozenset[str] = frozenset()
        """Who did the newest step that is done."""

    def done(self, nodes: Collection[str]) -> None:
        """These nodes have done a step."""
        self._at_work = frozenset(nodes)
        self._unseated.clear()
        self._heeded.clear()
        self._named.clear()

    def suspects(self, epoch: Epoch, node_id: str, failure: StepFailed) -> Sequence[str]:
        """Take what a stage says of a failure: who may be at fault, the likeliest first.

        Of a link the other end, unless there is more against this one: on its word another has gone already,
        it is new where the other is not, or other failures were of its links too.
        """
        other = _other_end(epoch, node_id, failure)
        ends = [node_id] if other is None else [other, node_id]
        self._named.update(ends)
        return sorted(
            ends, key=lambda node: (node not in self._heeded, node in self._at_work, -self._named[node])
        )

    def unseat(self, culprit: str, *, by: str) -> None:
        """The node gives up its stage, for what `by` said."""
        self._unseated.add(culprit)
        if by != culprit:
            self._heeded.add(by)
        self._named.clear()

    def blameless(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that have not given up a stage."""
        return [candidate for candidate in candidates if candidate.node_id not in self._unseated]


def _other_end(epoch: Epoch, node_id: str, failure: StepFailed) -> str | None:
    """Who is at the other end of the link that failed, if it was one of a neighbour's."""
    if failure.kind not in (FailureKind.LINK, FailureKind.PEER):
        return None
    stage = failure.peer_stage
    return epoch.seats[stage] if stage in neighbours(epoch, node_id) else None
