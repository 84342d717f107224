"""Main gradients between microbatches: rounding in e4m3 over long steps, sums in float32 otherwise."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.fp8.reference import Fp8Gradient, unpack_gradient
from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.data.data import Corpus
from node.model.chunk import Chunk, build_chunk, compute_precision, weight_dtype
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.stage.stage_model import StageModel
from node.state.serialization import deserialize_unit, serialize_unit
from node.training import gradients as gradients_module
from node.training import optimizer as optimizer_module
from node.training.gradients import MOST_TO_NEAREST, Fp8Gradients, gradient_of
from node.training.optimizer import StageOptimizer, sum_tied_gradients
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import RunError

CPU = torch.device("cpu")
MODEL = ModelSection(
    family="llama", layers=2, hidden=32, heads=2, kv_heads=1, ffn=72, vocab=256, sequence=16, tied=True
)
FP8 = TrainingSection(microbatch=1, lr=1e-2, warmup_steps=2, gradients="fp8", moments="fp8")


def trainer(microbatches: int, chunks: int = 1, seed: int = 3, **changes: str) -> ReferenceTrainer:
    training = replace(FP8, global_batch=microbatches, **changes)
    config = RunConfig(run=RunSection(steps=40, seed=seed), model=MODEL, training=training)
    # Like a language, windows have much in common, and so have their gradients.
    words = b"the pipeline waits for a slow link, and the link for the pipeline. "
    text = np.frombuffer(words * 60, np.uint8)
    corpus = Corpus(text, sequence=16, global_batch=microbatches, seed=3)
    return ReferenceTrainer(config, corpus, groups=split_units(MODEL, chunks))


def gradients(of: ReferenceTrainer) -> dict[str, Tensor]:
    """After the backwards of a step, by unit and name."""
    of.accumulate()
    return {
        f"{unit}.{name}": of.optimizer.gradients.get(parameter).clone()
        for chunk in of.chunks
        for unit, parameters in chunk.named_units()
        for name, parameter in parameters.items()
        if parameter.ndim >= 2
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_long_step_gives_the_same_bits_on_any_split_and_attempt() -> None:
    whole, split = trainer(MOST_TO_NEAREST + 1), trainer(MOST_TO_NEAREST + 1, chunks=2)
    first = gradients(whole)
    assert same(gradients(whole), first), "another attempt of the step"
    assert same(gradients(split), first), "another split"
    whole.train(1)
    split.train(1)
    assert whole.weights_sha256() == split.weights_sha256()

    again = trainer(MOST_TO_NEAREST + 1)
    for unit in whole.optimizer.units:
        state = serialize_unit(whole.optimizer.unit_state(unit))
        again.optimizer.load_unit_state(unit, deserialize_unit(state))
    again.step = whole.step
    assert same(gradients(again), gradients(whole)), "resumed"


def test_a_pipeline_draws_as_the_reference_does() -> None:
    """Stages with a microbatch in flight between them, each with its own backward."""
    alone = trainer(MOST_TO_NEAREST + 4, chunks=2)
    expected = gradients(alone)
    config = replace(alone.config, pipeline=PipelineSection(stages=2, head="last"))
    first, last = (StageModel(config, CPU) for _ in range(2))
    for index, stage in enumerate((first, last)):
        stage.build(index, 2)
    rows = torch.from_numpy(alone.corpus.batch(0).astype(np.int64))
    for _ in range(2):  # an aborted attempt before
        first.begin_step()
        last.begin_step()
        waiting: list[Tensor] = []
        for microbatch, row in enumerate(rows.split(1)):
            last.forward(0, microbatch, first.forward(0, microbatch, row[:, :-1]), row[:, 1:])
            upstream = last.backward(0, microbatch, None)
            assert upstream is not None
            waiting.append(upstream)
            if microbatch > 0:
                first.backward(0, microbatch - 1, waiting[microbatch - 1])
        first.backward(0, len(rows) - 1, waiting[-1])
    total = sum_tied_gradients(last.tied_gradient("head").clone(), first.tied_gradient("embed"))
    first.put_tied_gradient("embed", total)
    last.put_tied_gradient("head", total)
    found = {
        f"{unit}.{name}": stage.optimizer.gradients.get(parameter)
        for stage in (first, last)
        for chunk in stage._chunks
        for unit, parameters in chunk.named_units()
        for name, parameter in parameters.items()
        if parameter.ndim >= 2
    }
    assert same(found, expected)


def test_steps_microbatches_parameters_and_ranks_draw_apart() -> None:
    """The same addend at each place; only random bits differ."""

    def codes(seed: int = 3, microbatch: int = 0, rank: int = 0, step: int = 0) -> list[bytes]:
        optimizer = trainer(MOST_TO_NEAREST + 1, seed=seed).optimizer
        for unit in optimizer.units:
            state = optimizer.unit_state(unit)
            optimizer.load_unit_state(unit, {**state, "step": torch.tensor(step)})
        optimizer.begin_backward(microbatch, rank)
        found = []
        for parameter in optimizer.parameters:
            if parameter.ndim >= 2:
                addend = torch.linspace(1, 3, 1024).repeat(parameter.numel() // 1024 + 1)
                optimizer.gradients.add(parameter, addend[: parameter.numel()].view(parameter.shape))
                found.append(bytes(optimizer.gradients.get(parameter).flatten()[:1024].numpy()))
        return found

    first = codes()
    assert codes() == first
    assert len(set(first)) == len(first) > 10
    for other in (codes(seed=4), codes(microbatch=1), codes(rank=1), codes(step=1)):
        assert not set(other) & set(first)


def test_short_steps_are_rounded_to_nearest() -> None:
    """As what is recorded of convergence was: nothing is drawn, whatever the seed says."""
    optimizer = trainer(MOST_TO_NEAREST).optimizer
    parameter = next(parameter for parameter in optimizer.parameters if parameter.ndim >= 2)
    addend = torch.linspace(1, 3, parameter.numel()).view(parameter.shape)
    optimizer.begin_backward(0)
    optimizer.gradients.add(parameter, addend)
    found = optimizer.gradients.get(parameter)
    # No more than half a step of the codes of 3 mantissa bits.
    assert float(((found - addend) / addend).abs().max()) <= 1 / 16


@cache
def exact_gradients(microbatches: int) -> dict[str, Tensor]:
    return gradients(trainer(microbatches, gradients="float32"))


def projected(microbatches: int) -> tuple[float, float]:
    """The part of a step's sum along the exact one, and its error, both relative to that."""
    found, exact = gradients(trainer(microbatches)), exact_gradients(microbatches)
    size = sum(float(value.square().sum()) for value in exact.values())
    along = sum(float((found[name] * value).sum()) for name, value in exact.items())
    apart = sum(float((found[name] - value).square().sum()) for name, value in exact.items())
    return along / size, (apart / size) ** 0.5


def test_a_step_adds_up_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    along, error = projected(8)
    assert abs(along - 1) < 0.01 and error < 0.07
    along, error = projected(64)
    assert abs(along - 1) < 0.02 and error < 0.25
    # To nearest such a sum comes to a standstill.
    monkeypatch.setattr(optimizer_module, "MOST_TO_NEAREST", 64)
    assert projected(64)[0] < 0.9


HALF = replace(
    FP8, gradients="float32", precision="bfloat16", weights="bfloat16", microbatch=1, global_batch=8
)


def tokens(number: int) -> Tensor:
    return torch.randint(0, 256, (1, 17), generator=torch.Generator().manual_seed(number))


def half(*, in_place: bool = False) -> tuple[Chunk, StageOptimizer]:
    chunk = build_chunk(MODEL, unit_names(MODEL), 5, CPU, weight_dtype("bfloat16"))
    return chunk, StageOptimizer([chunk], HALF, 5, gradients_in_place=in_place)


def backward(chunk: Chunk, number: int) -> None:
    with compute_precision("bfloat16", CPU):
        loss = chunk.loss(tokens(number)[:, :-1], tokens(number)[:, 1:])
    loss.backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_bfloat16_weights_add_up_in_float32(in_place: bool) -> None:
    chunk, optimizer = half(in_place=in_place)
    # What backward makes of each microbatch, by itself.
    alone = build_chunk(MODEL, unit_names(MODEL), 5, CPU, weight_dtype("bfloat16"))
    made: list[list[Tensor]] = []
    for number in range(20):
        alone.zero_grad(set_to_none=True)
        backward(alone, number)
        made.append([gradient_of(parameter).clone() for parameter in alone.parameters()])
    for _ in range(2):  # the second time after clearing
        optimizer.zero_grad()
        for number in range(20):
            backward(chunk, number)
        for parameter, *each in zip(chunk.parameters(), *made, strict=True):
            assert {one.dtype for one in each} == {parameter.dtype}
            total = torch.zeros(parameter.shape)
            for one in each:
                total += one.float()
            found = optimizer.gradients.get(parameter)
            assert found.dtype == torch.float32 and torch.equal(found, total)
            if parameter.dtype == torch.bfloat16:
                assert parameter.grad is None
                in_half = torch.zeros_like(parameter)
                for one in each:
                    in_half += one
                assert parameter.numel() < 100 or not torch.equal(in_half.float(), total)


def test_no_gradient_of_a_microbatch_stays_beside_the_sum() -> None:
    chunk, optimizer = half()
    backward(chunk, 0)
    backward(chunk, 1)
    assert all(p.grad is None for p in chunk.parameters() if p.dtype == torch.bfloat16)
    assert optimizer.gradients.nbytes == 4 * sum(p.numel() for p in chunk.parameters())
    optimizer.zero_grad()
    assert optimizer.gradients.nbytes == 0
    with pytest.raises(RunError, match="no gradient"):
        optimizer.squared_norms()


def test_an_update_of_bfloat16_weights_takes_the_sum_as_it_is() -> None:
    """The optimizer's step from the main gradients is the one from the same numbers given to it."""
    chunk, optimizer = half()
    twin, given = half()
    for number in range(20):
        backward(chunk, number)
    for parameter, other in zip(chunk.parameters(), twin.parameters(), strict=True):
        given.gradients.put(other, optimizer.gradients.get(parameter).clone())
    assert given.squared_norms() == optimizer.squared_norms()
    for one in (optimizer, given):
        one.apply(1e-2, 0.7)
    before = build_chunk(MODEL, unit_names(MODEL), 5, CPU, weight_dtype("bfloat16"))
    for mine, theirs, old in zip(chunk.parameters(), twin.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs) and not torch.equal(mine, old)


def test_non_finite_values_show_in_the_norm() -> None:
    chunk, optimizer = half()
    backward(chunk, 0)
    parameter = next(p for p in chunk.parameters() if p.dtype == torch.bfloat16)
    optimizer.gradients.get(parameter).view(-1)[0] = torch.inf
    assert not all(norm < float("inf") for norm in optimizer.squared_norms().values())


def test_float32_weights_keep_their_gradients_in_grad() -> None:
    """As ever: autograd adds them up there, and nothing else touches them."""
    chunk = build_chunk(MODEL, unit_names(MODEL), 5, CPU)
    optimizer = StageOptimizer([chunk], TrainingSection(), 5)
    for number in range(3):
        chunk.loss(tokens(number)[:, :-1], tokens(number)[:, 1:]).backward()
    for parameter in chunk.parameters():
        assert optimizer.gradients.get(parameter) is parameter.grad
        assert optimizer.gradients.unpacked(parameter) is parameter.grad


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_stored_layer_is_a_copy(kind: str) -> None:
    """The step scales gradients in place, and both ends of a tied pair are given the same sum."""
    of = trainer(2, gradients="float32", weights=kind, precision=kind)
    of.accumulate()
    parameter = of.chunks[-1].tied_parameter("head")
    assert parameter is not None
    shared = torch.ones(parameter.shape)
    of.optimizer.gradients.put(parameter, shared)
    of.optimizer.gradients.get(parameter).mul_(0.5)
    assert torch.equal(shared, torch.ones(parameter.shape))


def test_pieces_change_no_bits_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as it is stored nor as it is read, nor its norm beyond the last bits; a broken block too."""
    parameter = torch.nn.Parameter(torch.zeros(7, 173))
    value = torch.linspace(-3, 5, parameter.numel()).view(parameter.shape)
    value[3, 40] = torch.nan
    whole, pieces = Fp8Gradients([parameter]), Fp8Gradients([parameter])
    whole.put(parameter, value)
    expected = whole.get(parameter)
    assert int(expected.isnan().sum()) == 128
    monkeypatch.setattr(gradients_module, "GRADIENT_PIECE", 256)
    pieces.put(parameter, value)
    for kept in (whole, pieces):
        assert torch.equal(kept.get(parameter).nan_to_num(), expected.nan_to_num())
    parts = torch.stack(gradients_module.norms([expected.nan_to_num()])[0])
    assert len(parts) == 5
    full = torch.linalg.vector_norm(expected.nan_to_num(), dtype=torch.float64)
    torch.testing.assert_close(parts.square().sum(), full.square())


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_gradient_that_is_taken_begins_again_at_zero(in_place: bool, packed: bool) -> None:
    """As a gradient group ends; one that stays in place is read by captured passes."""
    training = replace(HALF, precision="float32", weights="float32", gradients="fp8" if packed else "float32")
    chunk = build_chunk(MODEL, unit_names(MODEL), 5, CPU)
    optimizer = StageOptimizer([chunk], training, 5, gradients_in_place=in_place)
    optimizer.zero_grad()
    values: list[dict[tuple[str, str], Tensor]] = []
    places = []
    for _ in range(2):
        chunk.loss(tokens(3)[:, :-1], tokens(3)[:, 1:]).backward()
        places.append([p.grad.data_ptr() for p in chunk.parameters() if p.grad is not None])
        taken = {
            (unit, name): one
            for unit in optimizer.units
            for name, one in optimizer.take_gradients(unit).items()
        }
        values.append(
            {
                key: unpack_gradient(one) if isinstance(one, Fp8Gradient) else one.flatten()
                for key, one in taken.items()
            }
        )
    assert all(torch.equal(value, values[1][key]) for key, value in values[0].items())
    assert any(value.count_nonzero() for value in values[0].values())
    if in_place:
        assert places[0] == places[1]
        assert not any(optimizer.gradients.get(p).count_nonzero() for p in chunk.parameters() if p.ndim < 2)
    for unit in optimizer.units:
        optimizer.put_gradients(unit, {name: value for (of, name), value in values[0].items() if of == unit})
    assert optimizer.squared_norms()["head"] > 0
