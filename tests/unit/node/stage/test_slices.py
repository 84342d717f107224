"""Microbatches cut along the sequence: losses and gradients of whole ones, and the same bits on any split."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    DataSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    SyncSection,
    TrainingSection,
)
from node.model import offload
from node.model.blocks import Block
from node.model.offload import Offload
from node.stage.stage_model import StageModel
from tests.support.host_memory import LateHostMemory
from tests.support.memory_pipeline import MemoryPipeline, trained
from tests.support.reference_trainer import Step

STEPS = 2
SLICES = 3
LLAMA = RunConfig(
    run=RunSection(steps=8, seed=7),
    model=ModelSection(layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=24),
    training=TrainingSection(global_batch=4, microbatch=2, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=1, forward_codec="fp32", backward_codec="fp32"),
)


def of(
    *,
    storage: dict[str, str] | None = None,
    lora: int = 0,
    training: dict[str, Any] | None = None,
    **model: Any,
) -> RunConfig:
    return replace(
        LLAMA,
        model=replace(LLAMA.model, **model),
        storage=StorageSection(**(storage or {})),
        lora=LoraSection(rank=lora, dropout=0.1 if lora else 0.0),
        training=replace(LLAMA.training, **(training or {})),
    )


ROUTED: dict[str, Any] = {
    "family": "mixture",
    "experts": 5,
    "experts_per_token": 2,
    "balance_loss": 0.3,
    "z_loss": 0.1,
    "init_std": 0.2,
}
"""Terms of the loss of their own, of a size that counts."""
KEPT = {"norm_input": "none", "ffn_input": "none", "attention": "none", "attention_output": "none"}
EXACT = {
    "llama": of(),
    "tied": of(tied=True),
    "gpt2": of(family="gpt2", kv_heads=4),
    "gpt2-documents": replace(of(family="gpt2", kv_heads=4), data=DataSection(separate_documents=True)),
    "documents": replace(of(window=9, no_window=(1,)), data=DataSection(separate_documents=True)),
    "window": of(window=7, no_window=(1,), window_theta=500.0),
    "llama3": of(rope_scaling="llama3", rope_factor=4.0, rope_original=8),
    "linear": of(rope_scaling="linear", rope_factor=2.0),
    "yarn": of(rope_scaling="yarn", rope_factor=4.0, rope_original=8),
    "qwen3": of(qk_norm="head", head_width=16),
    "olmo2": of(qk_norm="full", norm_place="output"),
    "gemma3": of(norm_place="both", norm_offset=True, activation="gelu", query_scale=4, qk_norm="head"),
    "biases": of(qkv_bias=True, no_rope=(2,)),
    "attention-again": of(storage={**KEPT, "attention": "recompute", "attention_output": "recompute"}),
    "ffn-again": of(storage={**KEPT, "ffn_input": "recompute"}, qk_norm="head"),
    "mixture": of(**ROUTED, qk_norm="head"),
    "gpt-oss": of(
        **ROUTED, sinks=True, window=7, no_window=(1,), qkv_bias=True, all_biases=True, swiglu_limit=0.5
    ),
    "experts-again": of(**ROUTED, storage={**KEPT, "ffn_input": "recompute"}),
}
"""Where slices change nothing but the order of sums."""
LOSSY = {
    "compact": of(storage={"preset": "compact"}),
    "agoq": of(storage={"preset": "agoq"}, qk_norm="head"),
    "packed-again": of(storage={"preset": "compact", "attention": "8", "attention_output": "recompute"}),
    "bfloat16": of(training={"precision": "bfloat16", "gradients": "fp8"}),
    "lora": of(lora=4),
    "mixture-lora": replace(of(**ROUTED), lora=LoraSection(rank=4, base="4")),
}


def cut(config: RunConfig, slices: int, **pipeline: Any) -> RunConfig:
    return replace(config, pipeline=replace(config.pipeline, sequence_chunks=slices, **pipeline))


@cache
def alone(config: RunConfig) -> tuple[list[Step], str]:
    return trained(config, STEPS)


Gradients = dict[str, Tensor]


@cache
def one_step(config: RunConfig, *, again: bool = False, moves: bool = False) -> tuple[float, Gradients]:
    """The loss and the gradients of a step, by unit and parameter, with blocks that run again in backward, or
    whose tensors wait for it in host memory."""
    with MemoryPipeline(config) as stages:
        (executor,) = stages.executors
        assert isinstance(executor.model, StageModel)
        (chunk,) = executor.model._chunks
        chunk.offload = executor.model._offload = Offload(LateHostMemory())
        for block in (layer for layer in chunk.layers if isinstance(layer, Block)):
            block.storage = replace(block.storage, again=again, offload=("all",) * moves)
        (vote,) = stages.outcomes()
        taken = executor.model.take_gradients(executor.units)
        assert vote.loss is not None
        return vote.loss, {f"{unit} {name}": one for unit, own in taken.items() for name, one in own.items()}


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of a parameter's gradient, relative to it or to a thousandth of the whole gradient:
    that of a key's bias may be 0."""
    assert found.keys() == expected.keys()
    least = 1e-3 * float(torch.stack([one.norm() for one in expected.values()]).norm())
    return max(float((found[k] - one).norm()) / max(float(one.norm()), least) for k, one in expected.items())


@pytest.mark.parametrize("name", EXACT)
def test_gradients_and_losses_are_those_of_whole_microbatches(name: str) -> None:
    config = EXACT[name]
    (loss, sliced), (expected, whole) = one_step(cut(config, SLICES)), one_step(config)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert error(sliced, whole) < 2e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixture"])
def test_what_runs_again_or_waits_in_host_memory_has_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    config = cut(EXACT[name], SLICES)
    expected, gradients = one_step(config)
    for again, moves in ((True, False), (False, True), (True, True)):
        loss, found = one_step(config, again=again, moves=moves)
        assert loss == expected
        assert all(torch.equal(found[key], one) for key, one in gradients.items())


def test_rounds_of_local_steps_have_the_same_bits_on_any_split() -> None:
    config = replace(cut(LLAMA, SLICES, groups=2), sync=SyncSection(every=2, warmup=0))
    config = replace(config, training=replace(config.training, global_batch=8))
    assert trained(config, STEPS) == trained(cut(config, SLICES, stages=2), STEPS)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_rounded_stays_near_whole_microbatches(name: str) -> None:
    config = LOSSY[name]
    (whole, *_), (sliced, *_) = alone(config)[0], alone(cut(config, SLICES))[0]
    assert sliced.loss == pytest.approx(whole.loss, rel=0.01)
    assert sliced.grad_norm == pytest.approx(whole.grad_norm, rel=0.1)


PLACES = (
    PipelineSection(stages=2, window=3),
    PipelineSection(stages=4),
    PipelineSection(stages=2),
    PipelineSection(stages=3, head="first"),
    PipelineSection(stages=3, head="last", window=1),
)


SPLIT = (
    *("tied", "tied", "gpt2", "tied", "tied", "documents", "qwen3", "attention-again", "agoq", "lora"),
    *("gpt-oss", "mixture-lora"),
)


@pytest.mark.parametrize(
    ("name", "pipeline"), [(name, PLACES[number % len(PLACES)]) for number, name in enumerate(SPLIT)]
)
def test_as_many_slices_have_the_same_bits_on_any_split(name: str, pipeline: PipelineSection) -> None:
    config = cut({**EXACT, **LOSSY}[name], SLICES)
    there = replace(pipeline, sequence_chunks=SLICES, forward_codec="fp32", backward_codec="fp32")
    assert trained(replace(config, pipeline=there), STEPS) == alone(config)


def test_rows_and_gradient_groups_count_microbatches() -> None:
    config = cut(LLAMA, SLICES, stages=2, groups=2)
    assert trained(config, STEPS) == trained(config, STEPS, ((0,), (1,)))


def test_a_run_in_float16_scales_the_loss_of_each_slice() -> None:
    config = of(training={"precision": "float16", "loss_scale": 2.0**20, "loss_scale_steps": 2}, tied=True)
    run = trained(cut(config, SLICES), 6)
    assert trained(cut(config, SLICES, stages=2), 6) == run
    norms = [step.grad_norm for step in run[0]]
    assert inf in norms and min(norms) < inf
