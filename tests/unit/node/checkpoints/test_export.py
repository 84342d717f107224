"""Exported folders: the same bytes as imported, and a model that transformers loads and runs."""

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from node.checkpoints import export as module
from node.checkpoints.export import export
from node.checkpoints.start import read_units
from node.config.schema import DataSection, ModelSection, RunConfig
from node.model.chunk import build_chunk
from node.model.units import block_name, unit_names
from node.training.optimizer import StageOptimizer
from node.training.serialization import serialize_unit
from node.training.snapshot import SnapshotWriter, prune, read_unit
from tests.unit.node.checkpoints.test_families import CONFIGS, make, section
from wire.errors import RunError, UserError

CPU = torch.device("cpu")


def snapshot(run_directory: Path, config: RunConfig, step: int = 4) -> StageOptimizer:
    """A snapshot of the model as it starts."""
    units = unit_names(config.model)
    chunk = build_chunk(config.model, units, 3, CPU)
    optimizer = StageOptimizer([chunk], config.training)
    weights = asyncio.run(read_units(config.model, units)) if config.model.from_ else {}
    writer = SnapshotWriter(run_directory / "snapshots", config, "run")
    for unit in units:
        state = optimizer.unit_state(unit)
        state |= {f"parameter.{name}": torch.from_numpy(a) for name, a in weights.get(unit, {}).items()}
        data = serialize_unit(state)
        writer.put(step, unit, data, hashlib.sha256(data).hexdigest())
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_import_then_export_gives_the_same_bytes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make(family).to(dtype).save_pretrained(source)
    model = section(source, 2048)
    snapshot(tmp_path / "run", replace(RunConfig(), model=model))
    assert export(tmp_path / "run", out) == 4
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == dtype
        assert torch.equal(tensor, after[name]), name
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(load(out, dtype=dtype)(tokens).logits, load(source, dtype=dtype)(tokens).logits)


SHAPE = ModelSection(layers=3, hidden=32, heads=4, kv_heads=4, ffn=48, sequence=64)
GEMMA = replace(
    SHAPE,
    qk_norm="head",
    norm_place="both",
    norm_offset=True,
    activation="gelu",
    scaled_embedding=True,
    window=6,
    no_window=(1,),
    window_theta=500.0,
    query_scale=12,
)


@pytest.mark.parametrize(
    "model",
    [SHAPE, replace(SHAPE, family="gpt2"), replace(SHAPE, window=6), GEMMA],
    ids=["llama", "gpt2", "mistral", "gemma3"],
)
def test_a_model_of_ours_generates_the_same_tokens_in_transformers(
    model: ModelSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(RunConfig(), model=replace(model, init_std=0.3), data=DataSection(tokenizer="bytes"))
    snapshot(tmp_path / "run", config)
    monkeypatch.setattr(module, "SHARD_BYTES", 20_000)
    export(tmp_path / "run", tmp_path / "out", step=4, dtype="float32")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "größer \x00 than 1\n"
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokens[0].tolist() == list(text.encode())
    assert tokenizer.decode(tokens[0]) == text
    ours = build_chunk(config.model, unit_names(config.model), 3, CPU)
    made = tokens
    with torch.no_grad():
        for _ in range(12):
            made = torch.cat((made, ours(made)[:, -1:].argmax(-1)), dim=1)
    found = loaded.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(found, made)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 4 |" in card and "| tokens | 4,096 |" in card


def test_the_next_snapshot_is_exported_where_the_run_removes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16)
    config, run = replace(RunConfig(), model=model), tmp_path / "run"
    snapshot(run, config, 4)

    def read_as_the_run_goes_on(directory: Path, unit: str) -> bytes:
        if directory.name == "step-00000004" and unit == block_name(0):
            snapshot(run, config, 8)
            prune(run / "snapshots", 1)
        return read_unit(directory, unit)

    monkeypatch.setattr(module, "read_unit", read_as_the_run_goes_on)
    assert export(run, tmp_path / "out") == 8
    assert "| steps | 8 |" in (tmp_path / "out" / "README.md").read_text()
    snapshot(run, config, 4)
    with pytest.raises(RunError, match=r"step-00000004 .*use an older one"):
        export(run, tmp_path / "other", step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_bad_requests_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with pytest.raises(UserError, match="no complete snapshot yet"):
        export(run, out)
    snapshot(run, replace(RunConfig(), model=ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16)))
    with pytest.raises(UserError, match="no snapshot of step 5; it has 4"):
        export(run, out, step=5)
    with pytest.raises(UserError, match="--dtype int8: expected one of float32"):
        export(run, out, dtype="int8")
    (out / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="is in use"):
        export(run, out)
    assert [path.name for path in tmp_path.iterdir() if path != run] == ["out"]
    strange = replace(RunConfig(), model=replace(ModelSection(layers=1), qkv_bias=True, qk_norm="head"))
    snapshot(tmp_path / "other", strange)
    with pytest.raises(UserError, match=r"family has all of model\.qkv_bias True, qk_norm head"):
        export(tmp_path / "other", tmp_path / "third")
    assert not (tmp_path / "third").exists() and not list(tmp_path.glob(".*"))
