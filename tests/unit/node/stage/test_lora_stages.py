"""Stages of a model with adapters: the bits of one stage, whatever is aborted, resumed or split again."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.stage.inbox import StepInterrupted
from node.state.serialization import deserialize_unit, serialize_unit
from tests.support.memory_pipeline import MemoryPipeline, reference_run, trained

CONFIG = RunConfig(
    run=RunSection(steps=8, seed=3),
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=4, ffn=48, vocab=256, sequence=16, tied=True),
    training=TrainingSection(global_batch=4, microbatch=1, lr=1e-2, warmup_steps=2),
    lora=LoraSection(rank=4, dropout=0.2, base="4"),
    pipeline=PipelineSection(stages=2, window=1, forward_codec="fp32", backward_codec="fp32"),
)
FORMS = {
    "4 bits, dropout": CONFIG,
    "no dropout": replace(CONFIG, lora=LoraSection(rank=4, base="bf16")),
    "some targets": replace(CONFIG, lora=replace(CONFIG.lora, targets=("query", "up"), base="8")),
    "gpt2": replace(CONFIG, model=replace(CONFIG.model, family="gpt2", tied=False)),
    "bf16": replace(
        CONFIG,
        training=replace(
            CONFIG.training, precision="bfloat16", weights="bfloat16", moments="fp8", gradients="fp8"
        ),
    ),
    "stored": replace(CONFIG, storage=StorageSection(preset="agoq")),
    "interleaved": replace(
        CONFIG,
        model=replace(CONFIG.model, layers=4),
        pipeline=replace(CONFIG.pipeline, chunks=2),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_stages_give_the_bits_of_one(form: str) -> None:
    steps, weights = reference_run(FORMS[form], 3)
    assert trained(FORMS[form], 3) == (steps, weights)
    assert len({step.loss for step in steps}) == 3 and all(step.grad_norm > 0 for step in steps)


def test_a_step_that_was_aborted_drops_the_same_elements_again() -> None:
    with MemoryPipeline(CONFIG) as plain, MemoryPipeline(CONFIG) as aborted:
        expected = plain.train(3)
        found = aborted.train(1)
        # Every stage votes, and the step is called off: its gradients are dropped.
        losses = [outcome.loss for outcome in aborted.outcomes(epoch=1)]
        aborted.forget()
        # Called off in the middle.
        submitted = aborted.submit(lambda: aborted.inboxes[1].interrupt("a neighbour has gone"))
        submitted.result()
        with pytest.raises(StepInterrupted):
            aborted.outcomes(epoch=2)
        aborted.forget()
        found += [aborted.commit(aborted.outcomes(epoch=3)) for _ in range(2)]
        assert found == expected
        assert losses[-1] == expected[1].loss
        assert aborted.weights_sha256() == plain.weights_sha256()


def test_dropout_changes_what_is_learnt() -> None:
    without = replace(CONFIG, lora=replace(CONFIG.lora, dropout=0.0))
    assert reference_run(CONFIG, 1)[1] != reference_run(without, 1)[1]


def test_a_snapshot_holds_adapters_alone_and_resumes_on_another_split() -> None:
    whole = replace(CONFIG, lora=LoraSection())
    with MemoryPipeline(CONFIG) as stages:
        stages.train(2)
        files = {unit: serialize_unit(state) for unit, state in stages.state().items()}
        expected, weights = stages.train(2), stages.weights_sha256()
    with MemoryPipeline(whole) as full:
        full_bytes = sum(len(serialize_unit(state)) for state in full.state().values())
    # Rank 4 of a model 32 wide; an 8B model's share is in test_lora.py.
    assert sum(map(len, files.values())) < 0.35 * full_bytes
    assert len(files["embed"]) < 200 and len(files["head"]) < 200

    def fetch(unit: str) -> Mapping[str, Tensor]:
        return deserialize_unit(files[unit])

    alone = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=1))
    for config in (CONFIG, alone):
        with MemoryPipeline(config) as stages:
            stages.restore(2, fetch)
            assert stages.train(2) == expected
            assert stages.weights_sha256() == weights


def test_frozen_weights_stay_as_they_are() -> None:
    with MemoryPipeline(CONFIG) as stages:
        models = [executor.model for executor in stages.executors]
        before = [_frozen(model) for model in models]
        stages.train(2)
        for model, kept in zip(models, before, strict=True):
            for name, value in _frozen(model).items():
                assert torch.equal(value, kept[name])


def _frozen(model: object) -> dict[str, Tensor]:
    chunks = getattr(model, "_chunks")  # noqa: B009  # the protocol has none
    return {
        f"{number}.{name}": value.clone()
        for number, chunk in enumerate(chunks)
        for name, value in chunk.named_buffers()
    }
