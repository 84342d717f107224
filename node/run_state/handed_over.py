"""Which groups of a step do not depend any more on the nodes that computed them. Pure.

A node reports the groups whose sums have arrived at other nodes of its stage: at those that sum up the
pieces, and at those that would do so without the node. If it dies then, its row keeps these groups as soon as
the row's other nodes have computed them, too. Each node that holds sums of a dead one then sends them to the
node that would replace it, and reports that. If it dies earlier, these groups are lost.
"""

from collections.abc import Callable, Collection, Iterable

from wire.messages import HandedOver


class HandedGroups:
    """What the rows of one step have handed over."""

    def __init__(self) -> None:
        self._computed: dict[str, set[int]] = {}
        """By node: groups that it has computed completely."""
        self._safe: dict[str, dict[int, float | None]] = {}
        """By node: the groups of these that survive the node, and their losses."""
        self._passed_on: dict[str, set[int]] = {}
        """By node: groups of rows without a node of its stage that survive it, too."""
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
            self._passed_on.setdefault(node_id, set()).update(message.passed_on)

    def kept_without(self, node_id: str, mates: Iterable[str], groups: Collection[int]) -> set[int]:
        """The groups that a row keeps if it loses this node. `mates`: its other nodes."""
        return self.computed(mates, groups).intersection(self._safe.get(node_id, ()))

    def computed(self, nodes: Iterable[str], groups: Collection[int]) -> set[int]:
        """The groups of these that all of some nodes have computed completely."""
        return set(groups).intersection(*(self._computed.get(node, set()) for node in nodes))

    def keeps(self, row: int, stage: int) -> bool:
        """Whether a row has lost its node of this stage and kept groups."""
        return stage in self._kept.get(row, ())

    def at_risk(self, node_id: str, stage: int, groups_of: Callable[[int], Collection[int]]) -> list[int]:
        """The rows whose kept groups are lost if this node of a stage dies. `groups_of`: a row's groups."""
        safe = self._passed_on.get(node_id, set())
        return [row for row in self._kept if self.keeps(row, stage) and not safe.issuperset(groups_of(row))]

    def keep(self, row: int, stage: int) -> None:
        """A row has lost its node of this stage, and has kept groups."""
        self._kept.setdefault(row, set()).add(stage)

    def lose(self, row: int) -> None:
        """A row has lost all its groups."""
        self._kept.pop(row, None)

    def node_lost(self, node_id: str, stage: int, column: Iterable[str], generation: int) -> dict[int, float]:
        """A node is gone. What the other nodes of its stage had sent to it has to be sent again, so their
        reports count no more. Returns the losses that the node has reported.

        Args:
            column: the other nodes of the stage.
            generation: the first in which they know.
        """
        losses = self.losses(node_id)
        self._safe.pop(node_id, None)
        self._computed.pop(node_id, None)
        self._passed_on.pop(node_id, None)
        for other in column:
            self._safe.pop(other, None)
            self._passed_on.pop(other, None)
        self._valid_from[stage] = generation
        return losses

    def losses(self, node_id: str) -> dict[int, float]:
        """The losses of groups that a node has reported."""
        return {group: loss for group, loss in self._safe.get(node_id, {}).items() if loss is not None}
