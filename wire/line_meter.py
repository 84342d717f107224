"""Measures the capacity of a machine's line over all its links, from when bytes passed. Pure.

Time is divided into spans of `SPAN_SECONDS`. What a link carried between two moments is distributed over the
spans between them. The maximum over the newest spans is a lower bound of the line's capacity, and equals it
once the line was full for a span. The few largest spans are ignored, because a shaper's bucket and a late
clock produce values that the line cannot sustain.

The newest spans are those of the last two steps: the parts of a step differ, but steps with the same
placement are alike. If a line becomes slower, this shows two steps later. Until then, windows that were
planned for the faster line only lengthen its queue.
"""

import threading
from collections import deque

SPAN_SECONDS = 1.0
SPANS = 120
"""The most spans that count: the newest ones in which anything was carried."""
LEAST_SPANS = 10
"""The fewest spans that count if steps are short."""
STEPS = 2
BEYOND = 0.05
"""The fraction of spans, the largest ones, that is ignored."""


class LineMeter:
    """Measures one direction, for links on several threads. Times are seconds on any clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[int, float] = {}
        """The bytes carried in each span, by its number."""
        self._steps: deque[int] = deque(maxlen=STEPS)
        """The spans in which the newest steps began."""

    def step_begins(self, now: float) -> None:
        """Record that a step begins. Only what was carried since the last step began still counts."""
        with self._lock:
            self._steps.append(int(now // SPAN_SECONDS))
            if len(self._steps) == STEPS:
                for span in sorted(self._spans)[:-LEAST_SPANS]:
                    if span < self._steps[0]:
                        del self._spans[span]

    def carried(self, size: int, start: float, end: float) -> None:
        """Record that a link carried `size` bytes evenly between `start` and `end`, which is about now.

        Tensors that take long are reported late, and count in the spans in which they were carried.
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
        """The measured bytes per second; 0 before a span is complete."""
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
        """`most_up`: the most bytes per second that it may send; 0 for no limit."""
        self._most_up = most_up
        self.sent = LineMeter()
        self.received = LineMeter()

    def step_begins(self, now: float) -> None:
        self.sent.step_begins(now)
        self.received.step_begins(now)

    def up(self, now: float) -> float:
        """The most bytes per second that it can send, as set or as measured; 0 while unknown."""
        return self._most_up or self.sent.rate(now)

    def down(self, now: float) -> float:
        """The most bytes per second that it can receive, as measured; 0 while unknown."""
        return self.received.rate(now)
