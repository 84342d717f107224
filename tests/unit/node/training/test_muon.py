"""Muon: its arithmetic, the same bits on any split, and a lower loss than AdamW's."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.orthogonal.reference import COEFFICIENTS
from node.config.schema import LoraSection, ModelSection, RunConfig, RunSection, SyncSection, TrainingSection
from node.model.optimizers import ADAMW, MuonRule, state_bytes, unit_layout, update_rule
from node.model.shard_shapes import check_shards
from node.model.units import unit_names
from node.run_file.validate import problems
from node.schedule.placement import split_units
from node.training.muon import SCALE, Muon
from node.training.update_rules import Step
from tests.support.memory_pipeline import corpus
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import RunError

CONFIG = RunConfig(
    run=RunSection(steps=120, seed=7),
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(
        global_batch=4, microbatch=2, lr=1e-2, warmup_steps=5, optimizer="muon", weight_decay=0.1
    ),
)


def plain_orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz on singular values alone, which it leaves the singular vectors of."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    first, third, fifth = COEFFICIENTS
    for _ in range(5):
        values = first * values + third * values**3 + fifth * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize(("shape", "joined"), [((24, 40), 1), ((40, 24), 1), ((48, 16), 3)])
def test_steps_are_those_of_a_plain_reference_in_double_precision(
    shape: tuple[int, int], joined: int
) -> None:
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=random)
    wanted, mean = weight.double(), torch.zeros(shape, dtype=torch.float64)
    moment, muon = torch.zeros(shape), Muon(MuonRule(joined=joined), CONFIG.training)
    for number in range(1, 4):
        gradient = torch.randn(shape, generator=random)
        scaled = 0.5 * gradient.double()
        mean = 0.95 * mean + 0.05 * scaled
        update = 0.05 * scaled + 0.95 * mean
        parts = [plain_orthogonal(part) for part in update.chunk(joined)]
        factor = 0.01 * SCALE * math.sqrt(max(shape[0] // joined, shape[1]))
        wanted = wanted * (1 - 0.01 * 0.1) - factor * torch.cat(parts)
        muon.step(weight, gradient, [moment], Step(lr=0.01, weight_decay=0.1, number=number, scale=0.5))
    assert torch.allclose(weight.double(), wanted, atol=2e-5)
    assert torch.allclose(moment.double(), mean, atol=1e-6)


def test_only_matrices_of_blocks_are_stepped_by_it() -> None:
    cases = {
        ("embed", "tokens.weight", (256, 32)): ADAMW,
        ("head", "output.weight", (256, 32)): ADAMW,
        ("block.0001", "norm.weight", (32,)): ADAMW,
        ("block.0001", "query.weight", (32, 32)): MuonRule(),
        ("block.0001", "qkv_projection.weight", (96, 32)): MuonRule(joined=3),
        ("block.0001", "qkv_projection.bias", (96,)): ADAMW,
        ("block.0001", "qkv_projection.lora_A", (4, 32)): MuonRule(),
        ("block.0001", "qkv_projection.lora_B", (96, 4)): MuonRule(joined=3),
    }
    assert {case: update_rule("muon", *case) for case in cases} == cases
    assert {update_rule("adamw", *case) for case in cases} == {ADAMW}


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
@pytest.mark.parametrize("moments", ["float32", "fp8"])
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


def test_what_it_cannot_share_is_refused() -> None:
    rounds = replace(
        CONFIG,
        pipeline=replace(CONFIG.pipeline, groups=2, stages=1),
        training=replace(CONFIG.training, global_batch=8),
        sync=SyncSection(every=2),
    )
    assert any("training.optimizer" in problem for problem in problems(rounds))
    adamw = replace(rounds, training=replace(rounds.training, optimizer="adamw"))
    assert not any("training.optimizer" in problem for problem in problems(adamw))
    assert any(
        "training.optimizer" in one
        for one in problems(replace(CONFIG, training=TrainingSection(optimizer="sgd")))
    )
    with pytest.raises(RunError, match=r"training\.optimizer muon"):
        check_shards(CONFIG, 2)
    check_shards(replace(CONFIG, training=TrainingSection()), 2)
    assert all(
        unit_layout(replace(CONFIG, lora=LoraSection(rank=4)), unit) for unit in unit_names(CONFIG.model)
    )
