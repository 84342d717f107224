"""A block's stored activations: presets, forms, bytes, and bits by stage."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.model.shard_shapes import check_shards
from node.model.storage import (
    KINDS,
    PACKED,
    PRESETS,
    STAGE_BITS,
    Storage,
    configured,
    stage_bits,
    stored_bytes,
    unit_bytes,
)
from node.model.units import is_block
from node.run_file.validate import problems
from node.schedule.placement import chunk_units, stage_units
from node.schedule.schedule import Kind, schedule
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes, stage_storages
from tests.support.cases import each
from wire.errors import RunError

BFLOAT16 = TrainingSection(precision="bfloat16", microbatch=1)
PAPER = ModelSection(layers=1, hidden=4096, heads=32, kv_heads=32, ffn=4 * 4096, sequence=8192)
LLAMA3_8B = ModelSection(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192)
LLAMA2_13B = ModelSection(layers=1, hidden=5120, heads=40, kv_heads=40, ffn=13824, sequence=8192)
CONFIG = RunConfig(
    model=ModelSection(layers=12, hidden=64, heads=4, kv_heads=2, ffn=96, sequence=32),
    training=TrainingSection(global_batch=16, microbatch=2),
    pipeline=PipelineSection(stages=4, window=0),
    storage=StorageSection(preset="agoq", bits_by_stage=True),
)


def units(model: ModelSection, storage: Storage) -> float:
    return stored_bytes(model, BFLOAT16, storage).total / unit_bytes(model, 1)


def test_the_papers_layer_is_below_the_papers_figure() -> None:
    # Two norms' inputs, SwiGLU's two of 4 U, attention's four tensors, and its sums of 4 bytes a head.
    expected = 2 * (4 + 16 / 128) / 16 + 8 * (4 + 16 / 128) / 16 + 4 + 4 * 32 / (2 * 4096)
    assert units(PAPER, PRESETS["agoq"]) == pytest.approx(expected) and expected < 7.5
    assert units(PAPER, PRESETS["compact"]) < 5
    assert units(LLAMA2_13B, PRESETS["agoq"]) == pytest.approx(5.92, abs=0.01)


def test_keys_replace_the_presets_forms() -> None:
    section = StorageSection(preset="agoq", ffn_input="3", attention="none")
    assert configured(section) == replace(PRESETS["agoq"], ffn_input="3", attention="none")
    assert configured(StorageSection()) == Storage() and Storage().is_off
    same = replace(CONFIG, storage=StorageSection(preset="compact"))
    assert stage_storages(same, 4) == (PRESETS["compact"],) * 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_kind_is_valid_and_others_are_not(kind: str) -> None:
    def broken(form: str) -> list[str]:
        storage = StorageSection(**{"attention_output": "recompute", kind: form})
        return problems(replace(RunConfig(), storage=storage))

    assert [form for form in KINDS[kind] if broken(form)] == []
    assert len(broken("7")) == 1 and f"storage.{kind} '7' is unknown" in broken("7")[0]
    assert ("3" in KINDS[kind]) == (kind == "ffn_input") and ("recompute" in KINDS[kind]) == (
        kind != "norm_input"
    )


@pytest.mark.parametrize(
    ("storage", "window", "words"),
    [
        (StorageSection(preset="agoq", bits_by_stage=True), "auto", "pipeline.window to be a number"),
        (StorageSection(bits_by_stage=True), 0, "neither is kept in 4 to 8 bits"),
        (StorageSection(preset="agoq", attention="recompute"), 0, "recompute both, or neither"),
        (StorageSection(preset="smallest"), 0, "storage.preset 'smallest' is unknown"),
    ],
)
def test_storage_that_cannot_be_right_is_refused(
    storage: StorageSection, window: int | str, words: str
) -> None:
    config = replace(RunConfig(), storage=storage, pipeline=PipelineSection(window=window))
    found = problems(config)
    assert len(found) == 1 and words in found[0]


def test_bits_are_the_papers_for_its_pipeline() -> None:
    assert stage_bits((11, 9, 7, 5), 4) == (4, 4, 6, 8)
    assert stage_bits((4, 3, 2, 1), 4) == (4, 5, 8, 16)
    assert stage_bits((3, 3), 3) == (3, 3) and stage_bits((12, 9), 3) == (3, 4)
    assert stage_bits((4, 3, 2, 1), 4, widest=6) == (4, 5, 6, 6) and stage_bits((4, 1), 8, widest=4) == (8, 8)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.sampled_from((3, 4, 5, 6, 8)))
def test_no_stage_holds_more_than_the_heaviest(loads: list[int], base: int) -> None:
    bits = stage_bits(loads, base)
    peak = base * max(loads)
    assert all(count * load <= peak for count, load in zip(bits, loads, strict=True))
    for count, load in zip(bits, loads, strict=True):
        assert count >= base and count in {base, *STAGE_BITS}
        # The next one up would not fit.
        assert all(more * load > peak for more in STAGE_BITS if more > count)


@given(
    stages=st.integers(1, 6),
    chunks=st.integers(1, 3),
    window=st.integers(0, 4),
    microbatches=st.integers(1, 12),
    layers=st.integers(18, 30),
)
def test_bits_by_stage_never_raise_the_peak_that_the_schedule_makes(
    stages: int, chunks: int, window: int, microbatches: int, layers: int
) -> None:
    config = replace(
        CONFIG,
        model=replace(CONFIG.model, layers=layers),
        training=TrainingSection(global_batch=microbatches, microbatch=1),
        pipeline=PipelineSection(stages=stages, chunks=chunks if stages > 1 else 1, window=window),
    )

    def peaks(storages: tuple[Storage, ...]) -> list[int]:
        """Bytes held at most, counted action by action."""
        made = []
        orders = schedule(stages, config.pipeline.chunks, microbatches, window)
        for stage, order in enumerate(orders):
            own = [sum(map(is_block, units)) for units in chunk_units(config, stages)[stage::stages]]
            each = stored_bytes(config.model, config.training, storages[stage]).total
            held, most = 0, 0
            for action in order:
                held += (1 if action.kind is Kind.FORWARD else -1) * own[action.chunk]
                most = max(most, held * each)
            made.append(most)
        return made

    base = (PRESETS["agoq"],) * stages
    chosen = stage_storages(config, stages)
    assert max(peaks(chosen)) <= max(peaks(base))
    assert all(PACKED[storage.norm_input] == PACKED[storage.ffn_input] >= 4 for storage in chosen)
    assert all(storage.attention == storage.attention_output == "bf16" for storage in chosen)


def test_bits_follow_from_the_run_file_and_the_number_of_stages() -> None:
    forms = [[storage.norm_input for storage in stage_storages(CONFIG, stages)] for stages in (1, 2, 4)]
    assert forms == [["4"], ["4", "8"], ["4", "5", "8", "bf16"]]
    other = replace(CONFIG, run=replace(CONFIG.run, seed=9, steps=7))
    assert stage_storages(other, 4) == stage_storages(CONFIG, 4)


ARRANGEMENTS = [
    Devices(count=rows * ranks, tensor_parallel=ranks, on_cpu=on_cpu)
    for rows, ranks in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4))
    for on_cpu in (True, False)
]


def can_compute(config: RunConfig, devices: Devices) -> bool:
    try:
        check_shards(config, devices.tensor_parallel)
    except RunError:
        return False
    return config.training.microbatch % devices.rows == 0


SHAPES = {
    "large vocabulary": (LLAMA3_8B, 4),
    "small vocabulary": (replace(LLAMA2_13B, layers=16), 4),
    "GPT-2": (replace(PAPER, family="gpt2", layers=8, hidden=768, heads=8, ffn=3072, vocab=50257), 2),
    "no head to speak of": (replace(CONFIG.model, heads=8, kv_heads=8), 2),
}
STORES: dict[str, dict[str, str]] = {
    "float32": {},
    "fp8 gradients": {"gradients": "fp8"},
    "bfloat16 weights": {"gradients": "fp8", "moments": "fp8", "weights": "bfloat16"},
}


@each(
    ("stores", "chunks"),
    [(STORES["float32"], 1), (STORES["fp8 gradients"], 2), (STORES["bfloat16 weights"], 1)],
)
@each("stages", [2, 4])
@each(("model", "microbatch"), SHAPES.values())
def test_bits_by_stage_never_raise_what_the_heaviest_stage_is_estimated_to_take(
    model: ModelSection, microbatch: int, stages: int, chunks: int, stores: dict[str, str]
) -> None:
    """All of it: weights, gradients and moments, the head at work, and what is kept."""
    config = replace(
        CONFIG,
        model=model,
        training=replace(BFLOAT16, global_batch=8 * microbatch, microbatch=microbatch, **stores),
        pipeline=PipelineSection(stages=stages, chunks=chunks, window=0),
    )
    plain = replace(config, storage=StorageSection(preset="agoq"))
    possible = [devices for devices in ARRANGEMENTS if can_compute(config, devices)]
    assert len(possible) >= 4
    for devices in possible:
        assert max(stage_bytes(config, stages, devices)) <= max(stage_bytes(plain, stages, devices)), devices


def test_a_stage_with_a_large_head_keeps_to_its_bits_and_others_get_theirs() -> None:
    # Four equal stages: only what a head adds differs.
    split = replace(CONFIG.pipeline, split=(3, 3, 3, 3))
    large = replace(CONFIG, model=replace(CONFIG.model, vocab=50257), pipeline=split)
    assert [storage.norm_input for storage in stage_storages(large, 4)] == ["4", "5", "8", "4"]


def test_whether_passes_are_captured_changes_no_bits_by_stage() -> None:
    """Graphs take memory of their own, and the heaviest stage may be another one with them."""
    model = ModelSection(layers=8, hidden=256, heads=8, kv_heads=8, ffn=768, vocab=8192, sequence=128)
    training = TrainingSection(global_batch=16, microbatch=4, precision="bfloat16")
    pipeline = PipelineSection(stages=2, window=2)
    graphs = replace(CONFIG, model=model, training=training, pipeline=pipeline)
    plain = replace(graphs, training=replace(training, cuda_graphs=False))
    assert stage_storages(graphs, 2) == stage_storages(plain, 2)
    gpu = Devices(on_cpu=False)
    for run in (graphs, plain):
        base = replace(run, storage=StorageSection(preset="agoq"))
        assert max(stage_bytes(run, 2, gpu)) <= max(stage_bytes(base, 2, gpu))


@pytest.mark.parametrize("stages", [3, 4])
def test_a_codecs_cache_does_not_make_more_bits_raise_the_peak(stages: int) -> None:
    """It grows with the text, and stages between two others remember at both ends."""
    pipeline = PipelineSection(stages=stages, window=0, forward_codec="aqsgd-4")
    config = replace(CONFIG, pipeline=pipeline)
    plain = replace(config, storage=StorageSection(preset="agoq"))
    assert stage_storages(config, stages) != stage_storages(plain, stages)
    for windows in (0, 1, 16, 100, 1000, 10**6):
        for devices in ARRANGEMENTS[:2]:
            most, before = (
                max(stage_bytes(run, stages, devices, windows=windows)) for run in (config, plain)
            )
            assert most <= before, (windows, devices)


def test_the_estimate_counts_what_is_kept() -> None:
    plain = replace(CONFIG, storage=StorageSection())
    packed = replace(CONFIG, storage=StorageSection(preset="agoq"))
    assert max(stage_bytes(packed, 4)) < max(stage_bytes(plain, 4))
    # The first stage holds 4 microbatches of its 3 blocks; 8 instead of 4 bits for the norms' inputs.
    wider = replace(CONFIG, storage=StorageSection(preset="agoq", norm_input="8"))
    assert sum(map(is_block, stage_units(CONFIG, 4)[0])) == 3
    more = (
        stored_bytes(CONFIG.model, CONFIG.training, replace(PRESETS["agoq"], norm_input="8")).total
        - stored_bytes(CONFIG.model, CONFIG.training, PRESETS["agoq"]).total
    )
    assert stage_bytes(wider, 4)[0] - stage_bytes(packed, 4)[0] == 4 * 3 * more
