"""How long passes wait for copies of what blocks move to host memory, between use and use. Torch-free.

`node.model.offload` copies a block's tensors out from the end of its forward, and they must be out when the
next block that moves is done, or when backward begins. They come back from the begin of the backward of the
next block above that moves, or of the chunk. So a copy has the compute of as many blocks to hide behind as
lie between two that move: its *window*. Behind the last block of a chunk there is nothing but a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Blocks that a plan counts as a window; of a wider one, the largest of these."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Blocks of one kind in a chunk."""

    count: int
    moved: int
    """Bytes of a microbatch that each moves; 0 moves nothing."""
    again: bool
    """They run again in backward, and come first in the chunk."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds that a microbatch's passes through one chunk wait."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CopyClock:
    """What copies of one chunk run beside."""

    forward: float
    """Seconds of a block,"""
    backward: float
    head_forward: float = 0.0
    """and of the head behind the last one."""
    head_backward: float = 0.0
    out_rate: float
    """Bytes a second to host memory,"""
    in_rate: float
    """and back."""

    def within(self, moved: int, window: int) -> Waits:
        """Of a block that moves so many bytes, with the compute of `window` blocks to hide them."""
        return Waits(
            forward=max(0.0, moved / self.out_rate - window * self.forward),
            backward=max(0.0, moved / self.in_rate - window * self.backward),
        )

    def again(self, moved: int) -> Waits:
        """Of a block that runs again: those above and below do too."""
        return Waits(
            forward=max(0.0, moved / self.out_rate - self.forward),
            backward=max(0.0, moved / self.in_rate - self.backward - self.forward),
        )

    def last(self, moved: int, *, again: bool) -> Waits:
        """What a chunk's last block waits beyond `again` or a window of one: backward begins with it."""
        before = self.again(moved) if again else self.within(moved, 1)
        return Waits(
            forward=max(0.0, moved / self.out_rate - self.head_forward - before.forward),
            backward=max(0.0, moved / self.in_rate - self.head_backward - before.backward),
        )

    def windows(self, sizes: Sequence[int], blocks: int) -> tuple[int, ...]:
        """Windows that make a difference to blocks that move so many bytes: to the first that hides all."""
        found: list[int] = []
        for window in WINDOWS:
            if window > blocks:
                break
            found.append(window)
            each = [self.within(size, window) for size in sizes]
            if not any(one.forward or one.backward for one in each):
                break
        return tuple(found)

    def waits(self, parts: Sequence[Copied], windows: Sequence[int]) -> Waits:
        """Of a chunk of these blocks, in the order of `node.tuning.memory_program.spread`.

        Args:
            windows: those that `windows` gives for all that may move.
        """
        again = [part for part in parts if part.again and part.moved and part.count]
        moving = [part for part in parts if not part.again and part.moved and part.count]
        blocks = sum(part.count for part in parts if not part.again)
        count = sum(part.count for part in moving)
        window = max((one for one in windows if one * count < blocks), default=1)
        each = [(part.count, self.again(part.moved)) for part in again]
        each += [(part.count, self.within(part.moved, window)) for part in moving]
        at_end = moving if count == blocks and blocks else []
        if not blocks and sum(part.count for part in again) == sum(part.count for part in parts):
            at_end = again
        if at_end:
            smallest = min(at_end, key=lambda part: part.moved)
            each.append((1, self.last(smallest.moved, again=smallest.again)))
        return Waits(
            forward=sum(number * one.forward for number, one in each),
            backward=sum(number * one.backward for number, one in each),
        )
