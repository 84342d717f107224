"""How fast a link carries what is sent, from when tensors were queued and when they were acknowledged. Pure.

A link carries one tensor after the other. So a tensor that was queued behind another was carried from that
one's acknowledgement to its own, and a tensor that found the link idle from its queueing to its
acknowledgement, less the round trip of the news. Time in which the link had nothing to carry does not count,
however many tensors were on their way.
"""

import math
from collections import deque

_MEMORY_SECONDS = 2.0
"""Carrying time after which a sample weighs 1/e of a new one: long enough to even out the clock's noise."""


class LinkMeter:
    """One direction of a link. `now` is seconds on any clock; bytes are totals since the link was made."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._busy_since: float | None = None
        self._waiting: deque[tuple[int, float]] = deque()  # (total bytes at its end, when it was queued)
        self._counted = 0  # total bytes at the end of the last tensor that was measured
        self._last_news = -math.inf
        self._bytes = 0.0
        self._seconds = 0.0

    def busy_seconds(self, now: float) -> float:
        """Time in which anything waited to be sent or acknowledged."""
        return self._busy_seconds + (0.0 if self._busy_since is None else max(0.0, now - self._busy_since))

    @property
    def capacity(self) -> float:
        """Bytes a second that the link carries; 0 before it is known."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def queued(self, end_bytes: int, now: float) -> None:
        """A tensor was queued; with it, `end_bytes` in all have been."""
        if self._busy_since is None:
            self._busy_since = now
        self._waiting.append((end_bytes, now))

    def acknowledged(self, total_bytes: int, *, round_trip: float, now: float) -> None:
        """The receiver has `total_bytes`; `round_trip` is the least one seen, seconds."""
        queued_at = None
        end_bytes = self._counted
        while self._waiting and self._waiting[0][0] <= total_bytes:
            end_bytes, at = self._waiting.popleft()
            queued_at = at if queued_at is None else queued_at
        if queued_at is None:
            return
        seconds = max(0.0, now - max(self._last_news, queued_at + round_trip))
        fade = math.exp(-seconds / _MEMORY_SECONDS)
        self._bytes = fade * self._bytes + end_bytes - self._counted
        self._seconds = fade * self._seconds + seconds
        self._counted, self._last_news = end_bytes, now
        if not self._waiting:
            self._busy_seconds = self.busy_seconds(now)
            self._busy_since = None

    def interrupted(self, now: float) -> None:
        """The connection broke, or is back: the time until now is not the link's speed."""
        self._waiting = deque((end_bytes, now) for end_bytes, _ in self._waiting)
        self._last_news = now
