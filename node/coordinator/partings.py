"""The actions by which nodes learn that an epoch, their part in the run, or the run is over. Pure."""

from collections.abc import Iterable

from node.coordinator.actions import Action, Released, Send
from wire.messages import Abort, Finish


def epoch_over(nodes: Iterable[str], epoch: int, reason: str) -> list[Action]:
    """They go back to waiting for a place."""
    return [Send(node_id=node, message=Abort(epoch=epoch, reason=reason)) for node in nodes]


def run_over(nodes: Iterable[str], reason: str, *, failed: bool) -> list[Action]:
    """They end."""
    return [Send(node_id=node, message=Finish(reason=reason, failed=failed)) for node in nodes]


def sent_away(node_id: str, reason: str) -> list[Action]:
    """The run has no use for this node."""
    return [*run_over([node_id], reason, failed=True), Released(node_id=node_id, reason=reason)]


def let_go(node_id: str) -> list[Action]:
    """The node asked for it."""
    return [
        *run_over([node_id], "you have left the run", failed=False),
        Released(node_id=node_id, reason="it left"),
    ]
