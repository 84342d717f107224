"""What nodes without a stage are sent ahead of need. Pure."""

from collections.abc import Callable, Iterable, Sequence

from node.coordinator.actions import Action, Send
from node.coordinator.epoch import Epoch
from node.coordinator.roster import Roster
from node.coordinator.seating import prefetch_order
from wire.messages import Prefetch


def keep_warm(
    nodes: Iterable[str],
    epoch: Epoch | None,
    roster: Roster,
    newest: int,
    units: Callable[[int], Sequence[Sequence[str]]],
) -> list[Action]:
    """To spares among `nodes`: the newest snapshot, the stage that each would most likely take first.

    Args:
        newest: its step; 0 when there is none.
        units: number of stages -> the layer units of each.
    """
    if epoch is None or newest == 0:
        return []
    spares, split = roster.spares(epoch.seats), units(len(epoch.seats))
    orders = {node: prefetch_order(spares.index(node), split) for node in nodes if node in spares}
    return [Send(node_id=node, message=Prefetch(step=newest, units=order)) for node, order in orders.items()]
