"""Which layers a stage holds and what memory that takes, for every number of stages a run may shrink to."""

from dataclasses import replace
from itertools import product
from operator import ge

import pytest

from node.config.schema import LoraSection, ModelSection, PipelineSection, RunConfig, TrainingSection
from node.model.units import is_block, unit_cost, unit_names
from node.schedule.floor import PipelineStep
from node.schedule.placement import (
    chunk_units,
    chunks_of,
    decided,
    head_bytes,
    head_first,
    head_share,
    held_blocks,
    slices_of,
    stage_units,
)
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes, stage_memory
from wire.errors import ConfigError

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


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_with_the_head_first_the_costliest_stage_costs_least(stages: int, chunks: int) -> None:
    """A head of nearly five blocks, as in GPT-2 small: the first stage may then have the embedding alone."""
    pipeline = PipelineSection(stages=stages, chunks=chunks, head="first")
    for vocab in (64, 1000, 2500):
        model = replace(CONFIG.model, layers=9, vocab=vocab, tied=True)
        config = replace(CONFIG, model=model, pipeline=pipeline)
        assert head_first(config, stages) and not head_first(config, 1)
        units = chunk_units(config, stages)
        assert [unit for chunk in units for unit in chunk] == list(unit_names(model))
        assert units[-1] == ("head",) and stage_units(config, stages)[0][-1] == "head"
        assert all(any(map(is_block, chunk)) for chunk in units[1:-1])
        costs = [sum(unit_cost(model, unit) for unit in own) for own in stage_units(config, stages)]
        assert head_share(config, stages) == unit_cost(model, "head") / costs[0]
        # However the blocks are spread over stages, each with one for every chunk that needs it.
        least = [max(0, chunks - 1), *(chunks,) * (stages - 1)]
        block, fixed = unit_cost(model, "block.0000"), [unit_cost(model, "head"), *(0.0,) * (stages - 1)]
        spreads = (
            spread
            for spread in product(range(10), repeat=stages)
            if sum(spread) == 9 and all(map(ge, spread, least))
        )
        best = min(max(e + n * block for e, n in zip(fixed, s, strict=True)) for s in spreads)
        assert max(costs) == pytest.approx(best)


def test_the_heads_place_follows_from_bytes_unless_it_is_set() -> None:
    tied = replace(CONFIG, model=replace(CONFIG.model, tied=True))
    boundary, exchange = head_bytes(tied)
    assert head_first(tied, 4) == (boundary <= exchange) and head_share(CONFIG, 4) is None
    for vocab, head in ((100_000, "first"), (8, "last")):
        config = replace(tied, model=replace(tied.model, vocab=vocab))
        assert decided(config).pipeline.head == head
        other = replace(
            config, pipeline=replace(config.pipeline, head={"first": "last", "last": "first"}[head])
        )
        assert head_first(other, 4) != head_first(config, 4)
    # Frozen weights have no gradient to share.
    assert not head_first(replace(tied, lora=LoraSection(rank=2)), 4)


def test_a_split_by_hand_may_leave_the_first_stage_the_head_alone() -> None:
    tied = replace(SPLIT, model=replace(SPLIT.model, tied=True))
    tied = replace(tied, pipeline=replace(tied.pipeline, split=(0, 4, 4, 4), head="first"))
    assert chunk_units(tied, 4)[0] == ("embed",)
    assert stage_units(tied, 4)[0] == ("embed", "head")
    with pytest.raises(ConfigError, match="at least one block"):
        chunk_units(replace(tied, pipeline=replace(tied.pipeline, head="last")), 4)


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


@pytest.mark.parametrize(
    ("stages", "samples", "sequence", "groups", "slices"),
    [
        (4, 16, 8192, 1, 5),
        (4, 16, 8192, 4, 16),
        (4, 1, 131072, 1, 73),
        (4, 1, 2048, 1, 4),
        (1, 16, 8192, 1, 1),
        (2, 64, 8192, 1, 1),
    ],
)
def test_auto_takes_the_fewest_slices_with_short_edges(
    stages: int, samples: int, sequence: int, groups: int, slices: int
) -> None:
    config = RunConfig(
        model=ModelSection(sequence=sequence),
        training=TrainingSection(global_batch=samples, microbatch=1),
        pipeline=PipelineSection(stages=stages, groups=groups, sequence_chunks="auto"),
    )
    assert decided(config).pipeline.sequence_chunks == slices == slices_of(config)
    own = samples // groups
    floors = [
        PipelineStep(microbatches=own, forward=[1.0] * stages, backward=[2.0] * stages, slices=count).floor()
        for count in range(1, slices + 1)
    ]
    edges = [1 - own * floor.microbatch_seconds / floor.seconds for floor in floors]
    # Short samples are not cut further.
    assert edges[-1] <= 0.04 or sequence // slices == 512
    assert all(share > 0.04 for share in edges[:-1])


def test_a_sample_cache_and_interleaving_go_without_slices() -> None:
    for own in (PipelineSection(forward_codec="aqsgd-4"), PipelineSection(chunks=2)):
        config = RunConfig(model=ModelSection(sequence=8192), pipeline=replace(own, sequence_chunks="auto"))
        assert slices_of(config) == 1
