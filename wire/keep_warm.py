"""Keeps a link's TCP connection from forgetting its rate while the pipeline pauses. Pure.

A pipeline pauses between steps, a stage's bulk stream from its last tensor of one step to its first of the
next: a round trip at least. TCP that has sent nothing for a retransmission timeout (RFC 5681, section 4.1;
0.2 s and more) begins again with ten packets a round trip, and where a round trip takes tens of milliseconds
most of a step is over before the link is full again. With a byte now and then the connection is never idle;
one that leaves its window unused merely halves it in every such timeout (RFC 7661), which after a pause of
half a second is one or two round trips' worth of growth, not ten.
"""

MESSAGE = b"\0"
"""On the bulk stream, where it is no frame: a frame has 64 bytes and more."""
PERIOD_SECONDS = 0.1
"""Below the least retransmission timeout on Linux."""
LONGEST_SECONDS = 3.0
"""After so long a pause nothing would be left of the rate."""
LEAST_ROUND_TRIP = 0.005
"""Seconds. On a nearer link a slow start is over in the time of a message."""


class KeepWarm:
    """Says when a stream that has nothing to send should send `MESSAGE`."""

    def __init__(self) -> None:
        self._frame_at: float | None = None
        self._sent_at = 0.0

    def frame_sent(self, now: float) -> None:
        """A frame has left."""
        self._frame_at = self._sent_at = now

    def sent(self, now: float) -> None:
        """`MESSAGE` has left."""
        self._sent_at = now

    def due_at(self, round_trip: float) -> float | None:
        """When the next is to leave; None if none should before a frame does.

        Args:
            round_trip: the link's, in seconds; 0 while not known.
        """
        if self._frame_at is None or round_trip < LEAST_ROUND_TRIP:
            return None
        due = self._sent_at + PERIOD_SECONDS
        return due if due <= self._frame_at + LONGEST_SECONDS else None
