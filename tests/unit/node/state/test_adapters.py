"""Runs with adapters: PEFT loads the export, a merged model computes the same, a checkpoint is the base."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from node.cli.snapshot_model import build_model
from node.config.schema import (
    DataSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.coordinator.snapshot_uses import SnapshotExports
from node.model.chunk import Chunk, build_chunk
from node.model.units import unit_names
from node.state.export import export
from node.state.merging import merged_parameters
from node.state.serialization import as_frozen, deserialize_unit, serialize_unit
from node.state.snapshot import SnapshotFolder
from node.state.start import read_units
from node.state.unit_state import weights_file
from node.training.optimizer import StageOptimizer
from tests.support.families import SIZES, make, section
from tests.support.memory_pipeline import MemoryPipeline, corpus
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import DataError, RunError, UserError

CPU = torch.device("cpu")
LORA = LoraSection(rank=3, alpha=6.0, base="float32", targets=("attention_output", "down"))
TOKENS = torch.arange(40)[None]


def base(family: str, folder: Path) -> ModelSection:
    """A checkpoint by transformers, and our `[model]` for it."""
    make(family).save_pretrained(folder)
    return section(folder, 64)


def trained(config: RunConfig) -> Chunk:
    """A whole model with adapters that add something, on its checkpoint."""
    model = config.model
    units = unit_names(model)
    chunk = build_chunk(model, units, config.run.seed, CPU, lora=config.lora)
    for unit, weights in asyncio.run(read_units(model, units)).items() if model.from_ else ():
        chunk.load_frozen(unit, {name: torch.from_numpy(array) for name, array in weights.items()})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return chunk


def snapshot(run_directory: Path, config: RunConfig, chunk: Chunk) -> None:
    optimizer = StageOptimizer([chunk], config.training)
    writer = SnapshotFolder(run_directory / "snapshots", config, "run")
    for unit in unit_names(config.model):
        data = serialize_unit(optimizer.unit_state(unit))
        writer.put(4, unit, data)


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize(
    ("family", "targets", "tensors"),
    [
        *((family, LORA.targets, 16) for family in ("llama3", "qwen2", "olmo2", "gpt2")),
        # A and B of four projections of attention and the router, and of three of five experts.
        *((family, (), 8 * (5 + 3 * 5)) for family in ("qwen3_moe", "mixtral", "olmoe")),
        ("gpt_oss", (), 8 * (5 + 2)),
        ("gpt_oss", ("down",), 8),
    ],
)
def test_peft_loads_the_exported_adapters(
    family: str, targets: tuple[str, ...], tensors: int, tmp_path: Path
) -> None:
    import transformers  # takes seconds, which only some workers spend
    from peft import PeftModel  # takes seconds, which only some workers spend

    model = base(family, tmp_path / "base")
    config = RunConfig(model=model, lora=replace(LORA, targets=targets))
    chunk = trained(config)
    snapshot(tmp_path / "run", config, chunk)
    assert export(tmp_path / "run", tmp_path / "out") == 4
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "base"
    assert not (tmp_path / "out" / "config.json").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if str(tmp_path).encode() in path.read_bytes()]
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert len(file.keys()) == tensors
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        before = plain(TOKENS).logits
        loaded = PeftModel.from_pretrained(plain, tmp_path / "out").eval()
        expected = chunk(TOKENS)
        found = loaded(TOKENS).logits
    assert (found - before).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        *(("llama3", "float32"), ("qwen3", "4"), ("gpt2", "4"), ("qwen3_moe", "float32")),
        *(("gpt_oss", "4"), ("", "4")),
    ],
)
def test_a_merged_model_computes_what_was_trained(family: str, kept: str, tmp_path: Path) -> None:
    """Also on a packed base, and one from a seed."""
    import transformers

    model = ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=64, init_std=0.2)
    if family:
        model = base(family, tmp_path / "base")
    config = RunConfig(model=model, lora=replace(LORA, base=kept), run=RunSection(seed=9))
    chunk = trained(config)
    snapshot(tmp_path / "run", config, chunk)
    export(tmp_path / "run", tmp_path / "out", merge=merged_parameters, dtype="float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, chunk(TOKENS), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama3", ""])
def test_a_snapshot_is_evaluated_on_the_base_it_was_trained_on(family: str, tmp_path: Path) -> None:
    """By `thinwire eval` and `sample`: the base is the run's checkpoint, or follows from the seed."""
    model = ModelSection(layers=2, hidden=32, heads=4, kv_heads=2)
    if family:
        model = base(family, tmp_path / "base")
    config = RunConfig(model=model, lora=LORA, run=RunSection(seed=9))
    chunk = trained(config)
    snapshot(tmp_path / "run", config, chunk)
    whole = build_model(config, tmp_path / "run" / "snapshots" / "step-00000004", "cpu")
    with torch.no_grad():
        assert torch.equal(whole.chunk(TOKENS), chunk(TOKENS))


async def test_snapshots_of_a_run_with_adapters_are_exported_as_adapters(tmp_path: Path) -> None:
    """By `training.export_every`, beside the snapshots."""
    model = ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=64)
    run, training = RunSection(steps=8, snapshot_every=4), TrainingSection(export_every=1)
    config = RunConfig(model=model, lora=LORA, run=run, training=training)
    snapshot(tmp_path, config, trained(config))
    exports = SnapshotExports(config, tmp_path)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(exports.run())
        exports.stored(4)
        await exports.finish()
        running.cancel()
    out = tmp_path / "exports" / "step-00000004"
    assert json.loads((out / "adapter_config.json").read_text())["r"] == LORA.rank
    with safe_open(out / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == 2 * 2 * model.layers


def test_merging_a_whole_model_is_refused(tmp_path: Path) -> None:
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=24, sequence=8)
    config = RunConfig(model=model)
    snapshot(tmp_path / "run", config, build_chunk(model, unit_names(model), 0, CPU))
    with pytest.raises(UserError, match="--merge is for runs with adapters"):
        export(tmp_path / "run", tmp_path / "out", merge=merged_parameters)


def test_weights_of_another_model_are_not_taken() -> None:
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=24, sequence=8)
    chunk = build_chunk(model, unit_names(model), 0, CPU, lora=LORA)
    before = {name: value.clone() for name, value in chunk.named_buffers()}
    with pytest.raises(RunError, match=r"block\.0000 do not fit"):
        chunk.load_frozen("block.0000", {"query.weight": torch.zeros(16, 16)})
    assert all(torch.equal(value, before[name]) for name, value in chunk.named_buffers())


def test_stages_take_the_base_from_the_checkpoint_at_every_restore(tmp_path: Path) -> None:
    import transformers

    sizes = transformers.LlamaConfig(**{**SIZES, "vocab_size": 256})
    transformers.LlamaForCausalLM(sizes).save_pretrained(tmp_path / "base")
    model = section(tmp_path / "base", 16)
    config = RunConfig(
        run=RunSection(steps=8),
        model=model,
        data=DataSection(tokenizer="bytes"),
        training=TrainingSection(global_batch=4, microbatch=2, lr=1e-2, warmup_steps=2),
        lora=replace(LORA, base="8", dropout=0.1),
        pipeline=PipelineSection(stages=2, window=0, forward_codec="fp32", backward_codec="fp32"),
    )
    weights = asyncio.run(read_units(model, unit_names(model)))
    frozen = {
        unit: as_frozen({f"parameter.{name}": torch.from_numpy(array) for name, array in arrays.items()})
        for unit, arrays in weights.items()
    }

    def fetch(files: Mapping[str, bytes]) -> Callable[[str], Mapping[str, Tensor]]:
        return lambda unit: {**(deserialize_unit(files[unit]) if files else {}), **frozen[unit]}

    with MemoryPipeline(config, fetch=fetch({})) as stages:
        first = stages.train(2)
        files = {unit: serialize_unit(state) for unit, state in stages.state().items()}
        assert max(map(len, files.values())) < 0.5 * max(
            sum(array.nbytes for array in arrays.values()) for arrays in weights.values()
        )
        expected, hashed = stages.train(2), stages.weights_sha256()
    reference = ReferenceTrainer(config, corpus(config))
    reference.start_from(weights)
    assert reference.train(4) == first + expected and reference.weights_sha256() == hashed
    one = replace(config, pipeline=replace(config.pipeline, stages=1))
    for other in (config, one):
        with MemoryPipeline(other, fetch=fetch({})) as stages:
            stages.restore(2, fetch(files))
            assert stages.train(2) == expected
            assert stages.weights_sha256() == hashed
    whole = replace(config, lora=LoraSection())
    reference = ReferenceTrainer(whole, corpus(whole))
    reference.start_from(weights)
    windows = torch.arange(34).view(2, 17)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        wanted = F.cross_entropy(theirs(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert reference.validation_loss(windows.numpy()) == pytest.approx(float(wanted), rel=1e-5)
    # On another base losses are others.
    with MemoryPipeline(replace(config, model=replace(model, from_=""))) as stages:
        assert stages.train(1)[0].loss != first[0].loss


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_adapters_are_not_joined_to_a_base_that_has_changed(stored: torch.dtype, tmp_path: Path) -> None:
    """One weight is enough. Merging, `eval` and the coordinator's answer to nodes compare the same digest."""
    model = base("llama3", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    kept = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    save_file(kept, file, {"format": "pt"})
    units = {unit: asyncio.run(read_units(model, [unit], as_stored=True))[unit] for unit in unit_names(model)}
    known = {unit: sha256(weights_file(weights)).hexdigest() for unit, weights in units.items()}
    config = RunConfig(model=model, lora=LORA)
    snapshot(tmp_path / "run", config, trained(config))
    export(tmp_path / "run", tmp_path / "out", merge=partial(merged_parameters, known=known))
    directory = tmp_path / "run" / "snapshots" / "step-00000004"
    build_model(config, directory, "cpu", known)
    kept["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.5
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"block\.0001"):
        export(tmp_path / "run", tmp_path / "other", merge=partial(merged_parameters, known=known))
    with pytest.raises(DataError, match=r"block\.0001"):
        build_model(config, directory, "cpu", known)
