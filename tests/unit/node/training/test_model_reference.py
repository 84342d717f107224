"""The unsplit trainer: learns, repeats itself, and gives the same bits on any grouping."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, RunConfig, RunSection, TrainingSection
from node.data.data import Corpus
from node.schedule.placement import split_units
from node.state.serialization import serialize_unit
from node.state.snapshot import SnapshotFolder
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import DataError
from wire.spec import Direction, TensorKey

LLAMA = RunConfig(
    run=RunSection(steps=20, seed=11),
    model=ModelSection(layers=4, hidden=32, heads=4, kv_heads=2, ffn=80, vocab=256, sequence=16),
    training=TrainingSection(global_batch=6, microbatch=2, lr=1e-2, warmup_steps=4),
)
GPT2 = replace(LLAMA, model=replace(LLAMA.model, family="gpt2", tied=True))
IN_FP8 = replace(LLAMA, training=replace(LLAMA.training, precision="bfloat16", compute="fp8"))
BOTH = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2-tied"])
ALL = pytest.mark.parametrize("config", [LLAMA, GPT2, IN_FP8], ids=["llama", "gpt2-tied", "products in fp8"])


def corpus(config: RunConfig) -> Corpus:
    text = b"the quick brown fox jumps over the lazy dog. " * 200
    return Corpus(
        np.frombuffer(text, dtype=np.uint8),
        sequence=config.model.sequence,
        global_batch=config.training.global_batch,
        seed=config.run.seed,
    )


@BOTH
def test_the_loss_falls_and_the_run_repeats(config: RunConfig) -> None:
    data = corpus(config)
    trainer = ReferenceTrainer(config, data)
    windows = data.validation_windows(8)
    untrained = trainer.validation_loss(windows)
    with pytest.raises(DataError, match="too short to hold any out"):
        trainer.validation_loss(windows[:0])
    steps = trainer.train(20)
    assert steps[0].loss == pytest.approx(np.log(256), rel=0.02)
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert trainer.validation_loss(windows) < 0.7 * untrained
    again = ReferenceTrainer(config, data)
    assert again.weights_sha256() != trainer.weights_sha256()
    assert again.train(6) == steps[:6]


@pytest.mark.parametrize(
    ("config", "chunks"),
    [(LLAMA, 2), (GPT2, 4), (IN_FP8, 2)],
    ids=["llama-2", "gpt2-tied-4", "products in fp8-2"],
)
def test_boundaries_without_codecs_change_no_bit(config: RunConfig, chunks: int) -> None:
    data = corpus(config)
    one = ReferenceTrainer(config, data)
    split = ReferenceTrainer(config, data, groups=split_units(config.model, chunks))
    assert one.train(3) == split.train(3)
    assert one.weights_sha256() == split.weights_sha256()


def test_a_step_is_the_whole_batchs_gradient() -> None:
    """Accumulated over microbatches it equals one big batch's, up to rounding."""
    data = corpus(LLAMA)
    small = ReferenceTrainer(LLAMA, data)
    big = ReferenceTrainer(replace(LLAMA, training=replace(LLAMA.training, microbatch=6)), data)
    for first, second in zip(small.train(3), big.train(3), strict=True):
        assert first.loss == pytest.approx(second.loss, rel=1e-5)
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)


def test_codecs_sit_at_every_boundary_both_ways() -> None:
    keys: list[TensorKey] = []

    def boundary(tensor: Tensor, key: TensorKey) -> Tensor:
        assert tensor.shape == (2, 16, 32) and not tensor.requires_grad
        keys.append(key)
        return tensor.to(torch.bfloat16).float()

    data = corpus(LLAMA)
    groups = split_units(LLAMA.model, 3)
    trainer = ReferenceTrainer(LLAMA, data, groups=groups, boundary=boundary)
    (step,) = trainer.train(1)
    one_way = [(microbatch, index) for microbatch in range(3) for index in range(2)]
    for direction in (Direction.ACTIVATION, Direction.GRADIENT):
        assert sorted((key.microbatch, key.boundary) for key in keys if key.direction is direction) == one_way
    # A microbatch's gradients come back in reverse.
    assert [key.boundary for key in keys[:4]] == [0, 1, 1, 0]

    (exact,) = ReferenceTrainer(LLAMA, data).train(1)
    assert step.loss != exact.loss
    assert step.loss == pytest.approx(exact.loss, rel=1e-3)
    assert step.grad_norm == pytest.approx(exact.grad_norm, rel=1e-2)


def test_gradients_pass_straight_through() -> None:
    """Halving what comes back halves every gradient below the boundary and none above."""

    def halved(tensor: Tensor, key: TensorKey) -> Tensor:
        return tensor * 0.5 if key.direction is Direction.GRADIENT else tensor

    data = corpus(LLAMA)
    groups = split_units(LLAMA.model, 2)
    norms = []
    for boundary in (None, halved):
        trainer = ReferenceTrainer(LLAMA, data, groups=groups, boundary=boundary)
        trainer.accumulate()
        norms.append(trainer.optimizer.squared_norms())
    exact, below_halved = norms
    for unit in groups[0]:
        assert below_halved[unit] == exact[unit] / 4
    for unit in groups[1]:
        assert below_halved[unit] == exact[unit]


@pytest.mark.parametrize("compute", ["precision", "fp8"])
def test_bfloat16_follows_float32(compute: str) -> None:
    data = corpus(LLAMA)
    training = replace(LLAMA.training, precision="bfloat16", compute=compute)
    rough = ReferenceTrainer(replace(LLAMA, training=training), data)
    exact = ReferenceTrainer(LLAMA, data)
    for first, second in zip(rough.train(6), exact.train(6), strict=True):
        assert first.loss == pytest.approx(second.loss, rel=0.02)


@ALL
def test_resumed_from_a_snapshot_it_ends_with_the_same_bits(config: RunConfig, tmp_path: Path) -> None:
    data = corpus(config)
    straight = ReferenceTrainer(config, data)
    steps = straight.train(6)

    first = ReferenceTrainer(config, data)
    assert first.train(3) == steps[:3]
    writer = SnapshotFolder(tmp_path, config, "run")
    manifest = None
    for unit in first.optimizer.units:
        content = serialize_unit(first.optimizer.unit_state(unit))
        manifest = writer.put(3, unit, content)
    assert manifest is not None
    assert manifest.weights_sha256 == first.weights_sha256()

    resumed = ReferenceTrainer(config, data, groups=split_units(config.model, 3))
    resumed.restore(tmp_path / "step-00000003")
    assert resumed.step == 3
    assert resumed.train(3) == steps[3:]
    assert resumed.weights_sha256() == straight.weights_sha256()
