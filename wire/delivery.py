"""Whether frames that were written arrive, and how fast. State machines without I/O.

A path may accept the bytes of one stream and deliver none, while other streams beside it go on. Pings on
the control stream do not show that; only acknowledgements of frames do.
"""

import math

PATIENCE = 3.0
"""A connection may be silent for this many times the longest wait so far, because a slow link waits long for
each frame."""
_MOST_DOUBLINGS = 6

OWED_SECONDS, OWED_RATE = 0.25, 125_000.0
"""What a relay owes a link: an acknowledgement within these seconds, plus the time of the bytes at this
rate."""
SLOW_TIMES = 2.0
"""A relay is slow if it takes this many times as long as it owes."""
LEAST_SECONDS = 2.0
"""Frames must have been under way for this many seconds before a relay is judged."""
LEAST_OWED = 3 * OWED_SECONDS
"""A path counts as fast only if it has acknowledged as many frames as this time allows."""
_MEMORY_SECONDS = 10.0
"""The time under way after which older measurements weigh 1/e."""


class Delivery:
    """The delivery of one link, over all its connections. Times are seconds on any clock."""

    def __init__(self, least_seconds: float) -> None:
        """`least_seconds`: without an acknowledgement for so long, a connection may count as stalled."""
        self._least = least_seconds
        self._longest = 0.0
        self._stalls = 0
        """The number of stalls since the last acknowledgement. The wait doubles with each, or a slow link
        would never deliver."""
        self._since: float | None = None
        """The time since which an acknowledgement is awaited."""

    @property
    def limit(self) -> float:
        """The seconds without an acknowledgement after which the connection counts as stalled."""
        return max(self._least * 2.0**self._stalls, PATIENCE * self._longest)

    def connected(self) -> None:
        """There is a new connection, and nothing has been written on it."""
        self._since = None

    def written(self, *, again: bool, now: float) -> None:
        """A frame begins to be written; `again`: not for the first time."""
        if self._since is None or not again:
            self._since = now

    def acknowledged(self, *, all_of_it: bool, now: float) -> None:
        """More frames have arrived; `all_of_it`: nothing else is under way."""
        if self._since is not None:
            self._longest = max(self._longest, now - self._since)
        self._stalls = 0
        self._since = None if all_of_it else now

    def stalled(self, now: float) -> bool:
        """Whether to give the connection up. Call `connected` before the next `written`."""
        if self._since is None or now - self._since <= self.limit:
            return False
        self._stalls = min(self._stalls + 1, _MOST_DOUBLINGS)
        self._since = None
        return True


class Service:
    """What one connection through a relay delivers, compared with what it owes. Times are seconds on any
    clock.

    Only frames under way count. What waits for the neighbour's window, or for this node's bandwidth limit,
    says nothing about a relay.
    """

    def __init__(self) -> None:
        self.connected()

    def connected(self) -> None:
        """There is a new connection."""
        self._took = self._owed = 0.0
        self._since: float | None = None
        """The time since which frames have been under way without a pause."""
        self._bytes = 0

    def written(self, size: int, now: float) -> None:
        """A frame begins to be written."""
        if self._since is None:
            self._since = now
        self._bytes += size

    def acknowledged(self, *, all_of_it: bool, now: float) -> None:
        """More frames have arrived; `all_of_it`: nothing else is under way."""
        if self._since is None or not (all_of_it or now - self._since > _MEMORY_SECONDS):
            return
        took = now - self._since
        fade = math.exp(-took / _MEMORY_SECONDS)
        self._took = fade * self._took + took
        self._owed = fade * self._owed + OWED_SECONDS + self._bytes / OWED_RATE
        self._since, self._bytes = (None if all_of_it else now), 0

    def times(self, now: float) -> float:
        """How many times as long as owed frames take; 0 before any was under way."""
        took, owed = self._took, self._owed
        if self._since is not None:
            took, owed = took + now - self._since, owed + OWED_SECONDS + self._bytes / OWED_RATE
        return took / owed if owed else 0.0

    def is_slow(self, now: float) -> bool:
        running = 0.0 if self._since is None else now - self._since
        return self._took + running >= LEAST_SECONDS and self.times(now) >= SLOW_TIMES

    def is_faster(self, times: float, now: float) -> bool:
        """Whether frames take at most half as often as long as owed as they took elsewhere."""
        return self._owed >= LEAST_OWED and 2 * self.times(now) <= times
