"""Where the compute thread's time goes: every moment belongs to exactly one kind.

A `StageClock` is always in one kind. Switching closes the running interval and opens the next at the same
clock reading, so the kinds sum to wall time by construction; nothing is measured twice or left out.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from threading import Lock

from node.telemetry.spans import SpanRing
from wire.spec import TensorKey


class TimeKind(StrEnum):
    """What the compute thread is doing. The values are label values of metrics."""

    FORWARD = "forward"
    BACKWARD = "backward"
    ENCODE = "encode"
    DECODE = "decode"
    OPTIMIZER = "optimizer"
    WAIT_UPSTREAM = "wait-upstream"
    WAIT_DOWNSTREAM = "wait-downstream"
    WAIT_COORDINATOR = "wait-coordinator"


WAITS = frozenset({TimeKind.WAIT_UPSTREAM, TimeKind.WAIT_DOWNSTREAM, TimeKind.WAIT_COORDINATOR})
"""The kinds in which the stage is idle."""

Times = Mapping[TimeKind, float]
"""Seconds by kind; all kinds present."""


class StageClock:
    """Attributes wall time to kinds. One thread switches; any thread may take snapshots.

    `clock` gives seconds and never goes back. Time before the first switch counts as `kind`: a stage begins
    by waiting for its coordinator.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        kind: TimeKind = TimeKind.WAIT_COORDINATOR,
    ) -> None:
        self._ring: SpanRing | None = None
        self._key: TensorKey | None = None
        self._clock = clock
        self._kind = kind
        self._seconds = dict.fromkeys(TimeKind, 0.0)
        self._lock = Lock()
        self._since = clock()

    def record(self, ring: SpanRing) -> None:
        """Hand what ends from here on to `ring`."""
        with self._lock:
            self._ring = ring

    def switch(self, kind: TimeKind, key: TensorKey | None = None) -> TimeKind:
        """End the running kind now and begin `kind`, for the tensor `key`; gives the kind that ran before."""
        with self._lock:
            now = self._clock()
            previous = self._kind
            self._seconds[previous] += now - self._since
            if self._ring is not None and now > self._since:
                self._ring.record(previous, self._since, now, self._key)
            self._kind, self._since, self._key = kind, now, key
            return previous

    @contextmanager
    def spent(self, kind: TimeKind) -> Iterator[None]:
        """Count the block as `kind`, then go on with the kind that ran before, also after an exception."""
        previous = self.switch(kind)
        try:
            yield
        finally:
            self.switch(previous)

    def running(self) -> tuple[TimeKind, float]:
        """The kind that runs now, and for how many seconds it has."""
        with self._lock:
            return self._kind, self._clock() - self._since

    @contextmanager
    def beside(self, kind: str, key: TensorKey) -> Iterator[None]:
        """The block, on another thread, is work for a tensor: a span for traces, no time of this clock."""
        began = self._clock()
        try:
            yield
        finally:
            if self._ring is not None:
                self._ring.record(kind, began, self._clock(), key)

    def snapshot(self) -> dict[TimeKind, float]:
        """Seconds by kind since the clock was made, with the running kind counted up to now."""
        with self._lock:
            seconds = self._seconds.copy()
            seconds[self._kind] += self._clock() - self._since
            return seconds


def difference(later: Times, earlier: Times) -> dict[TimeKind, float]:
    """Seconds by kind between two snapshots of one clock."""
    return {kind: later[kind] - earlier[kind] for kind in TimeKind}
