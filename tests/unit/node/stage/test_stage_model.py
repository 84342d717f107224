"""A stage's model as it is built, again and again."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.config.schema import ModelSection, RunConfig, TrainingSection
from node.model import chunk
from node.stage import stage_model
from node.stage.stage_model import StageModel

CONFIG = RunConfig(
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=1, microbatch=1),
)


@pytest.mark.parametrize("gradients", ["float32", "fp8"])
def test_a_rollback_never_holds_two_of_a_stage(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there is gone before its successor is made, without waiting for a collection of cycles."""
    config = replace(CONFIG, training=replace(CONFIG.training, gradients=gradients))
    model = StageModel(config, torch.device("cpu"))
    model.build(0, 1)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model.begin_step()
    model.forward(0, 0, tokens, tokens)
    model.backward(0, 0, None)
    model.finish_step()
    model.squared_norms()
    model.apply(1e-3, 1.0)
    weights = [weakref.ref(parameter) for parameter in model.optimizer.parameters]
    assert weights and all(weight() is not None for weight in weights)
    build: Callable[..., Any] = stage_model.build_chunk
    built: list[str] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        assert not [weight for weight in weights if weight() is not None]
        built.append("chunk")
        return build(*arguments, **options)

    monkeypatch.setattr(stage_model, "build_chunk", watched)
    model.build(0, 1)
    assert built == ["chunk"]


@pytest.mark.parametrize("compute", ["float32", "fp8"])
def test_weights_that_are_loaded_are_not_drawn_before(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = "float32" if compute == "float32" else "bfloat16"
    config = replace(CONFIG, training=replace(CONFIG.training, compute=compute, precision=precision))
    drawn, loaded = StageModel(config, torch.device("cpu")), StageModel(config, torch.device("cpu"))
    drawn.build(0, 1)
    monkeypatch.setattr(chunk, "initial_weight", lambda *_: pytest.fail("a weight was drawn"))
    loaded.build(0, 1, is_drawn=False)
    for unit in drawn.optimizer.units:
        loaded.load_unit_state(unit, drawn.unit_state(unit))
    tokens = torch.arange(16).reshape(1, 16)
    for model in (drawn, loaded):
        model.begin_step()
        model.forward(0, 0, tokens, tokens)
        model.backward(0, 0, None)
        model.finish_step()
    assert drawn.squared_norms() == loaded.squared_norms()
