"""Whether frames that were written arrive. A state machine without I/O.

A path may take bytes of one stream and deliver none, while other streams beside it go on. Pings of the
control stream do not show that; only acknowledgements of frames do.
"""

PATIENCE = 3.0
"""Times the longest wait so far: a slow link waits long for each frame."""
_MOST_DOUBLINGS = 6


class Delivery:
    """Of one link, over all its connections. Times are seconds on any clock."""

    def __init__(self, least_seconds: float) -> None:
        """`least_seconds`: without an acknowledgement for so long, a connection may count as stalled."""
        self._least = least_seconds
        self._longest = 0.0
        self._stalls = 0
        """Since the last acknowledgement: the wait doubles with each, or a slow link would never deliver."""
        self._since: float | None = None
        """Since when an acknowledgement is awaited."""

    @property
    def limit(self) -> float:
        """Seconds without an acknowledgement after which the connection counts as stalled."""
        return max(self._least * 2.0**self._stalls, PATIENCE * self._longest)

    def connected(self) -> None:
        """There is a new connection, on which nothing was written."""
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
