"""A bounded record of what a node did and when, for traces."""

from collections import deque
from enum import StrEnum
from threading import Lock

from wire.spec import TensorKey
from wire.telemetry import Span

MOST_KEPT = 20_000
"""Spans; a step has a few hundred. What is older is dropped, and counted."""


class WorkKind(StrEnum):
    """What goes on beside the compute thread; that waits for it in `encode` and `decode`."""

    PACK = "pack"
    UNPACK = "unpack"


class SpanRing:
    """The newest spans. Any thread may record; whoever takes them gets each once."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._dropped = 0
        self._lock = Lock()

    def record(
        self, kind: str, start: float, end: float, key: TensorKey | None = None, peer_stage: int = -1
    ) -> None:
        """Times in seconds on the monotonic clock."""
        span = Span(kind, start, end - start, key, peer_stage)
        with self._lock:
            self._dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def take(self) -> tuple[tuple[Span, ...], int]:
        """What was recorded since it was taken last, and how many spans were dropped."""
        with self._lock:
            spans, dropped = tuple(self._spans), self._dropped
            self._spans.clear()
            self._dropped = 0
        return spans, dropped
