"""Finds the plan with the least time in a given memory, by a mixed-integer program over counts of blocks.
This module imports no torch.

Adacc (Chen et al. 2025, equations 4 to 8) makes a choice for each tensor of one block and repeats it for all.
Here a *column* is one way to treat the tensors of a block, by kind. The program counts how many blocks of
each chunk take each column, so identical blocks are one variable. Beyond Adacc it moves tensors to host
memory, bounds the peaks at the beginning of backward and when the first block runs again, and bounds copies
by the engines' time, both in total and for single blocks.

`CopyClock` says how long passes wait for the copies of single blocks' tensors. `node.model.offload` copies a
block's tensors out from the end of its forward; they must be out when the next moved block is done, or when
backward begins. They return from the beginning of the backward of the next moved block above, or of the
chunk. So a copy can hide behind the compute of as many blocks as lie between two moved ones: its *window*.
Only the head follows the last block of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The window sizes, in blocks, that a plan distinguishes. A wider window counts as the next smaller one of
these."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The blocks of one kind in a chunk."""

    count: int
    moved: int
    """The bytes of a microbatch that each block moves; 0 if it moves nothing."""
    again: bool
    """Whether they run again in backward. Such blocks come first in the chunk."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The seconds that a microbatch's passes through one chunk wait."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CopyClock:
    """The compute beside which one chunk's copies run, and the rates of these copies."""

    forward: float
    """The seconds of a block's forward."""
    backward: float
    """The seconds of a block's backward."""
    head_forward: float = 0.0
    """The seconds of the head's forward after the last block."""
    head_backward: float = 0.0
    """The seconds of the head's backward before the last block's."""
    out_rate: float
    """Bytes per second to host memory."""
    in_rate: float
    """Bytes per second from host memory."""

    def within(self, moved: int, window: int) -> Waits:
        """The waits of a block that moves this many bytes, if they can hide behind the compute of `window`
        blocks."""
        return Waits(
            forward=max(0.0, moved / self.out_rate - window * self.forward),
            backward=max(0.0, moved / self.in_rate - window * self.backward),
        )

    def again(self, moved: int) -> Waits:
        """The waits of a block that runs again, between blocks that run again too."""
        return Waits(
            forward=max(0.0, moved / self.out_rate - self.forward),
            backward=max(0.0, moved / self.in_rate - self.backward - self.forward),
        )

    def last(self, moved: int, *, again: bool) -> Waits:
        """The waits of a chunk's last block beyond those of `again` or a window of one. Backward begins with
        it."""
        before = self.again(moved) if again else self.within(moved, 1)
        return Waits(
            forward=max(0.0, moved / self.out_rate - self.head_forward - before.forward),
            backward=max(0.0, moved / self.in_rate - self.head_backward - before.backward),
        )

    def windows(self, sizes: Sequence[int], blocks: int) -> tuple[int, ...]:
        """The windows that make a difference to blocks that move these sizes, up to the first that hides all
        copies."""
        useful: list[int] = []
        for window in WINDOWS:
            if window > blocks:
                break
            useful.append(window)
            each = [self.within(size, window) for size in sizes]
            if not any(wait.forward or wait.backward for wait in each):
                break
        return tuple(useful)

    def waits(self, parts: Sequence[Copied], windows: Sequence[int]) -> Waits:
        """The waits of a chunk with these blocks, in the order of `node.tuning.memory_program.spread`.

        Args:
            windows: the result of `windows` for all that may move.
        """
        again = [part for part in parts if part.again and part.moved and part.count]
        moving = [part for part in parts if not part.again and part.moved and part.count]
        blocks = sum(part.count for part in parts if not part.again)
        count = sum(part.count for part in moving)
        window = max((length for length in windows if length * count < blocks), default=1)
        each = [(part.count, self.again(part.moved)) for part in again]
        each += [(part.count, self.within(part.moved, window)) for part in moving]
        at_end = moving if count == blocks and blocks else []
        if not blocks and sum(part.count for part in again) == sum(part.count for part in parts):
            at_end = again
        if at_end:
            smallest = min(at_end, key=lambda part: part.moved)
            each.append((1, self.last(smallest.moved, again=smallest.again)))
        return Waits(
            forward=sum(number * wait.forward for number, wait in each),
            backward=sum(number * wait.backward for number, wait in each),
        )


ENOUGH = 2e-3
"""A plan may be worse than the optimum by this share."""
MOST_NODES = 250
"""The most nodes of the search tree. Twice as many improve no plan by 0.1 %. A time limit instead could make
the processes of one node find different plans."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One way to treat a block, with its sizes and times for one microbatch."""

    kept: int
    """The bytes of tensors on the device between forward and backward."""
    pages: int = 0
    """What a GPU's allocator holds besides them."""
    moved: int
    """The bytes that wait in host memory."""
    host: int
    """The bytes of host memory that they take."""
    seconds: float
    """The seconds that it adds to forward and backward."""
    working: int
    """The bytes that its backward needs beyond a block with everything kept, without tensors that return."""
    left: int = 0
    """What stays on the device if the first block's tensors move: the chunks' inputs."""
    again: bool
    """Whether it runs the whole block again. Such blocks come first in a chunk."""

    @property
    def there(self) -> int:
        """The bytes on the device between forward and backward."""
        return self.kept + self.pages


@dataclass(frozen=True, kw_only=True)
class StateMove:
    """One kind of state that may be in host memory. Bytes are those of one device."""

    most: int
    """The number of parts that can move: blocks, or 1 for all of it."""
    freed: int
    """The bytes that a part frees on the device."""
    there: int = 0
    """The bytes on the device as soon as any part has moved: parts at work, and on their way."""
    applying: int = 0
    """The bytes that the optimizer's step then needs more (or fewer, if negative) besides the state."""
    host: int
    """The bytes that a part takes in host memory."""
    seconds: float
    """A microbatch's share of the copies of a part for norms and the optimizer's step, in seconds. Nothing
    hides them."""
    forward_in: int = 0
    """The bytes of a part that a microbatch's forward fetches during compute."""
    backward_in: int = 0
    """The bytes of a part that its backward fetches."""
    backward_out: int = 0
    """The bytes of a part that its backward sends back."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of one stage. Bytes are those of one device."""

    columns: tuple[Column, ...]
    blocks: tuple[int, ...]
    held: tuple[int, ...]
    """The most microbatches of each chunk between forward and backward."""
    room: int
    """The room for what blocks keep and add to their work: the memory without everything else, also without a
    block at work."""
    room_again: int
    """The room while a block runs again."""
    room_head: int | None = None
    """The room for what blocks keep while the head is at work; None without a head."""
    room_casting: int = 0
    """The room in forward, during which each block of a chunk that will run again holds `casts` bytes."""
    casts: int = 0
    forward: float
    """The seconds of the forward of the stage's blocks for one microbatch."""
    backward: float
    """The seconds of their backward."""
    clocks: tuple[CopyClock, ...]
    """The copy clock of each chunk."""
    host: int = 0
    """The bytes of host memory."""
    state: tuple[StateMove, ...] = ()
    """The kinds of state that may move. Kinds after the first may move only if all of the first does."""
    applying: int | None = None
    """The room besides the state during the optimizer's step; below 0 it does not fit. None if `room`
    includes it."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    blocks: tuple[tuple[int, ...], ...]
    """For each chunk, how many blocks take each column."""
    state: tuple[int, ...]
    """For each kind of state, how many parts move."""


def solve(program: Program) -> Counts | None:
    """The counts that add the least time in the given memory; None if nothing fits."""
    # scipy takes a while to load, and most nodes keep everything.
    from scipy.optimize import Bounds, LinearConstraint, milp

    chunks, columns, states = len(program.blocks), program.columns, len(program.state)
    width = len(columns)
    unit = float(max(1, *(column.there + column.moved for column in columns)))
    second = max(program.forward, 1e-12)
    # The variables are: counts by chunk and column; whether a column is used; whether a chunk runs any block
    # again; whether state of a kind moves, and how many parts; the most that returns, that is worked on and
    # that is left; how long forward and backward wait for copies.
    used = chunks * width
    runs_again = used + width
    moves = runs_again + chunks
    state = moves + states
    coming, working, left, waits_forward, waits_back = range(state + states, state + states + 5)
    between = [_BetweenUses(program, chunk) for chunk in range(chunks)]
    count = waits_back + 1
    for each in between:
        count = each.number(count)
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
        # The tensors of the block at work, and those of the next block, which are on their way.
        limit({used + k: 2 * column.moved / unit, coming: -1.0}, 0)
        limit({used + k: column.working / unit, working: -1.0}, 0)
        limit({used + k: column.left / unit, left: -1.0}, 0)
    held = {
        chunk * width + k: program.held[chunk] * column.there / unit
        for chunk in range(chunks)
        for k, column in enumerate(columns)
    }
    freed = {state + k: -move.freed / unit for k, move in enumerate(program.state)}
    freed |= {moves + k: move.there / unit for k, move in enumerate(program.state)}
    applying = {moves + k: (move.there + move.applying) / unit for k, move in enumerate(program.state)}
    # If the step's memory is not that of the passes, it is added to theirs.
    first = held | freed | (applying if program.applying is None else {}) | {left: 1.0}
    passes = first | {coming: 1.0, working: 1.0}
    most_working = max(column.working for column in columns) / unit
    if total:
        limit(passes, program.room / unit)
        if program.room_head is not None:
            limit(first | {coming: 1.0}, program.room_head / unit)
    if any(column.again for column in columns):
        rooms = [program.room_again, program.room]
        rooms += [program.room_casting] * (program.casts > 0)
        much = (sum(program.held) * total + 4) * 2.0 + (max(rooms) - min(rooms)) / unit + most_working
        for chunk in range(chunks):
            limit(passes | {runs_again + chunk: much}, program.room_again / unit + much)
            if program.casts:
                casts = {
                    chunk * width + k: held[chunk * width + k] + program.casts / unit
                    for k, column in enumerate(columns)
                    if column.again
                }
                limit(passes | casts | {runs_again + chunk: much}, program.room_casting / unit + much)
    for k, move in enumerate(program.state):
        limit({state + k: 1.0, moves + k: -float(move.most)}, 0)
        limit({moves + k: 1.0, state + k: -1.0}, 0)
        limit({moves + k: 1.0, moves: -1.0} if k else {}, 0)
    if program.applying is not None:
        limit(freed | applying, program.applying / unit)
    host = {
        chunk * width + k: program.held[chunk] * column.host / unit
        for chunk in range(chunks)
        for k, column in enumerate(columns)
    }
    host |= {state + k: move.host / unit for k, move in enumerate(program.state)}
    limit(host, program.host / unit)
    places = [(chunk * width + k, column) for chunk in range(chunks) for k, column in enumerate(columns)]
    parts = [(state + k, move) for k, move in enumerate(program.state)]
    out_rate, in_rate = (rate * second for rate in (program.clocks[0].out_rate, program.clocks[0].in_rate))
    # Both engines copy at the same time. Recomputing hides copies too.
    forward_out = {at: column.moved / out_rate for at, column in places}
    forward_in = {at: move.forward_in / in_rate for at, move in parts}
    back_in = {at: column.moved / in_rate - column.seconds / second for at, column in places}
    back_in |= {at: move.backward_in / in_rate for at, move in parts}
    back_out = {at: -column.seconds / second for at, column in places}
    back_out |= {at: move.backward_out / out_rate for at, move in parts}
    limit(forward_out | {waits_forward: -1.0}, program.forward / second)
    limit(forward_in | {waits_forward: -1.0}, program.forward / second)
    limit(back_in | {waits_back: -1.0}, program.backward / second)
    limit(back_out | {waits_back: -1.0}, program.backward / second)
    for each in between:
        rows += each.rows(second)
    for waits, own_waits in (
        (waits_forward, [each.forward for each in between if each.matters]),
        (waits_back, [each.backward for each in between if each.matters]),
    ):
        limit(dict.fromkeys(own_waits, 1.0) | {waits: -1.0}, 0)
    cost = np.zeros(count)
    for chunk in range(chunks):
        for k, column in enumerate(columns):
            cost[chunk * width + k] = column.seconds / second
    cost[state : state + states] = [move.seconds / second for move in program.state]
    cost[[waits_forward, waits_back]] = 1.0
    matrix = np.zeros((len(rows), count))
    for number, (terms, _, _) in enumerate(rows):
        for at, value in terms.items():
            matrix[number, at] = value
    whole = np.ones(count)
    whole[coming:] = 0
    high = np.full(count, np.inf)
    high[used:state] = 1
    high[state : state + states] = [move.most for move in program.state]
    for each in between:
        whole[list(each.yes_or_no)] = 1
        high[[*each.yes_or_no, *each.last.values()]] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
        integrality=whole,
        bounds=Bounds(0, high),
        options={"mip_rel_gap": ENOUGH, "node_limit": MOST_NODES},
    )
    if result.x is None:
        return None
    counts = [round(value) for value in result.x[:used]]
    return Counts(
        blocks=tuple(tuple(counts[chunk * width : (chunk + 1) * width]) for chunk in range(chunks)),
        state=tuple(round(value) for value in result.x[state:coming]),
    )


class _BetweenUses:
    """The variables and rows for how long one chunk's passes wait, as in `CopyClock.waits`: which window its
    blocks have, and which column its last block takes if all of them move."""

    def __init__(self, program: Program, chunk: int) -> None:
        columns = program.columns
        self._clock, self._blocks = program.clocks[chunk], program.blocks[chunk]
        self._columns = {chunk * len(columns) + k: column for k, column in enumerate(columns)}
        self._again = [at for at, column in self._columns.items() if column.again and column.moved]
        self._moving = [at for at, column in self._columns.items() if not column.again and column.moved]
        sizes = [self._columns[at].moved for at in self._moving]
        self._windows = self._clock.windows(sizes, self._blocks)
        self.matters = bool(self._again or self._moving)
        self.forward = self.backward = -1
        """The variables for the seconds that the passes wait."""
        self._none = self._end = -1
        self._of_window: dict[int, int] = {}
        self.last: dict[int, int] = {}
        """For the variable of each column: the variable for whether the last block takes it, if all blocks
        move."""
        self.yes_or_no: tuple[int, ...] = ()

    def number(self, first: int) -> int:
        """Take variables from `first` on and return the next free one."""
        if not self.matters:
            return first
        self.forward, self.backward, self._none, self._end = range(first, first + 4)
        self._of_window = {window: first + 4 + k for k, window in enumerate(self._windows)}
        first += 4 + len(self._windows)
        self.last = {at: first + k for k, at in enumerate((*self._moving, *self._again))}
        chosen = [self._none, self._end, *self._of_window.values()]
        # For a block that runs again, the last block's wait is exact only if this variable is 0 or 1.
        self.yes_or_no = (*chosen, *(self.last[at] for at in self._again))
        return first + len(self.last)

    def rows(self, second: float) -> list[tuple[dict[int, float], float, float]]:
        """The rows as (coefficients, lower bound, upper bound). Seconds are in units of `second`."""
        if not self.matters:
            return []
        blocks, least = float(self._blocks), -np.inf
        rows: list[tuple[dict[int, float], float, float]] = []
        ways = (self._none, self._end, *self._of_window.values())
        rows.append((dict.fromkeys(ways, 1.0), 1.0, 1.0))
        # Nothing moves, except inputs of blocks that run again below a block that does not move.
        rows.append((dict.fromkeys(self._moving, 1.0) | {self._none: blocks}, least, blocks))
        rows.append((dict.fromkeys(self._again, 1.0) | {self._none: 1.0}, least, blocks))
        # Between two moved blocks, and after the last one, there are as many blocks as the window has.
        runs_again = {at: 1.0 for at, column in self._columns.items() if column.again}
        for window, chosen in self._of_window.items():
            much = window * blocks + 1
            terms = runs_again | dict.fromkeys(self._moving, float(window)) | {chosen: much}
            rows.append((terms, least, blocks - 1 + much))
        rows.append((dict.fromkeys(self.last.values(), 1.0) | {self._end: -1.0}, 0.0, 0.0))
        for at, last in self.last.items():
            rows.append(({last: blocks if at in self._again else 1.0, at: -1.0}, least, 0.0))
        for pick, waits in ((_forward, self.forward), (_backward, self.backward)):
            again = {at: pick(self._clock.again(self._columns[at].moved)) / second for at in self._again}
            rows.append((again | {waits: -1.0}, least, 0.0))
            for window, chosen in ((1, self._end), *self._of_window.items()):
                moving = {
                    at: pick(self._clock.within(self._columns[at].moved, window)) / second
                    for at in self._moving
                }
                much = blocks * max(moving.values(), default=0.0)
                terms = again | moving | {waits: -1.0, chosen: much}
                if chosen == self._end:
                    for at, last in self.last.items():
                        own = self._clock.last(self._columns[at].moved, again=at in self._again)
                        terms[last] = pick(own) / second
                rows.append((terms, least, much))
        return rows


def _forward(waits: Waits) -> float:
    return waits.forward


def _backward(waits: Waits) -> float:
    return waits.backward


def spread(columns: Sequence[Column], counts: Sequence[int]) -> list[int]:
    """The columns of a chunk in the order of its blocks.

    Blocks that run again come first. Of the others, moved blocks are spread evenly, so that a copy can hide
    behind the compute of several blocks. The last block moves only if all do, and then it is the one that
    moves the least.
    """
    moving = sorted(
        (k for k, column in enumerate(columns) for _ in range(counts[k]) if _moves(column)),
        key=lambda k: (-columns[k].moved, k),
    )
    staying = [k for k, column in enumerate(columns) for _ in range(counts[k]) if stays(column)]
    again = [k for k, column in enumerate(columns) for _ in range(counts[k]) if column.again]
    again.sort(key=lambda k: -columns[k].moved)
    blocks, left = len(moving) + len(staying), iter(staying)
    places = {number * blocks // len(moving): k for number, k in enumerate(moving)}
    return again + [places[at] if at in places else next(left) for at in range(blocks)]


def stays(column: Column) -> bool:
    """Whether what a block keeps is on the device until its backward."""
    return not column.again and column.moved == 0


def _moves(column: Column) -> bool:
    return not column.again and column.moved > 0
