"""A sender whose every frame is sound but that means harm: the receiver stays bounded and gives once."""

import pytest

from wire.errors import ProtocolViolationError
from wire.frames import Frame, pack_frame, run_tag
from wire.spec import Direction, TensorKey
from wire.stream_receiver import Acknowledge, Completed, Expect, StreamReceiver
from wire.stream_sender import StreamSender

TAG = run_tag("test-run")
PIECE = 16  # payload bytes of a frame here
WINDOW = 4  # frames


def key(microbatch: int, step: int = 0) -> TensorKey:
    return TensorKey(1, step, microbatch, 0, Direction.ACTIVATION)


def make_receiver(expect: Expect) -> StreamReceiver:
    return StreamReceiver(
        tag=TAG, expect=expect, window_bytes=WINDOW * PIECE, resend_seconds=1.0, payload_bytes=PIECE
    )


def nothing(_: TensorKey) -> int | None:
    return None


def frame(sequence: int, key: TensorKey, *, total: int = PIECE, index: int = 0) -> bytes:
    """The frame `index` of a tensor of `total` bytes, all zero."""
    payload = bytes(min(PIECE, total - index * PIECE))
    return pack_frame(Frame(0, sequence, key, total, index * PIECE, payload), TAG)


def flood(receiver: StreamReceiver, frames: int) -> int:
    """Send single-frame tensors from 1 on, never frame 0; how many were taken before one was refused."""
    for sequence in range(1, frames):
        try:
            completed = receiver.receive(frame(sequence, key(sequence)), 0.0)
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
    receiver.receive(frame(0, key(0)), 0.0)
    assert (receiver.next_sequence, receiver.credit_limit) == (WINDOW, 2 * WINDOW)


def test_only_one_tensor_can_complete_behind_a_withheld_frame() -> None:
    receiver, frames = make_receiver(nothing), 50
    for index in range(frames):
        receiver.receive(frame(WINDOW - 1 + index, key(1), total=frames * PIECE, index=index), 0.0)
    assert receiver.credit_limit == WINDOW - 1 + frames
    with pytest.raises(ProtocolViolationError, match="without credit"):
        receiver.receive(frame(receiver.credit_limit, key(2)), 0.0)
    assert len(receiver._beyond) == frames


@pytest.mark.parametrize("size", [None, PIECE], ids=["stale", "released"])
def test_a_lost_frame_does_not_stop_a_correct_sender(size: int | None) -> None:
    """It has used up its credit behind the frame that was lost, and sends that again without any."""
    receiver = make_receiver(lambda _: size)
    sender = StreamSender(tag=TAG, outbox_bytes=10**6, resend_seconds=1.0, payload_bytes=PIECE)
    for microbatch in range(10):
        sender.send(key(microbatch), bytes(PIECE))
    lost = True
    for _ in range(100):
        for message in receiver.poll(0.0):
            if isinstance(message, Acknowledge):
                sender.acknowledge(message.next_sequence, message.credit_limit)
            else:
                sender.send_again(list(message.sequences))
        data = sender.next_frame(0.0)
        if data is None:
            break
        if lost:
            lost = False
        elif completed := receiver.receive(data, 0.0):
            receiver.release(completed.key, 0.0)
    assert (receiver.next_sequence, sender.queued_bytes, sender.retransmits) == (10, 0, 1)


# ---- a tensor that comes again


def test_a_released_tensor_is_not_taken_again() -> None:
    receiver = make_receiver(lambda _: PIECE)
    first = receiver.receive(frame(0, key(0)), 0.0)
    assert isinstance(first, Completed)
    receiver.release(key(0), 0.0)
    with pytest.raises(ProtocolViolationError, match="is sent a second time"):
        receiver.receive(frame(1, key(0)), 0.0)
    assert receiver.held_bytes == 0


def test_nor_when_the_next_step_has_begun() -> None:
    """`expect` may still say yes: a stage hears of a step later than its neighbour."""
    receiver = make_receiver(lambda _: PIECE)
    for sequence, step in enumerate((7, 8)):
        assert receiver.receive(frame(sequence, key(0, step)), 0.0)
        receiver.release(key(0, step), 0.0)
    for step in (7, 8):
        with pytest.raises(ProtocolViolationError, match="is sent a second time"):
            receiver.receive(frame(2, key(0, step)), 0.0)


def test_what_is_remembered_of_tensors_is_that_of_two_steps() -> None:
    receiver, sequence = make_receiver(lambda _: PIECE), 0
    for step in range(20):
        for microbatch in range(5):
            assert receiver.receive(frame(sequence, key(microbatch, step)), 0.0)
            receiver.release(key(microbatch, step), 0.0)
            sequence += 1
    assert receiver._taken == {key(microbatch, step) for microbatch in range(5) for step in (18, 19)}


def test_an_unexpected_tensor_can_arrive_again() -> None:
    """Nothing was taken, so nothing is remembered."""
    receiver = make_receiver(nothing)
    for sequence in range(3):
        assert receiver.receive(frame(sequence, key(0)), 0.0) is None
    assert (receiver.stale, receiver._taken) == (3, set())
