"""Batches as a pure function of (seed, step), and which samples came before a step."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import DataSection
from node.data.data import Corpus
from node.data.order import SampleOrder
from wire.errors import DataError

SEQUENCE = 8


def numbered(length: int) -> np.ndarray:
    """Tokens that tell where they stand, as far as a byte can."""
    return (np.arange(length) % 251).astype(np.uint8)


def corpus(length: int = 2000, *, seed: int = 3, batch: int = 4, sequence: int = SEQUENCE) -> Corpus:
    return Corpus(numbered(length), sequence=sequence, global_batch=batch, seed=seed)


def starts(data: Corpus, first_sample: int, count: int) -> list[int]:
    """Where windows begin, found by content; the text is short enough to be unambiguous."""
    assert data.global_batch == 1
    return [int(data.batch(sample)[0, 0]) for sample in range(first_sample, first_sample + count)]


def test_any_order_of_steps_gives_the_same_batches() -> None:
    forwards, other = corpus(), corpus()
    expected = [forwards.batch(step) for step in range(200)]
    for step in reversed(range(200)):
        assert np.array_equal(other.batch(step), expected[step])


def test_seed_decides() -> None:
    assert not np.array_equal(corpus().batch(0), corpus(seed=4).batch(0))


@given(length=st.integers(SEQUENCE + 1, 250), seed=st.integers(0, 5), number=st.integers(0, 4))
def test_a_pass_repeats_no_window_and_stays_inside(length: int, seed: int, number: int) -> None:
    data = corpus(length, seed=seed, batch=1)
    found = starts(data, number * data.windows, data.windows)
    assert len(set(found)) == data.windows
    assert len({start % SEQUENCE for start in found}) == 1
    assert min(found) >= 0
    assert max(found) + SEQUENCE + 1 <= len(data.training)
    # Windows are back to back, so a pass leaves out less than two windows.
    assert sorted(found) == list(range(min(found), max(found) + 1, SEQUENCE))
    assert data.windows * SEQUENCE + 2 * SEQUENCE >= len(data.training) - 1


def test_passes_differ_in_order_and_phase() -> None:
    data = corpus(250, batch=1)
    passes = [starts(data, number * data.windows, data.windows) for number in range(8)]
    assert len({tuple(found) for found in passes}) == 8
    assert len({min(found) % SEQUENCE for found in passes}) > 2


def test_batches_run_on_over_the_end_of_a_pass() -> None:
    one, four = corpus(250, batch=1), corpus(250, batch=4)
    rows = np.concatenate([one.batch(sample) for sample in range(4 * 20)])
    assert np.array_equal(rows, np.concatenate([four.batch(step) for step in range(20)]))


def test_validation_is_held_out() -> None:
    data = corpus(200_000)
    windows = data.validation_windows()
    assert windows.shape == ((2000 - 1) // SEQUENCE, SEQUENCE + 1)
    assert len(data.training) + len(data.validation) == 200_000
    assert np.array_equal(windows[0], numbered(200_000)[198_000 : 198_000 + SEQUENCE + 1])
    assert np.array_equal(data.validation_windows(3), windows[:3])
    # At least 16 windows where the text has room, at most a tenth of it.
    assert len(corpus(5000).validation_windows()) == 16
    assert len(corpus(1000).validation) == 100
    assert len(corpus(20).validation_windows()) == 0


def test_the_smallest_text_that_works() -> None:
    data = corpus(SEQUENCE + 1)
    assert data.windows == 1
    assert (data.batch(5) == numbered(SEQUENCE + 1)).all()
    with pytest.raises(DataError, match="8 tokens"):
        corpus(SEQUENCE)


def test_load_and_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the same text " * 30)
    (tmp_path / "b.txt").write_text("the other text" * 30)
    first, again, other = (
        Corpus.load(DataSection(path=str(tmp_path / name)), sequence=16, global_batch=2, seed=0)
        for name in ("a.txt", "a.txt", "b.txt")
    )
    assert bytes(first.training) + bytes(first.validation) == b"the same text " * 30
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


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


@pytest.mark.timeout(10)
def test_another_tokenizer_than_a_checkpoints_own_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("The ferry leaves at seven. " * 9)
    data = DataSection(path=str(tmp_path / "a.txt"))
    for vocab, fixed, reported in ((270, True, False), (4096, False, False), (4096, True, True)):
        Corpus.load(data, sequence=SEQUENCE, global_batch=1, seed=0, vocab=vocab, fixed=fixed)
        assert ("(bytes) has 256 tokens" in caplog.text) == reported
