"""A stage's turns: its order, but for actions that run early while the one that is next waits. Pure.

An order fixes in which sequence forwards run and in which sequence backwards do, and how many microbatches a
stage may hold between the two. How the two sequences interleave does not change a bit of the result. So a
stage whose next action waits for a tensor runs the next action of the other kind when that one can: a
gradient is not held up by forwards that come over a slow link, nor a forward by gradients.

Every action still comes after a fixed set of others: its own kind's one before, its tensor's maker, a
backward after its forward, a forward after the backward that makes room for it. The order itself obeys all of
these, so they make no circle, and no choice of turns can end in a deadlock.
"""

from collections.abc import Callable, Sequence

from node.pipeline.schedule import Kind, Order, held_activations


class Turns:
    """What a stage may do next, and what it has begun. Actions are named by their places in the order.

    Args:
        swap: whether actions may run early. Only where the tensors of each neighbour come in the order in
            which they are needed, as with one chunk a stage: else what is wanted may wait behind what is not.
    """

    def __init__(self, order: Order, *, swap: bool) -> None:
        self._forwards = [place for place, action in enumerate(order) if action.kind is Kind.FORWARD]
        self._backwards = [place for place, action in enumerate(order) if action.kind is Kind.BACKWARD]
        self._begun_forwards = 0
        self._begun_backwards = 0
        self._most_held = held_activations(order)
        self._swap = swap

    @property
    def left(self) -> int:
        """Actions that have not begun."""
        return len(self._forwards) + len(self._backwards) - self._begun_forwards - self._begun_backwards

    @property
    def choices(self) -> Sequence[int]:
        """What may run once its tensor is here: the order's next action, then the one that may run early."""
        forward, backward = self._begun_forwards, self._begun_backwards
        places = self._soonest(1)
        if len(places) < 2 or not self._swap:
            return places[:1]
        # The k-th backward is of the k-th forward: swaps are for one chunk.
        held = forward - backward
        may = held < self._most_held if places[1] == self._forwards[forward] else held > 0
        return places if may else places[:1]

    def upcoming(self, count: int) -> Sequence[int]:
        """The next `count` actions of the order, and what may run early."""
        return list(dict.fromkeys((*self._soonest(count)[:count], *self.choices)))

    def begin(self, ready: Callable[[int], bool]) -> int | None:
        """Take the turn of the first of `choices` that is ready; None when all of them wait."""
        for place in self.choices:
            if ready(place):
                if self._forwards[self._begun_forwards : self._begun_forwards + 1] == [place]:
                    self._begun_forwards += 1
                else:
                    self._begun_backwards += 1
                return place
        return None

    def _soonest(self, count: int) -> list[int]:
        """The next `count` of each kind, in the order's sequence."""
        forward, backward = self._begun_forwards, self._begun_backwards
        return sorted(
            (*self._forwards[forward : forward + count], *self._backwards[backward : backward + count])
        )
