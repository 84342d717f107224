"""How fast a link carries what is sent: measured from acknowledgements while tensors wait. Pure.

While anything waits to be sent or acknowledged, the link is busy, and acknowledgements come at the rate at
which it delivers. A busy period is cut into samples: bytes acknowledged, over the time since the sample
began. The first sample of a period also waits one round trip for its first byte to be acknowledged, so that
is taken off. Pauses between periods say nothing about the link and do not count.
"""

import math

_SAMPLE_SECONDS = 0.25
"""A long busy period is cut this often, so that a link that changes is noticed while it is busy."""
_MEMORY_SECONDS = 4.0
"""Busy time after which a sample weighs 1/e of a new one."""
_LEAST_SECONDS = 0.002
"""What is left of a shorter sample without its round trip is noise."""


class LinkMeter:
    """One direction of a link. `now` is seconds on any clock; bytes are totals since the link was made."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._since: float | None = None  # when the running busy period was last counted
        self._sample_began = 0.0
        self._sample_bytes = 0  # acknowledged when the sample began
        self._first = True
        self._bytes = 0.0
        self._seconds = 0.0

    def busy_seconds(self, now: float) -> float:
        """Time in which anything waited to be sent or acknowledged."""
        return self._busy_seconds + (0.0 if self._since is None else max(0.0, now - self._since))

    @property
    def capacity(self) -> float:
        """Bytes a second that the link delivers while it is busy; 0 before it is known."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0

    def queued(self, acknowledged_bytes: int, now: float) -> None:
        """A tensor was queued."""
        if self._since is None:
            self._since = now
            self._first = True
            self._begin_sample(acknowledged_bytes, now)

    def acknowledged(self, acknowledged_bytes: int, *, idle: bool, round_trip: float, now: float) -> None:
        """News of the receiver. `idle`: nothing waits any more; `round_trip`: the least one seen, seconds."""
        if self._since is None:
            return
        if idle or now - self._sample_began >= _SAMPLE_SECONDS:
            seconds = now - self._sample_began - (round_trip if self._first else 0.0)
            size = acknowledged_bytes - self._sample_bytes
            if size > 0 and seconds >= _LEAST_SECONDS:
                fade = math.exp(-seconds / _MEMORY_SECONDS)
                self._bytes = fade * self._bytes + size
                self._seconds = fade * self._seconds + seconds
                self._first = False
                self._begin_sample(acknowledged_bytes, now)
        if idle:
            self._stop(now)

    def interrupted(self, now: float) -> None:
        """The connection broke: the time until it is back is not the link's speed."""
        if self._since is not None:
            self._stop(now)

    def _begin_sample(self, acknowledged_bytes: int, now: float) -> None:
        self._sample_began, self._sample_bytes = now, acknowledged_bytes

    def _stop(self, now: float) -> None:
        self._busy_seconds = self.busy_seconds(now)
        self._since = None
