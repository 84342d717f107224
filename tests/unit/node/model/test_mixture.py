"""Mixtures of experts: what is kept, the block's own terms of the loss, frozen experts, training."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.reach import EVERYTHING
from node.config.schema import (
    DataSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.model import routed_half
from node.model.blocks import Block
from node.model.chunk import Chunk, build_chunk
from node.model.mixture_block import MixtureBlock
from node.model.optimizers import MuonRule, update_rules
from node.model.shard_shapes import check_shards, frozen_bytes
from node.model.storage import Storage, stored_bytes
from node.model.units import block_name, unit_names, unit_parameters
from node.run_file.validate import problems
from node.state.start import read_units
from tests.support.families import make, section
from tests.support.memory_pipeline import MemoryPipeline, corpus
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import RunError

CPU = torch.device("cpu")
QWEN = ModelSection(
    family="mixture",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_width=16,
    ffn=24,
    experts=5,
    experts_per_token=2,
    qk_norm="head",
    sequence=40,
    init_std=0.2,
)
GPT_OSS = replace(
    QWEN,
    qk_norm="none",
    qkv_bias=True,
    all_biases=True,
    sinks=True,
    swiglu_limit=0.5,
    window=16,
    no_window=(1,),
    rope_scaling="yarn",
    rope_factor=4.0,
    rope_original=16,
)
TOKENS = torch.randint(0, 256, (2, 41), generator=torch.Generator().manual_seed(1))


def whole(model: ModelSection, storage: Storage | None = None, lora: LoraSection | None = None) -> Chunk:
    return build_chunk(model, unit_names(model), 0, CPU, storage=storage, lora=lora)


def gradients(chunk: Chunk) -> dict[str, Tensor]:
    chunk.zero_grad(set_to_none=True)
    chunk.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    return {name: one.grad for name, one in chunk.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("model", [QWEN, GPT_OSS], ids=["qwen3", "gpt-oss"])
def test_what_runs_again_has_the_same_bits_and_few_bits_are_near(model: ModelSection) -> None:
    expected = gradients(whole(model))
    assert len(expected) == len(list(whole(model).parameters()))
    for storage in (Storage(ffn_input="recompute"), Storage(again=True)):
        for name, value in gradients(whole(model, storage)).items():
            assert torch.equal(value, expected[name]), name
    kept = Storage(norm_input="8", ffn_input="8", attention="bf16", attention_output="bf16")
    for name, value in gradients(whole(model, kept)).items():
        assert float((value - expected[name]).norm()) < 0.2 * float(expected[name].norm()), name


@pytest.mark.parametrize("kept", ["bf16", "recompute", "4"])
def test_clamped_activations_in_pieces_have_the_same_bits(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(ffn_input=kept)
    expected = gradients(whole(GPT_OSS, storage))
    monkeypatch.setattr(routed_half, "ELEMENTS_AT_ONCE", 1)
    for name, value in gradients(whole(GPT_OSS, storage)).items():
        assert torch.equal(value, expected[name]), name


def test_a_blocks_own_terms_have_the_gradients_of_their_formula() -> None:
    """Of the mean over all blocks of one microbatch, as transformers has it where there is one block."""
    model = replace(QWEN, layers=1, balance_loss=0.7, z_loss=0.3)
    plain, found = gradients(whole(replace(model, balance_loss=0.0, z_loss=0.0))), whole(model)
    found.share_loss(0.5)
    added = {name: value - plain[name] for name, value in gradients(found).items()}
    block = found.layers[1]
    assert isinstance(block, MixtureBlock) and block.load is not None
    assert int(block.load.sum()) == 2 * 40 * 2
    # By autograd: the router's logits of the block's own input.
    with torch.no_grad():
        x = block._attention_half(found.layers[0](TOKENS[:, :-1]), EVERYTHING)
    x.requires_grad_()
    logits = block.router(block.ffn_norm(x)).flatten(0, 1)
    load = torch.bincount(logits.topk(2, dim=1).indices.flatten(), minlength=5)
    assert torch.equal(load, block.load)
    block.zero_grad()
    balance = 0.7 * 5 * (load / len(logits) * logits.softmax(1).mean(0)).sum()
    (0.5 * (balance + 0.3 * logits.logsumexp(1).square().mean())).backward()
    assert block.router.weight.grad is not None
    torch.testing.assert_close(
        added["layers.1.router.weight"], block.router.weight.grad, rtol=1e-3, atol=1e-6
    )
    for name in ("gate", "up", "down"):
        assert not added[f"layers.1.{name}.weight"].any()


@pytest.mark.parametrize("base", ["float32", "bf16", "8", "6", "5", "4", "3"])
def test_frozen_experts_compute_as_what_they_unpack_to(base: str) -> None:
    """And take the bytes that are counted; the router stays in float32."""
    lora = LoraSection(rank=3, alpha=6.0, base=base)
    packed = whole(GPT_OSS, lora=lora)
    plain = whole(GPT_OSS, lora=replace(lora, base="float32"))
    kept = 0
    for block, other in zip(packed.layers, plain.layers, strict=True):
        if not isinstance(block, Block):
            continue
        kept = sum(value.nbytes for name, value in block.named_buffers() if "_sd" not in name)
        for name, module in block.named_modules():
            if hasattr(module, "adapt"):
                assert module.weight.form == ("float32" if name == "router" else base)
                other.get_submodule(name).weight.kept = module.weight.dense(torch.float32)
    assert kept == frozen_bytes(GPT_OSS, lora, block_name(0))
    for chunk in (packed, plain):
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            for end in (chunk.layers[0].tokens, chunk.layers[-1].output):
                weight = end.weight if isinstance(end.weight, Tensor) else end.weight.kept
                weight.copy_(weight.bfloat16())
    expected, found = gradients(plain), gradients(packed)
    # Of attention, router and experts: A and B.
    assert expected.keys() == found.keys() and len(found) == 2 * 2 * 8
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def config(model: ModelSection, **training: object) -> RunConfig:
    return RunConfig(
        run=RunSection(steps=40),
        model=model,
        data=DataSection(tokenizer="bytes"),
        training=replace(
            TrainingSection(
                global_batch=4,
                microbatch=2,
                lr=1e-2,
                warmup_steps=0,
                schedule="constant",
                weight_decay=0.0,
                clip=1e9,
            ),
            **training,
        ),
        pipeline=PipelineSection(stages=2, window=0, forward_codec="fp32", backward_codec="fp32"),
    )


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_steps_have_the_losses_of_transformers(family: str, tmp_path: Path) -> None:
    """Of one AdamW over the whole model, from the same weights on the same samples."""
    theirs = make(family)
    theirs.resize_token_embeddings(256)
    theirs.save_pretrained(tmp_path)
    run = config(section(tmp_path, 32), lr=1e-3)
    weights = asyncio.run(read_units(run.model, unit_names(run.model)))
    reference = ReferenceTrainer(run, corpus(run))
    reference.start_from(weights)
    found = [step.loss for step in reference.train(8)]
    theirs.train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    data, expected = corpus(run), []
    for step in range(8):
        samples = torch.from_numpy(np.asarray(data.batch(step), dtype=np.int64))
        loss = F.cross_entropy(theirs(samples[:, :-1]).logits.flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-3) and found[-1] < 0.99 * found[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bits_do_not_depend_on_stages_or_a_restore(optimizer: str) -> None:
    run = config(replace(QWEN, balance_loss=0.3, z_loss=0.1), optimizer=optimizer)
    with MemoryPipeline(run) as stages:
        first = stages.train(2)
        state = stages.state()
        expected, hashed = stages.train(2), stages.weights_sha256()
    # Each of two microbatches has half of the blocks' own loss terms.
    whole = ReferenceTrainer(run, corpus(run)).train(2)
    norms = [step.grad_norm for step in first]
    assert [step.grad_norm for step in whole] == pytest.approx(norms, rel=1e-4)
    for count in (1, 2):
        other = replace(run, pipeline=replace(run.pipeline, stages=count))
        with MemoryPipeline(other) as stages:
            assert stages.train(2) == first
            assert stages.train(2) == expected
        with MemoryPipeline(other) as stages:
            stages.restore(2, _kept(state))
            assert stages.train(2) == expected and stages.weights_sha256() == hashed


def _kept(state: Mapping[str, Mapping[str, Tensor]]):  # type: ignore[no-untyped-def]
    return lambda unit: state[unit]


def test_muon_steps_each_expert_by_itself() -> None:
    run = config(GPT_OSS, optimizer="muon")
    rules = [rule for rule in update_rules(run, block_name(0)) if isinstance(rule, MuonRule)]
    assert [rule.joined for rule in rules] == [1, 1, 1, 1, 1, 5, 5, 5]
    adapted = replace(run, lora=LoraSection(rank=2, targets=("gate", "up")))
    adapted = replace(adapted, training=replace(run.training, adapter_optimizer="muon"))
    assert [rule.joined for rule in update_rules(adapted, block_name(0))] == [5, 5, 5, 5]  # type: ignore[attr-defined]


def test_sizes_are_those_of_all_experts_and_costs_those_of_a_tokens_own() -> None:
    qwen30b = ModelSection(
        family="mixture",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_width=128,
        ffn=768,
        experts=128,
        experts_per_token=8,
        qk_norm="head",
        vocab=151_936,
        sequence=2048,
    )
    assert sum(unit_parameters(qwen30b, unit) for unit in unit_names(qwen30b)) == 30_532_122_624
    lora = LoraSection(rank=8, base="4")
    assert 315e6 < frozen_bytes(qwen30b, lora, block_name(0)) < 330e6
    kept = stored_bytes(qwen30b, TrainingSection(precision="bfloat16"), Storage(ffn_input="bf16"), 1)
    assert kept.ffn_input == 2048 * (2 * 2 * 8 * 768 + 4 * 128)
    check_shards(RunConfig(model=qwen30b, lora=lora), 2)
    assert frozen_bytes(qwen30b, lora, block_name(0), 2) < 0.51 * frozen_bytes(qwen30b, lora, block_name(0))
    with pytest.raises(RunError, match=r"into 192, and lora\.base 4 needs multiples of 128"):
        check_shards(RunConfig(model=qwen30b, lora=lora), 4)


@pytest.mark.parametrize(
    ("model", "lora", "words"),
    [
        ({"experts": 0}, {}, "model.experts must be at least 1"),
        ({"experts_per_token": 6}, {}, "model.experts_per_token must be from 1"),
        ({"norm_place": "output"}, {}, "model.norm_place is for model.family llama"),
        ({}, {"rank": 2, "targets": ("gate",)}, "both gate and up"),
        ({}, {"rank": 2, "dropout": 0.1}, "lora.dropout must be 0"),
        ({"balance_loss": -1.0}, {}, "model.balance_loss must be"),
    ],
)
def test_impossible_settings_are_named(model: dict, lora: dict, words: str) -> None:  # type: ignore[type-arg]
    run = config(replace(QWEN, **model))
    found = problems(replace(run, lora=replace(LoraSection(), **lora)))
    assert any(words in line for line in found), found
