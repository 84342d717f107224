"""A node's clock against the coordinator's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.telemetry.clock import MOST_REPLIES, ClockSync


def test_nothing_is_known_before_the_first_answer() -> None:
    sync = ClockSync()
    assert not sync.known and sync.offset == sync.error == 0.0
    sync.answer(sent=5.0, received=4.0, at=1000.0)
    assert not sync.known, "an answer cannot come before its question"


def test_the_answer_with_the_least_round_trip_counts() -> None:
    sync = ClockSync()
    sync.answer(sent=10.0, received=11.0, at=1010.9)
    sync.answer(sent=12.0, received=12.1, at=1012.05)
    sync.answer(sent=14.0, received=15.0, at=1014.0)
    assert sync.offset == pytest.approx(1000.0)
    assert sync.error == pytest.approx(0.05)


def test_old_answers_are_forgotten_so_that_drift_does_not_add_up() -> None:
    sync = ClockSync()
    sync.answer(sent=0.0, received=0.0, at=1.0)
    for second in range(MOST_REPLIES):
        sync.answer(sent=second, received=second + 0.5, at=second + 2.25)
    assert sync.offset == pytest.approx(2.0)


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=40),
    st.floats(-1e9, 1e9),
)
def test_the_error_bounds_the_truth(answers: list[tuple[float, float, float]], true_offset: float) -> None:
    """Whatever the two ways take, as long as the clocks do not drift."""
    sync = ClockSync()
    for sent, there, back in answers:
        sync.answer(sent=sent, received=sent + there + back, at=sent + there + true_offset)
    assert abs(sync.offset - true_offset) <= sync.error + 1e-5
