"""Choose a stage's next action: its order, but an action may run early while the next one waits. Pure.

An order fixes the sequence of forwards, the sequence of backwards, and how many microbatches a stage may hold
between the two. How the two sequences interleave does not change the result. So while the next action waits
for a tensor, the next action of the other kind may run: slow forwards do not hold up gradients, nor the
reverse.

Every action still comes after a fixed set of others: the one before of its kind, the maker of its tensor, for
a backward its forward, for a forward the backward that frees its memory. The order itself satisfies all of
these, so there is no circle and no deadlock.
"""

from collections.abc import Callable, Sequence

from node.pipeline.schedule import Kind, Order, held_activations


class Turns:
    """What a stage may do next, and what it has begun. Actions are named by their index in the order.

    Args:
        swap: whether actions may run early. Only if each neighbour's tensors come in the order in which they
            are needed, as with one chunk a stage; otherwise a needed tensor may wait behind others.
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
        """What may run once its tensor has arrived: the order's next action, then the one that may run
        early."""
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
