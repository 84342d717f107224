"""What stages say against their neighbours, and when it is enough. Pure."""

from node.coordinator.epoch import Epoch
from wire.messages import FailureKind, StepFailed

MAX_STRIKES = 3
"""Complaints of its neighbours about a node before it is quarantined."""


class Complaints:
    """Strikes against nodes: one an epoch is enough, whoever complains."""

    def __init__(self) -> None:
        self.quarantined: dict[str, str] = {}
        """Why nobody works with a node any more."""
        self._strikes: dict[str, int] = {}
        self._struck: dict[str, int] = {}
        """The epoch of each node's newest strike."""

    def hear(self, epoch: Epoch, node_id: str, message: StepFailed) -> str | None:
        """Take what a stage of `epoch` says; gives the node that is quarantined for it."""
        if message.kind is not FailureKind.PEER or node_id not in epoch.seats:
            return None
        stage, stages = epoch.seats.index(node_id), len(epoch.seats)
        # Only a neighbour can know; the first and the last stage may be neighbours too.
        peers = {stage - 1, stage + 1, *({0, stages - 1} if stage in (0, stages - 1) else ())} - {stage}
        if message.peer_stage not in peers & set(range(stages)):
            return None
        culprit = epoch.seats[message.peer_stage]
        if self._struck.get(culprit, 0) >= epoch.number:
            return None
        self._struck[culprit] = epoch.number
        self._strikes[culprit] = self._strikes.get(culprit, 0) + 1
        if self._strikes[culprit] < MAX_STRIKES:
            return None
        self.quarantined[culprit] = message.message
        return culprit
