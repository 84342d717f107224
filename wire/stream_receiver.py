"""The receiving end of a bulk stream as a state machine without I/O: frames in, each whole tensor out once.

**RAM.** A frame occupies the window from its arrival until its tensor is released. The sender may run at
most a window of frames ahead of the released ones, but may always finish a tensor that it has begun. So
buffers never exceed `window_bytes` plus one tensor, however slow the consumer is, and a tensor larger than
the window still passes. Buffers of released tensors are reused for tensors of the same size, within
`window_bytes` plus the peak of held tensors. The record of frames is bounded too: no frame may be further
than a window, or the rest of its tensor, beyond the lowest missing one. This never delays a correct sender,
because missing frames need no credit.

**No deadlock.** The consumer may take tensors in another order than the sender's. A tensor that has begun
always completes (above). For a tensor that has not begun, the consumer calls `want`. Until that tensor is
complete, the window counts from the lowest missing frame instead of the oldest unreleased one, so everything
sent before it gets through. Buffers then exceed the bound only by what was sent before the wanted tensor,
which any receiver would have to hold.

**Once.** A key that was received in the two newest steps is refused when it arrives again; `expect` drops
older steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wire.errors import ProtocolViolationError
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES, DamagedFrameError, Frame, parse_frame
from wire.spec import TensorKey

Expect = Callable[[TensorKey], int | None]
"""Returns the exact length of a tensor in bytes, or None to drop it as stale or unknown.

Keys come from the network. A tensor may arrive before this node has begun its step, so accept every key that
the epoch may still need; a dropped tensor is lost. Drop keys two steps older than the newest expected one,
because they are no longer checked for repeats.
"""

MAX_DAMAGED_IN_A_ROW = 64
SMALL_BYTES = 64 * 1024
"""Smaller tensors are acknowledged together, because a message costs both ends more than the tensor."""
ACK_SECONDS = 0.02
"""How long acknowledgements of frames and of small tensors are delayed to be sent together."""
MOST_SPARE = 8
"""How many released buffers to keep, so that a busy link with tensors of several sizes allocates nothing."""


class Completed(NamedTuple):
    """A whole tensor. The consumer owns the buffer until `release`; then it is reused."""

    key: TensorKey
    buffer: bytearray


class Arrival(NamedTuple):
    """The arrival of a complete tensor."""

    next_sequence: int
    """One past its last frame."""
    at: float


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Every frame below `next_sequence` has arrived; frames below `credit_limit` may be sent."""

    next_sequence: int
    credit_limit: int
    arrived: tuple[Arrival, ...] = ()
    """The tensors completed since the last acknowledgement, in order. The sender measures the link from their
    times."""


@dataclass(frozen=True, slots=True)
class SendAgain:
    """These frames arrived damaged or not at all."""

    sequences: tuple[int, ...]


@dataclass(slots=True)
class _Incoming:
    key: TensorKey
    buffer: bytearray | None  # None: stale, its frames are counted and dropped
    total: int
    first: int  # its first piece
    end: int  # one past its last
    missing: int  # pieces


class StreamReceiver:
    """Receives the tensors of one link.

    After every call, `poll` returns the messages that are due, and `deadline` is when the next one will be.
    Acknowledgements of frames and of small tensors are delayed by up to `ACK_SECONDS`, and repeated every
    `repeat_seconds`, so that a lost one cannot stop the link. The link sets `session` before the first frame
    arrives.
    """

    def __init__(
        self,
        *,
        tag: int,
        expect: Expect,
        window_bytes: int,
        resend_seconds: float,
        repeat_seconds: float = 2.0,
        payload_bytes: int = PAYLOAD_BYTES,
    ) -> None:
        self.session = 0
        self.frames = 0
        self.rejects = 0  # damaged frames
        self.stale = 0  # frames of tensors that nobody expects
        self.held_bytes = 0  # buffers of tensors that are incomplete or not released
        self.peak_held_bytes = 0
        self._tag = tag
        self._expect = expect
        self._payload_bytes = payload_bytes
        self._window = max(1, window_bytes // payload_bytes)  # frames
        self._resend_seconds = resend_seconds
        self._repeat_seconds = repeat_seconds

        self._next = 0  # every frame below has arrived
        self._beyond: set[int] = set()  # arrived, above `_next`
        self._highest = 0  # one past the newest that arrived
        self._arrived: list[Arrival] = []  # complete tensors that are not acknowledged
        self._large = 0  # one past the last frame of the newest complete tensor that is not small
        self._retired = 0  # frames whose room in the window is free again
        self._limit = self._window
        self._incoming: dict[int, _Incoming] = {}  # by first sequence
        self._held: dict[TensorKey, _Incoming] = {}  # complete or not, until released
        self._newest_step = 0  # of the tensors that were expected
        self._taken: set[TensorKey] = set()  # expected and begun, in that step and the one before
        self._window_bytes = window_bytes
        self._spare: list[bytearray] = []  # buffers of released tensors, the newest last
        self._wanted: TensorKey | None = None
        self._damaged_in_a_row = 0

        self._asked: dict[int, float] = {}  # missing frame -> when to ask (again)
        self._ack_at = 0.0
        self._told = Acknowledge(0, 0)

    @property
    def next_sequence(self) -> int:
        """The number of the lowest frame that has not arrived."""
        return self._next

    @property
    def credit_limit(self) -> int:
        """Frames below this may be sent."""
        return self._limit

    @property
    def deadline(self) -> float:
        """When to call `poll` again if nothing happens."""
        return min(self._ack_at, min(self._asked.values(), default=self._ack_at))

    def receive(self, data: bytes, now: float) -> Completed | None:
        """Take one frame. Returns the tensor that it completes, if any.

        Raises `ProtocolViolationError` for anything that no correct peer sends, before allocating memory.
        """
        try:
            frame = parse_frame(data, self._tag)
        except DamagedFrameError as error:
            self._damaged(error, self._pieces(len(data) - HEADER_BYTES), now)
            return None
        self._damaged_in_a_row = 0
        if frame.session != self.session:
            raise ProtocolViolationError(f"frame {frame.sequence} belongs to another session of this link")
        pieces = range(frame.sequence, frame.sequence + self._pieces(len(frame.payload)))
        if pieces.stop > self._limit:
            raise ProtocolViolationError(
                f"frame {frame.sequence} was sent without credit; the limit is {self._limit}"
            )
        new = [piece for piece in pieces if piece >= self._next and piece not in self._beyond]
        if not new:
            self._ack_at = now  # the sender seems to have missed our acknowledgement
            return None
        tensor = self._tensor_of(frame)
        self._mark_arrived(pieces, new, now)
        tensor.missing -= len(new)
        if tensor.buffer is None:
            self.stale += 1
            self._retired += len(new)
        else:
            # A memoryview, because assigning to a slice of a bytearray would first copy the payload.
            memoryview(tensor.buffer)[frame.offset : frame.offset + len(frame.payload)] = frame.payload
        if tensor.missing == 0:
            del self._incoming[tensor.first]
            self._arrived.append(Arrival(tensor.end, now))
            if tensor.total >= SMALL_BYTES:
                self._large = max(self._large, tensor.end)
            if tensor.key == self._wanted:
                self._wanted = None
        self._update(now)
        if tensor.missing == 0 and tensor.buffer is not None:
            return Completed(tensor.key, tensor.buffer)
        return None

    def release(self, key: TensorKey, now: float) -> None:
        """Free the space of a tensor that the consumer has finished with. Raises ValueError if not held."""
        tensor = self._held.get(key)
        if tensor is None or tensor.missing:
            raise ValueError(f"{key} is not a complete, unreleased tensor of this link")
        del self._held[key]
        self.held_bytes -= tensor.total
        if tensor.buffer is not None:
            self._spare.append(tensor.buffer)
            self._bound_spare()
        self._retired += tensor.end - tensor.first
        self._update(now)

    def want(self, key: TensorKey | None, now: float) -> None:
        """Record that the consumer waits for this tensor and releases nothing before it; None: no longer."""
        held = None if key is None else self._held.get(key)
        self._wanted = key if held is None or held.missing else None
        self._update(now)

    def reconnect(self, now: float) -> None:
        """Record a new connection, on which the sender restarts from `next_sequence` unasked."""
        self._asked.clear()
        self._ack_at = now

    def poll(self, now: float) -> list[Acknowledge | SendAgain]:
        """The messages to send now."""
        messages: list[Acknowledge | SendAgain] = []
        due = tuple(sorted(sequence for sequence, at in self._asked.items() if at <= now))
        if due:
            self._asked.update(dict.fromkeys(due, now + self._resend_seconds))
            messages.append(SendAgain(due))
        if now >= self._ack_at:
            self._told = Acknowledge(self._next, self._limit, self._take_arrived())
            self._ack_at = now + self._repeat_seconds
            messages.append(self._told)
        return messages

    def _take_arrived(self) -> tuple[Arrival, ...]:
        """The complete tensors below the lowest missing frame, each with the time since which no frame below
        its end is missing."""
        taken: list[Arrival] = []
        at = 0.0
        for end, complete_at in sorted(self._arrived):
            if end <= self._next:
                at = max(at, complete_at)
                taken.append(Arrival(end, at))
        self._arrived = [arrival for arrival in self._arrived if arrival.next_sequence > self._next]
        return tuple(taken)

    def forget(self) -> None:
        """Drop all buffers, because no more frames will arrive."""
        self._incoming.clear()
        self._held.clear()
        self._spare.clear()
        self.held_bytes = 0

    def _damaged(self, error: DamagedFrameError, pieces: int, now: float) -> None:
        self.rejects += 1
        self._damaged_in_a_row += 1
        if self._damaged_in_a_row > MAX_DAMAGED_IN_A_ROW:
            raise ProtocolViolationError(
                f"{self._damaged_in_a_row} damaged frames arrived in a row, the last: {error}; "
                "check both machines' memory and that both run the same thinwire"
            ) from error
        guess = error.sequence
        if guess is None or not self._next <= guess < self._limit or guess in self._beyond:
            guess = self._next
        for piece in range(guess, min(guess + pieces, self._limit)):
            if piece not in self._beyond:
                self._asked[piece] = now

    def _pieces(self, size: int) -> int:
        return max(1, -(-size // self._payload_bytes))

    def _tensor_of(self, frame: Frame) -> _Incoming:
        index, misplaced = divmod(frame.offset, self._payload_bytes)
        first = frame.sequence - index
        rest = frame.total - frame.offset
        if misplaced or (len(frame.payload) % self._payload_bytes and len(frame.payload) != rest):
            raise ProtocolViolationError(
                f"frame {frame.sequence} carries {len(frame.payload)} bytes at {frame.offset} of "
                f"{frame.total}; tensors are cut every {self._payload_bytes} bytes: frame sizes must agree"
            )
        tensor = self._incoming.get(first)
        if tensor is not None:
            if (tensor.key, tensor.total) != (frame.key, frame.total):
                raise ProtocolViolationError(f"frame {frame.sequence} names {frame.key} within {tensor.key}")
            return tensor
        count = self._pieces(frame.total)
        end = first + count
        if first < self._next or any(first < t.end and t.first < end for t in self._incoming.values()):
            raise ProtocolViolationError(f"frame {frame.sequence} of {frame.key} overlaps another tensor's")
        allowed = self._expect(frame.key)
        buffer = None
        if allowed is not None:
            if frame.total != allowed:
                raise ProtocolViolationError(
                    f"{frame.key} is announced with {frame.total} bytes; {allowed} were negotiated"
                )
            if frame.key in self._taken or frame.key in self._held:
                raise ProtocolViolationError(f"{frame.key} is sent a second time")
            buffer = self._room(frame.total)
            self._remember(frame.key)
        tensor = _Incoming(frame.key, buffer, frame.total, first, end, count)
        self._incoming[first] = tensor
        if buffer is not None:
            self._held[frame.key] = tensor
            self.held_bytes += frame.total
            self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)
            self._bound_spare()
        return tensor

    def _remember(self, key: TensorKey) -> None:
        if key.step > self._newest_step:
            self._newest_step = key.step
            self._taken = {taken for taken in self._taken if taken.step >= key.step - 1}
        self._taken.add(key)

    def _room(self, size: int) -> bytearray:
        """The newest spare buffer of this size, or a new one."""
        for place in reversed(range(len(self._spare))):
            if len(self._spare[place]) == size:
                return self._spare.pop(place)
        return bytearray(size)

    def _bound_spare(self) -> None:
        """Drop the oldest spare buffers beyond the bounds."""
        room = self._window_bytes + self.peak_held_bytes - self.held_bytes
        while self._spare and (len(self._spare) > MOST_SPARE or sum(map(len, self._spare)) > room):
            del self._spare[0]

    def _mark_arrived(self, pieces: range, new: list[int], now: float) -> None:
        self.frames += 1
        for piece in new:
            self._asked.pop(piece, None)
        # The stream is ordered: a skipped piece was lost or damaged beyond recognition.
        for skipped in range(max(self._highest, self._next), pieces.start):
            self._asked.setdefault(skipped, now)
        self._highest = max(self._highest, pieces.stop)
        self._beyond.update(new)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1

    def _update(self, now: float) -> None:
        # Space freed beyond a missing frame counts only after that frame has arrived. Otherwise a sender
        # could withhold it and send frames that need no space for ever, and the set of arrived frames would
        # grow without bound.
        start = self._next if self._wanted is not None else min(self._next, self._retired)
        limit = start + self._window
        self._limit = max(self._limit, limit, max((t.end for t in self._incoming.values()), default=0))
        arrived, credit = self._next - self._told.next_sequence, self._limit - self._told.credit_limit
        if not arrived and not credit:
            return
        # The sender needs credit in time to keep the window full, and holds a large tensor until it is
        # acknowledged, so these messages are immediate. Other acknowledgements are delayed.
        low = self._told.credit_limit - self._highest < self._window // 4
        large = self._large > self._told.next_sequence
        many = max(1, self._window // 4)
        urgent = low or large or max(arrived, credit) >= many
        if not arrived and not urgent:
            return  # the sender has enough credit for now; the next arrival brings more
        self._ack_at = min(self._ack_at, now if urgent else now + ACK_SECONDS)
