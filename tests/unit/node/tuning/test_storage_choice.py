"""In how many bits a stage stores: what is allowed, what a node's memory gets, and what would let one fit."""

from dataclasses import replace
from math import ceil, inf
from pathlib import Path

import pytest

from node.config.schema import LoraSection, RunConfig, StorageSection
from node.model.storage import KINDS, Storage, configured
from node.run_file.loader import load_config, to_toml
from node.run_file.validate import problems
from node.tuning.block_times import BlockTimes, assumed_times
from node.tuning.decisions import StepHistory
from node.tuning.device_memory import Devices
from node.tuning.memory import MEMORY_SHARE, most_held
from node.tuning.memory_plan import Room, least_stage_bytes
from node.tuning.storage_choice import (
    MOST_PLANNED,
    StoragePlan,
    allowed_storages,
    choose,
    chosen_config,
    fastest,
    kept_bytes,
    name_of,
    narrowest,
    plan_storages,
    remedies,
    stage_configs,
    storage_seconds,
)
from tests.support.stored_runs import run
from wire.errors import ConfigError

GPU, CPU = Devices(on_cpu=False), Devices()
HOST_MEMORY = replace(GPU, host_bytes=10**12)


def allowing(*forms: str, **section: str) -> RunConfig:
    config = run("autocast")
    return replace(
        config,
        model=replace(config.model, layers=8),
        storage=StorageSection(allow=forms, **section),
        pipeline=replace(config.pipeline, window=0),
    )


def test_a_run_file_allows_its_own_storage_and_what_it_names_the_most_bits_first() -> None:
    assert allowed_storages(allowing()) == (Storage(),)
    found = allowed_storages(allowing("ffn_input:8", "ffn_input:4"))
    assert [storage.ffn_input for storage in found] == ["none", "8", "4"]
    assert {storage.norm_input for storage in found} == {"none"}
    # A form alone is for both inputs.
    both = allowed_storages(allowing("8", preset="agoq"))
    assert [(one.norm_input, one.ffn_input) for one in both] == [
        ("8", "8"),
        ("4", "8"),
        ("8", "4"),
        ("4", "4"),
    ]
    assert {one.attention for one in both} == {"bf16"}
    apart = allowed_storages(allowing("norm_input:4", "norm_input:5", "norm_input:4+outliers"))
    assert [one.norm_input for one in apart] == ["none", "5", "4+outliers", "4"]


def times_with(config: RunConfig, packing: float) -> BlockTimes:
    """Packing takes this many times as long as assumed."""
    times = assumed_times(config, GPU)
    return replace(
        times,
        packing=tuple(
            replace(one, pack=packing * one.pack, unpack=packing * one.unpack) for one in times.packing
        ),
    )


@pytest.mark.parametrize(
    ("devices", "packing"),
    [(GPU, 0.0), (GPU, 1.0), (HOST_MEMORY, 50.0)],
    ids=["gpu-0", "gpu-1", "host memory-50"],
)
def test_a_stage_gets_the_fastest_storage_and_of_equals_the_most_bits(
    devices: Devices, packing: float
) -> None:
    config = allowing("ffn_input:8", "attention:8")
    allowed, times = allowed_storages(config), times_with(config, packing)
    assert len(allowed) == 4
    needs = [kept_bytes(config, storage, 2, devices)[0] for storage in allowed]
    for memory in (min(needs), (min(needs) + max(needs)) // 2, max(needs)):
        room, found = Room(devices=devices, memory_bytes=memory, times=times), {}
        for storage in allowed:
            plan = room.plan(chosen_config(config, storage), 2, 0)
            if plan.fits:
                found[storage] = plan.seconds + plan.moving
        best = min(found.values())
        chosen = choose(config, 2, 0, room)
        assert found[chosen] <= 1.0101 * best
        better = allowed[: allowed.index(chosen)]
        assert all(found.get(storage, best * 2) > 1.0099 * best for storage in better)
    # Nothing is packed that need not be.
    assert chosen == allowed[0] or packing == 0.0
    assert choose(config, 2, 0, Room(devices=devices)) == configured(config.storage)


def test_packing_that_costs_nothing_comes_before_computing_again() -> None:
    config = allowing("ffn_input:8", "ffn_input:4")
    wide, middle, narrow = allowed_storages(config)
    for storage in (middle, narrow):
        memory = kept_bytes(config, storage, 2, GPU)[0]
        room = Room(devices=GPU, memory_bytes=memory, times=times_with(config, 0.0))
        assert choose(config, 2, 0, room) == storage
        slow = replace(room, times=times_with(config, 50.0))
        assert choose(config, 2, 0, slow) == wide
        assert replace(room, times=None).plan(chosen_config(config, wide), 2, 0).text() != ""


def test_with_too_little_for_any_bits_the_node_plans_the_rest_of_the_fewest() -> None:
    config = allowing("4", "attention:8", "attention_output:8")
    least = least_stage_bytes(narrowest(config), 2, GPU)[0]
    room = Room(devices=GPU, memory_bytes=least)
    plan = room.plan(chosen_config(config, choose(config, 2, 0, room)), 2, 0)
    assert plan.fits and plan.text() != ""
    assert least < least_stage_bytes(allowing(), 2, GPU)[0]
    nothing = storage_seconds(config, 2, 0, Room(devices=GPU, memory_bytes=1))
    assert nothing == {} and fastest(config, [nothing]) == allowed_storages(config)[-1]


def test_a_measured_window_leaves_room_for_more_microbatches_in_flight() -> None:
    config = allowing("8", "4")
    auto = replace(config, pipeline=replace(config.pipeline, window="auto"))
    wide = allowed_storages(config)[0]
    room = Room(devices=GPU, memory_bytes=kept_bytes(config, wide, 2, GPU)[0])
    fixed, shared = (storage_seconds(one, 2, 0, room).get(name_of(wide), inf) for one in (config, auto))
    assert shared > fixed, "it no longer keeps everything"
    larger = replace(room, memory_bytes=ceil(room.memory_bytes / MEMORY_SHARE))
    assert storage_seconds(auto, 2, 0, larger)[name_of(wide)] == pytest.approx(fixed)


def test_a_node_plans_with_some_of_many_storages_the_most_and_the_fewest_bits_among_them() -> None:
    config = allowing("8", "6", "5", "4", "attention:8", "attention:4")
    allowed = allowed_storages(config)
    assert len(allowed) > MOST_PLANNED
    memory = kept_bytes(config, allowed[0], 2, GPU)[0]
    found = storage_seconds(config, 2, 0, Room(devices=GPU, memory_bytes=memory))
    assert len(found) == MOST_PLANNED
    assert {name_of(allowed[0]), name_of(allowed[-1])} <= found.keys()


def test_windows_are_planned_for_what_stages_store() -> None:
    config = allowing("4")
    memory = [2 * size for size in least_stage_bytes(config, 2, GPU)]
    wide, narrow = (
        most_held(config, 2, memory, 0, (GPU, GPU), stage_configs(config, StoragePlan((name_of(one),) * 2)))
        for one in (allowed_storages(config)[0], allowed_storages(config)[-1])
    )
    assert all(few <= many for few, many in zip(wide, narrow, strict=True)) and wide != narrow
    assert stage_configs(config, None) is None


def test_all_rows_of_a_stage_store_the_same_and_its_slowest_node_decides() -> None:
    config = allowing("8", "4")
    wide, *_, narrow = (name_of(one) for one in allowed_storages(config))
    quick, slow, small = {wide: 1.0, narrow: 1.2}, {wide: 3.0, narrow: 2.0}, {narrow: 1.5}
    stages = [[quick, slow], [quick, quick], [quick, small], [{wide: 1.0}, {narrow: 1.0}], [{}]]
    plan = plan_storages(config, stages)
    assert plan.names == (narrow, wide, narrow, narrow, narrow)
    assert StoragePlan.from_json(plan.to_json()) == plan


def test_more_bits_may_cost_a_hundredth() -> None:
    config = allowing("8", "4")
    wide, *_, narrow = (name_of(one) for one in allowed_storages(config))
    assert name_of(fastest(config, [{wide: 1.009, narrow: 1.0}])) == wide
    assert name_of(fastest(config, [{wide: 1.011, narrow: 1.0}])) == narrow
    # A name that is no storage of this run decides nothing.
    assert name_of(fastest(config, [{wide: 1.0, "none/1/none/none": 0.1}])) == wide


@pytest.mark.parametrize("text", ["", "{}", "[1]", '["none/8"]', "null"])
def test_a_damaged_record_is_an_error_for_users(text: str) -> None:
    with pytest.raises(ConfigError, match="storage plan on record is damaged"):
        StoragePlan.from_json(text)
    with pytest.raises(ConfigError, match="ascending"):
        StepHistory(((3, StoragePlan(())), (3, StoragePlan(()))))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            StorageSection(allow=("ffn_inputs:8",)),
            "names 'ffn_inputs', which is none of norm_input",
        ),
        (
            StorageSection(allow=("attention:3",)),
            "attention may be stored in bf16, 8, 6, 5, 4;",
        ),
        (StorageSection(allow=("ffn_input:recompute",)), "change no bit, so each node decides"),
        (
            StorageSection(allow=("attention:8",), attention="recompute", attention_output="recompute"),
            "storage.attention = recompute does not store at all",
        ),
        (StorageSection(preset="agoq", allow=("8",), bits_by_stage=True), "set one of them"),
        (
            StorageSection(
                allow=(
                    "attention_output:8",
                    *(f"{kind}:{bits}" for kind in list(KINDS)[:3] for bits in "4568"),
                )
            ),
            "gives 250 choices a stage, of at most 128",
        ),
    ],
)
def test_what_cannot_be_allowed_is_refused_in_one_line(section: StorageSection, message: str) -> None:
    (line,) = problems(replace(allowing(), storage=section))
    assert message in line


def test_models_with_more_norms_and_with_adapters_allow_as_much() -> None:
    config = allowing("8")
    other = replace(config, model=replace(config.model, qk_norm="head"))
    assert problems(other) == []
    assert problems(replace(config, lora=LoraSection(rank=2))) == []


def test_what_would_let_a_stage_fit_does(tmp_path: Path) -> None:
    config = replace(allowing(), training=replace(allowing().training, microbatch=2, global_batch=8))
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    more = replace(config, pipeline=replace(config.pipeline, stages=4))
    fewer = replace(config, training=replace(config.training, microbatch=1))
    room = max(*least_stage_bytes(more, 4, GPU), *least_stage_bytes(fewer, 2, GPU))
    assert room < max(least_stage_bytes(config, 2, GPU))
    found = remedies(config, 2, GPU, room)
    settings = [line.split(" (")[0].replace(" = ", "=") for line in found]
    assert {setting.split("=")[0] for setting in settings} >= {"pipeline.stages", "training.microbatch"}
    for setting in settings:
        changed = load_config(path, [setting])
        needs = least_stage_bytes(narrowest(changed), changed.pipeline.stages, GPU)
        assert max(needs) <= room, setting
    assert remedies(config, 2, GPU, 1) == []
