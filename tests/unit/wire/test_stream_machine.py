"""A sender and a receiver over an invented network that loses, reorders, repeats, damages and reconnects.

Whatever happens: every tensor is delivered once, bit for bit, in bounded memory; and when the network heals,
everything arrives.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from wire.frames import MOST_PIECES, run_tag
from wire.spec import Direction, TensorKey
from wire.stream_receiver import Acknowledge, SendAgain, StreamReceiver
from wire.stream_sender import StreamSender

TAG = run_tag("test-run")
PIECE = 16
INDEX = st.integers(0, 999)


def content(key: TensorKey, size: int) -> bytes:
    return random.Random(key.microbatch).randbytes(size)


class StreamMachine(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 8), in_order=st.booleans())
    def start(self, window: int, in_order: bool) -> None:
        self.in_order = in_order  # the consumer takes tensors as they come and never waits for a certain one
        self.now = 0.0
        self.window_bytes = window * PIECE
        self.sizes: dict[TensorKey, int] = {}
        self.stale: set[TensorKey] = set()
        self.delivered: dict[TensorKey, bytes] = {}
        self.unreleased: list[TensorKey] = []
        self.frames: list[bytes] = []  # in flight
        self.messages: list[Acknowledge | SendAgain] = []  # in flight
        self.sender = StreamSender(tag=TAG, outbox_bytes=10**6, resend_seconds=1.0, payload_bytes=PIECE)
        self.receiver = StreamReceiver(
            tag=TAG,
            expect=lambda key: None if key in self.stale else self.sizes.get(key),
            window_bytes=self.window_bytes,
            resend_seconds=1.0,
            payload_bytes=PIECE,
        )

    # ---- the two ends

    @rule(size=st.integers(1, 12 * PIECE), stale=st.integers(0, 9))
    def send(self, size: int, stale: int) -> None:
        key = TensorKey(1, 0, len(self.sizes), 0, Direction.ACTIVATION)
        self.sizes[key] = size
        if stale == 0:
            self.stale.add(key)
        self.sender.send(key, content(key, size))

    @rule(count=st.integers(1, 10), pieces=st.integers(1, MOST_PIECES))
    def transmit(self, count: int, pieces: int) -> None:
        self.sender.pieces = pieces
        for _ in range(count):
            frame = self.sender.next_frame(self.now)
            if frame is None:
                break
            self.frames.append(frame)

    @rule()
    def poll(self) -> None:
        self.messages += self.receiver.poll(self.now)

    @precondition(lambda self: self.unreleased)
    @rule(which=INDEX)
    def release(self, which: int) -> None:
        self.receiver.release(self.unreleased.pop(which % len(self.unreleased)), self.now)

    @precondition(lambda self: not self.in_order and len(self.delivered) + len(self.stale) < len(self.sizes))
    @rule(which=INDEX)
    def want(self, which: int) -> None:
        missing = [key for key in self.sizes if key not in self.delivered and key not in self.stale]
        self.receiver.want(missing[which % len(missing)], self.now)

    # ---- the network

    @precondition(lambda self: self.frames)
    @rule(which=INDEX, keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        which %= len(self.frames)
        self.receive(self.frames[which] if keep else self.frames.pop(which))

    @precondition(lambda self: self.frames)
    @rule(count=st.integers(1, 12))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.frames))):
            self.receive(self.frames.pop(0))

    @precondition(lambda self: self.frames)
    @rule(which=INDEX)
    def lose(self, which: int) -> None:
        del self.frames[which % len(self.frames)]

    @precondition(lambda self: self.frames)
    @rule(which=INDEX, where=INDEX, flip=st.integers(1, 255))
    def damage(self, which: int, where: int, flip: int) -> None:
        frame = bytearray(self.frames.pop(which % len(self.frames)))
        frame[where % len(frame)] ^= flip
        rejects = self.receiver.rejects
        assert self.receiver.receive(bytes(frame), self.now) is None
        assert self.receiver.rejects == rejects + 1

    @precondition(lambda self: self.messages)
    @rule(which=INDEX, keep=st.booleans())
    def deliver_message(self, which: int, keep: bool) -> None:
        which %= len(self.messages)
        self.tell(self.messages[which] if keep else self.messages.pop(which))

    @precondition(lambda self: self.messages)
    @rule(which=INDEX)
    def lose_message(self, which: int) -> None:
        del self.messages[which % len(self.messages)]

    @rule(rounds=st.integers(1, 20))
    def fair_weather(self, rounds: int) -> None:
        """For a while, nothing goes wrong."""
        for _ in range(rounds):
            for message in self.receiver.poll(self.now):
                self.tell(message)
            self.transmit(4, 2)
            self.deliver_in_order(len(self.frames))
            self.now += 0.05

    @rule(seconds=st.floats(0.001, 10.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reconnect(self) -> None:
        self.frames.clear()
        self.messages.clear()
        self.sender.reconnect(self.receiver.next_sequence)
        self.receiver.reconnect(self.now)

    # ---- what must hold

    def receive(self, frame: bytes) -> None:
        completed = self.receiver.receive(frame, self.now)
        if completed is not None:
            key = completed.key
            assert key not in self.delivered and key not in self.stale
            assert completed.buffer == content(key, self.sizes[key])
            self.delivered[key] = bytes(completed.buffer)
            self.unreleased.append(key)

    def tell(self, message: Acknowledge | SendAgain) -> None:
        if isinstance(message, Acknowledge):
            self.sender.acknowledge(message.next_sequence, message.credit_limit)
        else:
            self.sender.send_again(list(message.sequences))

    @invariant()
    def memory_is_bounded(self) -> None:
        held = self.receiver.held_bytes
        assert held >= sum(self.sizes[key] for key in self.unreleased)
        if self.in_order:
            assert held <= self.window_bytes + max(self.sizes.values(), default=0)

    @invariant()
    def frames_beyond_a_missing_one_are_bounded(self) -> None:
        """A window, and what the tensor that begins in it needs."""
        longest = max((-(-size // PIECE) for size in self.sizes.values()), default=0)
        beyond = self.receiver.credit_limit - self.receiver.next_sequence
        assert beyond <= self.window_bytes // PIECE + longest

    @invariant()
    def sender_keeps_what_may_be_needed(self) -> None:
        if not self.sender.unacknowledged:
            return
        undelivered = sum(s for k, s in self.sizes.items() if k not in self.delivered and k not in self.stale)
        assert self.sender.queued_bytes >= undelivered

    def teardown(self) -> None:
        """The network heals and the consumer takes what comes: everything arrives in bounded time."""
        if not hasattr(self, "sender"):
            return
        for _ in range(50 + 20 * sum(1 + size // PIECE for size in self.sizes.values())):
            while (frame := self.sender.next_frame(self.now)) is not None:
                self.receive(frame)
            while self.unreleased:
                self.receiver.release(self.unreleased.pop(), self.now)
            messages = self.receiver.poll(self.now)
            for message in messages:
                self.tell(message)
            if self.sender.queued_bytes == 0:
                break
            if not messages:
                deadlines = [self.receiver.deadline, self.sender.deadline]
                self.now = max(self.now, min(at for at in deadlines if at is not None))
        assert self.sender.queued_bytes == 0
        assert self.receiver.held_bytes == 0
        assert set(self.delivered) == set(self.sizes) - self.stale


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(max_examples=examples(100), stateful_step_count=60)
