"""The sender and the receiver of a bulk stream, without a network, and a sender that means harm."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial

import google_crc32c
import pytest

from wire.errors import LinkError, ProtocolViolationError
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES, Frame, pack_frame, parse_frame, run_tag
from wire.spec import Direction, TensorKey
from wire.stream_receiver import (
    MAX_DAMAGED_IN_A_ROW,
    MOST_SPARE,
    Acknowledge,
    Arrival,
    Completed,
    SendAgain,
    StreamReceiver,
)
from wire.stream_sender import StreamSender

TAG = run_tag("test-run")
PIECE = 16  # payload bytes of a frame here


def key(microbatch: int, step: int = 0) -> TensorKey:
    return TensorKey(1, step, microbatch, 0, Direction.ACTIVATION)


def content(microbatch: int, size: int) -> bytes:
    return random.Random(microbatch).randbytes(size)


def make_sender(outbox_bytes: int = 10**6) -> StreamSender:
    return StreamSender(tag=TAG, outbox_bytes=outbox_bytes, resend_seconds=1.0, payload_bytes=PIECE)


def make_receiver(
    sizes: dict[TensorKey, int] | Callable[[TensorKey], int | None], window: int = 4
) -> StreamReceiver:
    expect = sizes.get if isinstance(sizes, dict) else sizes
    return StreamReceiver(
        tag=TAG, expect=expect, window_bytes=window * PIECE, resend_seconds=1.0, payload_bytes=PIECE
    )


def drain(sender: StreamSender, now: float = 0.0) -> list[bytes]:
    frames = []
    while (frame := sender.next_frame(now)) is not None:
        frames.append(frame)
    return frames


def sequences(frames: list[bytes]) -> list[int]:
    return [parse_frame(frame, TAG).sequence for frame in frames]


def frame(sequence: int, microbatch: int, offset: int, payload: bytes, total: int) -> bytes:
    return pack_frame(Frame(0, sequence, key(microbatch), total, offset, payload), TAG)


# ---- sender


def test_frames_wait_for_credit() -> None:
    sender = make_sender()
    sender.send(key(0), content(0, 5 * PIECE + 1))
    assert drain(sender) == []
    sender.acknowledge(0, 4)
    assert sequences(drain(sender)) == [0, 1, 2, 3]
    sender.acknowledge(0, 2)  # older news
    assert drain(sender) == []
    sender.acknowledge(2, 100)
    last = drain(sender)
    assert sequences(last) == [4, 5]
    assert len(last[-1]) == HEADER_BYTES + 1


def test_tensors_are_kept_without_a_copy_until_acknowledged() -> None:
    sender = make_sender()
    buffer = bytearray(content(0, 3 * PIECE))
    sender.send(key(0), buffer)
    sender.acknowledge(0, 10)
    drain(sender)
    assert (sender.queued_bytes, sender.unacknowledged) == (48, 3)
    with pytest.raises(BufferError):  # the sender still refers to this very buffer
        buffer.append(0)
    sender.acknowledge(2, 10)
    assert sender.queued_bytes == 48
    sender.acknowledge(3, 10)
    assert (sender.queued_bytes, sender.unacknowledged) == (0, 0)
    buffer.append(0)


def test_full_outbox_is_refused_but_one_large_tensor_passes() -> None:
    sender = make_sender(outbox_bytes=100)
    sender.send(key(0), bytes(500))
    with pytest.raises(LinkError, match="500 bytes already wait"):
        sender.send(key(1), b"x")
    with pytest.raises(LinkError, match="has 0 bytes"):
        sender.send(key(1), b"")


def test_asked_for_frames_go_first_and_absurd_ones_are_ignored() -> None:
    sender = make_sender()
    sender.send(key(0), content(0, 8 * PIECE))
    sender.acknowledge(0, 6)
    first = drain(sender)
    sender.acknowledge(2, 8)
    sender.send_again([0, 3, 7, 99])
    again = drain(sender)
    assert sequences(again) == [3, 6, 7]
    assert again[0] == first[3]
    assert sender.retransmits == 1


def test_reconnection_goes_back_to_what_the_other_end_lacks() -> None:
    sender = make_sender()
    sender.send(key(0), content(0, 8 * PIECE))
    sender.acknowledge(0, 8)
    drain(sender)
    sender.acknowledge(3, 8)
    sender.reconnect(5)
    assert sequences(drain(sender)) == [5, 6, 7]
    assert sender.retransmits == 3
    with pytest.raises(ProtocolViolationError, match="restarted"):
        sender.reconnect(4)


def test_a_silent_link_is_probed_with_one_frame_at_growing_intervals() -> None:
    sender = make_sender()
    sender.send(key(0), content(0, 3 * PIECE))
    sender.acknowledge(0, 3)
    assert len(drain(sender, now=0.0)) == 3
    assert sender.deadline == 1.0
    assert sender.next_frame(0.9) is None
    times: list[float] = []
    while len(times) < 4:
        assert sender.deadline is not None
        at = sender.deadline
        probe = sender.next_frame(at)
        if probe is not None:
            times.append(at)
            assert sequences([probe]) == [0]
        else:
            assert sender.deadline > at
        sender.next_frame(at)  # notes when the quiet begins
    assert times == [1.0, 3.0, 7.0, 15.0]
    sender.acknowledge(3, 3)
    assert sender.deadline is None


def test_acknowledging_the_future_is_a_violation() -> None:
    sender = make_sender()
    sender.send(key(0), bytes(PIECE))
    with pytest.raises(ProtocolViolationError, match="only 0 frames were sent"):
        sender.acknowledge(1, 10)


# ---- receiver


def test_out_of_order_frames_land_in_place_and_complete_once() -> None:
    data = content(0, 3 * PIECE + 5)
    receiver = make_receiver({key(0): len(data)})
    frames = [frame(i, 0, i * PIECE, data[i * PIECE : (i + 1) * PIECE], len(data)) for i in range(4)]
    results = [receiver.receive(frames[i], 0.0) for i in (2, 0, 3, 3, 1, 0)]
    assert [r for r in results if r] == [Completed(key(0), bytearray(data))]
    assert receiver.next_sequence == 4


def test_gap_is_asked_for_and_asked_again() -> None:
    receiver = make_receiver({key(0): 4 * PIECE})
    receiver.receive(frame(0, 0, 0, bytes(PIECE), 64), 0.0)
    receiver.receive(frame(3, 0, 48, bytes(PIECE), 64), 0.0)
    assert SendAgain((1, 2)) in receiver.poll(0.0)
    assert not any(isinstance(m, SendAgain) for m in receiver.poll(0.9))
    receiver.receive(frame(2, 0, 32, bytes(PIECE), 64), 0.9)
    assert SendAgain((1,)) in receiver.poll(1.0)


def test_a_damaged_frame_is_requested_by_its_guessed_sequence() -> None:
    receiver = make_receiver({key(0): 2 * PIECE})
    damaged = bytearray(frame(0, 0, 0, bytes(PIECE), 32))
    damaged[-1] ^= 1
    assert receiver.receive(bytes(damaged), 0.0) is None
    assert SendAgain((0,)) in receiver.poll(0.0)
    damaged[20:28] = b"\xff" * 8  # now the number is damaged too: ask for the lowest that lacks
    receiver.receive(bytes(damaged), 0.1)
    assert SendAgain((0,)) in receiver.poll(0.1)
    assert (receiver.rejects, receiver.held_bytes) == (2, 0)


def test_nothing_but_damage_ends_the_link() -> None:
    receiver = make_receiver({})
    for _ in range(MAX_DAMAGED_IN_A_ROW):
        receiver.receive(b"junk", 0.0)
    with pytest.raises(ProtocolViolationError, match="65 damaged frames"):
        receiver.receive(b"junk", 0.0)


def test_acknowledgement_is_repeated_so_that_none_can_be_missed() -> None:
    receiver = make_receiver({key(0): PIECE})
    assert receiver.poll(0.0) == [Acknowledge(0, 4)]
    assert receiver.poll(1.9) == []
    assert receiver.poll(2.0) == [Acknowledge(0, 4)]


def test_credit_goes_with_the_next_arrival_while_the_sender_has_some_left() -> None:
    receiver = make_receiver({key(i): PIECE for i in range(16)}, window=16)
    receiver.poll(0.0)
    for i in range(3):
        receiver.receive(frame(i, i, 0, bytes(PIECE), PIECE), 0.1)
    assert told(receiver.poll(0.15)) == [(3, 16)]
    for i in range(3):
        receiver.release(key(i), 0.2)
    assert receiver.poll(0.5) == []
    receiver.receive(frame(3, 3, 0, bytes(PIECE), PIECE), 0.6)
    assert told(receiver.poll(0.65)) == [(4, 19)]
    receiver.release(key(3), 0.7)
    assert receiver.poll(0.7) == []
    for i in range(4, 8):
        receiver.receive(frame(i, i, 0, bytes(PIECE), PIECE), 0.8)
    receiver.poll(0.8)
    for i in range(4, 8):
        receiver.release(key(i), 0.9)
    assert receiver.poll(0.9) == [Acknowledge(8, 24)], "a quarter of the window is due at once"


def told(messages: list[Acknowledge | SendAgain]) -> list[tuple[int, int]]:
    return [(one.next_sequence, one.credit_limit) for one in messages if isinstance(one, Acknowledge)]


def test_small_tensors_are_acknowledged_together_with_the_time_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wire.stream_receiver.SMALL_BYTES", 3 * PIECE)
    receiver = make_receiver({key(0): PIECE, key(1): 2 * PIECE, key(2): PIECE, key(3): 3 * PIECE}, window=64)
    receiver.poll(0.0)
    receiver.receive(frame(0, 0, 0, bytes(PIECE), PIECE), 0.100)
    assert receiver.deadline == pytest.approx(0.12) and receiver.poll(0.100) == []
    # The second tensor lacks its first frame, so the third is no part of the answer.
    receiver.receive(frame(2, 1, PIECE, bytes(PIECE), 2 * PIECE), 0.105)
    receiver.receive(frame(3, 2, 0, bytes(PIECE), PIECE), 0.110)
    messages = receiver.poll(0.121)
    assert messages == [SendAgain((1,)), Acknowledge(1, 64, (Arrival(1, 0.100),))]
    receiver.receive(frame(1, 1, 0, bytes(PIECE), 2 * PIECE), 0.130)
    assert receiver.poll(0.151) == [Acknowledge(4, 64, (Arrival(3, 0.130), Arrival(4, 0.130)))]
    for i in range(3):
        assert receiver.poll(0.200) == []
        receiver.receive(frame(4 + i, 3, i * PIECE, bytes(PIECE), 3 * PIECE), 0.200)
    assert receiver.poll(0.200) == [Acknowledge(7, 64, (Arrival(7, 0.200),))], "a large one at once"


def test_stale_tensor_is_acknowledged_and_dropped() -> None:
    receiver = make_receiver({}, window=1)
    for i in range(5):
        assert receiver.receive(frame(i, 0, i * PIECE, bytes(PIECE), 5 * PIECE), 0.0) is None
    assert (receiver.stale, receiver.next_sequence, receiver.peak_held_bytes) == (5, 5, 0)
    assert receiver.credit_limit == 6


def test_tensor_that_turns_up_amid_its_frames_stays_dropped() -> None:
    """`expect` may change its mind between two frames; half a tensor must not wait for its lost half."""
    sizes: dict[TensorKey, int] = {}
    receiver = make_receiver(sizes)
    receiver.receive(frame(0, 0, 0, bytes(PIECE), 32), 0.0)
    sizes[key(0)] = 32
    assert receiver.receive(frame(1, 0, PIECE, bytes(PIECE), 32), 0.0) is None
    assert (receiver.stale, receiver.held_bytes) == (2, 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (frame(0, 0, 0, bytes(PIECE), 2**32 - 1), "4294967295 bytes; 64 were negotiated"),
        (frame(0, 0, 0, bytes(PIECE), 48), "48 bytes; 64 were negotiated"),
        (frame(0, 0, 0, bytes(8), 64), "frame sizes must agree"),
        (frame(1, 0, 8, bytes(PIECE), 64), "frame sizes must agree"),
        (frame(0, 0, 16, bytes(PIECE), 64), "overlaps"),
        (frame(4, 0, 0, bytes(PIECE), 64), "without credit"),
    ],
)
def test_false_claims_are_refused_before_anything_is_allocated(bad: bytes, message: str) -> None:
    receiver = make_receiver({key(0): 64})
    with pytest.raises(ProtocolViolationError, match=message):
        receiver.receive(bad, 0.0)
    assert receiver.peak_held_bytes == 0


def test_contradicting_frames_are_violations() -> None:
    receiver = make_receiver({key(0): 64, key(1): 64})
    receiver.receive(frame(0, 0, 0, bytes(PIECE), 64), 0.0)
    with pytest.raises(ProtocolViolationError, match="within"):
        receiver.receive(frame(1, 1, PIECE, bytes(PIECE), 64), 0.0)
    with pytest.raises(ProtocolViolationError, match="overlaps"):
        receiver.receive(frame(2, 1, 0, bytes(PIECE), 64), 0.0)
    for i in (1, 2, 3):
        receiver.receive(frame(i, 0, i * PIECE, bytes(PIECE), 64), 0.0)
    receiver.session = 9
    with pytest.raises(ProtocolViolationError, match="another session"):
        receiver.receive(frame(4, 1, 0, bytes(PIECE), 64), 0.0)
    assert receiver.held_bytes == 64


def test_key_sent_twice_is_a_violation_while_the_first_is_held() -> None:
    receiver = make_receiver({key(0): PIECE})
    receiver.receive(frame(0, 0, 0, bytes(PIECE), PIECE), 0.0)
    with pytest.raises(ProtocolViolationError, match=r"^the activation of step 1, .* is sent a second time"):
        receiver.receive(frame(1, 0, 0, bytes(PIECE), PIECE), 0.0)


def test_release_of_what_is_not_held_is_an_error() -> None:
    receiver = make_receiver({key(0): 2 * PIECE})
    receiver.receive(frame(0, 0, 0, bytes(PIECE), 32), 0.0)
    with pytest.raises(ValueError, match="not a complete, unreleased tensor"):
        receiver.release(key(0), 0.0)


# ---- both


def exchange(sender: StreamSender, receiver: StreamReceiver, now: float) -> list[TensorKey]:
    """Move everything over a perfect network until nothing moves."""
    arrived: list[TensorKey] = []
    while True:
        for message in receiver.poll(now):
            if isinstance(message, Acknowledge):
                sender.acknowledge(message.next_sequence, message.credit_limit)
            else:
                sender.send_again(list(message.sequences))
        data = sender.next_frame(now)
        if data is None:
            return arrived
        completed = receiver.receive(data, now)
        if completed:
            arrived.append(completed.key)


def test_without_want_another_order_stops_at_the_window() -> None:
    """Why `want` exists; and a consumer that stops waiting closes the window again."""
    sizes = {key(i): PIECE for i in range(20)}
    sender, receiver = make_sender(), make_receiver(sizes, window=4)
    for k, size in sizes.items():
        sender.send(k, bytes(size))
    assert len(exchange(sender, receiver, 0.0)) == 4
    receiver.want(key(9), 1.0)
    assert len(exchange(sender, receiver, 1.0)) == 9  # the wanted one, and a window beyond
    receiver.want(None, 2.0)
    assert exchange(sender, receiver, 2.0) == []


def test_forged_but_intact_frames_never_crash_nor_deliver_wrong_bytes() -> None:
    """Header fields set at random, with a checksum that fits: a violation, a drop, or the right bytes."""
    rng = random.Random(3)
    data = {i: content(i, rng.randrange(1, 5 * PIECE)) for i in range(8)}
    fields = [(20, "<Q", 14), (36, "<I", 10), (44, "<I", 90), (48, "<I", 90), (52, "<I", 20), (3, "B", 5)]
    violations = delivered = 0
    for _ in range(400):
        receiver = make_receiver({key(i): len(d) for i, d in data.items()})
        sender = make_sender()
        for i, d in data.items():
            sender.send(key(i), d)
        for _ in range(30):
            for message in receiver.poll(0.0):
                if isinstance(message, Acknowledge):
                    sender.acknowledge(message.next_sequence, message.credit_limit)
            good = sender.next_frame(0.0)
            if good is None:
                break
            forged = bytearray(good)
            at, form, most = rng.choice(fields)
            struct.pack_into(form, forged, at, rng.randrange(most))
            struct.pack_into("<I", forged, 60, google_crc32c.value(bytes(forged[:60] + forged[64:])))
            try:
                receiver.receive(bytes(forged), 0.0)
            except ProtocolViolationError:
                violations += 1
            else:
                break  # accepted: what follows would be told apart from the truth by no one
            completed = receiver.receive(good, 0.0)
            if completed:
                delivered += 1
                assert completed.buffer == data[completed.key.microbatch]
                receiver.release(completed.key, 0.0)
        assert receiver.peak_held_bytes <= sum(map(len, data.values()))
    assert violations > 400
    assert delivered > 100


class Arrivals:
    """Whole tensors, one after the other, at a receiver whose window is `window` frames."""

    def __init__(self, sizes: dict[TensorKey, int], window: int) -> None:
        self.receiver = make_receiver(sizes, window)
        self._sizes = sizes
        self._sequence = 0

    def __call__(self, microbatch: int) -> bytearray:
        data = content(microbatch, self._sizes[key(microbatch)])
        completed = None
        for offset in range(0, len(data), PIECE):
            piece = frame(self._sequence, microbatch, offset, data[offset : offset + PIECE], len(data))
            completed = self.receiver.receive(piece, 0.0)
            self._sequence += 1
        assert completed is not None and completed.buffer == data
        return completed.buffer


def test_released_buffers_are_used_again_and_never_before() -> None:
    arrive = Arrivals({key(i): 3 * PIECE for i in range(4)} | {key(9): 2 * PIECE}, window=100)
    receiver = arrive.receiver
    first, second = arrive(0), arrive(1)
    assert first is not second, "both are held"
    receiver.release(key(0), 0.0)
    assert arrive(2) is first
    assert second == content(1, 3 * PIECE)
    receiver.release(key(1), 0.0)
    assert len(arrive(9)) == 2 * PIECE, "a tensor of another size gets a buffer of its own"
    assert arrive(3) is second


def test_sizes_that_alternate_allocate_nothing_after_the_first_of_each() -> None:
    sizes = {key(i): (3 if i % 2 else 2) * PIECE for i in range(40)}
    arrive = Arrivals(sizes, window=10)
    # All are kept alive here, so that none can come again but from the receiver.
    seen = []
    for microbatch in range(40):
        seen.append(arrive(microbatch))
        arrive.receiver.release(key(microbatch), 0.0)
    assert len({id(buffer) for buffer in seen}) == 2


def test_spare_buffers_are_bounded_and_the_oldest_go_first() -> None:
    """By bytes, window and the most that was held, and by number."""
    sizes = {key(i): (i + 1) * PIECE for i in range(20)}
    arrive = Arrivals(sizes, window=8)
    receiver = arrive.receiver
    for microbatch in range(5, 20):
        arrive(microbatch)
        receiver.release(key(microbatch), 0.0)
        kept = [len(buffer) for buffer in receiver._spare]
        assert sum(kept) <= 8 * PIECE + receiver.peak_held_bytes
        assert kept[-1] == sizes[key(microbatch)]
    arrive(0)
    assert sum(map(len, receiver._spare)) + receiver.held_bytes <= 8 * PIECE + receiver.peak_held_bytes
    arrive = Arrivals({key(i): PIECE for i in range(20)}, window=100)
    for microbatch in range(20):
        arrive(microbatch)
    for microbatch in range(20):
        arrive.receiver.release(key(microbatch), 0.0)
    assert len(arrive.receiver._spare) == MOST_SPARE


def test_a_frame_is_copied_once_on_its_way_out_and_once_on_its_way_in() -> None:
    size = 4 * PAYLOAD_BYTES
    sender = StreamSender(tag=TAG, outbox_bytes=2 * size, resend_seconds=1.0)
    receiver = StreamReceiver(tag=TAG, expect=lambda _: size, window_bytes=size, resend_seconds=1.0)
    sender.send(key(0), memoryview(content(0, size)))
    sender.acknowledge(0, 4)

    def allocated(work: Callable[[], object]) -> int:
        """The most bytes that there were beyond those before, what `work` returns included."""
        tracemalloc.start()
        try:
            result = work()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        frames.append(result)
        return peak

    frames: list[object] = []
    for _ in range(4):
        assert PAYLOAD_BYTES < allocated(lambda: sender.next_frame(0.0)) < 1.1 * PAYLOAD_BYTES
    for piece in frames[:4]:
        assert isinstance(piece, bytes)
        added = size if piece is frames[0] else 0  # the tensor's own buffer
        assert allocated(partial(receiver.receive, piece, 0.0)) < added + 0.1 * PAYLOAD_BYTES
    assert isinstance(frames[-1], Completed) and frames[-1].buffer == content(0, size)


WINDOW = 4  # frames, as `make_receiver` has it


def nothing(_: TensorKey) -> int | None:
    return None


def zeros(sequence: int, key: TensorKey, *, total: int = PIECE, index: int = 0) -> bytes:
    """The frame `index` of a tensor of `total` bytes, all zero."""
    payload = bytes(min(PIECE, total - index * PIECE))
    return pack_frame(Frame(0, sequence, key, total, index * PIECE, payload), TAG)


def flood(receiver: StreamReceiver, frames: int) -> int:
    """Send single-frame tensors from 1 on, never frame 0; how many were taken before one was refused."""
    for sequence in range(1, frames):
        try:
            completed = receiver.receive(zeros(sequence, key(sequence)), 0.0)
        except ProtocolViolationError as error:
            assert "without credit" in str(error)
            return sequence - 1
        if completed is not None:
            receiver.release(completed.key, 0.0)
    raise AssertionError(f"{frames - 1} frames were taken behind one that never came")


# ---- a frame that is withheld


@pytest.mark.parametrize("waits", [False, True], ids=["idle", "waiting"])
@pytest.mark.parametrize("size", [None, PIECE], ids=["stale", "released"])
def test_frames_behind_a_withheld_one_are_bounded(size: int | None, waits: bool) -> None:
    """Frames that take no room, or give it back, are remembered all the same."""
    receiver = make_receiver(lambda _: size)
    if waits:
        receiver.want(key(0), 0.0)
    assert flood(receiver, 1000) == WINDOW - 1
    assert len(receiver._beyond) == WINDOW - 1
    assert (receiver.next_sequence, receiver.credit_limit) == (0, WINDOW)


def test_the_withheld_frame_opens_the_window_again() -> None:
    receiver = make_receiver(nothing)
    assert flood(receiver, 1000) == WINDOW - 1
    receiver.receive(zeros(0, key(0)), 0.0)
    assert (receiver.next_sequence, receiver.credit_limit) == (WINDOW, 2 * WINDOW)


def test_only_one_tensor_can_complete_behind_a_withheld_frame() -> None:
    receiver, frames = make_receiver(nothing), 50
    for index in range(frames):
        receiver.receive(zeros(WINDOW - 1 + index, key(1), total=frames * PIECE, index=index), 0.0)
    assert receiver.credit_limit == WINDOW - 1 + frames
    with pytest.raises(ProtocolViolationError, match="without credit"):
        receiver.receive(zeros(receiver.credit_limit, key(2)), 0.0)
    assert len(receiver._beyond) == frames


@pytest.mark.parametrize("size", [None, PIECE], ids=["stale", "released"])
def test_a_lost_frame_does_not_stop_a_correct_sender(size: int | None) -> None:
    """It has used up its credit behind the frame that was lost, and sends that again without any."""
    receiver, sender = make_receiver(lambda _: size), make_sender()
    for microbatch in range(10):
        sender.send(key(microbatch), bytes(PIECE))
    sender.acknowledge(0, WINDOW)
    assert sender.next_frame(0.0), "the one that is lost"
    while arrived := exchange(sender, receiver, 0.0):
        for one in arrived:
            receiver.release(one, 0.0)
    assert (receiver.next_sequence, sender.queued_bytes, sender.retransmits) == (10, 0, 1)


# ---- a tensor that comes again


def test_a_released_tensor_is_not_taken_again() -> None:
    receiver = make_receiver(lambda _: PIECE)
    first = receiver.receive(zeros(0, key(0)), 0.0)
    assert isinstance(first, Completed)
    receiver.release(key(0), 0.0)
    with pytest.raises(ProtocolViolationError, match="is sent a second time"):
        receiver.receive(zeros(1, key(0)), 0.0)
    assert receiver.held_bytes == 0


def test_nor_when_the_next_step_has_begun() -> None:
    """`expect` may still say yes: a stage hears of a step later than its neighbour."""
    receiver = make_receiver(lambda _: PIECE)
    for sequence, step in enumerate((7, 8)):
        assert receiver.receive(zeros(sequence, key(0, step)), 0.0)
        receiver.release(key(0, step), 0.0)
    for step in (7, 8):
        with pytest.raises(ProtocolViolationError, match="is sent a second time"):
            receiver.receive(zeros(2, key(0, step)), 0.0)


def test_what_is_remembered_of_tensors_is_that_of_two_steps() -> None:
    receiver, sequence = make_receiver(lambda _: PIECE), 0
    for step in range(20):
        for microbatch in range(5):
            assert receiver.receive(zeros(sequence, key(microbatch, step)), 0.0)
            receiver.release(key(microbatch, step), 0.0)
            sequence += 1
    assert receiver._taken == {key(microbatch, step) for microbatch in range(5) for step in (18, 19)}


def test_an_unexpected_tensor_can_arrive_again() -> None:
    """Nothing was taken, so nothing is remembered."""
    receiver = make_receiver(nothing)
    for sequence in range(3):
        assert receiver.receive(zeros(sequence, key(0)), 0.0) is None
    assert (receiver.stale, receiver._taken) == (3, set())
