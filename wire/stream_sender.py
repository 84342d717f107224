"""The sending end of a bulk stream as a state machine without I/O: tensors in, frames out, in order.

A frame is cut from the caller's buffer when it is due, and copied once, into gRPC's message. A tensor that
waits or is unacknowledged needs no second copy; a piece to retransmit is cut again, alone. Sequence numbers,
credit and acknowledgements count pieces.
"""

from bisect import bisect_right
from dataclasses import dataclass

from wire.errors import LinkError, ProtocolViolationError
from wire.frames import MAX_TENSOR_BYTES, PAYLOAD_BYTES, Frame, pack_frame
from wire.spec import TensorKey

Payload = bytes | bytearray | memoryview

_MAX_PROBE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class _Outgoing:
    key: TensorKey
    data: memoryview
    first: int  # sequence of its first piece
    end: int  # one past its last


class StreamSender:
    """Sends the tensors of one link, oldest first, and repeats frames until they are acknowledged.

    The receiver's `credit_limit` bounds its RAM, and `outbox_bytes` bounds what waits here. An unacknowledged
    frame is sent again after `resend_seconds` of silence, then after twice that, and so on, so that a lost
    acknowledgement cannot stop the link. The link sets `session` before it takes the first frame.
    """

    def __init__(
        self,
        *,
        tag: int,
        outbox_bytes: int,
        resend_seconds: float,
        payload_bytes: int = PAYLOAD_BYTES,
    ) -> None:
        self.session = 0
        self.pieces = 1
        """The most pieces that a new frame carries."""
        self.retransmits = 0
        self._tag = tag
        self._payload_bytes = payload_bytes
        self._outbox_limit = outbox_bytes
        self._resend_seconds = resend_seconds
        self._tensors: list[_Outgoing] = []
        self._queued_bytes = 0
        self._done_bytes = 0  # of tensors that were acknowledged as a whole
        self._end = 0  # one past the last frame of the last tensor
        self._acknowledged = 0  # every frame below has arrived
        self._cursor = 0  # next frame in order; a reconnection moves it back
        self._sent = 0  # one past the newest frame ever taken
        self._credit_limit = 0
        self._again: set[int] = set()
        self._probe_seconds = resend_seconds
        self._probe_at: float | None = None

    @property
    def queued_bytes(self) -> int:
        """The bytes of tensors that are not fully acknowledged."""
        return self._queued_bytes

    @property
    def acknowledged_bytes(self) -> int:
        """The payload bytes of fully acknowledged tensors since the link was created."""
        return self._done_bytes

    @property
    def sent_bytes(self) -> int:
        """The payload bytes of all tensors queued since the link was created."""
        return self._done_bytes + self._queued_bytes

    @property
    def unacknowledged(self) -> int:
        """The number of frames taken but not yet acknowledged."""
        return self._sent - self._acknowledged

    @property
    def has_more(self) -> bool:
        """Whether there are frames to send or to send again."""
        return self._cursor < self._end or bool(self._again)

    @property
    def deadline(self) -> float | None:
        """When to call `next_frame` again if nothing happens."""
        return self._probe_at

    def send(self, key: TensorKey, payload: Payload) -> None:
        """Queue a tensor. Its bytes must not change until they are acknowledged.

        Raises `LinkError` when it is empty or too long, or when the outbox is full.
        """
        data = memoryview(payload).cast("B")
        if not 0 < len(data) <= MAX_TENSOR_BYTES:
            raise LinkError(f"{key} has {len(data)} bytes; a link carries 1 to {MAX_TENSOR_BYTES}")
        # One tensor larger than the whole outbox still passes, alone.
        if self._tensors and self._queued_bytes + len(data) > self._outbox_limit:
            raise LinkError(
                f"cannot queue {key}: {self._queued_bytes} bytes already wait, and the limit is "
                f"{self._outbox_limit}; the schedule sends more than it should keep in flight"
            )
        frames = -(-len(data) // self._payload_bytes)
        self._tensors.append(_Outgoing(key, data, self._end, self._end + frames))
        self._end += frames
        self._queued_bytes += len(data)

    def next_frame(self, now: float) -> bytes | None:
        """The frame to write next; None if nothing may be written before `deadline`."""
        count = 1
        if self._again:
            sequence = min(self._again)
            self._again.remove(sequence)
        elif self._cursor < min(self._end, self._credit_limit):
            sequence = self._cursor
            # New and retransmitted pieces are counted separately, so they do not share a frame.
            before = self._sent if sequence < self._sent else self._end
            end = min(self._tensor(sequence).end, self._credit_limit, before)
            count = min(self.pieces, end - sequence)
            self._cursor += count
        elif self._acknowledged < self._cursor and self._probe_is_due(now):
            sequence = self._acknowledged
            self._probe_seconds = min(2 * self._probe_seconds, _MAX_PROBE_SECONDS)
        else:
            return None
        self._probe_at = None
        if sequence < self._sent:
            self.retransmits += 1
        self._sent = max(self._sent, sequence + count)
        return self._cut(sequence, count)

    def acknowledge(self, next_sequence: int, credit_limit: int) -> None:
        """Record that frames below `next_sequence` have arrived and those below `credit_limit` may be sent.

        Ignores outdated acknowledgements. Raises `ProtocolViolationError` for frames that were never sent.
        """
        if next_sequence > self._sent:
            raise ProtocolViolationError(
                f"the neighbour acknowledged frame {next_sequence - 1}; only {self._sent} frames were sent"
            )
        self._credit_limit = max(self._credit_limit, credit_limit)
        if next_sequence <= self._acknowledged:
            return
        self._acknowledged = next_sequence
        self._cursor = max(self._cursor, next_sequence)
        self._again = {sequence for sequence in self._again if sequence >= next_sequence}
        self._probe_seconds, self._probe_at = self._resend_seconds, None
        while self._tensors and self._tensors[0].end <= next_sequence:
            size = len(self._tensors.pop(0).data)
            self._queued_bytes -= size
            self._done_bytes += size

    def send_again(self, sequences: list[int]) -> None:
        """Retransmit frames that were lost or damaged. Ignores invalid numbers from damaged headers."""
        self._again.update(s for s in sequences if self._acknowledged <= s < self._cursor)

    def reconnect(self, next_sequence: int) -> None:
        """Continue on a new connection from the lowest frame that the other end lacks.

        Raises `ProtocolViolationError` if the other end has lost frames that it acknowledged.
        """
        if next_sequence < self._acknowledged:
            raise ProtocolViolationError(
                f"the neighbour asks for frame {next_sequence} after acknowledging {self._acknowledged}: "
                "it was restarted; a new epoch is needed"
            )
        self.acknowledge(next_sequence, 0)
        self._cursor = next_sequence
        self._again.clear()
        self._probe_seconds, self._probe_at = self._resend_seconds, None

    def forget(self) -> None:
        """Drop all tensors, because no more frames will be sent."""
        self._tensors.clear()
        self._queued_bytes = 0

    def _probe_is_due(self, now: float) -> bool:
        # The wait starts when nothing else is to send, because a slow link may take seconds to accept a
        # frame.
        if self._probe_at is None:
            self._probe_at = now + self._probe_seconds
        return now >= self._probe_at

    def _tensor(self, sequence: int) -> _Outgoing:
        return self._tensors[bisect_right(self._tensors, sequence, key=lambda t: t.first) - 1]

    def _cut(self, sequence: int, count: int) -> bytes:
        tensor = self._tensor(sequence)
        offset = (sequence - tensor.first) * self._payload_bytes
        payload = tensor.data[offset : offset + count * self._payload_bytes]
        return pack_frame(
            Frame(self.session, sequence, tensor.key, len(tensor.data), offset, payload), self._tag
        )
