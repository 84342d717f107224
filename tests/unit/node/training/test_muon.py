"""Muon: its arithmetic, the same bits on any split, and a lower loss than AdamW's."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.orthogonal.reference import ITERATIONS, POLYNOMIALS, orthogonal
from node.config.schema import ModelSection, RunConfig, RunSection, TrainingSection
from node.model.chunk import build_chunk
from node.model.optimizers import ADAMW, MuonRule, UpdateRule, state_bytes, unit_layout, update_rule
from node.model.shard_shapes import check_shards
from node.model.shards import merge_states, shard
from node.model.tensor_rank import TensorRank
from node.model.units import parameter_specs
from node.run_file.validate import problems
from node.schedule.placement import split_units
from node.training.muon import SCALE, Muon
from node.training.optimizer import StageOptimizer
from node.training.update_rules import Step
from tests.support.memory_pipeline import corpus
from tests.support.reference_trainer import ReferenceTrainer
from tests.support.thread_ranks import thread_ranks

CONFIG = RunConfig(
    run=RunSection(steps=120, seed=7),
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(
        global_batch=4, microbatch=2, lr=1e-2, warmup_steps=5, optimizer="muon", weight_decay=0.1
    ),
)


def plain_orthogonal(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Newton-Schulz on singular values alone, which it leaves the singular vectors of."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for first, third, fifth in POLYNOMIALS[iterations]:
        values = first * values + third * values**3 + fifth * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("kept_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "joined"), [((24, 40), 1), ((40, 24), 1), ((48, 16), 3)])
def test_steps_are_those_of_a_plain_reference_in_double_precision(
    shape: tuple[int, int], joined: int, kept_in: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=random)
    wanted, mean = weight.double(), torch.zeros(shape, dtype=torch.float64)
    moment, muon = torch.zeros(shape, dtype=kept_in), Muon(MuonRule(joined=joined), CONFIG.training)
    for number in range(1, 4):
        gradient = torch.randn(shape, generator=random)
        scaled = 0.5 * gradient.double()
        mean = 0.95 * mean + 0.05 * scaled
        update = 0.05 * scaled + 0.95 * mean
        parts = [plain_orthogonal(part) for part in update.chunk(joined)]
        factor = 0.01 * SCALE * math.sqrt(max(shape[0] // joined, shape[1]))
        wanted = wanted * (1 - 0.01 * 0.1) - factor * torch.cat(parts)
        muon.step(weight, gradient, [moment], Step(lr=0.01, weight_decay=0.1, number=number, scale=0.5))
        assert torch.allclose(moment.double(), mean, atol=1e-6, rtol=torch.finfo(kept_in).eps)
        mean = moment.double()  # as it is rounded
    assert torch.allclose(weight.double(), wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("iterations", "least", "low", "high"),
    [(3, 0.01, 0.7, 1.27), (4, 0.003, 0.76, 1.2), (5, 0.002, 0.68, 1.21)],
)
def test_iterations_bring_singular_values_near_one(
    iterations: int, least: float, low: float, high: float
) -> None:
    random = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(8, 8, generator=random)).Q for _ in range(2))
    small = torch.linspace(math.log(least), math.log(0.7), 200).exp()
    for value in small:
        values = torch.stack([value, (1 - value**2).sqrt()])
        (found,) = orthogonal([left[:, :2] @ torch.diag(values) @ right[:2]], iterations)
        ends = torch.linalg.svdvals(found)[:2]
        assert ((ends > low) & (ends < high)).all()


@pytest.mark.parametrize("iterations", POLYNOMIALS)
def test_a_run_chooses_its_iterations(iterations: int) -> None:
    config = replace(CONFIG, training=replace(CONFIG.training, muon_iterations=iterations))
    assert not [line for line in problems(config) if "muon_iterations" in line]
    weight, gradient = (torch.randn(24, 40, generator=torch.Generator().manual_seed(n)) for n in range(2))
    before, update = weight.double(), gradient.double().clone()
    muon = Muon(MuonRule(), config.training)
    muon.step(weight, gradient, [torch.zeros(24, 40)], Step(lr=0.01, weight_decay=0.0, number=1))
    wanted = before - 0.01 * SCALE * math.sqrt(40) * plain_orthogonal(update, iterations)
    assert torch.allclose(weight.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("iterations", [2, 6])
def test_no_polynomials_for_other_numbers_of_iterations(iterations: int) -> None:
    config = replace(CONFIG, training=replace(CONFIG.training, muon_iterations=iterations))
    assert iterations not in POLYNOMIALS
    assert problems(config) == [f"training.muon_iterations must be 3, 4 or 5, got {iterations}"]


def test_only_matrices_of_blocks_are_stepped_by_it() -> None:
    muon, adapters = TrainingSection(optimizer="muon"), TrainingSection(adapter_optimizer="muon")
    cases: dict[tuple[str, str, tuple[int, ...]], tuple[UpdateRule, UpdateRule]] = {
        ("embed", "tokens.weight", (256, 32)): (ADAMW, ADAMW),
        ("head", "output.weight", (256, 32)): (ADAMW, ADAMW),
        ("block.0001", "norm.weight", (32,)): (ADAMW, ADAMW),
        ("block.0001", "query.weight", (32, 32)): (MuonRule(), ADAMW),
        ("block.0001", "qkv_projection.weight", (96, 32)): (MuonRule(joined=3), ADAMW),
        ("block.0001", "qkv_projection.bias", (96,)): (ADAMW, ADAMW),
        ("block.0001", "qkv_projection.lora_A", (4, 32)): (ADAMW, MuonRule()),
        ("block.0001", "qkv_projection.lora_B", (96, 4)): (ADAMW, MuonRule(joined=3)),
    }
    for case, rules in cases.items():
        assert (update_rule(muon, *case), update_rule(adapters, *case)) == rules
        assert update_rule(TrainingSection(), *case) == ADAMW


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_step_as_one_does(family: str, ranks: int) -> None:
    """Each rank is a thread; gradients are the same, so weights and moments have the same bits."""
    model, unit = replace(CONFIG.model, family=family, kv_heads=4), "block.0000"
    specs, random = parameter_specs(model, unit), torch.Generator().manual_seed(1)
    gradients = [{spec.name: torch.randn(spec.shape, generator=random) for spec in specs} for _ in range(2)]

    def stepped(rank: TensorRank) -> dict[str, Tensor]:
        chunk = build_chunk(model, [unit], 7, torch.device("cpu"), rank=rank)
        optimizer = StageOptimizer([chunk], CONFIG.training, 7, rank)
        for step in gradients:
            mine = {spec.name: shard(unit, spec, step[spec.name], rank.index, rank.count) for spec in specs}
            optimizer.put_gradients(unit, {name: value.flatten() for name, value in mine.items()})
            optimizer.apply(1e-2, 0.5)
        return optimizer.unit_state(unit)

    with ThreadPoolExecutor(ranks) as pool:
        states = list(pool.map(stepped, thread_ranks(ranks)))
    config, whole = replace(CONFIG, model=model), stepped(TensorRank())
    merged = merge_states(config, unit, states)
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], value) for name, value in whole.items())
    check_shards(config, ranks)


def state(trainer: ReferenceTrainer) -> dict[str, dict[str, Tensor]]:
    return {unit: trainer.optimizer.unit_state(unit) for unit in trainer.optimizer.units}


def split(config: RunConfig, stages: int) -> ReferenceTrainer:
    return ReferenceTrainer(config, corpus(config), groups=split_units(config.model, stages))


@cache
def unsplit(config: RunConfig) -> str:
    trainer = split(config, 1)
    trainer.train(4)
    return trainer.weights_sha256()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "fp8"])
def test_a_resume_on_another_split_goes_on_with_the_same_bits(family: str, moments: str) -> None:
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, family=family, kv_heads=4),
        training=replace(CONFIG.training, moments=moments),
    )
    first, second = split(config, 2), split(config, 3)
    first.train(2)
    for unit, tensors in state(first).items():
        found = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        assert found == unit_layout(config, unit)
        assert sum(tensor.nbytes for tensor in tensors.values()) == state_bytes(config, unit)
        second.optimizer.load_unit_state(unit, tensors)
    second.step = first.step
    second.train(2)
    assert second.weights_sha256() == unsplit(config)


def test_its_loss_is_below_adamws_at_equal_steps() -> None:
    losses = {}
    for optimizer in ("adamw", "muon"):
        config = replace(
            CONFIG, training=replace(CONFIG.training, optimizer=optimizer, lr=3e-3, microbatch=4)
        )
        last = split(config, 1).train(config.run.steps)[-20:]
        losses[optimizer] = sum(step.loss for step in last) / len(last)
    assert losses["muon"] < losses["adamw"], losses


def test_an_unknown_name_is_refused() -> None:
    for key in ("optimizer", "adapter_optimizer"):
        wrong = replace(CONFIG, training=replace(CONFIG.training, **{key: "sgd"}))
        assert any(f"training.{key}" in problem for problem in problems(wrong))
    assert not any("training" in problem for problem in problems(CONFIG))
