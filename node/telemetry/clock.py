"""A bounded record of what a node did and when, for traces."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from wire.spec import TensorKey
from wire.telemetry import Span

MOST_KEPT = 20_000
"""Spans; a step has a few hundred. What is older is dropped, and counted."""


class WorkKind(StrEnum):
    """What goes on beside the compute thread; that waits for it in `encode` and `decode`."""

    PACK = "pack"
    UNPACK = "unpack"


class SpanRing:
    """The newest spans. Any thread may record; whoever takes them gets each once."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._dropped = 0
        self._lock = Lock()

    def record(
        self, kind: str, start: float, end: float, key: TensorKey | None = None, peer_stage: int = -1
    ) -> None:
        """Times in seconds on the monotonic clock."""
        span = Span(kind, start, end - start, key, peer_stage)
        with self._lock:
            self._dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def take(self) -> tuple[tuple[Span, ...], int]:
        """What was recorded since it was taken last, and how many spans were dropped."""
        with self._lock:
            spans, dropped = tuple(self._spans), self._dropped
            self._spans.clear()
            self._dropped = 0
        return spans, dropped


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


KEPT = 16
"""Answers: with a heartbeat every 2 s, those of half a minute, in which clocks drift about 1 ms."""


@dataclass(frozen=True, slots=True)
class _Answer:
    offset: float
    round_trip: float


class ClockSync:
    """Collects answers. Times in seconds: `sent` and `received` monotonic, `at` Unix at the coordinator."""

    def __init__(self) -> None:
        self._answers: deque[_Answer] = deque(maxlen=KEPT)

    def answer(self, *, sent: float, received: float, at: float) -> None:
        """One heartbeat's answer. An answer from before it was asked for says nothing and is dropped."""
        if received >= sent:
            self._answers.append(_Answer(at - (sent + received) / 2, received - sent))

    @property
    def known(self) -> bool:
        return bool(self._answers)

    @property
    def offset(self) -> float:
        """What to add to the monotonic clock to get the coordinator's Unix time; 0 while not known."""
        return self._best.offset if self._answers else 0.0

    @property
    def error(self) -> float:
        """How wrong `offset` may be; 0 while it is not known."""
        return self._best.round_trip / 2 if self._answers else 0.0

    @property
    def _best(self) -> _Answer:
        return min(self._answers, key=lambda answer: answer.round_trip)
