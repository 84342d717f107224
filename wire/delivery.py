"""Detects whether written frames arrive, and how fast. State machines without I/O.

A path may accept the bytes of one stream and deliver none of them, while other streams continue. Pings on
the control stream do not reveal this; only acknowledgements of frames do.
"""

import math

PATIENCE = 3.0
"""A connection stalls after this many times the longest wait so far, as frames of slow links take long."""
_MOST_DOUBLINGS = 6

OWED_SECONDS, OWED_RATE = 0.25, 125_000.0
"""A relay must deliver an acknowledgement within these seconds, plus the time that the bytes take at this
rate (bytes per second). Below, this is the time that it owes."""
SLOW_TIMES = 2.0
"""A relay is slow if it takes this many times the time that it owes."""
LEAST_SECONDS = 2.0
"""A relay is judged only after frames have been in flight for this many seconds."""
LEAST_OWED = 3 * OWED_SECONDS
"""A path counts as fast only after acknowledgements that were worth this many owed seconds."""
_MEMORY_SECONDS = 10.0
"""Measurements weigh 1/e after this many seconds with frames in flight."""


class Delivery:
    """Watches the delivery of one link, over all its connections. Times are seconds on any clock."""

    def __init__(self, least_seconds: float) -> None:
        """`least_seconds`: the least time without an acknowledgement after which a connection is stalled."""
        self._least = least_seconds
        self._longest = 0.0
        self._stalls = 0
        """The number of stalls since the last acknowledgement. Each doubles the limit, or a slow link would
        never deliver anything."""
        self._since: float | None = None
        """When the wait for the next acknowledgement began."""

    @property
    def limit(self) -> float:
        """The seconds without an acknowledgement after which the connection counts as stalled."""
        return max(self._least * 2.0**self._stalls, PATIENCE * self._longest)

    def connected(self) -> None:
        """Record a new connection, on which nothing has been written yet."""
        self._since = None

    def written(self, *, again: bool, now: float) -> None:
        """Record that the write of a frame begins. `again`: it is a retransmission."""
        if self._since is None or not again:
            self._since = now

    def acknowledged(self, *, all_of_it: bool, now: float) -> None:
        """Record that more frames have arrived. `all_of_it`: nothing else is in flight."""
        if self._since is not None:
            self._longest = max(self._longest, now - self._since)
        self._stalls = 0
        self._since = None if all_of_it else now

    def stalled(self, now: float) -> bool:
        """Whether to drop the connection. After True, call `connected` before the next `written`."""
        if self._since is None or now - self._since <= self.limit:
            return False
        self._stalls = min(self._stalls + 1, _MOST_DOUBLINGS)
        self._since = None
        return True


class Service:
    """Compares what one connection through a relay delivers with what it owes. Times are seconds on any
    clock.

    Only frames in flight count. Frames that wait for the neighbour's window or for this node's bandwidth
    limit say nothing about a relay.
    """

    def __init__(self) -> None:
        self.connected()

    def connected(self) -> None:
        self._took = self._owed = 0.0
        self._since: float | None = None
        """When the current stretch with frames in flight began."""
        self._bytes = 0

    def written(self, size: int, now: float) -> None:
        """Record that the write of a frame begins."""
        if self._since is None:
            self._since = now
        self._bytes += size

    def acknowledged(self, *, all_of_it: bool, now: float) -> None:
        """Record that more frames have arrived. `all_of_it`: nothing else is in flight."""
        if self._since is None or not (all_of_it or now - self._since > _MEMORY_SECONDS):
            return
        took = now - self._since
        fade = math.exp(-took / _MEMORY_SECONDS)
        self._took = fade * self._took + took
        self._owed = fade * self._owed + OWED_SECONDS + self._bytes / OWED_RATE
        self._since, self._bytes = (None if all_of_it else now), 0

    def times(self, now: float) -> float:
        """The time that frames take, divided by the time owed; 0 before any was in flight."""
        took, owed = self._took, self._owed
        if self._since is not None:
            took, owed = took + now - self._since, owed + OWED_SECONDS + self._bytes / OWED_RATE
        return took / owed if owed else 0.0

    def is_slow(self, now: float) -> bool:
        running = 0.0 if self._since is None else now - self._since
        return self._took + running >= LEAST_SECONDS and self.times(now) >= SLOW_TIMES

    def is_faster(self, times: float, now: float) -> bool:
        """Whether this path's ratio is at most half of `times`, the ratio of another path."""
        return self._owed >= LEAST_OWED and 2 * self.times(now) <= times
