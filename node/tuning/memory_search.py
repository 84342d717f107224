"""Searches for the best way to treat a stage's blocks and state. This module imports no torch.

A candidate says how many blocks of each chunk take each column (`node.tuning.memory_columns`), and how many
parts of each kind of state move. Candidates are compared by a score, for thousands at a time.

The search begins with all mixtures of two columns, in states from nothing to everything in host memory. From
the best mixtures of `STARTS` states it changes the column of one, half or all of some blocks, together with
the parts of one kind of state, as long as the score falls. Steps of an 8B and a 1B model on cards of 8 to 20
GB are then at most 0.5 % longer than those by a mixed-integer program (scripts/results/memory_search.json).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np

from node.tuning.memory_columns import Array

STARTS = 6
"""The number of states from which the search goes on."""
SHARES = 4
"""Of a mixture, one column has none, a quarter, half or three quarters of each chunk's blocks."""

Score = Callable[[Array, Array], Array]
"""The scores of counts [N, chunks, columns] and parts of state [N, kinds]. The least is the best."""
Found = tuple[float, Array, Array]
"""A score, and the counts and parts of state that have it."""


def search(
    blocks: Sequence[int], columns: int, parts: Sequence[int], score: Score, shares: int = SHARES
) -> tuple[Array, Array]:
    """The best counts [chunks, columns] and parts of state [kinds] that the search finds.

    Args:
        blocks: the number of blocks of each chunk.
        parts: the number of parts of each kind of state. Kinds after the first move only if all of the first
            does.
        shares: how finely mixtures are divided; with 1, all blocks are alike at first.
    """
    starts = [
        min((_best(score, counts, state) for counts in _mixtures(blocks, columns, shares)), key=_value)
        for state in _first_states(parts)
    ]
    starts.sort(key=_value)
    _, counts, state = min((_descended(score, start, parts) for start in starts[:STARTS]), key=_value)
    return counts, state


def _descended(score: Score, found: Found, parts: Sequence[int]) -> Found:
    """Take the best change of some blocks and of one kind of state while there is a better one."""
    while True:
        value, counts, state = found
        near = np.concatenate([counts[None], *_changed(counts)])
        found = min((_best(score, near, other) for other in _near_states(state, parts)), key=_value)
        if not found[0] < value:
            return value, counts, state


def _best(score: Score, counts: Array, state: Array) -> Found:
    """The best of these counts with this state."""
    scores = score(counts, np.broadcast_to(state, (len(counts), len(state))))
    at = scores.argmin()
    return float(scores[at]), counts[at], state


def _value(found: Found) -> float:
    return found[0]


def _mixtures(blocks: Sequence[int], columns: int, shares: int) -> Iterator[Array]:
    """Counts in which a share of each chunk's blocks, or none, takes one column, and all others take
    another."""
    each, whole = np.eye(columns), np.array(blocks, dtype=float)
    some = np.unique([np.round(whole * share / shares) for share in range(shares)], axis=0)
    for one in each if len(some) > 1 else each[:1]:
        mixed = one * some[:, :, None] + each[:, None, None] * (whole - some)[:, :, None]
        yield mixed.reshape(-1, len(blocks), columns)


def _changed(counts: Array) -> Iterator[Array]:
    """The counts in which one, half or all blocks of one column in a chunk take another column."""
    for chunk, column in np.argwhere(counts):
        count = int(counts[chunk, column])
        for amount in sorted({1, max(1, count // 2), count}):
            changed = np.repeat(counts[None], counts.shape[1], 0)
            changed[:, chunk, column] -= amount
            changed[np.arange(len(changed)), chunk, np.arange(len(changed))] += amount
            yield np.delete(changed, column, 0)


def _first_states(parts: Sequence[int]) -> Array:
    """States of which no, half or all parts of each kind move."""
    others = product(*({0, most // 2, most} for most in parts[1:]))
    moved = [(*parts[:1], *of_others) for of_others in others] if parts else []
    return np.array([(0,) * len(parts), *moved], dtype=float)


def _near_states(state: Array, parts: Sequence[int]) -> Array:
    """This state, and the states in which one kind has a part more or less, or none or all of its parts."""
    near = [state]
    for kind, most in enumerate(parts):
        for count in sorted({state[kind] - 1, state[kind] + 1, 0.0, float(most)} - {state[kind]}):
            other = state.copy()
            other[kind] = count
            if 0 <= count <= most and (not other.any() or other[0] == parts[0]):
                near.append(other)
    return np.array(near)
