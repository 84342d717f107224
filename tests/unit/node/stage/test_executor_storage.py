"""Packed activations in a pipeline: the unsplit trainer's bits, whatever the stages keep."""

from dataclasses import replace

import pytest

from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.pipeline.memory import stage_storages
from node.pipeline.placement import chunk_units
from node.run_file.validate import problems
from tests.support.memory_pipeline import MemoryPipeline, reference_run

STEPS = 2
CONFIG = RunConfig(
    run=RunSection(steps=STEPS, seed=7),
    model=ModelSection(layers=6, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=6, microbatch=1, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=3, window=0, forward_codec="fp32", backward_codec="fp32"),
)


@pytest.mark.parametrize(
    ("family", "storage", "pipeline"),
    [
        ("llama", StorageSection(preset="agoq"), {"window": 2}),
        ("gpt2", StorageSection(preset="agoq", bits_by_stage=True), {}),
        ("llama", StorageSection(preset="compact", bits_by_stage=True), {"chunks": 2}),
        ("llama", StorageSection(norm_input="5", attention="recompute", attention_output="recompute"), {}),
    ],
    ids=["agoq-window2", "agoq-by-stage", "compact-by-stage-x2", "recompute"],
)
def test_a_pipeline_gives_the_unsplit_models_bits(
    family: str, storage: StorageSection, pipeline: dict[str, int]
) -> None:
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, family=family),
        storage=storage,
        pipeline=replace(CONFIG.pipeline, **pipeline),
    )
    assert problems(config) == []
    expected, weights = reference_run(config, STEPS, groups=chunk_units(config, 3))
    assert weights != reference_run(replace(config, storage=StorageSection()), STEPS)[1]
    with MemoryPipeline(config) as stages:
        assert stages.train(STEPS) == expected
        assert stages.weights_sha256() == weights


def test_stages_differ_where_bits_go_by_stage() -> None:
    config = replace(CONFIG, storage=StorageSection(preset="agoq", bits_by_stage=True))
    assert [storage.ffn_input for storage in stage_storages(config, 3)] == ["4", "6", "8"]
