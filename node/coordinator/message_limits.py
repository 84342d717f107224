"""Bound what one member may send to the coordinator: sizes and rates by kind of message. Pure.

A correct node stays far below all of these. What is beyond them is refused before it is decoded.
"""

from dataclasses import dataclass

from node.config.schema import RunConfig
from node.coordinator.enrolment_service import RateLimit
from node.model.units import unit_names
from node.telemetry.trace_files import TracedSteps

MOST_LINKS = 4
"""In a report: a stage has two neighbours, or three where the ring closes."""
MESSAGE_BYTES = 16 * 1024
UNIT_BYTES = 64
"""Of a vote, for each layer unit."""
HEARTBEATS_KEPT = 500
"""Heartbeats, and as many other messages, that may come at once after an outage."""
HEARTBEAT_TIMES = 10.0
"""As often as a node is asked to send heartbeats."""
OTHERS_A_SECOND = 200.0
SPANS_BYTES = 512 * 1024
"""Of one message: `wire.telemetry.MOST_SPANS`, with room."""
SPANS_A_SECOND, SPANS_AT_ONCE = 20_000.0, 50_000.0
CONNECTIONS_A_SECOND, CONNECTIONS_AT_ONCE = 0.5, 20.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A message, before it is decoded."""

    kind: str
    size: int
    """Bytes."""
    links: int = 0
    """In its report."""
    step: int = 0
    """Of spans."""
    spans: int = 0


class MessageLimits:
    """One member's, over all its sessions."""

    def __init__(self, config: RunConfig) -> None:
        self.connections = RateLimit(CONNECTIONS_A_SECOND, CONNECTIONS_AT_ONCE)
        self._traced = TracedSteps.parse(config.telemetry.trace)
        self._most_bytes = MESSAGE_BYTES + UNIT_BYTES * len(unit_names(config.model))
        self._heartbeats = RateLimit(HEARTBEAT_TIMES / config.coordinator.heartbeat_seconds, HEARTBEATS_KEPT)
        self._others = RateLimit(OTHERS_A_SECOND, HEARTBEATS_KEPT)
        self._spans = RateLimit(SPANS_A_SECOND, SPANS_AT_ONCE)

    def refusal(self, message: Measured, now: float) -> str | None:
        """Why this message is refused at `now` (seconds on any monotonic clock); None if it is not."""
        kind, size = message.kind, message.size
        if kind == "step_spans":
            if message.step not in self._traced:
                return f"spans of step {message.step + 1}, which is not traced"
            if size > SPANS_BYTES:
                return f"spans of {size} bytes, more than {SPANS_BYTES}"
            return None if self._spans.take(now, message.spans) else "more spans than steps can have"
        if size > self._most_bytes:
            return f"a {kind} of {size} bytes, more than {self._most_bytes}"
        if message.links > MOST_LINKS:
            return f"a {kind} that names {message.links} links, more than {MOST_LINKS}"
        limit = self._heartbeats if kind == "heartbeat" else self._others
        return None if limit.take(now) else f"more {kind} messages than a node has reason to send"
