"""A node's clocks: how compute time is spent, spans for traces, the offset to the coordinator's clock.

A `StageClock` is always in one kind of time. A switch ends the running interval and begins the next at the
same clock reading, so the kinds sum to wall time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from wire.spec import TensorKey
from wire.telemetry import Span

MOST_SPANS = 20_000
"""A ring keeps this many spans; a step has a few hundred. Older ones are dropped and counted."""


class WorkKind(StrEnum):
    """Work on the packing thread. The compute thread waits for it in `encode` and `decode`."""

    PACK = "pack"
    UNPACK = "unpack"


class SpanRing:
    """A bounded buffer of the newest spans. Any thread may record. Each span is taken once."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._dropped = 0
        self._lock = Lock()

    def record(
        self, kind: str, start: float, end: float, key: TensorKey | None = None, peer_stage: int = -1
    ) -> None:
        """Record a span. Times are in seconds on the monotonic clock."""
        span = Span(kind, start, end - start, key, peer_stage)
        with self._lock:
            self._dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def take(self) -> tuple[tuple[Span, ...], int]:
        """The spans since the last call, and how many were dropped."""
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
    WAIT_VOTES = "wait-votes"
    """The stage waits for other stages to vote or to end the step."""
    WAIT_COORDINATOR = "wait-coordinator"
    """The stage waits for the coordinator after every stage has answered.

    The coordinator's disk, its processor or the way to it is slow.
    """
    SYNC = "sync"
    """After the last backward, gradient groups are summed with other rows."""


WAITS = frozenset(
    {
        TimeKind.WAIT_UPSTREAM,
        TimeKind.WAIT_DOWNSTREAM,
        TimeKind.WAIT_VOTES,
        TimeKind.WAIT_COORDINATOR,
        TimeKind.SYNC,
    }
)
"""The kinds in which the stage is idle."""

Times = Mapping[TimeKind, float]
"""Seconds by kind. All kinds are present."""


class StageClock:
    """Attributes wall time to kinds. One thread switches; any thread may take snapshots.

    Args:
        clock: returns monotonic seconds.
        kind: the kind of the time before the first switch.
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
        """Record spans that end from now on in `ring`."""
        with self._lock:
            self._ring = ring

    def switch(self, kind: TimeKind, key: TensorKey | None = None) -> TimeKind:
        """End the running kind and begin `kind` for the tensor `key`. Returns the kind that ran before."""
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
        """Count the block as `kind`, then return to the previous kind, also after an exception."""
        previous = self.switch(kind)
        try:
            yield
        finally:
            self.switch(previous)

    def running(self) -> tuple[TimeKind, float]:
        """The running kind, and for how many seconds it has run."""
        with self._lock:
            return self._kind, self._clock() - self._since

    @contextmanager
    def beside(self, kind: str, key: TensorKey) -> Iterator[None]:
        """Record the block, which runs on another thread, as a span. It does not count as time of this
        clock."""
        began = self._clock()
        try:
            yield
        finally:
            if self._ring is not None:
                self._ring.record(kind, began, self._clock(), key)

    def waited_for_votes(self, most: float) -> None:
        """Attribute up to `most` seconds of the wait for the coordinator to other stages. Call it when the
        coordinator has answered."""
        with self._lock:
            spent = min(max(0.0, most), self._clock() - self._since)
            if self._kind is TimeKind.WAIT_COORDINATOR and spent > 0:
                since, self._since = self._since, self._since + spent
                self._seconds[TimeKind.WAIT_VOTES] += spent
                if self._ring is not None:
                    self._ring.record(TimeKind.WAIT_VOTES, since, self._since, self._key)

    def snapshot(self) -> dict[TimeKind, float]:
        """The seconds by kind since the clock was created, including the running kind up to now."""
        with self._lock:
            seconds = self._seconds.copy()
            seconds[self._kind] += self._clock() - self._since
            return seconds

    def settled(self) -> dict[TimeKind, float]:
        """The seconds by kind without a wait for the coordinator that is still running.

        Only the coordinator's answer says for whom that wait was.
        """
        with self._lock:
            seconds = self._seconds.copy()
            if self._kind is not TimeKind.WAIT_COORDINATOR:
                seconds[self._kind] += self._clock() - self._since
            return seconds


def difference(later: Times, earlier: Times) -> dict[TimeKind, float]:
    """The seconds by kind between two snapshots of one clock."""
    return {kind: later[kind] - earlier[kind] for kind in TimeKind}


MOST_REPLIES = 16
"""With a heartbeat every 2 s these span half a minute, in which clocks drift by about 1 ms."""


@dataclass(frozen=True, slots=True)
class _Reply:
    offset: float
    round_trip: float


class ClockSync:
    """Estimates the offset of a node's clock from heartbeats and their replies (RFC 5905, section 8).

    The node reads its monotonic clock when it sends and when the reply arrives. The reply carries the
    coordinator's Unix time. The coordinator read it at some moment in between, so the middle is off by at
    most half a round trip. Of the newest replies, the one with the shortest round trip counts.
    """

    def __init__(self) -> None:
        self._replies: deque[_Reply] = deque(maxlen=MOST_REPLIES)

    def answer(self, *, sent: float, received: float, at: float) -> None:
        """Add one reply. `sent` and `received` are in monotonic seconds, `at` in Unix seconds. A reply that
        was received before it was sent is dropped."""
        if received >= sent:
            self._replies.append(_Reply(at - (sent + received) / 2, received - sent))

    @property
    def known(self) -> bool:
        return bool(self._replies)

    @property
    def offset(self) -> float:
        """Add this to the monotonic clock to get the coordinator's Unix time; 0 while unknown."""
        return self._best.offset if self._replies else 0.0

    @property
    def error(self) -> float:
        """A bound on the error of `offset` in seconds; 0 while unknown."""
        return self._best.round_trip / 2 if self._replies else 0.0

    @property
    def _best(self) -> _Reply:
        return min(self._replies, key=lambda reply: reply.round_trip)
