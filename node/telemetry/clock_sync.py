"""A node's clock against the coordinator's, from heartbeats and their replies (RFC 5905, section 8). Pure.

The node notes its monotonic clock when it sends and when the answer comes; the answer carries the
coordinator's Unix time. The coordinator's clock was read somewhere between the two, so the middle is at most
half a round trip wrong. Of the newest answers the one with the least round trip counts.
"""

from collections import deque
from dataclasses import dataclass

KEPT = 16
"""Answers: with a heartbeat every 2 s, those of half a minute, in which clocks drift about 1 ms."""


@dataclass(frozen=True, slots=True)
class _Answer:
    offset: float
    round_trip: float


class ClockSync:
    """Collects answers. Times in seconds: `sent` and `received` monotonic, `at` Unix at the coordinator."""

    def __init__(self) -> None:
        self._answers: deque[_Answer] = deque(maxlen=KEPT)

    def answer(self, *, sent: float, received: float, at: float) -> None:
        """One heartbeat's answer. An answer from before it was asked for says nothing and is dropped."""
        if received >= sent:
            self._answers.append(_Answer(at - (sent + received) / 2, received - sent))

    @property
    def known(self) -> bool:
        return bool(self._answers)

    @property
    def offset(self) -> float:
        """What to add to the monotonic clock to get the coordinator's Unix time; 0 while not known."""
        return self._best.offset if self._answers else 0.0

    @property
    def error(self) -> float:
        """How wrong `offset` may be; 0 while it is not known."""
        return self._best.round_trip / 2 if self._answers else 0.0

    @property
    def _best(self) -> _Answer:
        return min(self._answers, key=lambda answer: answer.round_trip)
