"""Chooses a stage's next action. It follows the order, but an action may run early while the next one waits.
All functions are pure.

An order fixes the sequence of forwards, the sequence of backwards, and how many microbatches a stage may hold
between the two. The interleaving of the two sequences does not change the result. So while the next action
waits for a tensor, the next action of the other kind may run: slow forwards do not delay gradients, nor the
reverse. A head on the first stage is a third sequence, with each microbatch's forward and, directly after it,
its backward, for which all stages wait.

Every action still comes after a fixed set of others: the previous one in its sequence, the producer of its
tensor, a backward's forward, and the backward that frees a forward's memory. The order itself satisfies all
of these, so there is no circle and no deadlock.
"""

from collections.abc import Callable, Sequence

from node.schedule.schedule import Kind, Order, held_activations

_HEAD = 2
"""The number of the head's sequence, after forwards and backwards."""


class Turns:
    """What a stage may do next, and what it has begun. Actions are named by their index in the order.

    Args:
        swap: whether actions may run early. This requires that each neighbour's tensors arrive in the order
            in which they are needed, as with one chunk per stage. Otherwise a needed tensor may wait behind
            others.
    """

    def __init__(self, order: Order, *, swap: bool) -> None:
        kinds = [action.kind if action.chunk == 0 else None for action in order]
        forwards = [action for action in order if action.chunk == 0 and action.kind is Kind.FORWARD]
        numbers = {(action.microbatch, action.slice): number for number, action in enumerate(forwards)}
        by_kind = [[p for p, kind in enumerate(kinds) if kind is of] for of in (*Kind, None)]
        # Forwards, backwards, the head's actions.
        self._sequences = by_kind if swap else [list(range(len(order)))]
        self._begun = [0] * len(self._sequences)
        self._forward_of = [
            numbers[action.microbatch, action.slice]
            for action in order
            if action.chunk == 0 and action.kind is Kind.BACKWARD
        ]
        """For each backward in its sequence, the number of its forward."""
        self._most_held = held_activations(tuple(action for action in order if action.chunk == 0))

    def extended(self, order: Order) -> "Turns":
        """The turns of an order that has more microbatches after those of this one. What has begun is
        kept."""
        more = Turns(order, swap=True)
        more._begun = list(self._begun)
        return more

    @property
    def left(self) -> int:
        """The number of actions that have not begun."""
        return sum(map(len, self._sequences)) - sum(self._begun)

    @property
    def choices(self) -> Sequence[int]:
        """The actions that may run once their tensor has arrived: the order's next action, then those that
        may run early."""
        return [place for place, _ in self._places()]

    def upcoming(self, count: int) -> Sequence[int]:
        """The next `count` actions of the order, and those that may run early."""
        soonest = sorted(
            place for sequence, begun in self._pairs() for place in sequence[begun : begun + count]
        )
        return list(dict.fromkeys((*soonest[:count], *self.choices)))

    def begin(self, ready: Callable[[int], bool]) -> int | None:
        """Take the turn of the first of `choices` that is ready; None if all of them wait."""
        for place, sequence in self._places():
            if ready(place):
                self._begun[sequence] += 1
                return place
        return None

    def _places(self) -> Sequence[tuple[int, int]]:
        """Each of `choices` with the number of its sequence."""
        if len(self._begun) > 1 and self._begun[_HEAD] % 2:
            return [(self._sequences[_HEAD][self._begun[_HEAD]], _HEAD)]
        places = [(sequence[b], s) for s, (sequence, b) in enumerate(self._pairs()) if b < len(sequence)]
        if len(places) < 2:
            return places
        first, _ = min(places)
        return sorted((place, s) for place, s in places if place == first or self._may_begin(s))

    def _may_begin(self, sequence: int) -> bool:
        """Whether memory, or the forward of a backward, lets this sequence's next action run early."""
        if sequence == _HEAD:
            return True
        if sequence == 0:
            return self._begun[0] - self._begun[1] < self._most_held
        return self._forward_of[self._begun[1]] < self._begun[0]

    def _pairs(self) -> Sequence[tuple[list[int], int]]:
        """Each sequence, and how many of its actions have begun."""
        return list(zip(self._sequences, self._begun, strict=True))
