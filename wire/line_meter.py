"""The most that a machine's line carries, over all links together, from when bytes passed. Pure.

Time is cut into spans of `SPAN_SECONDS`. What a link carried between two moments counts in the spans between
them. The most of the newest spans is what the line carries at least, and what it carries at most once it was
full for one span. The few largest do not count: a shaper's bucket and a late clock make spans that no line
repeats.
"""

from collections import deque

SPAN_SECONDS = 1.0
SPANS = 120
"""The newest ones that carried anything."""
BEYOND = 0.05
"""The share of them, the largest, that does not count."""


class LineMeter:
    """One direction. Times are seconds on any clock."""

    def __init__(self) -> None:
        self._whole: deque[float] = deque(maxlen=SPANS)
        """Bytes of spans that are over."""
        self._open: dict[int, float] = {}
        """Bytes of those that are not, by number."""

    def carried(self, size: int, start: float, end: float) -> None:
        """A link carried `size` bytes evenly between two moments, of which the second is about now."""
        last = int(end // SPAN_SECONDS)
        # What began long ago counts from its last spans on: no stalled link fills them all.
        first = max(int(min(start, end) // SPAN_SECONDS), last - SPANS + 1)
        if first == last:
            self._open[last] = self._open.get(last, 0.0) + size
        else:
            seconds = end - start
            for span in range(first, last + 1):
                within = min(end, (span + 1) * SPAN_SECONDS) - max(start, span * SPAN_SECONDS)
                self._open[span] = self._open.get(span, 0.0) + size * within / seconds
        if len(self._open) > 2:
            self._close(last - 1)

    def rate(self, now: float) -> float:
        """Bytes a second; 0 before a span was whole."""
        self._close(int(now // SPAN_SECONDS) - 1)
        if not self._whole:
            return 0.0
        sizes = sorted(self._whole)
        return sizes[-1 - int(BEYOND * len(sizes))] / SPAN_SECONDS

    def _close(self, before: int) -> None:
        """Spans before this one are whole: what comes for them later is too late to count."""
        for span in sorted(self._open):
            if span < before:
                self._whole.append(self._open.pop(span))


class Line:
    """A machine's line, which all its links share."""

    def __init__(self, most_up: float = 0.0) -> None:
        """`most_up`: bytes a second that it may send; 0: no limit."""
        self._most_up = most_up
        self.sent = LineMeter()
        self.received = LineMeter()

    def up(self, now: float) -> float:
        """Bytes a second that it sends at most, as set or as seen; 0 while not known."""
        return self._most_up or self.sent.rate(now)

    def down(self, now: float) -> float:
        """The same of what it receives."""
        return self.received.rate(now)
