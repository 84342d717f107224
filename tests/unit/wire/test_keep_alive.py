"""When a stream without tensors sends a byte, with an invented clock."""

from wire.frames import HEADER_BYTES
from wire.pacing import KEEP_ALIVE, LEAST_ROUND_TRIP, LONGEST_SECONDS, PERIOD_SECONDS, KeepAlive

FAR = 2 * LEAST_ROUND_TRIP


def test_nothing_leaves_before_the_first_frame() -> None:
    assert KeepAlive().due_at(FAR) is None


def test_a_near_link_and_one_of_unknown_length_stay_quiet() -> None:
    warm = KeepAlive()
    warm.frame_sent(10.0)
    assert warm.due_at(0.0) is None
    assert warm.due_at(LEAST_ROUND_TRIP / 2) is None


def test_a_pause_is_filled_until_nothing_would_be_left_to_keep() -> None:
    warm, now, left = KeepAlive(), 10.0, []
    warm.frame_sent(now)
    while (due := warm.due_at(FAR)) is not None:
        assert due - now <= PERIOD_SECONDS + 1e-9
        now = due
        left.append(now)
        warm.sent(now)
        assert len(left) < 1000
    assert 10.0 + LONGEST_SECONDS - PERIOD_SECONDS <= left[-1] <= 10.0 + LONGEST_SECONDS


def test_a_frame_begins_the_pause_again() -> None:
    warm = KeepAlive()
    warm.frame_sent(10.0)
    warm.sent(10.0 + LONGEST_SECONDS)
    assert warm.due_at(FAR) is None
    warm.frame_sent(20.0)
    assert warm.due_at(FAR) == 20.0 + PERIOD_SECONDS


def test_the_message_can_be_no_frame() -> None:
    assert 0 < len(KEEP_ALIVE) < HEADER_BYTES
