"""AdamW by layer unit: norms, decay, state, bit-exact resume."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, TrainingSection
from node.model.chunk import Chunk, build_chunk
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.state.serialization import deserialize_unit, serialize_unit
from node.training.gradients import gradient_of
from node.training.optimizer import StageOptimizer
from wire.errors import RunError

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
