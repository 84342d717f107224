"""A block's stored activations: presets, forms and bytes."""

from dataclasses import replace

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.model.storage import (
    KINDS,
    PRESETS,
    Storage,
    configured,
    stored_bytes,
    unit_bytes,
)
from node.model.units import is_block
from node.run_file.validate import problems
from node.schedule.placement import stage_units
from node.tuning.memory import stage_bytes

BFLOAT16 = TrainingSection(precision="bfloat16", microbatch=1)
PAPER = ModelSection(layers=1, hidden=4096, heads=32, kv_heads=32, ffn=4 * 4096, sequence=8192)
LLAMA3_8B = ModelSection(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192)
LLAMA2_13B = ModelSection(layers=1, hidden=5120, heads=40, kv_heads=40, ffn=13824, sequence=8192)
CONFIG = RunConfig(
    model=ModelSection(layers=12, hidden=64, heads=4, kv_heads=2, ffn=96, sequence=32),
    training=TrainingSection(global_batch=16, microbatch=2),
    pipeline=PipelineSection(stages=4, window=0),
    storage=StorageSection(preset="agoq"),
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
    assert configured(StorageSection(preset="compact")) == PRESETS["compact"]


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
    ("storage", "words"),
    [
        (StorageSection(preset="agoq", attention="recompute"), "recompute both, or neither"),
        (StorageSection(preset="smallest"), "storage.preset 'smallest' is unknown"),
    ],
)
def test_storage_that_cannot_be_right_is_refused(storage: StorageSection, words: str) -> None:
    found = problems(replace(RunConfig(), storage=storage))
    assert len(found) == 1 and words in found[0]


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
