"""The ways in which a stage's blocks and state may be treated, and how long passes wait for the copies of
tensors that move. This module imports no torch.

Adacc (Chen et al. 2025, equations 4 to 8) makes a choice for each tensor of one block and repeats it for all.
Here a *column* is one way to treat the tensors of a block, by kind, and each block of a stage may take
another. Beyond Adacc, tensors may move to host memory.

`CopyClock` says how long passes wait for the copies of single blocks' tensors. `node.model.offload` copies a
block's tensors out from the end of its forward; they must be out when the next moved block is done, or when
backward begins. They return from the beginning of the backward of the next moved block above, or of the
chunk. So a copy can hide behind the compute of as many blocks as lie between two moved ones: its *window*.
Only the head follows the last block of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The window sizes, in blocks, that a plan distinguishes. A wider window counts as the next smaller one of
these."""


class Waits(NamedTuple):
    """The seconds that a microbatch's passes wait for copies of one block."""

    forward: float
    backward: float


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


class CopyWaits:
    """How long a microbatch's passes through one chunk wait for copies, by how many of its blocks take each
    column."""

    def __init__(self, clock: CopyClock, columns: Sequence[Column], blocks: int) -> None:
        """`blocks`: the number of the chunk's blocks."""
        sizes = [column.moved for column in columns if _moves(column)]
        windows = clock.windows(sizes, blocks) or (1,)
        self._windows = np.array(windows)
        self._moved = np.array([column.moved for column in columns])
        self._again = np.array([column.again for column in columns])
        # By column and pass; those of a window first by window.
        within = [[clock.within(column.moved, window) for column in columns] for window in windows]
        self._within = np.array(within)
        self._of_again = np.array([clock.again(column.moved) for column in columns])
        self._last = np.array([clock.last(column.moved, again=column.again) for column in columns])

    def seconds(self, counts: Array) -> Array:
        """The seconds of forward and of backward [2, N], for counts of columns [N, K], in the order of
        `spread`."""
        again, others = counts * self._again, counts * ~self._again
        again_moving, moving = again * (self._moved > 0), others * (self._moved > 0)
        blocks, moves = others.sum(1), moving.sum(1)
        # The widest window that fits between two moved blocks, and behind the last one.
        window = np.maximum((self._windows * moves[:, None] < blocks[:, None]).sum(1) - 1, 0)
        by_window = moving @ self._within
        waits = again_moving @ self._of_again + by_window[window, np.arange(len(counts))]
        # Where all blocks move, the last one is the one that moves the least.
        all_move = np.where(blocks[:, None] > 0, moving, again_moving)
        is_last = (all_move.sum(1) == counts.sum(1) - (blocks > 0) * again.sum(1)) & (all_move.sum(1) > 0)
        last = np.where(all_move > 0, self._moved, np.inf).argmin(1)
        seconds: Array = waits + np.where(is_last[:, None], self._last[last], 0.0)
        return seconds.T


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
