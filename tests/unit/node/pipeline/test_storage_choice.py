"""In how many bits a stage stores: what is allowed, what a node's memory gets, and what would let one fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import LoraSection, RunConfig, StorageSection
from node.model.storage import KINDS, Storage, configured
from node.pipeline.device_memory import Devices
from node.pipeline.memory import MEMORY_SHARE, most_held, stage_memory
from node.pipeline.memory_plan import least_stage_bytes, plan_stage
from node.pipeline.storage_choice import (
    StorageHistory,
    StoragePlan,
    allowed_storages,
    choices_by_offer,
    choose,
    chosen_config,
    name_of,
    narrowest,
    offer_needed,
    plan_storages,
    remedies,
    stage_configs,
    words_of,
)
from node.run_file.loader import load_config, to_toml
from node.run_file.validate import problems
from tests.unit.node.pipeline.test_memory import run
from wire.errors import ConfigError

GPU, CPU = Devices(on_cpu=False), Devices()


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


@pytest.mark.parametrize("devices", [GPU, CPU, replace(GPU, count=2)], ids=["gpu", "cpu", "gpus"])
def test_a_stage_gets_the_most_bits_with_which_it_keeps_everything(devices: Devices) -> None:
    config = allowing("ffn_input:8", "ffn_input:4", "norm_input:8", "attention:8")
    allowed = allowed_storages(config)
    assert len(allowed) == 12
    for stage in range(2):
        needs = [offer_needed(config, storage, 2, devices)[stage] for storage in allowed]
        for offer in {*needs, *(need - 1 for need in needs)}:
            expected = next((s for s, need in zip(allowed, needs, strict=True) if need <= offer), allowed[-1])
            chosen = choose(config, 2, stage, devices, offer)
            assert chosen == expected
            own = replace(chosen_config(config, chosen), training=replace(config.training, cuda_graphs=False))
            kept = stage_memory(own, 2, devices)[stage].total
            assert kept <= offer or (chosen == allowed[-1] and all(need > offer for need in needs))
        assert choose(config, 2, stage, devices, 0) == configured(config.storage)
        ladder = choices_by_offer(config, 2, stage, devices)
        assert ladder[0][0] == allowed[0] and ladder[-1][0] == allowed[-1]
        for storage, offer in ladder[:-1]:
            assert choose(config, 2, stage, devices, offer) == storage
            assert choose(config, 2, stage, devices, offer - 1) != storage


def test_with_too_little_for_any_bits_the_node_plans_the_rest_of_the_fewest() -> None:
    config = allowing("4", "attention:8", "attention_output:8")
    least = least_stage_bytes(narrowest(config), 2, GPU)[0]
    storage = choose(config, 2, 0, GPU, least)
    assert storage == allowed_storages(config)[-1]
    plan = plan_stage(chosen_config(config, storage), 2, 0, GPU, least)
    assert plan.fits and plan.text() != ""
    assert least < least_stage_bytes(allowing(), 2, GPU)[0]


def test_a_measured_window_leaves_room_for_more_microbatches_in_flight() -> None:
    config = allowing("8", "4")
    auto = replace(config, pipeline=replace(config.pipeline, window="auto"))
    for storage in allowed_storages(config):
        fixed, share = (offer_needed(one, storage, 2, GPU)[0] for one in (config, auto))
        assert share == pytest.approx(fixed / MEMORY_SHARE, rel=1e-6)


def test_windows_are_planned_for_what_stages_store() -> None:
    config = allowing("4")
    memory = [2 * size for size in least_stage_bytes(config, 2, GPU)]
    wide, narrow = (
        most_held(config, 2, memory, 0, (GPU, GPU), stage_configs(config, StoragePlan((name_of(one),) * 2)))
        for one in (allowed_storages(config)[0], allowed_storages(config)[-1])
    )
    assert all(few <= many for few, many in zip(wide, narrow, strict=True)) and wide != narrow
    assert stage_configs(config, None) is None


def test_all_rows_of_a_stage_store_the_same_and_the_node_with_the_least_room_decides() -> None:
    config = allowing("8", "4")
    large, small = (max(offer_needed(config, allowed_storages(config)[place], 2, GPU)) for place in (0, -1))
    plan = plan_storages(config, [[(GPU, large), (GPU, small)], [(GPU, large), (GPU, large)]])
    first, second = (name_of(allowed_storages(config)[place]) for place in (-1, 0))
    assert plan.names == (first, second)
    assert StoragePlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["", "{}", "[1]", '["none/8"]', "null"])
def test_a_damaged_record_is_an_error_for_users(text: str) -> None:
    with pytest.raises(ConfigError, match="storage plan on record is damaged"):
        StoragePlan.from_json(text)
    with pytest.raises(ConfigError, match="ascending"):
        StorageHistory(((3, StoragePlan(())), (3, StoragePlan(()))))


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


def test_words_say_what_is_not_kept_as_computed() -> None:
    assert words_of(Storage()) == "all as computed"
    assert words_of(Storage(ffn_input="8", attention="bf16")) == "ffn_input in 8 bits, attention bf16"


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
