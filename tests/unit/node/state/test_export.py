"""Exported folders: the same bytes as imported, and a model that transformers loads and runs."""

import argparse
import asyncio
import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotsSection,
    TrainingSection,
)
from node.data.chat import TOOL_TEMPLATE
from node.data.data import Corpus
from node.data.samples import Samples
from node.data.tokenizer import load_tokenizer
from node.model.chunk import build_chunk
from node.model.units import block_name, unit_names
from node.run_file.loader import to_toml
from node.state import export as module
from node.state.byte_tokenizer import byte_pieces
from node.state.export import export
from node.state.families import read_config
from node.state.serialization import serialize_unit
from node.state.snapshot import WEIGHTS_FOLDER, SnapshotFolder, read_unit, snapshot_directory
from node.state.start import read_units
from node.state.whole_model import WholeModel
from node.telemetry.events import HeldOutLoss
from node.training.optimizer import StageOptimizer
from tests.support.cases import each
from tests.support.chat_data import TEMPLATE, write_tokenizer
from tests.support.families import CONFIGS, make, section
from tests.support.memory_pipeline import MemoryPipeline
from tests.support.recorded_run import append, write_run
from tests.support.run_events import done
from wire.errors import RunError, UserError
from wire.identity.files import write_private

CPU = torch.device("cpu")


def snapshot(run_directory: Path, config: RunConfig, step: int = 4) -> StageOptimizer:
    """A snapshot of the model as it starts."""
    units = unit_names(config.model)
    chunk = build_chunk(config.model, units, 3, CPU)
    optimizer = StageOptimizer([chunk], config.training)
    weights = asyncio.run(read_units(config.model, units)) if config.model.from_ else {}
    state = {
        unit: optimizer.unit_state(unit)
        | {f"parameter.{name}": torch.from_numpy(a) for name, a in weights.get(unit, {}).items()}
        for unit in units
    }
    write_snapshot(run_directory, config, state, step)
    return optimizer


def write_snapshot(
    run_directory: Path, config: RunConfig, state: Mapping[str, dict[str, torch.Tensor]], step: int
) -> None:
    writer = SnapshotFolder(run_directory / "snapshots", config, "run")
    for unit in unit_names(config.model):
        data = serialize_unit(state[unit])
        writer.put(step, unit, data)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in CONFIGS),
        *((family, torch.bfloat16) for family in ("llama3", "gpt2", "gemma3")),
    ],
    ids=str,
)
def test_import_then_export_gives_the_same_bytes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers  # takes seconds, which only some workers spend

    source, out = tmp_path / "source", tmp_path / "out"
    make(family).to(dtype).save_pretrained(source)
    described = json.loads((source / "config.json").read_text())
    described["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}  # code that no export holds
    (source / "config.json").write_text(json.dumps(described))
    model = section(source, 2048)
    config = replace(RunConfig(), model=model)
    snapshot(tmp_path / "run", config)
    assert export(tmp_path / "run", out) == 4
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == dtype and tensor.shape == after[name].shape
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(40)[None]
    loaded = load(out, dtype=dtype, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, load(source, dtype=dtype)(tokens).logits)
    if dtype is torch.float32:
        assert sampled(tmp_path / "run", config, tokens[0].tolist()) == continued(loaded, tokens)


def test_a_gpt2_with_synonyms_of_keys_is_exported_with_fewer_positions(tmp_path: Path) -> None:
    import transformers

    source, out = tmp_path / "source", tmp_path / "out"
    make("gpt2").save_pretrained(source)
    described = json.loads((source / "config.json").read_text())
    described |= {"max_position_embeddings": described["n_positions"], "hidden_size": described["n_embd"]}
    (source / "config.json").write_text(json.dumps(described))
    config = replace(RunConfig(), model=section(source, 64))
    snapshot(tmp_path / "run", config)
    export(tmp_path / "run", out)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.n_positions == 64
    tokens = torch.arange(20)[None]
    assert sampled(tmp_path / "run", config, tokens[0].tolist()) == continued(loaded, tokens)


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path, {"format": "pt"})


def embedding(tensors: dict[str, torch.Tensor]) -> str:
    (name,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    return name


def with_own_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tied model's head is in the file, and is another matrix than the embedding."""
    torch.manual_seed(5)
    return tensors | {"lm_head.weight": 0.3 * torch.randn_like(tensors[embedding(tensors)])}


def with_same_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"lm_head.weight": tensors[embedding(tensors)].clone()}


def with_head_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The one weight of a tied model has the head's name."""
    return {("lm_head.weight" if name == embedding(tensors) else name): tensors[name] for name in tensors}


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a base model is saved, by the class without a head."""
    return {name.removeprefix("model.").removeprefix("transformer."): tensors[name] for name in tensors}


def with_stale_shards(folder: Path) -> None:
    """An index and its shards of another state lie beside the whole file."""
    old = {name: tensor + 1.0 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(old, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_bytes(b"another format")


TIED = ("llama3", "qwen2", "smollm3", "gemma3", "gpt2")


@pytest.mark.parametrize(
    ("family", "spoil"),
    [
        # `test_import_then_export_gives_the_same_bytes` has every family.
        *((family, None) for family in ("llama2", "olmo2", "gpt_oss")),
        *((family, with_own_head) for family in ("qwen2", "gemma3", "gpt2")),
        ("qwen2", with_same_head),
        ("smollm3", with_head_alone),
        *((family, without_prefix) for family in ("llama3", "gpt2")),
        ("mistral", with_stale_shards),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "plain"),
)
def test_transformers_has_the_loss_that_the_run_measured(family: str, spoil: Any, tmp_path: Path) -> None:
    """On the folder that the run starts from, on an export before any step, and on one after some."""
    import transformers  # takes seconds, which only some workers spend

    source = tmp_path / "source"
    make(family).save_pretrained(source)
    if spoil is with_stale_shards:
        spoil(source)
    elif spoil is not None:
        rewritten(source, spoil)
    model = section(source, 64)
    assert model.tied == (family in TIED and spoil is not with_own_head)
    config = RunConfig(
        run=RunSection(steps=8),
        model=model,
        data=DataSection(tokenizer="bytes"),
        training=TrainingSection(global_batch=4, microbatch=2, lr=1e-2, warmup_steps=0),
        pipeline=PipelineSection(stages=2, window=0, forward_codec="fp32", backward_codec="fp32"),
    )
    weights = asyncio.run(read_units(model, unit_names(model)))
    tokens = np.random.default_rng(3).integers(0, 96, 2000).astype(np.uint8)
    corpus = Corpus(tokens, sequence=64, global_batch=4, seed=0)
    samples = Samples.of(corpus.batch(0))

    def fetch(unit: str) -> dict[str, torch.Tensor]:
        return {f"parameter.{name}": torch.from_numpy(array) for name, array in weights[unit].items()}

    def measured(step: int, state: Mapping[str, Mapping[str, torch.Tensor]]) -> float:
        """By `eval` and by transformers on the export, which agree."""
        run = tmp_path / f"run-{step}"
        write_snapshot(run, config, {unit: dict(state[unit]) for unit in state}, step)
        loss = WholeModel(config, snapshot_directory(run / "snapshots", step), CPU).loss(samples)
        export(run, tmp_path / f"out-{step}", dtype="float32")
        assert loss_by_transformers(tmp_path / f"out-{step}", samples) == pytest.approx(loss, abs=1e-5)
        return loss

    def loss_by_transformers(folder: Path, samples: Samples) -> float:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = torch.from_numpy(samples.windows)
        with torch.no_grad():
            logits = loaded(rows[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))

    with MemoryPipeline(config, data=corpus, fetch=fetch) as stages:
        before = measured(1, stages.state())
        assert before == pytest.approx(loss_by_transformers(source, samples), abs=1e-5)
        stages.train(3)
        assert abs(measured(4, stages.state()) - before) > 0.01


def sampled(
    run_directory: Path,
    config: RunConfig,
    prompt: list[int],
    tokens: int = 12,
    ends: Collection[int] = (),
) -> list[int]:
    """As `thinwire sample --temperature 0` continues a prompt."""
    model = WholeModel(config, run_directory / "snapshots" / "step-00000004", CPU)
    return list(model.generate(prompt, tokens=tokens, temperature=0.0, top_k=0, seed=0, ends=ends))


def continued(model: Any, prompt: torch.Tensor, tokens: int = 12) -> list[int]:
    """The same by transformers."""
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return list(made[0, prompt.shape[1] :].tolist())


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
    import transformers

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
    made = sampled(tmp_path / "run", config, tokens[0].tolist())
    assert continued(loaded, tokens) == made
    end = made[6]
    short = sampled(tmp_path / "run", config, tokens[0].tolist(), ends=(end,))
    assert short == made[: made.index(end)], "the text stops before the id that ends it"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": None,
        "eos_token_id": 0,
        **({} if model.family == "gpt2" else {"pad_token_id": None}),
    }


def test_bytes_are_a_sentencepiece_model_too(tmp_path: Path) -> None:
    """Whose pieces have the values of bytes as their ids, and the space is the piece that means one."""
    found = pieces(byte_pieces())
    assert [kind for _, kind in found[:32]] == 32 * [6] and found[32] == ("\u2581", 1)
    assert [int(text[3:5], 16) for text, _ in found[:32] + found[33:256]] == [*range(32), *range(33, 256)]
    assert found[256:] == [("<0x20>", 6), ("<unk>", 2)]
    if importlib.util.find_spec("sentencepiece") is not None:
        import sentencepiece

        read = sentencepiece.SentencePieceProcessor(model_proto=byte_pieces())
        text = " gr\u00f6\u00dfer  than 1\n \U0001f600"
        assert read.encode(text) == list(text.encode()) and read.decode(read.encode(text)) == text
    config = replace(RunConfig(), model=ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16))
    snapshot(tmp_path / "run", config)
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == byte_pieces()


def pieces(data: bytes) -> list[tuple[str, int]]:
    """Text and type of each piece of a SentencePiece model."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while data[at] & 128:
            value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        return value | data[at] << shift, at + 1

    def fields(at: int, end: int) -> Iterator[tuple[int, int, int]]:
        while at < end:
            key, at = varint(at)
            if key & 7 == 0:
                value, at = varint(at)
                yield key >> 3, value, 0
            else:
                size, at = (4, at) if key & 7 == 5 else varint(at)
                yield key >> 3, at, at + size
                at += size

    found = []
    for number, start, end in fields(0, len(data)):
        if number == 1:
            inside = {one: (first, last) for one, first, last in fields(start, end)}
            found.append((data[slice(*inside[1])].decode(), inside[3][0]))
    return found


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_tables_of_a_byte_pair_encoding_become_a_tokenizer_that_transformers_loads(
    names: tuple[str, str], tmp_path: Path
) -> None:
    import transformers

    folder = write_tokenizer(tmp_path / "tables")
    made = json.loads((folder / "tokenizer.json").read_text())["model"]
    for file in folder.iterdir():
        file.unlink()
    vocabulary = made["vocab"] | {"<|endoftext|>": 0}
    (folder / names[0]).write_text(json.dumps(vocabulary))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in made["merges"])
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(merges))
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=400)
    (tmp_path / "own.jinja").write_text(TEMPLATE, encoding="utf-8-sig")
    data = DataSection(tokenizer=str(folder), chat_template=str(tmp_path / "own.jinja"))
    config = replace(RunConfig(), model=model, data=data)
    snapshot(tmp_path / "run", config)
    export(tmp_path / "run", tmp_path / "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(str(folder))
    text = "question 7: river seven? \u4e2d\u6587 nobody answers"
    assert theirs(text)["input_ids"] == ours.prompt(text) != []
    assert theirs.chat_template == TEMPLATE
    assert theirs.eos_token_id == 0 and theirs.decode(theirs(text)["input_ids"]) == text


def test_a_tokenizer_without_settings_keeps_its_rules_in_transformers(tmp_path: Path) -> None:
    """Which takes the class of the model's type otherwise: here Qwen's, which normalizes text."""
    import transformers

    folder = write_tokenizer(tmp_path / "t")
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            file.unlink()
    shape = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=400, qk_norm="head")
    config = replace(RunConfig(), model=shape, data=DataSection(tokenizer=str(folder)))
    snapshot(tmp_path / "run", config)
    export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(str(folder))
    text = "caf" + "e\u0301 1 2"
    assert theirs(text)["input_ids"] == ours.prompt(text)
    assert theirs.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("is_same", [False, True])
def test_settings_of_the_base_go_with_its_own_tokenizer_alone(tmp_path: Path, is_same: bool) -> None:
    base, own = write_tokenizer(tmp_path / "base", TEMPLATE), write_tokenizer(tmp_path / "own", TEMPLATE)
    (base / "chat_template.jinja").write_text("another")
    (base / "special_tokens_map.json").write_text('{"pad_token": "<|im_end|>"}')
    if not is_same:
        (own / "tokenizer.json").write_text((own / "tokenizer.json").read_text() + "\n")
    make("llama3").save_pretrained(base)
    (base / "generation_config.json").write_text('{"eos_token_id": 7}')
    config = replace(RunConfig(), model=section(base), data=DataSection(tokenizer=str(own)))
    snapshot(tmp_path / "run", config)
    export(tmp_path / "run", tmp_path / "out")
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).exists() == is_same
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 7


@pytest.mark.parametrize("begin", ["", "<|im_end|>"])
def test_a_model_trained_with_a_response_marker_has_a_chat_template(tmp_path: Path, begin: str) -> None:
    import transformers

    folder, marker = write_tokenizer(tmp_path / "t", TEMPLATE), '\n### "Answer":\n'
    if begin:
        bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, bpe.token_to_id(begin))]
        )
        bpe.save(str(folder / "tokenizer.json"))
    (folder / TOOL_TEMPLATE).parent.mkdir()
    (folder / TOOL_TEMPLATE).write_text("another")
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=400)
    data = DataSection(tokenizer=str(folder), format="chat", response_marker=marker)
    snapshot(tmp_path / "run", replace(RunConfig(), model=model, data=data))
    export(tmp_path / "run", tmp_path / "out")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "out" / "tokenizer.json"),
        chat_template=(tmp_path / "out" / "chat_template.jinja").read_text(),
        eos_token="<|endoftext|>",
    )
    assert not (tmp_path / "out" / TOOL_TEMPLATE).exists()
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    turns = ["one?", "two.", f"three?{marker}"]
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    said = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert said == f"{begin}one?{marker}two.<|endoftext|>three?{marker}"


ODD_ENDS = ([], -1, "0", 0.0, True, {"a": 1}, [[0]], [None, {}])
"""No ids: what the tokenizer knows counts."""


@each("given", [None, 0, [0, 1], *ODD_ENDS])
def test_a_chat_models_text_ends_where_a_turn_ends(tmp_path: Path, given: object) -> None:
    """Whatever the tokenizer and its base model end a text with."""
    folder = write_tokenizer(tmp_path / "t", TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if given is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given, "top_k": 7}))
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=400)
    config = replace(RunConfig(), model=model, data=DataSection(tokenizer=str(folder), format="chat"))
    snapshot(tmp_path / "run", config)
    export(tmp_path / "run", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [2, 0, *([1] if given == [0, 1] else [])]
    assert given is None or found["top_k"] == 7


def test_the_card_says_how_the_model_was_made(tmp_path: Path) -> None:
    """Settings, sources with their shares, tokens, and losses up to the exported step, held out too."""
    config = RunConfig(
        run=RunSection(name="two | sources", steps=40, seed=9),
        model=ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, sequence=64),
        data=DataSection(
            sources=("/home/me/a.jsonl", "/home/me/b"), weights=(3.0, 1.0), valid="/home/me/held.txt"
        ),
        training=TrainingSection(global_batch=4, schedule="wsd", lr=2e-3, warmup_steps=3),
    )
    run = tmp_path / "run"
    snapshot(run, config)
    told = (
        *(replace(done(step), loss=loss) for step, loss in ((1, 5.5), (3, 4.5), (4, 4.0), (5, 1.0))),
        *(held_out(step, loss) for step, loss in ((2, 3.0), (2, 2.5), (4, 2.75), (6, 1.0))),
    )
    for event in told:
        append(run, 1.0, event)
    export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    rows = dict(line[2:-2].split(" | ", 1) for line in card.splitlines() if " | " in line[2:-2])
    expected = {
        "text": "a.jsonl (75 %), b (25 %)",
        "held-out text": "held.txt",
        "schedule": "3 warmup steps, then constant, then linear to 10 % over the last 8 of 40 steps (wsd)",
        "optimizer": "AdamW, betas 0.9 and 0.95, eps 1e-08, weight decay 0.1, gradients clipped to 1",
        "learning rate": "0.002",
        "tokens": "1,024",
        "seed": "9",
        "loss of step 1": "5.5000",
        "loss of step 4": "4.0000",
        "held-out loss at step 4, 64 samples": "2.7500, 3.0000 with the run's codecs on the links",
        "best held-out loss": "2.5000, at step 2",
    }
    assert {name: rows.get(name) for name in expected} == expected
    assert "/home/me" not in card and "# two | sources" in card


def test_an_export_of_what_nodes_hold_finds_the_files_of_the_run_file(tmp_path: Path) -> None:
    """Manifests that nodes have seen name no paths. Where a tokenizer lay is left out of its settings."""
    source = tmp_path / "source"
    make("qwen2").save_pretrained(source)
    write_tokenizer(source)
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {
        **{"name_or_path": str(source), "tokenizer_class": "TokenizersBackend"},
        "extra_special_tokens": ["<|im_start|>"],
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    nulls = json.loads((source / "config.json").read_text()) | {
        "rope_scaling": None,
        "max_window_layers": None,
    }
    (source / "config.json").write_text(json.dumps(nulls | {"architectures": ["Kept"], "mine": 7}))
    config = RunConfig(model=section(source, 64), data=DataSection(tokenizer=str(source)))
    run = tmp_path / "run"
    snapshot(run, config)
    write_private(run / "run.toml", to_toml(config).encode())
    path = run / "snapshots" / "step-00000004" / "manifest.json"
    path.write_text(path.read_text().replace(f"{source}", "source"))
    export(run, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["mine"] == 7 and not {"rope_scaling", "max_window_layers"} & exported.keys()
    assert load_tokenizer(str(tmp_path / "out")).fingerprint == load_tokenizer(str(source)).fingerprint
    # transformers 5 wrote what older versions cannot read.
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in written
    assert written["additional_special_tokens"] == ["<|im_start|>"]
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"]
    assert len(files) > 3 and not [path for path in files if str(tmp_path) in path.read_text()]


def held_out(step: int, uncompressed: float) -> HeldOutLoss:
    return HeldOutLoss(
        step=step, loss=uncompressed + 0.25, uncompressed=uncompressed, samples=64, best=False, seconds=1.0
    )


def test_the_next_snapshot_is_exported_where_the_run_removes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16)
    config, run = replace(RunConfig(), model=model), tmp_path / "run"
    snapshot(run, config, 4)

    def read_as_the_run_goes_on(directory: Path, unit: str) -> bytes:
        if directory.name == "step-00000004" and unit == block_name(0):
            snapshot(run, config, 8)
            SnapshotFolder(run / "snapshots", config, "run").hold((8,))
        return read_unit(directory, unit)

    monkeypatch.setattr(module, "read_unit", read_as_the_run_goes_on)
    assert export(run, tmp_path / "out") == 8
    assert "| steps | 8 |" in (tmp_path / "out" / "README.md").read_text()
    snapshot(run, config, 4)
    with pytest.raises(RunError, match=r"step-00000004 .*use an older one"):
        export(run, tmp_path / "other", step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_model_is_exported_whose_optimizers_state_is_still_to_come(tmp_path: Path) -> None:
    model = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16)
    config = replace(RunConfig(), model=model, snapshots=SnapshotsSection(last="weights"))
    snapshot(tmp_path, config, step=1)
    optimizer = snapshot(tmp_path / "later", config, step=4)
    ahead = SnapshotFolder(tmp_path / WEIGHTS_FOLDER, config, "run")
    for unit in unit_names(model):
        state = optimizer.unit_state(unit)
        ahead.put(
            config.run.steps, unit, serialize_unit({n: t for n, t in state.items() if "parameter" in n})
        )
    assert export(tmp_path, tmp_path / "out") == config.run.steps
    export(tmp_path / "later", tmp_path / "same", step=4)
    files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "same")]
    assert files[0] == files[1]


def test_bad_requests_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    with pytest.raises(UserError, match="no complete snapshot yet"):
        export(run, out)
    snapshot(run, replace(RunConfig(), model=ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16)))
    with pytest.raises(UserError, match="no snapshot of step 5"):
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


def test_an_empty_folder_is_filled_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that an earlier export began to write."""
    snapshot(tmp_path / "run", replace(RunConfig(), model=SHAPE))
    names = set()
    for out in (tmp_path / "new", tmp_path / "link", Path()):
        folder = tmp_path / f"of-{out.name}"
        if out.name != "new":
            (folder / ".partial").mkdir(parents=True)
        if out.name == "link":
            out.symlink_to(folder)
        if not out.name:
            monkeypatch.chdir(folder)
        export(tmp_path / "run", out)
        names.add(tuple(sorted(path.name for path in out.iterdir())))
    assert len(names) == 1 and "model.safetensors" in names.pop()
    with pytest.raises(UserError, match="is in use"):
        export(tmp_path / "run", Path())


@pytest.mark.parametrize("is_there", [False, True])
def test_two_exports_do_not_write_into_one_folder(is_there: bool, tmp_path: Path) -> None:
    snapshot(tmp_path / "run", replace(RunConfig(), model=SHAPE))
    out = tmp_path / "out"
    partial = out / ".partial" if is_there else tmp_path / ".out.partial"
    partial.mkdir(parents=True)
    (partial / "half.safetensors").touch()
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="on its way"):
        export(tmp_path / "run", out)
    assert (partial / "half.safetensors").exists()
    os.close(other)  # as if it was killed
    export(tmp_path / "run", out)
    assert (out / "model.safetensors").exists() and not (out / "half.safetensors").exists()


def test_a_step_that_ran_again_is_served_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from node.cli.serve import exported

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    write_run(run, ended=True)
    arguments = argparse.Namespace(run_dir=run, step="4")
    folders = []
    for scale in (1.0, 2.0):
        config = replace(RunConfig(), model=SHAPE)
        units = unit_names(config.model)
        optimizer = StageOptimizer([build_chunk(config.model, units, 3, CPU)], config.training)
        state = {unit: optimizer.unit_state(unit) for unit in units}
        write_snapshot(
            run, config, {u: {n: (scale * t).to(t.dtype) for n, t in s.items()} for u, s in state.items()}, 4
        )
        folders.append(exported(arguments))
        assert exported(arguments) == folders[-1]
        with monkeypatch.context() as elsewhere, pytest.raises(UserError, match="set XDG_CACHE_HOME"):
            elsewhere.setenv("XDG_CACHE_HOME", __file__)
            exported(arguments)
        shutil.rmtree(run / "snapshots")
    assert folders[0] != folders[1]
    assert not folders[0].exists() and (folders[1] / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("tokenizer", "pieces"),
    [("t", b"of t"), ("t/tokenizer.json", b"of t"), ("t/other.json", None), ("gone", b"of the base")],
)
def test_a_sentencepiece_model_is_exported_with_its_tokenizer(
    tokenizer: str, pieces: bytes | None, tmp_path: Path
) -> None:
    make("llama3").save_pretrained(tmp_path / "base")
    (write_tokenizer(tmp_path / "base", TEMPLATE) / "tokenizer.model").write_bytes(b"of the base")
    own = write_tokenizer(tmp_path / "t", TEMPLATE)
    shutil.copyfile(own / "tokenizer.json", own / "other.json")
    (own / "tokenizer.model").write_bytes(b"of t")
    data = DataSection(tokenizer=str(tmp_path / tokenizer))
    snapshot(tmp_path / "run", replace(RunConfig(), model=section(tmp_path / "base", 64), data=data))
    export(tmp_path / "run", tmp_path / "out")
    written = tmp_path / "out" / "tokenizer.model"
    assert (written.read_bytes() if written.exists() else None) == pieces


def test_a_model_without_its_tokenizer_is_not_served_until_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from node.cli import serve

    run, model = RunSection(name="a--b-"), replace(SHAPE, vocab=400)
    config = RunConfig(run=run, model=model, data=DataSection(tokenizer=str(tmp_path / "t")))
    snapshot(tmp_path / "run", config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("node.cli.run_directory.existing_run_directory", lambda directory: directory)
    kept = snapshot_directory(tmp_path / "run" / "snapshots", 4)
    monkeypatch.setattr(serve, "open_snapshot", lambda args: (config, 4, kept))
    arguments = argparse.Namespace(run_dir=tmp_path / "run", step="4")
    with pytest.raises(UserError, match="copy it there"):
        serve.exported(arguments)
    write_tokenizer(tmp_path / "t", TEMPLATE)
    folder = serve.exported(arguments)
    assert folder.name == "a-b-4" and (folder / "tokenizer.json").is_file()


def test_an_export_says_that_it_has_no_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor the chat template that the run trained with."""
    data = DataSection(tokenizer=str(tmp_path / "gone"), chat_template=str(tmp_path / "gone.jinja"))
    snapshot(tmp_path / "run", RunConfig(model=SHAPE, data=data))
    export(tmp_path / "run", tmp_path / "out")
    assert "gone is not on this machine" in caplog.text
    assert "gone.jinja is not on this machine" in caplog.text


@pytest.mark.parametrize("changed", ['{"rope_theta": 5e5}', "{", "[]", '{"model_type": "mamba"}'])
def test_a_config_of_the_checkpoint_that_has_changed_does_not_describe_the_trained_model(
    changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make("qwen3").save_pretrained(tmp_path / "base")
    model = section(tmp_path / "base", 64)
    snapshot(tmp_path / "run", replace(RunConfig(), model=model))
    path = tmp_path / "base" / "config.json"
    given = json.loads(path.read_text())
    added = json.loads(changed) if changed != "{" else None
    if isinstance(added, dict):
        given.pop("rope_parameters", None)
        changed = json.dumps(given | added)
    path.write_text(changed)
    export(tmp_path / "run", tmp_path / "out")
    assert "config.json" in caplog.text and str(tmp_path / "base") in caplog.text
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert read_config(written, "config.json", 64) == {
        key: getattr(model, key) for key in read_config(written, "", 64)
    }
