"""The factor of the loss in float16: a function of which steps were skipped."""

import math
from dataclasses import replace

import pytest
import torch

from node.config.schema import TrainingSection
from node.run_file.validate import problems
from node.training.loss_scale import LEAST, MOST, LossScale, LossScales, loss_scales
from node.training.overflow import Overflow
from tests.support.memory_pipeline import corpus
from tests.support.reference_trainer import ReferenceTrainer
from tests.support.run_harness import SMALL

TRAINING = TrainingSection(precision="float16", loss_scale=8.0, loss_scale_steps=3)


def factors(scales: LossScales, count: int) -> list[float]:
    return [scales.at(step).factor for step in range(count)]


def test_it_halves_after_a_skipped_step_and_doubles_after_enough_others() -> None:
    scales = LossScales(TRAINING)
    for step in range(9):
        scales.committed(step, skipped=step in (1, 2))
    assert factors(scales, 10) == [8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]
    assert not loss_scales(replace(TRAINING, precision="bfloat16"))


def test_it_stays_within_bounds() -> None:
    low = LossScales(TRAINING, skipped=range(20))
    assert low.overflows(2) and not low.overflows(3)
    assert factors(low, 20)[3:] == [LEAST] * 17
    high = LossScales(replace(TRAINING, loss_scale=MOST, loss_scale_steps=1))
    assert factors(high, 3) == [MOST] * 3


def test_replays_and_resumed_runs_have_the_same_factors() -> None:
    skipped = {1, 2, 7, 11}
    scales = LossScales(TRAINING)
    seen = []
    for step in range(20):
        seen.append(scales.at(step))
        scales.committed(step, skipped=step in skipped)
    for snapshot in (0, 5, 12):
        # The same process goes back; one that resumes knows the record, or the snapshot alone.
        again = [
            scales,
            LossScales(TRAINING, skipped),
            LossScales(TRAINING, known=(snapshot, seen[snapshot])),
        ]
        for one in again:
            for step in range(snapshot, 20):
                assert one.at(step) == seen[step]
                one.committed(step, skipped=step in skipped)


def test_what_overflows_is_sent_as_zeros_and_told_as_infinite() -> None:
    step = Overflow(2.0)
    fine = step.cleared(torch.ones(3))
    assert fine.tolist() == [1, 1, 1] and step.told({4: 1.0, 5: 2.0}) == {4: 1.0, 5: 2.0}
    assert step.told({4: 1.0, 5: math.nan}) == {4: math.inf, 5: math.inf}
    step.clear([{"weight": torch.tensor([1.0, math.inf])}])
    assert step.told({4: 1.0}) == {4: math.inf}
    least = Overflow(LEAST)
    assert least.cleared(torch.tensor([math.nan])).isnan() and math.isnan(least.told({0: math.nan})[0])


def test_the_trainer_skips_what_overflows_and_else_follows_float32() -> None:
    """At first the factor is too large by far; then losses are near those of exact arithmetic."""
    config = replace(SMALL, training=replace(SMALL.training, precision="float16", loss_scale=2.0**24))
    trainer = ReferenceTrainer(config, corpus(config))
    before, skipped = trainer.weights_sha256(), 0
    while not math.isfinite(trainer.train_step().grad_norm):
        skipped += 1
        assert trainer.weights_sha256() == before, "a skipped step changes no weight"
    assert 3 <= skipped < 15 and trainer.weights_sha256() != before
    assert trainer.scales is not None
    assert trainer.scales.at(trainer.step) == LossScale(factor=2.0 ** (24 - skipped), steps=1)
    assert set(trainer.optimizer.steps_taken.values()) == {1}, "AdamW counts no skipped step"

    calm = replace(config, training=replace(config.training, loss_scale=1024.0))
    exact = replace(config, training=replace(config.training, precision="float32"))
    half, full = (ReferenceTrainer(one, corpus(one)).train(4) for one in (calm, exact))
    assert [step.loss for step in half] == pytest.approx([step.loss for step in full], rel=1e-2)
    assert [step.grad_norm for step in half] == pytest.approx([step.grad_norm for step in full], rel=5e-2)


def test_a_run_file_in_float16_names_what_does_not_fit() -> None:
    def wrong(**keys: object) -> list[str]:
        return problems(replace(SMALL, training=replace(SMALL.training, precision="float16", **keys)))

    assert wrong() == []
    (told,) = wrong(loss_scale=3.0)
    assert "power of two" in told and told.endswith("3.0")
    assert "e4m3" in wrong(gradients="fp8")[0]
    assert wrong(weights="float16")[0].startswith("training.weights 'float16'")
