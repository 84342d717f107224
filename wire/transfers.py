"""Records when each tensor of a link was sent, in flight and received. Pure."""

from collections import deque
from collections.abc import Callable
from enum import StrEnum

from wire.frames import HEADER_BYTES, frame_place
from wire.spec import TensorKey

MOST_OPEN = 256
"""The most unfinished tensors to track. A damaged frame may name a tensor that never arrives."""


class TransferKind(StrEnum):
    """A part of a tensor's transfer over a link."""

    SEND = "send"
    """From when its first frame was written until the socket had accepted its last."""
    IN_FLIGHT = "in-flight"
    """From the end of `SEND` until the whole tensor was acknowledged."""
    RECEIVE = "receive"
    """From the arrival of its first frame to the arrival of its last."""


OnTransfer = Callable[[TransferKind, TensorKey, float, float], None]
"""Called with kind, tensor, start and end, in seconds."""


class TransferLog:
    """Watches the frames of one link. Retransmitted frames do not count."""

    def __init__(self, on_transfer: OnTransfer) -> None:
        self._on_transfer = on_transfer
        self._next_sequence = 0  # one past the newest frame that was sent
        self._sending: tuple[TensorKey, float] | None = None
        self._unacknowledged: deque[tuple[int, TensorKey, float]] = deque(maxlen=MOST_OPEN)
        self._receiving: dict[TensorKey, float] = {}

    def sending(self, frame: bytes, now: float) -> None:
        """Record that a frame is about to be written."""
        place = frame_place(frame)
        if place.sequence >= self._next_sequence and place.offset == 0 and place.key is not None:
            self._sending = place.key, now

    def sent(self, frame: bytes, now: float) -> None:
        """Record that the socket accepted the frame."""
        place = frame_place(frame)
        if place.sequence < self._next_sequence:
            return
        self._next_sequence = place.sequence + 1
        if self._sending is None or not place.is_last or self._sending[0] != place.key:
            return
        key, began = self._sending
        self._sending = None
        self._unacknowledged.append((place.sequence, key, now))
        self._on_transfer(TransferKind.SEND, key, began, now)

    def acknowledged(self, next_sequence: int, now: float) -> None:
        """Record that frames below `next_sequence` have arrived, maybe before `sent` was called for them."""
        while self._unacknowledged and self._unacknowledged[0][0] < next_sequence:
            _, key, began = self._unacknowledged.popleft()
            self._on_transfer(TransferKind.IN_FLIGHT, key, began, max(began, now))

    def received(self, frame: bytes, completed: TensorKey | None, now: float) -> None:
        """Record the arrival of a frame. `completed` is the tensor that it completed, if any."""
        if len(frame) >= HEADER_BYTES and completed is None:
            if len(self._receiving) >= MOST_OPEN:
                self._receiving.pop(next(iter(self._receiving)))
            if (key := frame_place(frame).key) is not None:
                self._receiving.setdefault(key, now)
        elif completed is not None:
            self._on_transfer(TransferKind.RECEIVE, completed, self._receiving.pop(completed, now), now)
