"""Tensors that another row sends before this node knows of the work that they are for.

Rows learn at different times who computes and sums what in a step. A tensor that no known work asks for stays
in the room of its link, so that link sends nothing more once the room is full. Without this, a member could
fill the memory with nodes of the tree that nobody needs.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from node.schedule.gradient_groups import StepWork
from wire.link import Link
from wire.spec import TensorKey


class Early(NamedTuple):
    """A complete tensor that its link still holds room for, unless that link is gone."""

    row: int
    key: TensorKey
    buffer: bytearray
    link: Link | None

    def release(self) -> None:
        """Its memory may be reused."""
        if self.link is not None:
            with contextlib.suppress(ValueError):  # a new link took the place of the one that it came by
                self.link.release(self.key)


class EarlyTensors:
    """The tensors of one epoch that wait. Thread-safe."""

    def __init__(self, comes: Callable[[int, TensorKey, StepWork], bool]) -> None:
        """`comes`: whether a row sends this tensor to this node with this work."""
        self._comes = comes
        self._lock = threading.Lock()
        self._works: list[tuple[int, StepWork]] = []
        """The works that are known of the newest steps: rows may still send for an earlier one."""
        self._waiting: list[Early] = []

    def learn(self, step: int, work: StepWork) -> list[Early]:
        """Rows compute a step like this from now on. Returns the tensors that wait no more."""
        with self._lock:
            if (step, work) in self._works:
                return []
            self._works = [(of, known) for of, known in self._works if of >= step - 1]
            self._works.append((step, work))
            due, waiting = list[Early](), list[Early]()
            for early in self._waiting:
                (due if self._is_due(early) else waiting).append(early)
            self._waiting = waiting
            return due

    def keeps(self, early: Early) -> bool:
        """Whether a tensor that has just arrived has to wait."""
        with self._lock:
            if self._is_due(early):
                return False
            self._waiting.append(early)
            return True

    def forget_before(self, step: int) -> list[Early]:
        """Drop the tensors of earlier steps, for which no work asked, and return them."""
        with self._lock:
            old = [early for early in self._waiting if early.key.step < step]
            self._waiting = [early for early in self._waiting if early.key.step >= step]
            return old

    def _is_due(self, early: Early) -> bool:
        # The newest work is that of the step that runs.
        return any(
            of == early.key.step and self._comes(early.row, early.key, work)
            for of, work in reversed(self._works)
        )
