"""When a stream without tensors sends a byte, with an invented clock."""

from wire.frames import HEADER_BYTES
from wire.pacing import KEEP_ALIVE, LEAST_ROUND_TRIP, LONGEST_SECONDS, PERIOD_SECONDS, KeepAlive

FAR = 2 * LEAST_ROUND_TRIP


def test_nothing_leaves_before_the_first_frame() -> None:
    assert KeepAlive().due_at(FAR) is None


def test_nearby_and_unknown_links_cause_no_message() -> None:
    warm = KeepAlive()
    warm.frame_sent(10.0)
    assert warm.due_at(0.0) is None
    assert warm.due_at(LEAST_ROUND_TRIP / 2) is None


def test_padding_fills_a_pause_until_nothing_is_left_to_keep() -> None:
    warm, now, left = KeepAlive(), 10.0, []
    warm.frame_sent(now)
    while (due := warm.due_at(FAR)) is not None:
        assert due - now <= PERIOD_SECONDS + 1e-9
        now = due
        left.append(now)
        warm.sent(now)
        assert len(left) < 1000
    assert 10.0 + LONGEST_SECONDS - PERIOD_SECONDS <= left[-1] <= 10.0 + LONGEST_SECONDS


def test_a_frame_restarts_the_pause() -> None:
    warm = KeepAlive()
    warm.frame_sent(10.0)
    warm.sent(10.0 + LONGEST_SECONDS)
    assert warm.due_at(FAR) is None
    warm.frame_sent(20.0)
    assert warm.due_at(FAR) == 20.0 + PERIOD_SECONDS


def test_the_message_can_be_no_frame() -> None:
    assert 0 < len(KEEP_ALIVE) < HEADER_BYTES
