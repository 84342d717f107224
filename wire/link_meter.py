"""Measures a link's capacity from when tensors were queued and when they were acknowledged. Pure.

A link carries one tensor after another. A tensor that was queued behind another was carried between the
other's acknowledgement and its own. A tensor that found the link idle was carried between its queueing and
its acknowledgement, minus a round trip. Time with nothing to carry does not count.

**Token buckets.** Shapers (the kernel's, a provider's, our own `Pacer`) save up idle time: a bucket of bytes
passes at line speed, and only what follows is carried at the shaper's rate. So a tensor after a pause may
seem faster than the link. The bucket's size is unknown, but it gains at most the pause's length at its rate,
and few hold more than `_BUCKET_SECONDS`. A tensor that took ten times as long as the bucket may last is a
*steady* sample, wrong by at most a tenth. Other samples count while there is no steady one. They also count
if the newest steady one is old and they are slower, because then the link has become slower. Faster ones do
not count, because they may be due to the bucket.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_MEMORY_SECONDS = 2.0
"""The carrying time after which a sample weighs 1/e of a new one. Averaging removes the clock's noise."""
_BUCKET_SECONDS = 0.05
"""The most that a bucket holds, in seconds at its rate; the same as in our `Pacer`."""
_SHARE_SAVED = 0.1
"""The largest fraction of a steady sample's time that a bucket may have saved up."""
_STEADY_SECONDS = 30.0
"""For this long after a steady sample, other samples do not count, even slower ones: TCP starts slowly."""


@dataclass(slots=True)
class _Rate:
    """Bytes over carrying time, with the largest weight on the newest."""

    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        fade = math.exp(-seconds / _MEMORY_SECONDS)
        self.bytes = fade * self.bytes + size
        self.seconds = fade * self.seconds + seconds

    @property
    def value(self) -> float:
        """The bytes per second; 0 before they are known."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class LinkMeter:
    """Measures one direction of a link. `now` is seconds on any clock. Bytes are totals of the link."""

    def __init__(self, carried: Callable[[int, float, float], None] | None = None) -> None:
        """`carried` is called with the number of bytes carried, the start and the end."""
        self._carried = carried
        self._busy_seconds = self._told_busy = 0.0
        self._busy_since: float | None = None
        self._waiting: deque[tuple[int, float]] = deque()  # (total bytes at its end, when it was queued)
        self._counted = 0  # total bytes at the end of the last tensor that was measured
        self._last_news = -math.inf
        self._saved_seconds = 0.0  # what a bucket may hold, in seconds at its rate
        self._steady = _Rate()
        self._steady_at = -math.inf
        self._other = _Rate()

    def busy_seconds(self, now: float) -> float:
        """The time in which anything waited to be sent or acknowledged. It never decreases, although a late
        acknowledgement may be for an arrival before `now`."""
        running = 0.0 if self._busy_since is None else max(0.0, now - self._busy_since)
        self._told_busy = max(self._told_busy, self._busy_seconds + running)
        return self._told_busy

    @property
    def capacity(self) -> float:
        """The bytes per second that the link carries; 0 before they are known."""
        steady, other = self._steady.value, self._other.value
        if steady == 0.0:
            return other
        if other == 0.0 or self._last_news - self._steady_at <= _STEADY_SECONDS:
            return steady
        return min(steady, other)

    def queued(self, end_bytes: int, now: float) -> None:
        """Record that a tensor was queued, after which `end_bytes` in total have been."""
        if self._busy_since is None:
            self._busy_since = now
        self._waiting.append((end_bytes, now))

    def acknowledged(self, total_bytes: int, *, round_trip: float, now: float) -> None:
        """Record that the receiver has `total_bytes`. `round_trip` is the least one seen, in seconds.

        `now` is when an immediate acknowledgement would have arrived, which may be a while ago.
        """
        now = max(now, self._last_news)
        queued_at = None
        end_bytes = self._counted
        while self._waiting and self._waiting[0][0] <= total_bytes:
            end_bytes, at = self._waiting.popleft()
            queued_at = at if queued_at is None else queued_at
        if queued_at is None:
            return
        idle = max(0.0, queued_at + round_trip - self._last_news)
        seconds = max(0.0, now - max(self._last_news, queued_at + round_trip))
        if self._carried is not None:
            self._carried(end_bytes - self._counted, now - seconds, now)
        self._saved_seconds = min(_BUCKET_SECONDS, self._saved_seconds + idle)
        if self._saved_seconds <= _SHARE_SAVED * seconds:
            self._steady.add(end_bytes - self._counted, seconds)
            self._steady_at = now
        else:
            self._other.add(end_bytes - self._counted, seconds)
        # A line at twice the bucket's rate empties it in this time, a faster one sooner.
        self._saved_seconds = max(0.0, self._saved_seconds - seconds)
        self._counted, self._last_news = end_bytes, now
        if not self._waiting or self._waiting[0][1] > now:
            self._busy_seconds += max(0.0, now - (now if self._busy_since is None else self._busy_since))
            self._busy_since = self._waiting[0][1] if self._waiting else None

    def interrupted(self, now: float) -> None:
        """Record that the connection broke or returned, so time until now says nothing about capacity."""
        self._waiting = deque((end_bytes, now) for end_bytes, _ in self._waiting)
        self._last_news = now
