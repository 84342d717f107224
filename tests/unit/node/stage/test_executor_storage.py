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
from node.run_file.validate import problems
from node.schedule.placement import chunk_units
from node.stage.stage_plans import StageStorage
from node.tuning.memory import stage_storages
from node.tuning.storage_choice import chosen_config, storage_named
from tests.support.memory_pipeline import MemoryPipeline, reference_run, trained
from wire.errors import ProtocolViolationError

STEPS = 2
CONFIG = RunConfig(
    run=RunSection(steps=STEPS, seed=7),
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=4, microbatch=1, lr=1e-2, warmup_steps=1),
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
        model=replace(CONFIG.model, family=family, layers=3 * pipeline.get("chunks", 1)),
        storage=storage,
        pipeline=replace(CONFIG.pipeline, **pipeline),
    )
    assert problems(config) == []
    expected = reference_run(config, STEPS, groups=chunk_units(config, 3))
    assert expected[0][-1] != reference_run(replace(config, storage=StorageSection()), STEPS)[0][-1]
    assert trained(config, STEPS) == expected


def test_stages_that_the_coordinator_chose_storages_for_have_the_bits_of_a_run_file_that_says_so() -> None:
    config = replace(CONFIG, storage=StorageSection(allow=("ffn_input:8", "ffn_input:4")))
    assert problems(config) == []
    names = ["none/8/none/none", "none/none/none/none", "none/8/none/none"]
    chosen = [chosen_config(config, storage_named(config, name)) for name in names]

    def weights(one: RunConfig, chosen: tuple[str, ...]) -> str:
        with MemoryPipeline(one) as stages:
            for executor in stages.executors:
                executor.use_storages(chosen)
                executor.restore(0, lambda unit: {})
            stages.train(STEPS)
            return stages.weights_sha256()

    mixed = weights(config, tuple(names))
    assert weights(config, tuple(names)) == mixed
    alike = weights(config, ("none/8/none/none",) * 3)
    assert alike == reference_run(chosen[0], STEPS, groups=chunk_units(config, 3))[1]
    plain = reference_run(chosen[1], STEPS)[1]
    assert weights(config, (names[1],) * 3) == plain
    assert len({mixed, alike, plain}) == 3


def test_a_state_that_was_built_with_another_storage_is_forgotten() -> None:
    config = replace(CONFIG, storage=StorageSection(allow=("8",)))
    narrow = ("8/8/none/none",) * 3
    with MemoryPipeline(config) as stages:
        executor = stages.executors[1]
        executor.use_storages(narrow)
        assert executor.state_step == -1
        executor.restore(0, lambda unit: {})
        executor.use_storages(narrow)
        assert executor.state_step == 0
        assert executor.storage.config.storage.norm_input == "8"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("8/8/none/none",) * 2, "chooses 2 storages for 3 stages"),
        ((), "chooses 0 storages for 3 stages"),
        (("4/4/none/none",) * 3, "'4/4/none/none', which this run's file does not allow"),
    ],
)
def test_a_coordinator_that_chooses_what_is_not_allowed_is_refused(
    names: tuple[str, ...], message: str
) -> None:
    storage = StageStorage(replace(CONFIG, storage=StorageSection(allow=("8",))))
    with pytest.raises(ProtocolViolationError, match=message):
        storage.choose(names, 1, 3)
    with pytest.raises(ProtocolViolationError, match="chooses 3 storages"):
        StageStorage(CONFIG).choose(("8/8/none/none",) * 3, 1, 3)


def test_stages_differ_where_bits_go_by_stage() -> None:
    config = replace(CONFIG, storage=StorageSection(preset="agoq", bits_by_stage=True))
    assert [storage.ffn_input for storage in stage_storages(config, 3)] == ["4", "6", "8"]
