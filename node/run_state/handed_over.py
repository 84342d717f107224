"""Which groups of a step do not depend any more on the nodes that computed them. Pure.

A node reports the groups whose sums have arrived at other nodes of its stage: at those that sum up the
pieces, and at those that would do so without the node. If it dies then, its row keeps these groups as soon as
the row's other nodes have computed them, too. They are lost if one more node of the stage dies, because what
it had been given is nowhere else.
"""

from collections.abc import Collection, Iterable

from wire.messages import HandedOver


class HandedGroups:
    """What the rows of one step have handed over."""

    def __init__(self) -> None:
        self._computed: dict[str, set[int]] = {}
        """By node: groups that it has computed completely."""
        self._safe: dict[str, dict[int, float | None]] = {}
        """By node: the groups of these that survive the node, and their losses."""
        self._valid_from: dict[int, int] = {}
        """By stage: the first generation whose reports count."""
        self._kept: dict[int, set[int]] = {}
        """By row: the stages at which it lost a node and still kept groups."""

    def said(self, node_id: str, stage: int, message: HandedOver) -> None:
        """A node has handed over groups."""
        self._computed.setdefault(node_id, set()).update(message.groups)
        if message.generation >= self._valid_from.get(stage, 0):
            losses = message.group_losses
            self._safe.setdefault(node_id, {}).update((group, losses.get(group)) for group in message.groups)

    def kept_without(self, node_id: str, mates: Iterable[str], groups: Collection[int]) -> set[int]:
        """The groups that a row keeps if it loses this node. `mates`: its other nodes."""
        kept = set(groups).intersection(self._safe.get(node_id, ()))
        return kept.intersection(*(self._computed.get(mate, set()) for mate in mates))

    def at_risk(self, stage: int) -> list[int]:
        """The rows whose kept groups are lost when any other node of this stage dies."""
        return [row for row, stages in self._kept.items() if stage in stages]

    def keep(self, row: int, stage: int) -> None:
        """A row has lost its node of this stage, and has kept groups."""
        self._kept.setdefault(row, set()).add(stage)

    def lose(self, row: int) -> None:
        """A row has lost all its groups."""
        self._kept.pop(row, None)

    def node_lost(self, node_id: str, stage: int, column: Iterable[str], generation: int) -> dict[int, float]:
        """A node is gone. The other nodes of its stage hand over again what they had given to it. Returns
        the losses that the node has reported.

        Args:
            column: the other nodes of the stage.
            generation: the first in which they know.
        """
        losses = self._safe.pop(node_id, {})
        self._computed.pop(node_id, None)
        for other in column:
            self._safe.pop(other, None)
        self._valid_from[stage] = generation
        return {group: loss for group, loss in losses.items() if loss is not None}
