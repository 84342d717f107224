"""The least time that fits in a memory, as a mixed-integer program over counts of blocks. Torch-free.

Adacc (Chen et al. 2025, equations 4 to 8) chooses for each tensor of one block and repeats that for all. Here
a *column* is one way to treat the tensors of a block, by kind, and the program counts how many blocks of each
chunk take it: identical blocks are one variable. Beyond Adacc it moves tensors to host memory, bounds the
peak where backward begins and where the first block runs again, and bounds copies by the engines' time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ENOUGH = 1e-3
"""Of an optimum: a plan may be worse by this share."""
MOST_NODES = 1000
"""Of the search tree; five times as many find nothing that adds 0.1 % less. A limit of time would let the
processes of one node find different plans."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One way to treat a block, of one microbatch."""

    kept: int
    """Bytes on the device between forward and backward, in tensors."""
    pages: int = 0
    """What a GPU's allocator holds beside them."""
    moved: int
    """Bytes that wait in host memory,"""
    host: int
    """and what they take there."""
    seconds: float
    """That it adds to forward and backward."""
    working: int
    """Bytes that its backward takes beyond a block's with everything kept, without tensors that come back."""
    again: bool
    """It runs the whole block again; such blocks come first in a chunk."""

    @property
    def there(self) -> int:
        """Bytes on the device between forward and backward."""
        return self.kept + self.pages


@dataclass(frozen=True, kw_only=True)
class StateMove:
    """One kind of state that may be in host memory. Bytes are those of one device."""

    most: int
    """Parts that can move: blocks, or 1 for all of it."""
    freed: int
    """That a part frees on the device."""
    there: int = 0
    """On the device as soon as a part has moved: parts at work, and on their way."""
    applying: int = 0
    """That the optimizer's step then takes more, or less, beside the state."""
    host: int
    """That a part takes in host memory."""
    seconds: float
    """A microbatch's share of the copies of a part for norms and the optimizer's step; nothing hides them."""
    forward_in: int = 0
    """Of a part, what a microbatch's forward brings in beside compute,"""
    backward_in: int = 0
    """and its backward,"""
    backward_out: int = 0
    """and what backward sends out."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One stage. Bytes are those of one device."""

    columns: tuple[Column, ...]
    blocks: tuple[int, ...]
    """Of each chunk."""
    held: tuple[int, ...]
    """Microbatches of each chunk between forward and backward, at most."""
    room: int
    """For what blocks keep and add to their work: memory less all else while passes run."""
    room_again: int
    """The same while a block runs again."""
    apart: bool
    """Nothing that later blocks of a chunk kept is free when an earlier one runs again (CUDA graphs)."""
    forward: float
    """Seconds of the stage's blocks for one microbatch,"""
    backward: float
    out_rate: float
    in_rate: float
    host: int = 0
    """Bytes of host memory."""
    state: tuple[StateMove, ...] = ()
    """Kinds that may move; those after the first only with all of it."""
    applying: int | None = None
    """Room that the optimizer's step leaves beside the state; below 0 it does not fit. None where it counts
    in `room`."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A solution."""

    blocks: tuple[tuple[int, ...], ...]
    """Of each chunk, how many take each column."""
    state: tuple[int, ...]
    """Of each kind of state, how many parts move."""


def solve(program: Program) -> Counts | None:
    """The counts that add the least time in the memory there is, or None if nothing fits."""
    # Loading it takes a while, and most nodes keep everything.
    from scipy.optimize import Bounds, LinearConstraint, milp

    chunks, columns, states = len(program.blocks), program.columns, len(program.state)
    width = len(columns)
    unit = float(max(1, *(column.there + column.moved for column in columns)))
    second = max(program.forward, 1e-12)
    # Variables: counts by chunk and column; whether a column is used; whether a chunk runs any block again;
    # whether state of a kind moves, and how many parts; the most that comes back or is worked on; what
    # forward and backward wait for copies.
    used = chunks * width
    runs_again = used + width
    moves = runs_again + chunks
    state = moves + states
    coming, working, waits_forward, waits_back = range(state + states, state + states + 4)
    count = waits_back + 1
    rows: list[tuple[dict[int, float], float, float]] = []

    def limit(terms: dict[int, float], most: float) -> None:
        rows.append((terms, -np.inf, most))

    for chunk, blocks in enumerate(program.blocks):
        own = range(chunk * width, (chunk + 1) * width)
        rows.append((dict.fromkeys(own, 1.0), blocks, blocks))
        again = {chunk * width + k: 1.0 for k in range(width) if columns[k].again}
        limit(again | {runs_again + chunk: -float(blocks)}, 0)
    total = sum(program.blocks)
    for k, column in enumerate(columns):
        limit({chunk * width + k: 1.0 for chunk in range(chunks)} | {used + k: -float(total)}, 0)
        # The block at work, and the next one's tensors on their way.
        limit({used + k: 2 * column.moved / unit, coming: -1.0}, 0)
        limit({used + k: column.working / unit, working: -1.0}, 0)
    held = {
        chunk * width + k: program.held[chunk] * column.there / unit
        for chunk in range(chunks)
        for k, column in enumerate(columns)
    }
    freed = {state + k: -one.freed / unit for k, one in enumerate(program.state)}
    freed |= {moves + k: one.there / unit for k, one in enumerate(program.state)}
    applying = {moves + k: (one.there + one.applying) / unit for k, one in enumerate(program.state)}
    # Where the step's memory is not that of the passes, it comes on top of theirs.
    passes = held | freed | (applying if program.applying is None else {}) | {coming: 1.0, working: 1.0}
    limit(passes, program.room / unit)
    if any(column.again for column in columns):
        much = (sum(program.held) * total + 4) * 2.0 + abs(program.room - program.room_again) / unit
        for chunk in range(chunks):
            later = {
                chunk * width + k: held[chunk * width + k] - (0.0 if program.apart else column.there / unit)
                for k, column in enumerate(columns)
                if not column.again
            }
            limit(passes | later | {runs_again + chunk: much}, program.room_again / unit + much)
    for k, one in enumerate(program.state):
        limit({state + k: 1.0, moves + k: -float(one.most)}, 0)
        limit({moves + k: 1.0, state + k: -1.0}, 0)
        limit({moves + k: 1.0, moves: -1.0} if k else {}, 0)
    if program.applying is not None:
        limit(freed | applying, program.applying / unit)
    host = {
        chunk * width + k: program.held[chunk] * column.host / unit
        for chunk in range(chunks)
        for k, column in enumerate(columns)
    }
    host |= {state + k: one.host / unit for k, one in enumerate(program.state)}
    limit(host, program.host / unit)
    places = [(chunk * width + k, column) for chunk in range(chunks) for k, column in enumerate(columns)]
    parts = [(state + k, one) for k, one in enumerate(program.state)]
    out_rate, in_rate = program.out_rate * second, program.in_rate * second
    # Both engines copy at a time; what is computed again hides copies too.
    forward_out = {at: column.moved / out_rate for at, column in places}
    forward_in = {at: one.forward_in / in_rate for at, one in parts}
    back_in = {at: column.moved / in_rate - column.seconds / second for at, column in places}
    back_in |= {at: one.backward_in / in_rate for at, one in parts}
    back_out = {at: -column.seconds / second for at, column in places}
    back_out |= {at: one.backward_out / out_rate for at, one in parts}
    limit(forward_out | {waits_forward: -1.0}, program.forward / second)
    limit(forward_in | {waits_forward: -1.0}, program.forward / second)
    limit(back_in | {waits_back: -1.0}, program.backward / second)
    limit(back_out | {waits_back: -1.0}, program.backward / second)
    cost = np.zeros(count)
    for chunk in range(chunks):
        for k, column in enumerate(columns):
            cost[chunk * width + k] = column.seconds / second
    cost[state : state + states] = [one.seconds / second for one in program.state]
    cost[[waits_forward, waits_back]] = 1.0
    matrix = np.zeros((len(rows), count))
    for number, (terms, _, _) in enumerate(rows):
        for at, value in terms.items():
            matrix[number, at] = value
    whole = np.ones(count)
    whole[coming:] = 0
    high = np.full(count, np.inf)
    high[used:state] = 1
    high[state : state + states] = [one.most for one in program.state]
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
        integrality=whole,
        bounds=Bounds(0, high),
        options={"mip_rel_gap": ENOUGH, "node_limit": MOST_NODES},
    )
    if found.x is None:
        return None
    counts = [round(value) for value in found.x[:used]]
    return Counts(
        blocks=tuple(tuple(counts[chunk * width : (chunk + 1) * width]) for chunk in range(chunks)),
        state=tuple(round(value) for value in found.x[state:coming]),
    )


def spread(columns: Sequence[Column], counts: Sequence[int]) -> list[int]:
    """A chunk's columns in the order of its blocks: those that run again first, the others spread evenly, so
    that copies of one block have the compute of several to hide behind."""
    order = [k for k, column in enumerate(columns) if column.again for _ in range(counts[k])]
    places = [
        ((number + 0.5) / counts[k], -columns[k].moved, k)
        for k, column in enumerate(columns)
        if not column.again
        for number in range(counts[k])
    ]
    return order + [k for _, _, k in sorted(places)]
