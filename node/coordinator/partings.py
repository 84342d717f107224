"""The actions by which nodes learn that an epoch, their part in the run, or the run is over. Pure."""

from collections.abc import Iterable

from node.coordinator.actions import Action, Released, Send
from wire.messages import Abort, Finish


def epoch_over(nodes: Iterable[str], epoch: int, reason: str) -> list[Action]:
    """They go back to waiting for a place."""
    return [Send(node_id=node, message=Abort(epoch=epoch, reason=reason)) for node in nodes]


def run_over(nodes: Iterable[str], reason: str, *, failed: bool) -> list[Action]:
    """They end."""
    return told(nodes, Finish(reason=reason, failed=failed))


def told(nodes: Iterable[str], finish: Finish) -> list[Action]:
    """So are they, in words that are given."""
    return [Send(node_id=node, message=finish) for node in nodes]


def goodbye(reason: str, *, failed: bool, done: bool) -> Finish:
    """What all hear at the end. Of a run that is stopped with steps left a node ends as of one that failed.

    So whatever keeps it up (systemd, a Job) starts it again, and it is there when the run is resumed.
    """
    if failed or done:
        return Finish(reason=reason, failed=failed)
    left = "the run was stopped before its last step; the same join line goes on once it is resumed"
    return Finish(reason=f"{reason}: {left}", failed=True)


def sent_away(node_id: str, reason: str) -> list[Action]:
    """The run has no use for this node."""
    return [*run_over([node_id], reason, failed=True), Released(node_id=node_id, reason=reason)]


def let_go(node_id: str) -> list[Action]:
    """The node asked for it."""
    return [
        *run_over([node_id], "you have left the run", failed=False),
        Released(node_id=node_id, reason="it left"),
    ]
