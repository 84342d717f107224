"""What stages say against their neighbours, and when it is enough. Pure."""

from node.coordinator.epoch import Epoch
from wire.messages import FailureKind, StepFailed

MAX_STRIKES = 3
"""Complaints of its neighbours about a node before it is quarantined."""
MAX_ALONE = 2
"""Nodes that are quarantined on the word of one neighbour alone; at the next it is out itself."""


def neighbours(epoch: Epoch, node_id: str) -> set[int]:
    """The stages that this one's node may have links to; the first and the last may have one too."""
    stage, stages = epoch.seats.index(node_id), len(epoch.seats)
    around = {stage - 1, stage + 1, *({0, stages - 1} if stage in (0, stages - 1) else ())} - {stage}
    return around & set(range(stages))


class Complaints:
    """Strikes against nodes: one an epoch is enough, whoever complains.

    Nobody but its neighbours can tell a node that breaks the protocol from one that is slandered. So one word
    is enough against a node or two, but who finds fault with every neighbour is the one at fault.
    """

    def __init__(self) -> None:
        self.quarantined: dict[str, str] = {}
        """Why nobody works with a node any more."""
        self._strikes: dict[str, int] = {}
        self._struck: dict[str, int] = {}
        """The epoch of each node's newest strike."""
        self._accusers: dict[str, set[str]] = {}
        """Who has complained of each node."""
        self._alone: dict[str, list[str]] = {}
        """The nodes that are quarantined on this one's word alone."""

    def hear(self, epoch: Epoch, node_id: str, message: StepFailed) -> str | None:
        """Take what a stage of `epoch` says; gives the node that is quarantined for it."""
        if message.kind is not FailureKind.PEER or node_id not in epoch.seats:
            return None
        # Only a neighbour can know.
        if message.peer_stage not in neighbours(epoch, node_id):
            return None
        culprit = epoch.seats[message.peer_stage]
        accusers = self._accusers.setdefault(culprit, set())
        accusers.add(node_id)
        if self._struck.get(culprit, 0) >= epoch.number:
            return None
        self._struck[culprit] = epoch.number
        self._strikes[culprit] = self._strikes.get(culprit, 0) + 1
        if self._strikes[culprit] < MAX_STRIKES:
            return None
        if len(accusers) == 1:
            others = self._alone.setdefault(node_id, [])
            if len(others) >= MAX_ALONE:
                del self._strikes[culprit], self._accusers[culprit]
                named = " and ".join(others)
                self.quarantined[node_id] = f"it alone found fault with {named}, and then with {culprit}"
                return node_id
            others.append(culprit)
        self.quarantined[culprit] = message.message
        return culprit
