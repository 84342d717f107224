"""Plans of blocks that a stage computes again: the best plan, its measured size, the same bits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.config.schema import LoraSection, ModelSection, PipelineSection, RunConfig, StorageSection
from node.model.storage import RECOMPUTE, Storage
from node.schedule.placement import held_blocks, stage_units
from node.stage.stage_model import StageModel
from node.tuning.block_times import BlockTimes, assumed_times
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_memory
from node.tuning.memory_columns import Column, spread
from node.tuning.memory_plan import (
    Choice,
    MemoryPlan,
    PlannedStage,
    Room,
    _stages,
    _variants,
    frontier,
    least_stage_bytes,
)
from node.tuning.state_moves import Moved
from tests.support.memory_meter import measured
from tests.support.passes import Forced
from tests.support.stored_runs import CPU, FORMS, LEAST, MOST, run

CPUS, GPU = Devices(), Devices(on_cpu=False)
PACKED = StorageSection(attention="8")
"""Inputs of norms and feed-forwards are kept as computed, so the latter may be computed again."""


def deep(form: str = "plain", *, layers: int = 10, **pipeline: Any) -> RunConfig:
    config = run(form, **pipeline)
    return replace(config, model=replace(config.model, layers=layers))


def plan_stage(
    config: RunConfig,
    stages: int,
    stage: int,
    devices: Devices,
    memory_bytes: int,
    times: BlockTimes | None = None,
) -> MemoryPlan:
    return Room(devices=devices, memory_bytes=memory_bytes, times=times).plan(config, stages, stage)


def budgets(config: RunConfig, stage: int, devices: Devices, count: int = 5) -> Iterator[int]:
    """From what fits nothing to what fits all."""
    most = stage_memory(config, 2, devices)[stage].total
    least = least_stage_bytes(config, 2, devices)[stage]
    for number in range(count):
        yield least + (most - least) * number // (count - 1)


def every_way(one: PlannedStage, blocks: int, states: Sequence[Moved] | None = None) -> Iterator[MemoryPlan]:
    """All counts of all choices, of a stage with one chunk; of state all too, or `states`."""

    def splits(left: int, width: int) -> Iterator[tuple[int, ...]]:
        if width == 1:
            yield (left,)
            return
        for first in range(left + 1):
            for rest in splits(left - first, width - 1):
                yield first, *rest

    for counts in splits(blocks, len(one.columns)):
        choices = one.order([counts])
        if states is not None:
            yield from (one.plan(choices, state=state) for state in states)
            continue
        for parts in product(*(range(move.most + 1) for move in one.state_kinds)):
            if parts[:1] != (0,) or not any(parts):
                yield one.plan(choices, state=Moved(*parts))


HOSTS = replace(GPU, host_bytes=1 << 40)
KINDS = {
    "cpu": CPUS,
    "gpu": GPU,
    "gpus": replace(GPU, count=2),
    "gpu with host memory": HOSTS,
    "gpu with little host memory": replace(HOSTS, host_bytes=5 << 20),
}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("plain", "cpu"),
        ("packed", "cpu"),
        ("autocast", "gpu"),
        ("agoq", "gpu"),
        ("agoq", "gpus"),
        ("plain", "gpu with host memory"),
        ("packed", "gpu with host memory"),
        ("autocast", "gpu with little host memory"),
    ],
)
def test_a_plan_fits_and_no_other_adds_less_time(form: str, kind: str) -> None:
    devices = KINDS[kind]
    config = deep("autocast" if form == "packed" else form, layers=4)
    if form == "packed":
        config = replace(config, storage=PACKED)
    everything = stage_memory(config, 2, devices)[0]
    variants = [first for first, _ in _variants(config, 2, devices)]
    ways = [plan for one in variants for plan in every_way(one, 2) if plan.host_bytes <= devices.host_bytes]
    for budget in budgets(config, 0, devices):
        plan = plan_stage(config, 2, 0, devices, budget)
        assert plan.fits and plan.memory.total <= budget and plan.host_bytes <= devices.host_bytes
        best = min(way.added for way in ways if way.memory.total <= budget)
        assert plan.added == pytest.approx(best, rel=2e-3, abs=1e-9)
    assert plan_stage(config, 2, 0, devices, everything.total).text() == ""
    assert plan_stage(config, 2, 0, devices, 0).memory == everything
    least = least_stage_bytes(config, 2, devices)[0]
    assert least <= min(way.memory.total for way in ways)
    assert not plan_stage(config, 2, 0, devices, least - 1).fits


ADAPTED = LoraSection(rank=4, base="4")


@pytest.mark.parametrize(
    ("lora", "rate"), [*((LoraSection(), 10.0**power) for power in (6, 9, 12)), (ADAPTED, 1e9)]
)
def test_weights_or_gradients_of_some_blocks_move_where_that_adds_the_least_time(
    lora: LoraSection, rate: float
) -> None:
    """With adapters frozen weights."""
    config = replace(deep("plain", layers=10), lora=lora)
    config = replace(config, training=replace(config.training, cuda_graphs=False))
    times = replace(assumed_times(config, HOSTS), out_rate=rate, in_rate=rate)
    (one,) = _stages(config, 2, HOSTS, only=0, times=times)
    assert [move.most for move in one.state_kinds] == ([1, 5] if lora.rank else [1, 5, 5])
    ways = list(every_way(one, 5))
    least = min(way.memory.total for way in ways)
    assert least_stage_bytes(config, 2, HOSTS)[0] == least
    found = set()
    most, few = stage_memory(config, 2, HOSTS)[0].total, one.state_kinds[0].freed // 2
    for budget in (*np.linspace(least, least + few, 10), (least + most) / 2, most):
        plan = plan_stage(config, 2, 0, HOSTS, int(budget), times=times)
        best = min(way.added for way in ways if way.memory.total <= int(budget))
        assert plan.fits and plan.added == pytest.approx(best, rel=2e-3, abs=1e-9)
        found.add(plan.state)
    assert Moved() in found and Moved(1, 5, 0 if lora.rank else 5) in found
    assert any(0 < state.weights < 5 or 0 < state.gradients < 5 for state in found)


def test_with_host_memory_a_stage_fits_in_less_and_slow_copies_are_not_hidden() -> None:
    config = deep("autocast", layers=16)
    budget = least_stage_bytes(config, 2, GPU)[0]
    assert least_stage_bytes(config, 2, HOSTS)[0] < budget
    assert least_stage_bytes(config, 2, replace(GPU, host_bytes=1))[0] == budget
    times = assumed_times(config, HOSTS)
    fast, slow = (
        plan_stage(config, 2, 0, HOSTS, budget, times=replace(times, out_rate=rate, in_rate=rate))
        for rate in (1e12, 1e6)
    )
    assert fast.added < plan_stage(config, 2, 0, GPU, budget).added
    assert fast.host_bytes > 0 and slow.host_bytes == 0 and slow.added > fast.added


def test_copies_have_the_compute_of_other_blocks_to_hide_behind() -> None:
    again, kept, moved = (
        Column(kept=1, moved=size, host=size, seconds=0.0, working=0, again=again)
        for again, size in ((True, 0), (False, 0), (False, 8))
    )
    assert spread((again, kept, moved), (1, 4, 2)) == [0, 2, 1, 1, 2, 1, 1]
    # Behind the last block there is nothing: it moves only if all do, and then the least.
    less = replace(moved, moved=4)
    assert spread((kept, less, moved), (1, 2, 2)) == [2, 2, 1, 1, 0]
    assert spread((kept, less, moved), (0, 1, 2)) == [2, 2, 1]


@pytest.mark.parametrize("rate", [1.0, 0.05])
@pytest.mark.parametrize(("storage", "blocks"), [(StorageSection(), 5), (PACKED, 2)])
def test_copies_that_blocks_wait_for_are_in_the_plan(
    storage: StorageSection, blocks: int, rate: float
) -> None:
    """Where a copy of a block takes about as long as it computes, up to twenty times as long."""
    config = replace(deep("plain", layers=2 * blocks), storage=storage)
    config = replace(config, training=replace(config.training, cuda_graphs=False))
    times = assumed_times(config, HOSTS)
    (one,) = _stages(config, 2, HOSTS, only=0, times=times)
    block = max(column.moved for column in one.columns.values())
    times = replace(times, out_rate=rate * block / times.forward, in_rate=rate * block / times.forward)
    (one,) = _stages(config, 2, HOSTS, only=0, times=times)
    ways = list(every_way(one, blocks, states=(Moved(), Moved(1))))
    least, most = min(way.memory.total for way in ways), stage_memory(config, 2, HOSTS)[0].total
    moved = set()
    for budget in np.linspace(least, most, 6):
        plan = plan_stage(config, 2, 0, HOSTS, int(budget), times=times)
        best = min(way.added for way in ways if way.memory.total <= int(budget))
        assert plan.fits and plan.added <= best * (1 + 2e-3) + 1e-9
        moved.add(sum(bool(choice.moved) for choice in plan.choices))
    assert len(moved) > 1


def test_less_memory_costs_more_operations_and_what_costs_least_per_byte_goes_first() -> None:
    config = replace(deep("autocast"), storage=PACKED)
    plans = frontier(config, 2, 0, CPUS)
    assert not any(choice.again or choice.recomputed for choice in plans[0].choices)
    assert plans[0].added == 0.0
    totals, added = [plan.memory.total for plan in plans], [plan.added for plan in plans]
    assert totals == sorted(totals, reverse=True) and added == sorted(added)
    assert Choice.AGAIN not in plans[1].choices
    assert sum(bool(choice.recomputed) for choice in plans[1].choices) == 1
    # A block's forward is a third of its time, and packs what attention keeps once more.
    assert 0.0 < added[-1] <= 0.4


def test_what_cannot_be_repeated_is_kept() -> None:
    config = replace(deep("plain"), lora=LoraSection(rank=4, base="float32", dropout=0.1))
    assert least_stage_bytes(config, 2, CPUS) == tuple(one.total for one in stage_memory(config, 2, CPUS))
    again = replace(config, lora=replace(config.lora, dropout=0.0))
    assert least_stage_bytes(again, 2, CPUS)[0] < least_stage_bytes(config, 2, CPUS)[0]


@pytest.mark.parametrize("stages_and_chunks", [(2, 1), (2, 2)])
def test_a_plan_says_what_each_block_does(stages_and_chunks: tuple[int, int]) -> None:
    stages, chunks = stages_and_chunks
    config = replace(deep("autocast", chunks=chunks), storage=PACKED)
    for stage in range(stages):
        low = least_stage_bytes(config, stages, CPUS)[stage]
        kept = stage_memory(config, stages, CPUS)[stage].total
        plan = plan_stage(config, stages, stage, CPUS, (low + kept) // 2)
        storages = plan.storages(Storage())
        assert len(storages) == 5
        assert [one.again for one in storages] == [choice.again for choice in plan.choices]
        found = [one.ffn_input == RECOMPUTE for one in storages]
        assert found == ["ffn_input" in choice.recomputed for choice in plan.choices]


@pytest.mark.parametrize("form", ["plain", "autocast", "agoq"])
def test_a_stage_takes_what_its_plan_says(form: str) -> None:
    config = deep(form, layers=4)
    config = replace(config, training=replace(config.training, microbatch=2))
    for budget in (*budgets(config, 0, CPUS, 3),):
        room = Room(memory_bytes=budget)
        plan = room.plan(config, 2, 0)
        found = measured(config, StageModel(config, CPU, room=room), 0, 2)
        memory = plan.memory
        expected = memory.state + max(memory.passes, memory.applying)
        assert LEAST <= expected / found <= MOST


@pytest.mark.parametrize("again", [2, 3])
def test_a_head_goes_forward_beside_the_casts_of_blocks_that_run_again(again: int) -> None:
    """Autocast holds them until the forward is over."""
    config = deep("autocast", layers=6)
    model = replace(config.model, kv_heads=1, ffn=512, sequence=64)
    config = replace(config, model=model, training=replace(config.training, microbatch=4))
    choices = (Choice.AGAIN,) * again + (Choice.KEPT,) * (3 - again)
    (one,) = _stages(config, 2, CPUS, only=1)
    memory = one.plan(choices).memory
    found = measured(config, StageModel(config, CPU, room=Forced(choices)), 1, 1)
    assert LEAST <= (memory.state + max(memory.passes, memory.applying)) / found <= MOST


def gradients(config: RunConfig, room: Room, stage: int) -> list[Tensor]:
    """Results and main gradients of a step of three microbatches, two in flight."""
    model = StageModel(config, CPU, room=room)
    model.build(stage, 2)
    training, sizes = config.training, config.model
    shape = (training.microbatch, sizes.sequence)
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, sizes.vocab, (3, *shape), generator=random)
    hidden, above = (torch.randn(3, *shape, sizes.hidden, generator=random) for _ in range(2))
    model.begin_step()
    found: list[Tensor] = []

    def forward(number: int) -> None:
        fed = hidden[number].clone() if stage else tokens[number]
        found.append(model.forward(0, number, fed, tokens[number] if stage else None))

    def backward(number: int) -> None:
        below = model.backward(0, number, None if stage else above[number])
        found.extend([] if below is None else [below])

    forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)
    model.finish_step()
    optimizer = model.optimizer
    return found + [optimizer.gradients.get(parameter).clone() for parameter in optimizer.parameters]


LORA = {"lora": ADAPTED}
OTHERS = {"qk norms": {"qk_norm": "head"}, "norms of outputs": {"norm_place": "output"}}


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        *((case, number % 2) for number, case in enumerate([*FORMS, "gpt2", "packed", "lora", *OTHERS])),
        ("agoq, fp8, bf16", 0),
        ("packed", 0),
    ],
)
def test_computing_again_changes_no_bit(case: str, stage: int) -> None:
    config = run(case if case in FORMS else "plain" if case in OTHERS else "autocast")
    config = replace(config, model=replace(config.model, hidden=64, ffn=96, vocab=101, sequence=16))
    if case == "gpt2":
        config = replace(config, model=replace(config.model, family="gpt2", kv_heads=4))
    elif case == "packed":
        config = replace(config, storage=PACKED)
    elif case == "lora":
        config = replace(config, lora=LORA["lora"])
    elif case in OTHERS:
        config = replace(config, model=replace(config.model, **OTHERS[case]))
    plain = gradients(config, Room(), stage)
    first = Choice(recomputed=("ffn_input",)) if case == "packed" else Choice.KEPT if stage else Choice.AGAIN
    for mine, expected in zip(gradients(config, Forced((Choice.AGAIN, first)), stage), plain, strict=True):
        assert torch.equal(mine, expected)


def test_a_run_with_more_stages_than_memory_still_has_a_plan() -> None:
    """Planning is fast for as many blocks as there are."""
    config = RunConfig(
        model=ModelSection(
            layers=96, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=32000, sequence=512
        ),
        training=replace(
            FORMS["autocast"][0],
            global_batch=64,
            microbatch=8,
            gradients="fp8",
            moments="fp8",
            cuda_graphs=False,
        ),
        storage=PACKED,
        pipeline=PipelineSection(stages=2),
    )
    low = least_stage_bytes(config, 2, GPU)[0]
    high = stage_memory(config, 2, GPU)[0].total
    added = [plan_stage(config, 2, 0, GPU, int(budget)).added for budget in np.linspace(low, high, 4)]
    assert added[0] > added[2] > added[3] == 0.0 and added == sorted(added, reverse=True)


def test_a_head_on_the_first_stage_counts_in_the_schedule() -> None:
    """What a plan saves there is of as many microbatches as the estimate says that the stage holds."""
    config = deep("plain", layers=6, head="first")
    config = replace(config, model=replace(config.model, tied=True))
    (held, *_) = held_blocks(config, 2)
    assert held > 0
    everything = stage_memory(config, 2, CPUS)[0]
    one = _stages(config, 2, CPUS)[0]
    again = one.plan(one.alike(Choice.AGAIN)).memory
    kept, input_alone = (one.columns[choice].kept for choice in (Choice.KEPT, Choice.AGAIN))
    assert everything.kept - again.kept == held * (kept - input_alone)


def test_a_stage_without_blocks_has_a_plan() -> None:
    """That of a tied embedding and head, whose vocabulary is large for so many cards."""
    model = ModelSection(
        layers=4, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=60_000, sequence=64, tied=True
    )
    config = RunConfig(model=model, pipeline=PipelineSection(stages=3))
    assert [sum(unit.startswith("block") for unit in units) for units in stage_units(config, 3)] == [0, 2, 2]
    need = least_stage_bytes(config, 3, GPU)[0]
    plan = plan_stage(config, 3, 0, GPU, need)
    assert plan.fits and plan.choices == ()
    assert not plan_stage(config, 3, 0, GPU, need // 2).fits
