"""The receiving end of a bulk stream as a state machine without I/O: frames in, whole tensors out, once each.

**Memory.** A frame holds its place in the window from its arrival until its tensor is released. At most a
window of frames may be sent beyond the released ones, except that a tensor that has begun may always be
finished. So buffers never exceed `window_bytes` plus one tensor, however slow the consumer, and a tensor
larger than the window passes. Buffers of released tensors are kept for the next of their size, as long as all
together take no more than `window_bytes` plus the most that tensors have taken. What is remembered of the
frames themselves is bounded as well: none may be sent a window, or what its tensor still needs, beyond the
lowest that is missing. A correct sender never waits for that: missing frames are sent again without credit.

**No deadlock.** The sender fixes the order of tensors, the consumer may take them in another. A tensor that
has begun always completes (above). For one that has not begun, the consumer says that it waits (`want`);
until that tensor is complete, the window counts from the lowest missing frame instead of the oldest
unreleased one, so everything that was sent before it gets through. What is then held beyond the bound is only
what the sender sent ahead of the tensor that the consumer needs, which any receiver would have to hold.

**Once each.** A key that was taken in the two newest steps is refused when it comes again; `expect` drops
those of older steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wire.errors import ProtocolViolationError
from wire.frames import PAYLOAD_BYTES, DamagedFrameError, Frame, parse_frame
from wire.spec import TensorKey

Expect = Callable[[TensorKey], int | None]
"""The exact length in bytes that a tensor must have; None when it is stale or unknown, so to be dropped.

Keys come from the network. A tensor may arrive before this node has begun its step: answer for every key of
the epoch that is still to come, or it is lost. Drop what is two steps older than the newest that was
expected: its keys are forgotten.
"""

MAX_DAMAGED_IN_A_ROW = 64
MOST_SPARE = 8
"""Buffers kept for the next tensors, so that a busy link allocates nothing, though its tensors be of several
sizes."""


class Completed(NamedTuple):
    """A whole tensor. The buffer is the consumer's until `release`; then its room and its memory are used
    again."""

    key: TensorKey
    buffer: bytearray


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Every frame below `next_sequence` has arrived; frames below `credit_limit` may be sent."""

    next_sequence: int
    credit_limit: int


@dataclass(frozen=True, slots=True)
class SendAgain:
    """These frames arrived damaged or not at all."""

    sequences: tuple[int, ...]


@dataclass(slots=True)
class _Incoming:
    key: TensorKey
    buffer: bytearray | None  # None: stale, its frames are counted and dropped
    total: int
    first: int  # sequence of its first frame
    end: int  # one past its last
    missing: int  # frames


class StreamReceiver:
    """Receives the tensors of one link.

    After every call, `poll` gives the messages that are due for the sender, and `deadline` when the next one
    will be. Acknowledgements are held back for `ack_seconds` to go together, and repeated every
    `repeat_seconds` so that a lost one cannot hang the link.

    `session` is set by the link before the first frame arrives.
    """

    def __init__(
        self,
        *,
        tag: int,
        expect: Expect,
        window_bytes: int,
        resend_seconds: float,
        ack_seconds: float = 0.02,
        repeat_seconds: float = 2.0,
        payload_bytes: int = PAYLOAD_BYTES,
    ) -> None:
        self.session = 0
        self.frames = 0
        self.rejects = 0  # damaged frames
        self.duplicates = 0
        self.stale = 0  # frames of tensors that nobody expects
        self.held_bytes = 0  # buffers of tensors that are incomplete or not released
        self.peak_held_bytes = 0
        self._tag = tag
        self._expect = expect
        self._payload_bytes = payload_bytes
        self._window = max(1, window_bytes // payload_bytes)  # frames
        self._resend_seconds = resend_seconds
        self._ack_seconds = ack_seconds
        self._repeat_seconds = repeat_seconds

        self._next = 0  # every frame below has arrived
        self._beyond: set[int] = set()  # arrived, above `_next`
        self._highest = 0  # one past the newest that arrived
        self._complete = 0  # one past the last frame of the newest complete tensor
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
        """The lowest frame that has not arrived."""
        return self._next

    @property
    def credit_limit(self) -> int:
        """Frames below this may be sent."""
        return self._limit

    @property
    def deadline(self) -> float:
        """When `poll` should be called again although nothing happened."""
        return min(self._ack_at, min(self._asked.values(), default=self._ack_at))

    def receive(self, data: bytes, now: float) -> Completed | None:
        """Take one frame; give the tensor that it completes.

        Raises `ProtocolViolationError` for what no correct peer sends; nothing has been allocated for it.
        """
        try:
            frame = parse_frame(data, self._tag)
        except DamagedFrameError as error:
            self._damaged(error, now)
            return None
        self._damaged_in_a_row = 0
        if frame.session != self.session:
            raise ProtocolViolationError(f"frame {frame.sequence} belongs to another session of this link")
        if frame.sequence >= self._limit:
            raise ProtocolViolationError(
                f"frame {frame.sequence} was sent without credit; the limit is {self._limit}"
            )
        if frame.sequence < self._next or frame.sequence in self._beyond:
            self.duplicates += 1
            self._ack_at = now  # the sender seems to lack our acknowledgement
            return None
        tensor = self._tensor_of(frame)
        self._mark_arrived(frame.sequence, now)
        tensor.missing -= 1
        if tensor.buffer is None:
            self.stale += 1
            self._retired += 1
        else:
            # Straight into its place: a bytearray would first make one of what is assigned to it.
            memoryview(tensor.buffer)[frame.offset : frame.offset + len(frame.payload)] = frame.payload
        if tensor.missing == 0:
            del self._incoming[tensor.first]
            self._complete = max(self._complete, tensor.end)
            if tensor.key == self._wanted:
                self._wanted = None
        self._update(now)
        if tensor.missing == 0 and tensor.buffer is not None:
            return Completed(tensor.key, tensor.buffer)
        return None

    def release(self, key: TensorKey, now: float) -> None:
        """The consumer is done with a tensor: its room is free again. ValueError if it is not held."""
        tensor = self._held.get(key)
        if tensor is None or tensor.missing:
            raise ValueError(f"{key} is not a complete tensor of this link that still waits for its release")
        del self._held[key]
        self.held_bytes -= tensor.total
        if tensor.buffer is not None:
            self._spare.append(tensor.buffer)
            self._bound_spare()
        self._retired += tensor.end - tensor.first
        self._update(now)

    def want(self, key: TensorKey | None, now: float) -> None:
        """The consumer waits for this tensor and may release nothing before it has it; None: no longer."""
        held = None if key is None else self._held.get(key)
        self._wanted = key if held is None or held.missing else None
        self._update(now)

    def reconnect(self, now: float) -> None:
        """A new connection: the sender starts again from `next_sequence` by itself."""
        self._asked.clear()
        self._ack_at = now

    def poll(self, now: float) -> list[Acknowledge | SendAgain]:
        """Messages that are due for the sender."""
        messages: list[Acknowledge | SendAgain] = []
        due = tuple(sorted(sequence for sequence, at in self._asked.items() if at <= now))
        if due:
            self._asked.update(dict.fromkeys(due, now + self._resend_seconds))
            messages.append(SendAgain(due))
        if now >= self._ack_at:
            self._told = Acknowledge(self._next, self._limit)
            self._ack_at = now + self._repeat_seconds
            messages.append(self._told)
        return messages

    def forget(self) -> None:
        """Drop all buffers: no frame comes any more."""
        self._incoming.clear()
        self._held.clear()
        self._spare.clear()
        self.held_bytes = 0

    def _damaged(self, error: DamagedFrameError, now: float) -> None:
        self.rejects += 1
        self._damaged_in_a_row += 1
        if self._damaged_in_a_row > MAX_DAMAGED_IN_A_ROW:
            raise ProtocolViolationError(
                f"{self._damaged_in_a_row} damaged frames arrived in a row, at last: {error}; "
                "check both machines' memory and that both run the same thinwire"
            ) from error
        guess = error.sequence
        if guess is None or not self._next <= guess < self._limit or guess in self._beyond:
            guess = self._next
        self._asked[guess] = now

    def _tensor_of(self, frame: Frame) -> _Incoming:
        index, misplaced = divmod(frame.offset, self._payload_bytes)
        first = frame.sequence - index
        if misplaced or len(frame.payload) != min(self._payload_bytes, frame.total - frame.offset):
            raise ProtocolViolationError(
                f"frame {frame.sequence} carries {len(frame.payload)} bytes at {frame.offset} of "
                f"{frame.total}; tensors are cut every {self._payload_bytes} bytes: frame sizes must agree"
            )
        tensor = self._incoming.get(first)
        if tensor is not None:
            if (tensor.key, tensor.total) != (frame.key, frame.total):
                raise ProtocolViolationError(f"frame {frame.sequence} says {frame.key} amid {tensor.key}")
            return tensor
        frames = -(-frame.total // self._payload_bytes)
        end = first + frames
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
        tensor = _Incoming(frame.key, buffer, frame.total, first, end, frames)
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

    def _mark_arrived(self, sequence: int, now: float) -> None:
        self.frames += 1
        self._asked.pop(sequence, None)
        # The stream is ordered: what was skipped was lost or damaged beyond recognition.
        for skipped in range(max(self._highest, self._next), sequence):
            self._asked.setdefault(skipped, now)
        self._highest = max(self._highest, sequence + 1)
        self._beyond.add(sequence)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1

    def _update(self, now: float) -> None:
        # Room that became free beyond a missing frame counts when that frame is here: a sender that withholds
        # it could go on for ever with frames that take no room, each of which is remembered.
        start = self._next if self._wanted is not None else min(self._next, self._retired)
        limit = start + self._window
        self._limit = max(self._limit, limit, max((t.end for t in self._incoming.values()), default=0))
        news = max(self._next - self._told.next_sequence, self._limit - self._told.credit_limit)
        if news == 0:
            return
        # The sender must hear in time to keep the window full. It measures the link by when a tensor is
        # complete, so that goes at once too; other news may travel together.
        low = self._told.credit_limit - self._highest < self._window // 4
        complete = self._complete > self._told.next_sequence
        urgent = low or complete or news >= max(1, self._window // 4)
        self._ack_at = min(self._ack_at, now if urgent else now + self._ack_seconds)
