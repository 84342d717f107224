"""A pipeline with `aqsgd-b` against an unsplit simulation of AQ-SGD, through aborts and restores."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.data.data import Corpus
from node.schedule.placement import split_units
from node.stage.executor import StageExecutor
from node.stage.stage_model import StageModel
from node.telemetry.clock import StageClock
from node.tuning.memory_plan import Room
from tests.support.memory_pipeline import TEXT, MemoryPipeline, corpus
from tests.support.reference_trainer import ReferenceTrainer, Step
from wire.codecs.registry import codec
from wire.errors import CacheMismatchError, ConfigError, RunError
from wire.spec import Direction, TensorKey, TensorSpec

CPU = torch.device("cpu")
BACKWARD = "fixed-8"
# The text has 26 samples, so that a pass ends within a step and within a microbatch.
CONFIG = RunConfig(
    run=RunSection(steps=14, seed=7),
    model=ModelSection(layers=6, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    data=DataSection(shift=False),
    training=TrainingSection(global_batch=8, microbatch=4, lr=1e-2, warmup_steps=3),
    pipeline=PipelineSection(stages=3, forward_codec="aqsgd-3", backward_codec=BACKWARD),
)
STEPS = 10
WINDOWS = 26


def few(config: RunConfig) -> Corpus:
    """Several passes in a few steps."""
    made = corpus(config, TEXT[: WINDOWS * config.model.sequence + 1])
    assert made.windows == WINDOWS - 3
    return made


def pipeline_of(config: RunConfig) -> MemoryPipeline:
    return MemoryPipeline(config, few(config))


class Simulation:
    """AQ-SGD as its paper writes it: a message a sample and boundary, found by the sample's own tokens."""

    def __init__(self, config: RunConfig, data: Corpus, since: Mapping[int, int] | None = None) -> None:
        self._data = data
        self._config = config
        self._bits = int(config.pipeline.forward_codec.removeprefix("aqsgd-"))
        self._messages: dict[tuple[int, bytes], Tensor] = {}
        self._next: dict[tuple[int, bytes], Tensor] = {}
        self._step = 0
        self.first_passes = 0

    def __call__(self, tensor: Tensor, key: TensorKey) -> Tensor:
        shape = TensorSpec(torch.float32, tuple(tensor.shape))
        if key.direction is Direction.GRADIENT:
            return codec(BACKWARD).decode(codec(BACKWARD).encode(tensor), shape)
        if key.step != self._step:
            self._messages |= self._next
            self._next.clear()
            self._step = key.step
        size = self._config.training.microbatch
        rows = self._data.batch(key.step)[key.microbatch * size : (key.microbatch + 1) * size]
        names = [(key.boundary, row.tobytes()) for row in rows]
        out = tensor.to(torch.bfloat16).float()
        known = [row for row, name in enumerate(names) if name in self._messages]
        self.first_passes += len(names) - len(known)
        if known:
            before = torch.stack([self._messages[names[row]] for row in known])
            change = tensor[known] - before
            fixed = codec(f"fixed-{self._bits}")
            quantized = fixed.decode(fixed.encode(change), TensorSpec(torch.float32, tuple(change.shape)))
            out[known] = (before + quantized).to(torch.bfloat16).float()
        self._next |= dict(zip(names, out, strict=True))
        return out.clone()


@cache
def simulated(config: RunConfig) -> tuple[list[Step], str, int]:
    data = few(config)
    groups = split_units(config.model, config.pipeline.stages * config.pipeline.chunks)
    simulation = Simulation(config, data)
    trainer = ReferenceTrainer(config, data, groups=groups, boundary=simulation)
    return trainer.train(STEPS), trainer.weights_sha256(), simulation.first_passes


@pytest.mark.parametrize(
    ("pipeline", "bits"),
    [
        (PipelineSection(stages=3), 3),
        (PipelineSection(stages=2, window=1), 2),
        (PipelineSection(stages=3, chunks=2, window=1), 4),
    ],
    ids=["3x1", "2x1-window1", "3x2-window1"],
)
def test_every_split_and_schedule_is_the_simulation(pipeline: PipelineSection, bits: int) -> None:
    config = replace(
        CONFIG, pipeline=replace(pipeline, forward_codec=f"aqsgd-{bits}", backward_codec=BACKWARD)
    )
    expected, weights, new = simulated(config)
    boundaries = pipeline.stages * pipeline.chunks - 1
    assert boundaries * (WINDOWS - 3) <= new < boundaries * 30, "only the first pass is uncompressed"
    stateless = replace(config, pipeline=replace(config.pipeline, forward_codec=f"fixed-{bits}"))
    with pipeline_of(config) as stages, pipeline_of(stateless) as others:
        assert stages.train(STEPS) == expected
        assert stages.weights_sha256() == weights
        assert others.train(1) != expected[:1]


def test_bytes_on_the_wire_are_those_of_two_kinds_of_passes() -> None:
    with pipeline_of(CONFIG) as stages:
        stages.train(8)
        sizes = [
            (key.step, bytes_sent)
            for key, bytes_sent in stages.ios[0].sent
            if key.direction is Direction.ACTIVATION
        ]
    # 32 channels are half a tile.
    raw, changes = 64 + 2 * 4 * 16 * 32, 64 + 4 * 16 * (2 + 3 * 8)
    assert {size for step, size in sizes if step < 2} == {raw}
    assert {size for step, size in sizes if step > 3} == {changes}
    # The pass of 23 samples ends at the last row of step 2.
    first, second = (size for step, size in sizes if step == 2)
    assert first == raw and changes < second < raw


def test_an_aborted_step_leaves_no_trace() -> None:
    expected, weights, _ = simulated(CONFIG)
    with pipeline_of(CONFIG) as stages:
        steps = stages.train(5)
        stages.outcomes()  # voted for, never committed
        stages.forget()
        for stage, executor in enumerate(stages.executors):
            assert executor.place(stage, 3) == 5
            executor.restore(5, lambda unit: pytest.fail(f"{unit} was fetched"))
        assert [*steps, *stages.train(STEPS - 5)] == expected
        assert stages.weights_sha256() == weights


@pytest.mark.parametrize("snapshot_at", [2, 6])
def test_a_replacement_goes_on_bit_for_bit(snapshot_at: int) -> None:
    """A new process takes the middle stage after step 9; all go back to the snapshot, two in place."""
    expected, weights, _ = simulated(CONFIG)
    with pipeline_of(CONFIG) as stages:
        steps = stages.train(snapshot_at)
        snapshot = stages.state()
        stages.train(9 - snapshot_at)
        model = StageModel(CONFIG, CPU)
        stages.executors[1] = StageExecutor(CONFIG, CPU, StageClock(), model, room=Room(windows=WINDOWS - 3))
        stages.executors[1].place(1, 3)
        stages.forget()
        stages.restore(snapshot_at, snapshot.__getitem__)
        assert [*steps, *stages.train(STEPS - snapshot_at)] == expected
        assert stages.weights_sha256() == weights


def test_another_split_starts_afresh_where_it_must() -> None:
    """From three stages (boundaries after blocks 1 and 3) to six: those two go on, the others start again."""
    with pipeline_of(CONFIG) as stages:
        stages.train(6)
        snapshot = stages.state()
    six = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=6))
    kept = {
        unit for unit, state in snapshot.items() if any(name.startswith("activation_cache") for name in state)
    }
    assert kept == {units[-1] for units in split_units(CONFIG.model, 3)[:-1]}
    # 32 channels are half a tile.
    raw, changes = 64 + 2 * 4 * 16 * 32, 64 + 4 * 16 * (2 + 3 * 8)
    results = []
    for _ in range(2):
        with pipeline_of(six) as stages:
            for stage, executor in enumerate(stages.executors):
                executor.place(stage, 6)
            stages.restore(6, snapshot.__getitem__)
            result = stages.train(2)
            sizes = [
                {size for key, size in io.sent if key.direction is Direction.ACTIVATION} for io in stages.ios
            ]
            results.append((result, stages.weights_sha256()))
            ends = [units[-1] for units in split_units(six.model, 6)[:-1]]
            assert sizes[:-1] == [{changes} if unit in kept else {raw} for unit in ends]
            assert kept <= set(ends)
    assert results[0] == results[1]


def test_a_stage_that_remembers_otherwise_is_refused_and_goes_back() -> None:
    with pipeline_of(CONFIG) as stages:
        stages.train(6)
        snapshot: dict[str, Mapping[str, Tensor]] = dict(stages.state())
        unit = stages.executors[1].units[-1]
        values = snapshot[unit]["activation_cache.values"].clone()
        values[:, 0, 0] ^= 1
        wrong = {**snapshot, unit: {**snapshot[unit], "activation_cache.values": values}}
        stages.executors[2].forget()
        stages.executors[2].restore(6, wrong.__getitem__)
        with pytest.raises(CacheMismatchError, match="hold different sample caches"):
            stages.outcomes()


def test_fp32_links_leave_the_memory_alone() -> None:
    """A step that is run again uncompressed never commits; what follows a rollback packs as before."""
    expected, _, _ = simulated(CONFIG)
    with pipeline_of(CONFIG) as stages:
        stages.train(5)
        for executor in stages.executors:
            executor.uncompressed = True
        assert stages.outcomes()[-1].loss != expected[5].loss
        for executor in stages.executors:
            executor.uncompressed = False
        stages.forget()
        assert stages.train(1) == expected[5:6]


def test_a_stage_needs_the_number_of_samples_and_the_room() -> None:
    with pytest.raises(RunError, match="did not send"):
        StageExecutor(CONFIG, CPU, StageClock(), StageModel(CONFIG, CPU))
    tight = replace(CONFIG, pipeline=replace(CONFIG.pipeline, cache_gb=1e-4))
    with pytest.raises(ConfigError, match=r"0.000207 GB .*cache_gb"):
        StageExecutor(tight, CPU, StageClock(), StageModel(tight, CPU), room=Room(windows=100))
