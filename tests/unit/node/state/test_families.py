"""Every family of models: logits, gradients and round trips of tiny random models made by transformers."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from node.config.schema import DataSection, LoraSection, ModelSection, PipelineSection, RunConfig
from node.data.text import LFS_POINTER
from node.data.tokenizer import special_tokens
from node.model.chunk import Chunk, build_chunk
from node.model.llama_block import rotary_frequencies
from node.model.units import block_name, unit_names
from node.stage.executor import StageExecutor
from node.stage.stage_model import StageModel
from node.state.families import read_config, write_config
from node.state.start import check_weights, frozen_ends, open_source, read_units
from node.state.unit_state import weights_file
from node.state.weights import Checkpoint, CheckpointError, FolderFiles
from node.telemetry.clock import StageClock
from tests.support.chat_data import write_tokenizer
from tests.support.families import CONFIGS, LENGTH, SIZES, make, section
from wire.errors import ConfigError, DataError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=CONFIGS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path]]:
    """A model and the folder where transformers saved it."""
    model, folder = make(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    yield model, folder


def chunks(model: ModelSection, stages: int) -> list[Chunk]:
    """The model on so many stages, with the checkpoint's weights."""
    names = unit_names(model)
    cuts = [round(index * len(names) / stages) for index in range(stages + 1)]
    made = []
    for first, last in pairwise(cuts):
        units = names[first:last]
        chunk = build_chunk(model, units, 0, CPU)
        weights = asyncio.run(read_units(model, units))
        with torch.no_grad():
            for unit, parameters in chunk.named_units():
                assert parameters.keys() == weights[unit].keys()
                for name, parameter in parameters.items():
                    parameter.copy_(torch.from_numpy(weights[unit][name]))
        made.append(chunk)
    return made


def run(stages: list[Chunk], tokens: Tensor) -> Tensor:
    x = tokens
    for stage in stages:
        x = stage(x)
    return x


def test_gemmas_older_configs_say_the_same() -> None:
    """As the published checkpoints have it: no list of layers, two bases beside each other."""
    import transformers

    config = {
        **{key: value for key, value in SIZES.items() if value is not None},
        "model_type": "gemma3_text",
        "num_hidden_layers": 13,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    found = read_config(config, "config.json", LENGTH)
    expected = {
        "window": 512,
        "no_window": (5, 11),
        "window_theta": 10_000.0,
        "rope_theta": 1_000_000.0,
        "rope_scaling": "linear",
        "rope_factor": 8.0,
        "query_scale": 0,
        "norm_offset": True,
    }
    assert {key: found[key] for key in expected} == expected
    theirs = transformers.Gemma3TextConfig(**config)
    full = [index for index, name in enumerate(theirs.layer_types) if name == "full_attention"]
    assert tuple(full) == found["no_window"]


SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": SHORT_YARN | {"truncate": False}},
        {"rope_parameters": {"full_attention": {"type": "linear", "factor": 4.0}}},
        {"rope_parameters": {"full_attention": {"type": "linear"}}, "rope_scaling": {"factor": 8.0}},
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_gemmas_rotary_values_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, Gemma3TextConfig

    config = {**SIZES, "model_type": "gemma3_text", "head_dim": 16, "sliding_window_pattern": 2, **rope}
    ours = ModelSection(**read_config(config, "config.json", LENGTH))
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**deepcopy(config)))
    torch.testing.assert_close(rotary_frequencies(ours), theirs.full_attention_inv_freq)
    torch.testing.assert_close(rotary_frequencies(ours, windowed=True), theirs.sliding_attention_inv_freq)


def test_an_export_says_rotary_values_as_older_programs_read_them_too(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    original = json.loads((folder / "config.json").read_text())
    written = write_config(section(folder), "float32", original)
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    assert ("rope_theta" in older) == ("rope_parameters" in original)
    assert read_config(older, "", LENGTH) == read_config(original, "", LENGTH)
    theirs = type(model.config).from_dict(deepcopy(written))
    assert read_config(theirs.to_dict(), "", LENGTH) == read_config(original, "", LENGTH)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """All sixteen codes, and scales from the least to the largest."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make("gpt_oss")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)
    tensors, expected = model.state_dict(), {}
    generator = torch.Generator().manual_seed(3)
    for path in [path for path in tensors if path.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(path).shape
        codes, scales = (
            torch.randint(*within, shape, generator=generator, dtype=torch.uint8)
            for within, shape in (
                ((0, 256), (experts, outputs, inputs // 32, 16)),
                ((1, 252), (experts, outputs, inputs // 32)),
            )
        )
        tensors |= {f"{path}_blocks": codes, f"{path}_scales": scales}
        expected[path] = convert_moe_packed_tensors(codes, scales).float()
    save_file(tensors, tmp_path / "model.safetensors")
    read = asyncio.run(read_units(section(tmp_path), unit_names(section(tmp_path))))
    for number in range(SIZES["num_hidden_layers"]):
        within = f"model.layers.{number}.mlp.experts"
        fused, down = expected[f"{within}.gate_up_proj"], expected[f"{within}.down_proj"]
        for name, one in (("gate", fused[:, :, 0::2]), ("up", fused[:, :, 1::2]), ("down", down)):
            found = torch.as_tensor(read[block_name(number)][f"{name}.weight"])
            assert torch.equal(found.view(torch.int32), one.mT.flatten(0, 1).contiguous().view(torch.int32))


def test_logits_are_those_of_transformers_early_and_late(saved: tuple[Any, Path]) -> None:
    """On four stages; `test_gradients_are_those_of_transformers` has the model on one."""
    model, folder = saved
    tokens = torch.randint(0, 96, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
        found = run(chunks(section(folder), 4), tokens)
    for position in (0, 1000, LENGTH - 1):
        assert float(expected[0, position].abs().max()) > 1, "or the tolerance would say little"
        torch.testing.assert_close(found[0, position], expected[0, position], rtol=0, atol=1e-5)


def test_gradients_are_those_of_transformers(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    rows = torch.randint(0, 96, (2, 65), generator=torch.Generator().manual_seed(2))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    model.zero_grad()
    logits = model(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    short = section(folder, 64) if "n_positions" not in model.config.to_dict() else section(folder)
    # Theirs in the form of a checkpoint, which we read as one.
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.grad, parameter.data
    try:
        model.save_pretrained(tmp_path)
    finally:
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.grad, parameter.data
    expected = asyncio.run(read_units(replace(short, from_=str(tmp_path)), unit_names(short)))
    (whole,) = chunks(short, 1)
    whole.loss(tokens, labels).backward()
    found = {unit: {name: p.grad for name, p in named.items()} for unit, named in whole.named_units()}
    if short.tied:
        total = found["embed"]["tokens.weight"] + found["head"]["output.weight"]
        found["embed"]["tokens.weight"] = found["head"]["output.weight"] = total
    for unit, gradients in found.items():
        for name, gradient in gradients.items():
            wanted = torch.from_numpy(expected[unit][name])
            assert float((gradient - wanted).norm()) <= 1e-4 * float(wanted.norm()), (unit, name)


def test_shards_in_any_order_read_the_same(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors, key=lambda name: name[::-1])
    weight_map = {}
    for index in range(3):
        file = f"model-{index}.safetensors"
        part = names[index::3]
        save_file({name: tensors[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    units = unit_names(section(folder))
    one, many = (asyncio.run(read_units(section(place), units)) for place in (folder, tmp_path))
    for unit in units:
        for name, array in one[unit].items():
            assert np.array_equal(array, many[unit][name])


def test_weights_are_read_in_bfloat16_as_they_are_stored(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = saved
    tensors = {
        name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    units = unit_names(section(tmp_path))
    as_stored, as_numbers = (
        asyncio.run(read_units(section(tmp_path), units, as_stored=choice)) for choice in (True, False)
    )
    for unit in units:
        assert {array.dtype for array in as_stored[unit].values()} == {np.dtype(np.uint16)}
        assert weights_file(as_stored[unit]) == weights_file(as_numbers[unit])


def test_weights_in_float64_are_read_as_transformers_does(saved: tuple[Any, Path], tmp_path: Path) -> None:
    import transformers

    _, folder = saved
    kept = load_file(folder / "model.safetensors")
    tensors = {name: tensor.double() + 1e-9 for name, tensor in kept.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = theirs.get_input_embeddings().weight.detach().numpy()
    units = unit_names(section(tmp_path))
    for choice in (True, False):
        read = asyncio.run(read_units(section(tmp_path), units, as_stored=choice))
        assert np.array_equal(read["embed"]["tokens.weight"], expected)
    name = next(name for name in tensors if name.endswith(("model.norm.weight", "ln_f.weight")))
    tensors[name][0] = 1e300
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=f"tensor {name} has 1 infinities"):
        asyncio.run(read_units(section(tmp_path), units))


def test_a_stage_starts_from_the_checkpoint_with_a_fresh_optimizer(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    model = section(folder, 64)
    config = replace(RunConfig(), model=model, pipeline=replace(PipelineSection(), stages=2))
    executor = StageExecutor(config, CPU, StageClock(), StageModel(config, CPU))
    executor.place(1, 2)
    weights = asyncio.run(read_units(model, executor.units))
    named = {
        unit: {f"parameter.{name}": torch.from_numpy(array) for name, array in arrays.items()}
        for unit, arrays in weights.items()
    }
    executor.restore(0, named.__getitem__)
    state = executor.copy_state()
    assert state.units == tuple(weights)
    for unit in state.units:
        tensors = state.whole(unit)
        assert int(tensors["step"]) == 0
        for name, tensor in tensors.items():
            if name.startswith("parameter."):
                assert torch.equal(tensor, named[unit][name])
            else:
                assert not tensor.any()


# ---- refusals


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama2")
    make("llama2").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(llama2: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return shutil.copytree(llama2, tmp_path / "model")


def read(folder: Path) -> None:
    model = section(folder)
    asyncio.run(read_units(model, unit_names(model)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model_type": "deepseek_v2"}, "model_type is 'deepseek_v2'"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"vision_config": {}}, "vision_config is {}"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is {'bits': 4}"),
        ({"quantization": {"bits": 4}}, r"quantization is {'bits': 4}"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"is_causal": False}, "is_causal is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"max_position_embeddings": 100}, "model.sequence is 1100"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"model_type": "gemma3_text", "hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    ],
)
def test_unsupported_models_are_refused_by_key_and_value(
    llama2: Path, change: dict[str, Any], line: str
) -> None:
    config = json.loads((llama2 / "config.json").read_text()) | change
    with pytest.raises(ConfigError, match=line) as caught:
        read_config(config, "config.json", LENGTH)
    assert "\n" not in str(caught.value)


def drop(folder: Path, words: str) -> None:
    """Leave tensors of such names out."""
    path = folder / "model.safetensors"
    kept = {name: tensor.clone() for name, tensor in load_file(path).items() if words not in name}
    save_file(kept, path)


def put(folder: Path, tensor: Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: other.clone() for name, other in load_file(path).items()}
    save_file({**tensors, "model.layers.1.self_attn.q_proj.weight": tensor}, path)


def rename(folder: Path, old: str, new: str) -> None:
    path = folder / "model.safetensors"
    save_file({name.replace(old, new): tensor.clone() for name, tensor in load_file(path).items()}, path)


def cut(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def point(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(LFS_POINTER + b"v1\noid sha256:0\n")


def put_twice(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {name: other.clone() for name, other in load_file(path).items()}
    save_file({**tensors, "norm.weight": torch.zeros(32)}, path)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(folder: Path, file: str) -> None:
    """As of a model in several files."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-0.safetensors")
    save_file({"other": torch.zeros(1)}, folder / "model-1.safetensors")
    values = {"weight_map": dict.fromkeys(names, "model-0.safetensors") | {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda folder: drop(folder, "up_proj"), r"has no tensor .*up_proj.weight, which .*: copy the"),
        (lambda folder: drop(folder, "lm_head"), r"has no tensor lm_head.weight, .*tie_word_embeddings"),
        (
            lambda folder: put(folder, torch.zeros(3, 5)),
            r"q_proj.weight has shape \[3, 5\], expected \[32, 32.*: its config.json",
        ),
        (lambda folder: put(folder, torch.zeros(32, 4, dtype=torch.uint32)), "q_proj.weight is U32"),
        (lambda folder: cut(folder, -100), "is truncated: .* ends at byte .*: copy it again"),
        (
            lambda folder: cut(folder, 900),
            "is truncated or not a safetensors file: a header of .*: copy it again",
        ),
        (lambda folder: cut(folder, 5), "is truncated: 5 bytes.*: copy it again"),
        (point, "model.safetensors is a pointer of Git LFS; fetch"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (
            lambda folder: index(folder, "model-2.safetensors"),
            r"model-2.safetensors, which .*index.json names, is missing: copy it",
        ),
        (lambda folder: index(folder, "model-1.safetensors"), "lacks tensor model.norm.weight, which"),
        (lambda folder: index(folder, "../model.safetensors"), r"'../model.safetensors', .* beside it"),
        (lambda folder: index(folder, "x" * 256), "xxx.*, but names of files beside it are expected"),
        (lambda folder: index(folder, "x\x1b[31m"), "x1b.*, but names of files beside it are expected"),
        (
            lambda folder: rename(folder, "model.", "_orig_mod.model."),
            r"embed_tokens.weight, which .*; it has _orig_mod.model.embed_tokens.weight",
        ),
        (lambda folder: rename(folder, "q_proj.", "q_proj.base_layer."), "q_proj.weight, .*merge_and_unload"),
        (lambda folder: rename(folder, "q_proj.weight", "q_proj.qweight"), "qweight, of quantized"),
        (put_twice, "has both model.norm.weight and norm.weight"),
        (pickled, r"only pickled weights .*save_pretrained"),
    ],
)
def test_damaged_files_are_one_line(folder: Path, spoil: Callable[[Path], None], line: str) -> None:
    """Found by their headers, before a run starts, and again by whoever reads them; nothing is returned."""
    model = section(folder)
    asyncio.run(check_weights(model))
    spoil(folder)
    with pytest.raises(DataError, match=line) as early:
        asyncio.run(check_weights(model))
    with pytest.raises(DataError) as late:
        read(folder)
    assert str(late.value) == str(early.value) and "\n" not in str(early.value)


def test_weights_in_two_forms_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    section(folder)
    assert "both" not in caplog.text
    weights = (folder / "model.safetensors").read_bytes()
    index(folder, "model-0.safetensors")
    section(folder)
    assert "both" not in caplog.text
    (folder / "model.safetensors").write_bytes(weights)
    section(folder)
    assert "has both model.safetensors and model.safetensors.index.json" in caplog.text


def test_tensors_that_no_model_has_are_reported_and_one_in_two_files_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = load_file(folder / "model.safetensors")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file({**names, **old}, folder / "model.safetensors")
    asyncio.run(check_weights(section(folder)))
    assert not caplog.records
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    save_file({**names, **bias}, folder / "model.safetensors")
    asyncio.run(check_weights(section(folder)))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [*bias]
    for name, line in (("lora_A.default.weight", "merge_and_unload"), ("weight_scale_inv", "of quantized")):
        more = {f"model.layers.0.self_attn.q_proj.{name}": torch.ones(1)}
        save_file({**names, **more}, folder / "model.safetensors")
        with pytest.raises(DataError, match=line):
            asyncio.run(check_weights(section(folder)))
    save_file(names, folder / "model.safetensors")
    index(folder, "model-0.safetensors")
    values = json.loads((folder / "model.safetensors.index.json").read_text())
    values["weight_map"]["lm_head.weight"] = "model-1.safetensors"
    save_file(
        {name: names[name] for name in ("model.norm.weight", "lm_head.weight")},
        folder / "model-1.safetensors",
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"tensor .* in model-\d.safetensors and in model-\d.safetensors"):
        asyncio.run(check_weights(section(folder)))


@pytest.mark.parametrize("tied", [False, True])
def test_an_end_of_answers_that_was_never_trained_and_will_not_be_is_reported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, tied: bool
) -> None:
    """As a base model's file has it, where adapters are trained on conversations."""
    chat = DataSection(tokenizer=str(write_tokenizer(tmp_path / "chat")), format="chat")
    config = replace(RunConfig(), data=chat, lora=LoraSection(rank=4))
    ends = frozen_ends(config)
    assert ends == {2} and not frozen_ends(replace(config, lora=LoraSection()))
    assert not frozen_ends(replace(config, data=DataSection()))
    if tied:
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight").bfloat16()
    matrix = tensors["model.embed_tokens.weight"] if tied else head
    for value, reported in ((1e-3, False), (1e-24, True), (0.0, True)):
        matrix[2] = value
        own = {} if tied else {"lm_head.weight": matrix}
        save_file({**tensors, **own}, folder / "model.safetensors", {"format": "pt"})
        caplog.clear()
        asyncio.run(check_weights(section(folder), {*ends, 1000}))  # the text may have no such token
        assert ("token 2, which ends answers" in caplog.text) == reported


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_with_infinities_or_nans_is_named_by_whoever_reads_it(folder: Path, value: float) -> None:
    tensor = torch.zeros(32, 32)
    tensor[3, 4] = value
    put(folder, tensor)
    model = section(folder)
    asyncio.run(check_weights(model))
    asyncio.run(read_units(model, ["embed", block_name(0), "head"]))
    line = r"model\.safetensors: tensor model\.layers\.1\.self_attn\.q_proj\.weight has 1 infinities or NaNs"
    with pytest.raises(CheckpointError, match=line):
        asyncio.run(read_units(model, [block_name(1)]))


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("header", "line"),
    [
        (b"{%s}" % b",".join(b'"%d":%s' % (n, ENTRY) for n in range(100_001)), "more than 100,000 tensors"),
        (b'{"__metadata__":"%s"}' % (b"x" * (16 << 20)), "bytes of JSON"),
        (b"[" * 100_000, "its JSON cannot be read"),
        *(
            (b'{"lm_head.weight":%s}' % ENTRY.replace(old, new), "damaged at lm_head.weight")
            for old, new in (
                (b"[1]", b"[Infinity]"),
                (b"[1]", b"[true]"),
                (b"[1]", b'"12"'),
                (b"[1]", b"[-1]"),
                (b"[0,4]", b"[0]"),
                (b"[0,4]", b"[0,1e400]"),
                (b'"F32"', b"[]"),
            )
        ),
        (
            b'{"lm_head.weight":%s}' % ENTRY.replace(b"[1]", b"[%s]" % b",".join(9000 * [b"2"])),
            "is damaged: lm_head",
        ),
        (b'{"lm_head.weight":%s}' % ENTRY.replace(b"[0,4]", b"[8,4]"), "is damaged: lm_head"),
        (b'{"a":%s,"b":%s}' % (ENTRY, ENTRY), "a and b overlap"),
        (b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}}', "its header and a are 1 bytes apart"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "a and its end are 2 bytes apart"),
    ],
    ids=range(15),
)
def test_headers_that_a_stranger_wrote_are_bounded(folder: Path, header: bytes, line: str) -> None:
    path = folder / "model.safetensors"
    model = section(folder)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=line) as caught:
        asyncio.run(check_weights(model))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def linked(path: Path) -> None:
    private = path.parent.parent / "private"
    private.write_text("{}")
    path.symlink_to(private)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), linked], ids=range(3))
def test_pipes_devices_and_links_out_of_the_folder_are_not_read(
    folder: Path, name: str, put: Callable[[Path], None]
) -> None:
    (folder / name).unlink(missing_ok=True)
    put(folder / name)
    if name == "tokenizer_config.json":
        with pytest.raises(DataError) as caught:
            special_tokens(folder)
    else:
        with pytest.raises(DataError) as caught:
            read(folder)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_link_to_a_snapshot_of_the_cache_is_read_as_the_snapshot(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "hub/models--a--b/blobs"
    shutil.copytree(folder, blobs)
    snapshot = blobs.parent / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "mine").symlink_to(snapshot)
    asyncio.run(check_weights(section(tmp_path / "mine")))


def test_a_tied_models_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    make("qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(104, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[104, 32\], expected \[96, 32\]"):
        asyncio.run(check_weights(section(tmp_path)))


def test_adapters_are_no_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"contains adapters \(adapter_config.json\)"):
        section(folder)


def test_a_gguf_file_is_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match="GGUF") as raised:
            section(path)
        assert str(file) in str(raised.value)


def test_gguf_files_beside_a_model_are_ignored(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert section(folder).layers


async def test_neighbours_in_a_folder_are_read_at_once_and_from_a_hub_in_pieces(folder: Path) -> None:
    """A unit that is read at once is not joined: a copy of it, on the event loop."""
    lengths: list[int] = []

    class Counted(FolderFiles):
        async def read(self, name: str, start: int, end: int) -> bytes:
            lengths.append(end - start)
            return await super().read(name, start, end)

    model, (unit, *_) = section(folder), unit_names(section(folder))
    whole, pieces = Counted(folder), Counted(folder)
    pieces.piece_bytes = 1000
    at_once = await Checkpoint(whole).read(model, [unit])
    most = max(lengths)
    size = sum(weights.nbytes for weights in at_once[unit].values())
    assert most >= size, "all of the unit in one read"
    lengths.clear()
    in_pieces = await Checkpoint(pieces).read(model, [unit])
    assert lengths.count(1000) >= size // 1000 - 1
    for name, weights in at_once[unit].items():
        np.testing.assert_array_equal(weights, in_pieces[unit][name])


def test_a_key_that_contradicts_the_checkpoint_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.layers is 3, but .*config.json says 4"):
        open_source(str(folder), {"layers": 3})
