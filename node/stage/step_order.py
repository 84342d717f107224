"""The order of a row's actions on a stage in a step. Pure, without torch."""

from collections.abc import Sequence
from dataclasses import replace

from node.config.schema import RunConfig
from node.schedule.gradient_groups import RowShare, microbatches_of, parts_of_group
from node.schedule.placement import hops, stage_orders
from node.schedule.routing import StageLayout
from node.schedule.schedule import Action, Kind, Order, held_activations
from wire.errors import ProtocolViolationError

MOST_CACHED = 64


class StepOrder:
    def __init__(self, config: RunConfig, layout: StageLayout, share: RowShare) -> None:
        self._config = config
        self._layout = layout
        self._share = share
        self.groups = share.groups
        """The groups that the row computes in the step."""
        self.windows: tuple[int, ...] = ()
        """Extra microbatches in flight on each link; empty: as in the run file."""
        self.audited: tuple[int, ...] = ()
        """Groups of another row that the step computes too, only for their digests."""
        self._orders: dict[int, Order] = {}
        """Orders by number of microbatches, which are numbered from 0."""
        self._found: dict[tuple[int, ...], Order] = {}
        """Orders by microbatches."""

    def use(
        self,
        link_windows: tuple[int, ...],
        audited: tuple[int, ...] = (),
        groups: tuple[int, ...] | None = None,
    ) -> None:
        """Use these numbers of extra microbatches, or slices, in flight on each link from now on. Empty: use
        the run file's.

        Args:
            audited: groups of another row to compute after this row's, only for their digests.
            groups: this row's groups; as placed by default.

        Raises ProtocolViolationError for windows or groups that do not fit the placement.
        """
        config = self._config
        most, links = config.microbatches * self._layout.slices, hops(config, self._layout.stages)
        if link_windows and (len(link_windows) != links or max(link_windows) > most):
            raise ProtocolViolationError(
                f"the coordinator plans windows {link_windows}; expected {links} of at most {most}"
            )
        groups = self._share.groups if groups is None else groups
        others = set(range(config.pipeline.groups)).difference(groups)
        if not others.issuperset(audited):
            raise ProtocolViolationError(f"the coordinator asks for an audit of the groups {audited}")
        self.audited, self.groups = audited, groups
        if link_windows == self.windows:
            return
        self._orders.clear()
        self._found.clear()
        self.windows = link_windows

    @property
    def numbers(self) -> list[int]:
        """The microbatches that a step computes, in order: the row's, then the audited ones."""
        return self.numbers_of((*self.groups, *self.audited))

    def numbers_of(self, groups: Sequence[int]) -> list[int]:
        return [number for group in groups for number in microbatches_of(self._config, [group])]

    def whole(self) -> Order:
        """The order of a complete exact step."""
        return self._of(self.numbers)

    def of(self, groups: Sequence[int]) -> Order:
        """The order of these groups in an exact step, one after another."""
        return self._of(self.numbers_of(groups))

    def parts(self, group: int, count: int) -> list[Order]:
        """The orders of a group in a round, one for each of its `count` local steps."""
        return [self._of(part) for part in parts_of_group(self._config, group, count)]

    def held_out(self, first: int, microbatches: int) -> list[Action]:
        """This stage's forwards of held-out microbatches, which are numbered from `first`."""
        layout = self._layout
        chunks, ahead = range(layout.chunks), held_activations(self.whole())

        def place(action: Action) -> tuple[int, ...]:
            number = action.microbatch - first
            if layout.interleaved:
                # As many microbatches at a time as there are stages keep all stages of a ring busy.
                return number // layout.stages, action.chunk, number, action.slice
            # A head on the first stage runs as far behind as in training.
            return (number * layout.slices + action.slice + ahead * action.chunk,)

        numbers, slices = range(first, first + microbatches), range(layout.slices)
        actions = (Action(Kind.FORWARD, c, m, s) for c in chunks for m in numbers for s in slices)
        return sorted(actions, key=place)

    def _of(self, microbatches: Sequence[int]) -> Order:
        numbers, layout = tuple(microbatches), self._layout
        if not numbers:
            return ()
        if (order := self._found.get(numbers)) is not None:
            return order
        if len(self._found) >= MOST_CACHED:
            self._found.clear()
        count = len(numbers)
        if count not in self._orders:
            orders = stage_orders(self._config, layout.stages, self.windows or None, count)
            self._orders[count] = orders[layout.stage]
        renumbered = [
            replace(action, microbatch=numbers[action.microbatch]) for action in self._orders[count]
        ]
        order = self._found[numbers] = tuple(renumbered)
        return order
