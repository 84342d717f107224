"""Gradients and moments in e4m3, weights in bfloat16: state, resume, splits, ties, memory."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.fp8.reference import Fp8Gradient
from node.config.schema import ModelSection, RunConfig, RunSection, TrainingSection
from node.data.data import Corpus
from node.model.chunk import Chunk, build_chunk, weight_dtype
from node.model.optimizers import state_bytes
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.state.serialization import deserialize_unit, serialize_unit
from node.training.optimizer import StageOptimizer
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import RunError

CPU = torch.device("cpu")
MODEL = ModelSection(
    family="llama", layers=3, hidden=32, heads=2, kv_heads=1, ffn=72, vocab=256, sequence=16, tied=True
)
PLAIN = {"gradients": "float32", "moments": "float32", "weights": "float32"}
PAIRED = [
    {**PLAIN, "gradients": "fp8"},
    {**PLAIN, "moments": "fp8"},
    {**PLAIN, "gradients": "fp8", "moments": "fp8", "weights": "bfloat16"},
]
"""Gradients and moments in e4m3 alone, and all three together."""


def run_config(changes: dict[str, str]) -> RunConfig:
    precision = "bfloat16" if changes["weights"] == "bfloat16" else "float32"
    training = TrainingSection(
        global_batch=4, microbatch=2, lr=1e-2, warmup_steps=2, precision=precision, **changes
    )
    return RunConfig(run=RunSection(steps=40, seed=3), model=MODEL, training=training)


def corpus() -> Corpus:
    # A cycle that a small model learns at once.
    text = torch.arange(4000).remainder(37).to(torch.uint8).numpy()
    return Corpus(text, sequence=16, global_batch=4, seed=3)


def trainer(changes: dict[str, str], chunks: int = 1) -> ReferenceTrainer:
    config = run_config(changes)
    return ReferenceTrainer(config, corpus(), groups=split_units(MODEL, chunks))


@cache
def plain_losses() -> list[float]:
    return [step.loss for step in trainer(PLAIN).train(16)]


@pytest.mark.parametrize("changes", PAIRED, ids=lambda c: "/".join(c.values()))
def test_training_matches_float32(changes: dict[str, str]) -> None:
    expected = plain_losses()
    losses = [step.loss for step in trainer(changes).train(16)]
    assert expected[0] > 5 and expected[-1] < 2.8
    assert abs(losses[-1] - expected[-1]) < 0.06


@pytest.mark.parametrize("changes", PAIRED, ids=lambda c: "/".join(c.values()))
def test_a_split_and_a_resumed_run_give_the_same_bits(changes: dict[str, str]) -> None:
    whole, split = trainer(changes), trainer(changes, chunks=3)
    assert [whole.train_step() for _ in range(2)] == [split.train_step() for _ in range(2)]
    assert whole.weights_sha256() == split.weights_sha256()

    again = trainer(changes)
    for unit in whole.optimizer.units:
        state = serialize_unit(whole.optimizer.unit_state(unit))
        again.optimizer.load_unit_state(unit, deserialize_unit(state))
        assert serialize_unit(again.optimizer.unit_state(unit)) == state
    again.step = whole.step
    assert [again.train_step() for _ in range(2)] == [whole.train_step() for _ in range(2)]
    assert again.weights_sha256() == whole.weights_sha256()


@pytest.mark.parametrize("changes", PAIRED, ids=lambda c: "/".join(c.values()))
def test_both_copies_of_a_tied_weight_stay_equal(changes: dict[str, str]) -> None:
    trained = trainer(changes, chunks=2)
    trained.train(3)
    embed = trained.chunks[0].tied_parameter("embed")
    head = trained.chunks[-1].tied_parameter("head")
    assert embed is not None and head is not None and torch.equal(embed, head)


def packed(moments: str = "fp8", gradients: str = "fp8") -> tuple[Chunk, StageOptimizer]:
    chunk = build_chunk(MODEL, unit_names(MODEL), 5, CPU)
    return chunk, StageOptimizer([chunk], TrainingSection(moments=moments, gradients=gradients), 5)


def test_no_matrix_keeps_a_gradient_in_full() -> None:
    chunk, optimizer = packed()
    tokens = torch.arange(16).view(1, 16)
    counts = []

    def watch(parameter: Tensor) -> None:
        counts.append(sum(p.grad is not None and p.ndim >= 2 for p in chunk.parameters()))

    for parameter in chunk.parameters():
        if parameter.ndim >= 2:
            # Hooks run in the order of registration: after the one that packs.
            parameter.register_post_accumulate_grad_hook(watch)
    for _ in range(2):
        chunk.loss(tokens, tokens).backward()
    assert counts == [0] * len(counts) and len(counts) > 40
    matrices = [parameter for parameter in chunk.parameters() if parameter.ndim >= 2]
    stored = [optimizer.gradients.stored(parameter) for parameter in matrices]
    assert all(isinstance(gradient, Fp8Gradient) for gradient in stored)
    elements = sum(parameter.numel() for parameter in chunk.parameters())
    assert optimizer.gradients.nbytes < 1.1 * elements


def test_gradients_are_the_sum_of_microbatches_within_e4m3() -> None:
    chunk, optimizer = packed()
    plain = build_chunk(MODEL, unit_names(MODEL), 5, CPU)
    for shift in range(4):
        tokens = (torch.arange(32) * (shift + 1)).remainder(256).view(2, 16)
        chunk.loss(tokens, tokens).backward()
        plain.loss(tokens, tokens).backward()
    for parameter, expected in zip(chunk.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        found = optimizer.gradients.get(parameter)
        assert (found - expected.grad).norm() <= 0.06 * expected.grad.norm()


def test_moments_take_little_and_say_how_much() -> None:
    chunk, optimizer = packed()
    elements = sum(parameter.numel() for parameter in chunk.parameters() if parameter.ndim >= 2)
    vectors = sum(parameter.numel() for parameter in chunk.parameters() if parameter.ndim < 2)
    assert optimizer.moment_bytes <= 2.1 * elements + 8 * vectors
    assert packed(moments="float32")[1].moment_bytes == 8 * (elements + vectors)


@pytest.mark.parametrize("moments", ["float32", "fp8"])
def test_a_state_is_as_large_as_the_coordinator_reckons(moments: str) -> None:
    _, optimizer = packed(moments=moments)
    for unit in unit_names(MODEL):
        tensors = optimizer.unit_state(unit).values()
        config = RunConfig(model=MODEL, training=TrainingSection(moments=moments))
        assert sum(tensor.nbytes for tensor in tensors) == state_bytes(config, unit), unit


def test_an_unreached_gradient_is_named_and_clearing_forgets() -> None:
    chunk, optimizer = packed()
    weight = chunk.unit_parameters("block.0001")["gate.weight"]
    with pytest.raises(RunError, match="no gradient"):
        optimizer.squared_norms()
    tokens = torch.arange(16).view(1, 16)
    chunk.loss(tokens, tokens).backward()
    first = optimizer.gradients.get(weight)
    optimizer.zero_grad()
    with pytest.raises(RunError, match=r"shape \[72, 32\] has no gradient"):
        optimizer.gradients.get(weight)
    chunk.loss(tokens, tokens).backward()
    assert torch.equal(optimizer.gradients.get(weight), first)


def test_a_gradient_that_is_not_finite_fails_the_norm() -> None:
    chunk, optimizer = packed()
    tokens = torch.arange(16).view(1, 16)
    loss = chunk.loss(tokens, tokens)
    (loss * torch.inf).backward()
    assert not all(norm < float("inf") for norm in optimizer.squared_norms().values())


def test_a_state_of_other_moments_is_refused() -> None:
    _, optimizer = packed()
    _, plain = packed(moments="float32")
    with pytest.raises(RunError, match="another model"):
        optimizer.load_unit_state("embed", plain.unit_state("embed"))
    with pytest.raises(RunError, match="another model"):
        plain.load_unit_state("embed", optimizer.unit_state("embed"))


def test_bfloat16_weights_are_matrices_alone_and_snapshots_hold_them_exactly() -> None:
    config = run_config({"gradients": "fp8", "moments": "fp8", "weights": "bfloat16"})
    chunk = build_chunk(MODEL, unit_names(MODEL), 5, CPU, weight_dtype("bfloat16"))
    assert {p.dtype for p in chunk.parameters() if p.ndim >= 2} == {torch.bfloat16}
    assert {p.dtype for p in chunk.parameters() if p.ndim < 2} == {torch.float32}
    optimizer = StageOptimizer([chunk], config.training, 5)
    state = optimizer.unit_state("block.0000")
    assert state["parameter.gate.weight"].dtype == torch.float32
    weight = chunk.unit_parameters("block.0000")["gate.weight"]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    optimizer.load_unit_state("block.0000", state)
    assert torch.equal(weight, before)


def test_rounding_differs_between_steps_and_parameters() -> None:
    """Equal weights and gradients part ways by their salt alone."""
    config = replace(run_config({"gradients": "float32", "moments": "fp8", "weights": "bfloat16"}).training)
    chunk = build_chunk(MODEL, ("block.0000", "block.0001"), 5, CPU, weight_dtype("bfloat16"))
    optimizer = StageOptimizer([chunk], config, 5)
    pair = [chunk.unit_parameters(unit)["gate.weight"] for unit in chunk.units]
    with torch.no_grad():
        pair[0].fill_(1.0)
        pair[1].fill_(1.0)
    for parameter in chunk.parameters():
        optimizer.gradients.put(parameter, torch.ones(parameter.shape))
    optimizer.apply(1e-3, 1.0)
    values = {float(value) for value in pair[0].detach().float().flatten()}
    assert len(values) == 2
    assert not torch.equal(pair[0], pair[1])
