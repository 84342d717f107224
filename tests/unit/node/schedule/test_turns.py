"""A stage's turns: the order when nothing is late, and what may overtake it when something is."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.schedule.schedule import Kind, held_activations, one_f_one_b, schedule
from node.schedule.simulation import Timeline, simulate
from node.schedule.turns import Turns


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_without_delays_actions_run_in_order(chunks: int, swap: bool) -> None:
    for order in schedule(3, chunks, 7, 1):
        turns = Turns(order, swap=swap and chunks == 1)
        assert [turns.begin(lambda place: True) for _ in order] == list(range(len(order)))
        assert turns.left == 0 and not turns.choices
        assert turns.begin(lambda place: True) is None


def test_a_gradient_overtakes_forwards_that_are_late_and_they_catch_up() -> None:
    order = one_f_one_b(2, 4, 1)[0]
    assert "".join(action.kind[0] for action in order) == "fffbfbbb"
    turns = Turns(order, swap=True)
    assert turns.choices == [0]
    assert turns.begin(lambda place: place == 0) == 0
    # The next forward is late; the first gradient is here.
    assert turns.choices == [1, 3]
    assert turns.begin(lambda place: place == 3) == 3
    assert turns.choices == [1], "no forward is left whose backward could run"
    assert turns.begin(lambda place: False) is None
    ran = [turns.begin(lambda place: True) for _ in range(turns.left)]
    assert ran == [1, 2, 4, 5, 6, 7]


def test_a_forward_overtakes_a_gradient_only_into_room_that_is_free() -> None:
    order = one_f_one_b(2, 4, 1)[0]
    turns = Turns(order, swap=True)
    for _ in range(3):
        turns.begin(lambda place: True)
    # Three are held, as many as the order ever holds.
    assert turns.choices == [3]
    turns.begin(lambda place: True)
    assert turns.choices == [4, 5]


def test_without_swaps_the_order_waits() -> None:
    turns = Turns(one_f_one_b(2, 4, 1)[0], swap=False)
    turns.begin(lambda place: True)
    assert turns.choices == [1]
    assert turns.begin(lambda place: place != 1) is None


def test_the_next_item_is_looked_at_once() -> None:
    turns = Turns(one_f_one_b(2, 4, 1)[0], swap=True)
    assert turns.upcoming(3) == [0, 1, 2]
    turns.begin(lambda place: True)
    assert turns.upcoming(1) == [1, 3]
    assert turns.upcoming(3) == [1, 2, 3]


@given(
    st.integers(1, 6), st.integers(1, 16), st.integers(0, 5), st.booleans(), st.randoms(use_true_random=False)
)
def test_whatever_is_late_all_runs_in_sequence_and_within_memory(
    stages: int, microbatches: int, window: int, swap: bool, random: Random
) -> None:
    orders = schedule(stages, 1, microbatches, window)

    def seconds(*_: object) -> float:
        return random.choice((0.0, 0.5, 1.0, 20.0))

    # A deadlock would be a ConfigError.
    timeline = simulate(orders, seconds, seconds, seconds, 1.0, swap=swap)
    for spans, order in zip(timeline.spans, orders, strict=True):
        ran = tuple(span.action for span in spans)
        for kind in Kind:
            assert [a.microbatch for a in ran if a.kind is kind] == list(range(microbatches))
        assert held_activations(ran) <= held_activations(order)
        assert swap or ran == order


def test_a_wide_window_is_free_where_gradients_may_overtake() -> None:
    """A link that takes longer than a stage computes: forwards come slowly, and gradients need not wait."""

    def run(window: int, swap: bool) -> Timeline:
        return simulate(one_f_one_b(4, 16, window), 1, 2, 5.0, 0.5, swap=swap)

    narrow, best = run(0, True).total, min(run(window, False).total for window in range(6))
    assert narrow > 1.2 * best
    assert run(6, False).total > 1.2 * best
    for window in range(2, 16):
        assert run(window, True).total <= 1.001 * best
