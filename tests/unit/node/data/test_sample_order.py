"""Which samples a step sees, and which of them came before: against a search through all earlier steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.data import Corpus
from node.data.order import SampleOrder


@given(
    windows=st.integers(1, 12),
    batch=st.integers(1, 30),
    step=st.integers(0, 20),
    back=st.integers(0, 20),
    seed=st.integers(0, 3),
)
def test_the_table_matches_a_search(windows: int, batch: int, step: int, back: int, seed: int) -> None:
    order = SampleOrder(windows=windows, global_batch=batch, seed=seed)
    since = max(0, step - back)
    seen = {sample for earlier in range(since, step) for sample in order.samples(earlier)}
    assert order.known(step, since) == tuple(sample in seen for sample in order.samples(step))


def test_a_sample_holds_the_same_tokens_in_every_pass() -> None:
    tokens = np.arange(3000).astype(np.uint16)
    corpus = Corpus(tokens, sequence=16, global_batch=4, seed=2, shift=False)
    order = SampleOrder(windows=corpus.windows, global_batch=4, seed=2)
    texts: dict[int, bytes] = {}
    for step in range(3 * corpus.windows // 4):
        for sample, row in zip(order.samples(step), corpus.batch(step), strict=True):
            assert texts.setdefault(sample, row.tobytes()) == row.tobytes()
    assert len(set(texts.values())) == len(texts) == corpus.windows


def test_without_a_shift_no_window_is_left_out() -> None:
    assert Corpus(np.arange(101), sequence=10, global_batch=1, seed=0, shift=False).windows == 10
    shifted = Corpus(np.arange(101), sequence=10, global_batch=1, seed=0)
    assert shifted.windows == 9


def test_orders_differ_between_passes_and_seeds() -> None:
    order, other = (SampleOrder(windows=50, global_batch=50, seed=seed) for seed in (0, 1))
    assert sorted(order.samples(0)) == sorted(order.samples(1)) == list(range(50))
    assert len({order.samples(0), order.samples(1), other.samples(0)}) == 3


@pytest.mark.parametrize("steps", [(0, 5, 0, 9, 1), (9, 0, 9)])
def test_any_order_of_questions_gives_the_same_answers(steps: tuple[int, ...]) -> None:
    asked = SampleOrder(windows=7, global_batch=5, seed=1)
    for step in steps:
        fresh = SampleOrder(windows=7, global_batch=5, seed=1)
        assert asked.samples(step) == fresh.samples(step)
        assert asked.known(step, 0) == fresh.known(step, 0)
