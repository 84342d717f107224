"""AdamW by layer unit: norms, decay, state, bit-exact resume."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, TrainingSection
from node.model.chunk import Chunk, build_chunk
from node.model.units import unit_names
from node.run_file.validate import problems
from node.schedule.placement import split_units
from node.state.serialization import deserialize_unit, serialize_unit
from node.training.gradients import gradient_of
from node.training.loss_scale import LEAST, MOST, LossScale, LossScales, loss_scales
from node.training.optimizer import StageOptimizer
from node.training.overflow import Overflow
from node.training.schedule import SCHEDULES, clip_coefficient, learning_rate
from tests.support.cases import each
from tests.support.memory_pipeline import corpus
from tests.support.reference_trainer import ReferenceTrainer
from tests.support.run_harness import SMALL
from wire.errors import NonFiniteError, RunError

CPU = torch.device("cpu")
MODEL = ModelSection(family="gpt2", layers=3, hidden=16, heads=2, ffn=24, vocab=31, sequence=8, tied=True)
TRAINING = TrainingSection(lr=1e-2)


def build(chunks: int = 1) -> tuple[list[Chunk], StageOptimizer]:
    built = [build_chunk(MODEL, units, 5, CPU) for units in split_units(MODEL, chunks)]
    return built, StageOptimizer(built, TRAINING)


def named(chunks: Sequence[Chunk]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{unit}/{name}": parameter
        for chunk in chunks
        for unit, parameters in chunk.named_units()
        for name, parameter in parameters.items()
    }


def give_gradients(chunks: Sequence[Chunk], step: int) -> None:
    """Some gradient for every parameter, the same for both copies of the tied weight."""
    generator = torch.Generator().manual_seed(step)
    parameters = named(chunks)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    embed = parameters["embed/tokens.weight"].grad
    assert embed is not None
    parameters["head/output.weight"].grad = embed.clone()


def bits(chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named(chunks).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_norms_are_the_same_bits_on_any_split_and_count_a_tied_weight_once() -> None:
    seen = []
    for count in (1, 2, 3):
        chunks, optimizer = build(count)
        give_gradients(chunks, 0)
        norms = optimizer.squared_norms()
        assert tuple(norms) == unit_names(MODEL) == optimizer.units
        seen.append(norms)
    assert seen[0] == seen[1] == seen[2]

    chunks, _ = build()
    give_gradients(chunks, 0)
    total = sum(
        float(gradient_of(parameter).double().square().sum())
        for name, parameter in named(chunks).items()
        if name != "head/output.weight"
    )
    assert sum(seen[0].values()) == pytest.approx(total, rel=1e-12)


def test_norms_of_huge_and_broken_gradients() -> None:
    chunks, optimizer = build()
    give_gradients(chunks, 0)
    up = chunks[0].unit_parameters("block.0001")["up.weight"]
    up.grad = torch.full_like(up, 1e30)
    assert optimizer.squared_norms()["block.0001"] == pytest.approx(1e60 * up.numel())
    up.grad[0, 0] = math.nan
    assert math.isnan(optimizer.squared_norms()["block.0001"])


def test_no_gradient_is_an_error() -> None:
    _, optimizer = build()
    with pytest.raises(RunError, match="has no gradient"):
        optimizer.squared_norms()
    with pytest.raises(RunError, match="has no gradient"):
        optimizer.apply(1e-3, 1.0)


def test_a_step_is_adamw_with_clipping_and_decay_on_matrices_only() -> None:
    chunks, optimizer = build()
    before = bits(chunks)
    give_gradients(chunks, 0)
    gradients = {name: gradient_of(parameter).clone() for name, parameter in named(chunks).items()}
    optimizer.apply(lr=0.01, clip_coefficient=0.5)
    for name, after in bits(chunks).items():
        gradient = gradients[name] * 0.5
        decay = TRAINING.weight_decay if after.ndim == 2 else 0.0
        # After one step the corrected moments are the gradient and its square.
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * gradient / (gradient.abs() + TRAINING.eps)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in named(chunks).values())


def test_tied_copies_stay_equal() -> None:
    chunks, optimizer = build(2)
    for step in range(3):
        give_gradients(chunks, step)
        optimizer.apply(1e-2, 1.0)
    weights = named(chunks)
    assert torch.equal(weights["embed/tokens.weight"], weights["head/output.weight"])


@pytest.mark.parametrize("saved_at", [0, 1, 4])
@pytest.mark.parametrize("split_after", [1, 3])
def test_resume_is_bit_exact_on_any_split(saved_at: int, split_after: int) -> None:
    chunks, optimizer = build(2)
    for step in range(7):
        give_gradients(chunks, step)
        optimizer.apply(1e-2 / (step + 1), 0.7)
    expected = bits(chunks)

    chunks, optimizer = build(2)
    for step in range(saved_at):
        give_gradients(chunks, step)
        optimizer.apply(1e-2 / (step + 1), 0.7)
    saved = {unit: serialize_unit(optimizer.unit_state(unit)) for unit in optimizer.units}

    chunks, optimizer = build(split_after)
    with torch.no_grad():
        for parameter in named(chunks).values():
            parameter.fill_(9.0)
    for unit in optimizer.units:
        optimizer.load_unit_state(unit, deserialize_unit(saved[unit]))
    for step in range(saved_at, 7):
        give_gradients(chunks, step)
        optimizer.apply(1e-2 / (step + 1), 0.7)
    assert equal(bits(chunks), expected)


def test_state_is_a_copy_with_stable_names() -> None:
    chunks, optimizer = build()
    state = optimizer.unit_state("head")
    assert sorted(state) == sorted(
        ["step"]
        + [
            f"{prefix}.{name}"
            for prefix in ("parameter", "exp_avg", "exp_avg_sq")
            for name in ("norm.weight", "norm.bias", "output.weight")
        ]
    )
    kept = state["parameter.output.weight"].clone()
    give_gradients(chunks, 0)
    optimizer.apply(1e-2, 1.0)
    assert torch.equal(state["parameter.output.weight"], kept)
    assert int(state["step"]) == 0
    assert int(optimizer.unit_state("head")["step"]) == 1


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    chunks, optimizer = build()
    give_gradients(chunks, 0)
    optimizer.apply(1e-2, 1.0)
    before = bits(chunks)
    good = optimizer.unit_state("head")
    good["parameter.norm.weight"] += 1
    cases: dict[str, dict[str, Tensor]] = {
        "exp_avg.norm.bias is missing": {k: v for k, v in good.items() if k != "exp_avg.norm.bias"},
        "step is missing": {k: v for k, v in good.items() if k != "step"},
        "extra is unknown": {**good, "extra": torch.zeros(1)},
        r"exp_avg_sq.norm.bias is float32 \[15\], not float32 \[16\]": {
            **good,
            "exp_avg_sq.norm.bias": torch.zeros(15),
        },
        "parameter.output.weight is float16": {
            **good,
            "parameter.output.weight": good["parameter.output.weight"].half(),
        },
        r"step is float32 \[\], not int64": {**good, "step": torch.tensor(1.0)},
    }
    for message, tensors in cases.items():
        with pytest.raises(RunError, match=f"unit head:? {message}"):
            optimizer.load_unit_state("head", tensors)
        assert equal(bits(chunks), before)
    optimizer.load_unit_state("head", good)
    assert not equal(bits(chunks), before)


# ---- learning rate and clip coefficient


SCHEDULED = TrainingSection(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)


def test_warmup_is_linear_and_starts_above_zero() -> None:
    rates = [learning_rate(step, SCHEDULED, 111) for step in range(10)]
    assert rates == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_cosine_from_peak_to_minimum() -> None:
    assert learning_rate(10, SCHEDULED, 111) == pytest.approx(1.0)
    assert learning_rate(60, SCHEDULED, 111) == pytest.approx(0.55)
    assert learning_rate(110, SCHEDULED, 111) == pytest.approx(0.1)
    assert learning_rate(500, SCHEDULED, 111) == pytest.approx(0.1)
    rates = [learning_rate(step, SCHEDULED, 111) for step in range(10, 111)]
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


# ---- the factor of the loss in float16: a function of which steps were skipped


SCALED = TrainingSection(precision="float16", loss_scale=8.0, loss_scale_steps=3)


def factors(scales: LossScales, count: int) -> list[float]:
    return [scales.at(step).factor for step in range(count)]


def test_it_halves_after_a_skipped_step_and_doubles_after_enough_others() -> None:
    scales = LossScales(SCALED)
    for step in range(9):
        scales.committed(step, skipped=step in (1, 2))
    assert factors(scales, 10) == [8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]
    assert not loss_scales(replace(SCALED, precision="bfloat16"))


def test_it_stays_within_bounds() -> None:
    low = LossScales(SCALED, skipped=range(20))
    assert low.overflows(2) and not low.overflows(3)
    assert factors(low, 20)[3:] == [LEAST] * 17
    high = LossScales(replace(SCALED, loss_scale=MOST, loss_scale_steps=1))
    assert factors(high, 3) == [MOST] * 3


def test_replays_and_resumed_runs_have_the_same_factors() -> None:
    skipped = {1, 2, 7, 11}
    scales = LossScales(SCALED)
    seen = []
    for step in range(20):
        seen.append(scales.at(step))
        scales.committed(step, skipped=step in skipped)
    for snapshot in (0, 5, 12):
        # The same process goes back; one that resumes knows the record, or the snapshot alone.
        again = [
            scales,
            LossScales(SCALED, skipped),
            LossScales(SCALED, known=(snapshot, seen[snapshot])),
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
