"""The most that a machine's line carries, over all links together, measured from when bytes passed. Pure.

Time is cut into spans of `SPAN_SECONDS`. What a link carried between two moments counts in the spans
between them. The most of the newest spans is what the line carries at least; it is what the line carries
at most once the line was full for one span. The few largest spans do not count, because a shaper's bucket
and a late clock make spans that no line repeats.

The newest spans are those of the last two steps: the parts of a step differ, but steps of one placement
are alike. A line that became slower is known two steps later. Until then, windows that were planned for
the faster line only make its queue longer.
"""

import threading
from collections import deque

SPAN_SECONDS = 1.0
SPANS = 120
"""The most spans that count: the newest ones that carried anything."""
LEAST_SPANS = 10
"""The fewest spans that count, where steps are short."""
STEPS = 2
BEYOND = 0.05
"""The share of spans, the largest, that does not count."""


class LineMeter:
    """The meter of one direction, for links on several threads. Times are seconds on any clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, float] = {}
        """Bytes, by the number of a span."""
        self._steps: deque[int] = deque(maxlen=STEPS)
        """The spans in which the newest steps began."""

    def step_begins(self, now: float) -> None:
        """A step begins. What was carried before the last step no longer counts."""
        with self._lock:
            self._steps.append(int(now // SPAN_SECONDS))
            if len(self._steps) == STEPS:
                for span in sorted(self._spans)[:-LEAST_SPANS]:
                    if span < self._steps[0]:
                        del self._spans[span]

    def carried(self, size: int, start: float, end: float) -> None:
        """A link carried `size` bytes evenly between two moments, of which the second is about now.

        Of tensors that take long that is known late: they count in the spans in which they were carried.
        """
        last = int(end // SPAN_SECONDS)
        first = max(int(min(start, end) // SPAN_SECONDS), last - SPANS + 1)
        with self._lock:
            if first == last:
                self._add(last, size)
                return
            seconds = end - start
            for span in range(first, last + 1):
                within = min(end, (span + 1) * SPAN_SECONDS) - max(start, span * SPAN_SECONDS)
                self._add(span, size * within / seconds)

    def rate(self, now: float) -> float:
        """The measured bytes per second; 0 before a span was whole."""
        with self._lock:
            spans = tuple(self._spans.items())
        whole = sorted(size for span, size in spans if span < int(now // SPAN_SECONDS))
        return whole[-1 - int(BEYOND * len(whole))] / SPAN_SECONDS if whole else 0.0

    def _add(self, span: int, size: float) -> None:
        self._spans[span] = self._spans.get(span, 0.0) + size
        if len(self._spans) > SPANS:
            del self._spans[min(self._spans)]


class Line:
    """A machine's line, which all its links share."""

    def __init__(self, most_up: float = 0.0) -> None:
        """`most_up`: bytes a second that it may send; 0: no limit."""
        self._most_up = most_up
        self.sent = LineMeter()
        self.received = LineMeter()

    def step_begins(self, now: float) -> None:
        self.sent.step_begins(now)
        self.received.step_begins(now)

    def up(self, now: float) -> float:
        """The bytes per second that it sends at most, as set or as measured; 0 while not known."""
        return self._most_up or self.sent.rate(now)

    def down(self, now: float) -> float:
        """The same of what it receives."""
        return self.received.rate(now)
