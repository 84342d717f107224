"""Which layers a stage holds and what memory that takes, for every number of stages a run may shrink to."""

from dataclasses import replace

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.model.units import is_block, unit_names
from node.pipeline.device_memory import Devices
from node.pipeline.memory import stage_bytes, stage_memory
from node.pipeline.placement import chunk_units, chunks_of, held_blocks, stage_units

CONFIG = RunConfig(
    model=ModelSection(layers=12, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=256, sequence=32),
    training=TrainingSection(global_batch=8, microbatch=2),
    pipeline=PipelineSection(stages=4),
)
INTERLEAVED = replace(CONFIG, pipeline=PipelineSection(stages=4, chunks=3))
SPLIT = replace(CONFIG, pipeline=PipelineSection(stages=4, split=(1, 2, 3, 6)))


@pytest.mark.parametrize("config", [CONFIG, INTERLEAVED, SPLIT], ids=["plain", "interleaved", "split"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_unit_is_on_one_stage_whatever_their_number(config: RunConfig, stages: int) -> None:
    by_stage = stage_units(config, stages)
    assert len(by_stage) == stages == len(stage_bytes(config, stages))
    assert sorted(unit for units in by_stage for unit in units) == sorted(unit_names(config.model))
    assert by_stage[0][0] == "embed" and by_stage[-1][-1] == "head"
    assert all(any(map(is_block, units)) for units in by_stage)


def test_chunks_go_round_the_stages() -> None:
    chunks = chunk_units(INTERLEAVED, 4)
    assert [unit for chunk in chunks for unit in chunk] == list(unit_names(INTERLEAVED.model))
    assert len(chunks) == 12
    assert stage_units(INTERLEAVED, 4)[1] == (*chunks[1], *chunks[5], *chunks[9])


def test_a_single_stage_has_one_chunk() -> None:
    assert chunks_of(INTERLEAVED, 1) == 1
    assert chunks_of(INTERLEAVED, 2) == 3
    assert stage_units(INTERLEAVED, 1) == (unit_names(INTERLEAVED.model),)


def test_a_split_by_hand_holds_for_its_own_number_of_stages() -> None:
    def blocks(stages: int) -> list[int]:
        return [sum(map(is_block, units)) for units in stage_units(SPLIT, stages)]

    assert blocks(4) == [1, 2, 3, 6]
    assert blocks(3) == [sum(map(is_block, units)) for units in stage_units(CONFIG, 3)]


@pytest.mark.parametrize("config", [CONFIG, INTERLEAVED])
def test_fewer_stages_need_more_memory_each(config: RunConfig) -> None:
    largest = [max(stage_bytes(config, stages)) for stages in (1, 2, 3, 4)]
    assert largest == sorted(largest, reverse=True)


def test_a_wider_window_and_larger_microbatches_need_more() -> None:
    def largest(config: RunConfig) -> int:
        return max(stage_bytes(config, 4))

    large = replace(CONFIG, training=replace(CONFIG.training, global_batch=32, microbatch=8))
    assert largest(large) > largest(CONFIG)
    many = replace(CONFIG, training=replace(CONFIG.training, global_batch=64))
    assert largest(replace(many, pipeline=replace(many.pipeline, window=2))) > largest(many)


def test_chunks_that_share_no_memory_hold_what_each_of_them_does() -> None:
    """As captured passes do: a chunk's graphs stay when another chunk has more microbatches in flight."""
    long = replace(INTERLEAVED, training=replace(INTERLEAVED.training, global_batch=32))
    together, apart = (held_blocks(long, 4, apart=apart) for apart in (False, True))
    assert all(mine < theirs for mine, theirs in zip(together, apart, strict=True))
    assert held_blocks(SPLIT, 4, apart=True) == held_blocks(SPLIT, 4)
    graphs, plain = (
        stage_memory(replace(long, training=replace(long.training, cuda_graphs=on)), 4, Devices(on_cpu=False))
        for on in (True, False)
    )
    block = (plain[3].kept - plain[0].kept) // (together[3] - together[0])
    assert graphs[0].kept >= apart[0] * block > plain[0].kept
