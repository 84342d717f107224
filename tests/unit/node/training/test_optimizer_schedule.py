"""Learning rate and clip coefficient."""

import math

import pytest

from node.config.schema import TrainingSection
from node.training.schedule import SCHEDULES, clip_coefficient, learning_rate
from tests.support.cases import each
from wire.errors import NonFiniteError

TRAINING = TrainingSection(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)


def test_warmup_is_linear_and_starts_above_zero() -> None:
    rates = [learning_rate(step, TRAINING, 111) for step in range(10)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_cosine_from_peak_to_minimum() -> None:
    assert learning_rate(10, TRAINING, 111) == pytest.approx(1.0)
    assert learning_rate(60, TRAINING, 111) == pytest.approx(0.55)
    assert learning_rate(110, TRAINING, 111) == pytest.approx(0.1)
    assert learning_rate(500, TRAINING, 111) == pytest.approx(0.1)
    rates = [learning_rate(step, TRAINING, 111) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 2), (5, 3), (5, 5), (5, 6), (1, 1)])
def test_short_runs(warmup: int, steps: int) -> None:
    training = TrainingSection(lr=1.0, warmup_steps=warmup)
    assert all(0 < learning_rate(step, training, steps) <= 1.0 for step in range(steps))


def test_clipping() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(1.0, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 0.25
    assert clip_coefficient(4.0, 0.0) == 1.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_no_number_is_refused(norm: float) -> None:
    for clip in (0.0, 1.0):
        with pytest.raises(NonFiniteError, match="gradient norm is"):
            clip_coefficient(norm, clip)


def test_the_other_schedules() -> None:
    def rates(**keys: object) -> list[float]:
        training = TrainingSection(lr=1.0, min_lr_ratio=0.1, warmup_steps=10, **keys)  # type: ignore[arg-type]
        return [learning_rate(step, training, 111) for step in range(111)]

    for schedule in SCHEDULES:
        assert rates(schedule=schedule)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    linear = rates(schedule="linear")
    assert [linear[step] for step in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])
    assert set(rates(schedule="constant")[10:]) == {1.0}
    wsd = rates(schedule="wsd", decay_steps=20)
    assert set(wsd[10:91]) == {1.0} and wsd[91] < 1.0
    assert [wsd[100], wsd[110]] == pytest.approx([0.55, 0.1])
    assert rates(schedule="wsd")[87] == 1.0 and rates(schedule="wsd")[89] < 1.0, "a fifth of the run"


@each("schedule", SCHEDULES)
@each("steps", [1, 2, 5, 6])
def test_short_runs_of_every_schedule(schedule: str, steps: int) -> None:
    training = TrainingSection(lr=1.0, warmup_steps=min(2, steps), schedule=schedule)
    assert all(0 < learning_rate(step, training, steps) <= 1.0 for step in range(steps))
