"""A stage whose blocks are shared by processes of a node, on CPUs by gloo, against it on one device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.schedule.placement import slice_ranges
from node.stage.processes import DeviceGroup
from node.stage.stage_model import StageModel
from tests.support.device_groups import CPU, leading, tokens
from wire.errors import RunError, UserError

VOCAB = 61
LLAMA = RunConfig(
    run=RunSection(steps=10, seed=4),
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=4, ffn=48, vocab=256, sequence=16, tied=True),
    training=TrainingSection(global_batch=8, microbatch=4, lr=1e-3, warmup_steps=0),
    pipeline=PipelineSection(stages=1),
)
GPT2 = replace(LLAMA, model=replace(LLAMA.model, family="gpt2", tied=False))
STORED = replace(
    LLAMA,
    storage=StorageSection(ffn_input="recompute", attention="recompute", attention_output="recompute"),
    pipeline=PipelineSection(stages=3),
)
MUON = replace(GPT2, training=replace(GPT2.training, optimizer="muon"))
FP8_GRADIENTS = replace(GPT2, training=replace(GPT2.training, gradients="fp8"))
PACKED = replace(
    LLAMA,
    model=replace(LLAMA.model, hidden=256, ffn=256, layers=1),
    training=replace(
        LLAMA.training, gradients="fp8", moments="fp8", weights="bfloat16", precision="bfloat16"
    ),
    storage=StorageSection(preset="agoq"),
)

ADAPTED = replace(
    GPT2,
    lora=LoraSection(rank=4, dropout=0.2, base="bf16"),
    storage=StorageSection(ffn_input="recompute", attention="recompute", attention_output="recompute"),
)
ADAPTED_LLAMA = replace(
    LLAMA, model=replace(LLAMA.model, tied=False), lora=LoraSection(rank=4, dropout=0.2, base="float32")
)

ADAPTED_MIXTURE = replace(
    ADAPTED_LLAMA,
    model=replace(
        ADAPTED_LLAMA.model,
        family="mixture",
        head_width=64,
        ffn=256,
        experts=4,
        experts_per_token=2,
        qk_norm="head",
        balance_loss=0.1,
    ),
    lora=LoraSection(rank=4, base="4"),
)

SLICED = replace(STORED, pipeline=PipelineSection(stages=1, sequence_chunks=2))

State = dict[str, dict[str, Tensor]]

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("forked_workers")]


def run_step(model: StageModel, step: int) -> tuple[float, dict[str, float]]:
    """One step of a single stage."""
    model.begin_step()
    total = 0.0
    for microbatch in range(2):
        inputs, labels = tokens(step, microbatch, VOCAB)
        slices = list(enumerate(slice_ranges(model.config)))
        for number, own in slices:
            at = slice(own.start, own.stop)
            total += float(model.forward(0, microbatch, inputs[:, at], labels[:, at], number=number))
        for number, _ in reversed(slices):
            assert model.backward(0, microbatch, None, number) is None
    model.finish_step()
    if model.config.model.tied:
        shared = model.tied_gradient("head") + model.tied_gradient("embed")
        model.put_tied_gradient("embed", shared)
        model.put_tied_gradient("head", shared.clone())
    norms = model.squared_norms()
    model.apply(1e-3, 0.5)
    return total, norms


def states(model: StageModel) -> State:
    return {unit: model.unit_state(unit) for unit in model.optimizer.units}


def load(model: StageModel, saved: State) -> None:
    for unit, state in saved.items():
        model.load_unit_state(unit, state)


def equal(first: State, second: State) -> bool:
    return all(
        first[unit].keys() == second[unit].keys()
        and all(torch.equal(first[unit][name], second[unit][name]) for name in first[unit])
        for unit in first
    )


@pytest.mark.parametrize(
    ("config", "ranks", "tensor_parallel"),
    [
        (LLAMA, 4, 4),
        (GPT2, 2, 2),
        (MUON, 4, 2),
        (FP8_GRADIENTS, 4, 2),
        (ADAPTED, 4, 2),
        (ADAPTED_LLAMA, 2, 2),
        (ADAPTED_MIXTURE, 2, 2),
        (SLICED, 4, 2),
    ],
    ids=[
        "llama 4",
        "gpt2 2",
        "gpt2 2 x 2, muon",
        "gpt2 2 x 2, fp8 gradients",
        "adapters on stored gpt2 2 x 2",
        "adapters on llama 2",
        "adapters on experts 2",
        "slices of stored llama 2 x 2",
    ],
)
def test_ranks_do_as_one_device(config: RunConfig, ranks: int, tensor_parallel: int) -> None:
    alone = StageModel(config, CPU)
    alone.build(0, 1)
    initial = states(alone)
    expected = [run_step(alone, step) for step in range(2)]
    with leading(config, ranks, tensor_parallel) as leader:
        leader.build(0, 1)
        assert equal(states(leader), initial), "shards of the same initial weights"
        found = [run_step(leader, step) for step in range(2)]
        after = states(leader)
    packed = config is FP8_GRADIENTS
    # In e4m3 every rank's gradients are rounded before they are added.
    for (loss, norms), (one_loss, one_norms) in zip(found, expected, strict=True):
        assert loss == pytest.approx(one_loss, rel=2e-3 if packed else 2e-6)
        assert norms == pytest.approx(one_norms, rel=0.06 if packed else 1e-4)
    for unit, whole in states(alone).items():
        for name, tensor in whole.items():
            # AdamW's first steps are near lr whatever the gradient: no weight is further off than them.
            tolerance = 6e-3 if packed else 1e-5
            if name.startswith("parameter") and not name.endswith("qkv_projection.bias"):
                assert torch.allclose(after[unit][name], tensor, atol=tolerance), name


def test_a_snapshot_from_two_ranks_goes_on_on_one_device_and_back() -> None:
    """The middle of three stages, with stored activations: hidden states come and go whole."""
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1))
    gradient = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(2))

    def step(model: StageModel) -> tuple[Tensor, Tensor, dict[str, float]]:
        model.begin_step()
        results = [model.forward(0, microbatch, x.clone() * (microbatch + 1)) for microbatch in range(2)]
        sources = [model.backward(0, microbatch, gradient) for microbatch in range(2)]
        model.finish_step()
        norms = model.squared_norms()
        model.apply(1e-3, 0.5)
        return torch.cat(results), torch.cat([source for source in sources if source is not None]), norms

    alone = StageModel(STORED, CPU)
    alone.build(1, 3)
    with leading(STORED, 2, 2) as leader:
        leader.build(1, 3)
        step(leader)
        saved = states(leader)
        load(alone, saved)
        assert equal(states(alone), saved)
        for _ in range(2):
            for found, expected in zip(step(leader)[:2], step(alone)[:2], strict=True):
                assert found.shape == expected.shape == (8, 16, 32)
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        # An unfinished step leaves nothing behind, and the way back is as exact.
        leader.begin_step()
        leader.forward(0, 0, x.clone())
        load(leader, saved)
        load(alone, saved)
        assert equal(states(leader), saved)
        found, expected = step(leader), step(alone)
        assert torch.allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)
        assert found[2] == pytest.approx(expected[2], rel=1e-5)
        # A gradient that is spoilt on one rank alone spoils the norm.
        leader.begin_step()
        for microbatch in range(2):
            leader.forward(0, microbatch, x.clone())
            leader.backward(0, microbatch, gradient)
        leader.finish_step()
        spoilt = leader.any_gradient()
        assert spoilt is not None
        spoilt.view(-1)[0] = torch.nan
        assert any(norm != norm for norm in leader.squared_norms().values())


def test_the_same_run_gives_the_same_bits_packed_and_replayed() -> None:
    """Everything in 4 and 8 bits; a snapshot of it is whole on one device, bit for bit."""
    with leading(PACKED, 2, 2) as leader:
        leader.build(0, 1)
        losses = [run_step(leader, 0)]
        saved = states(leader)
        losses.append(run_step(leader, 1))
        after = states(leader)
        leader.build(0, 1)
        load(leader, saved)
        assert run_step(leader, 1) == losses[1]
        assert equal(states(leader), after)
    with leading(PACKED, 2, 2) as another:
        another.build(0, 1)
        assert run_step(another, 0) == losses[0]
        assert equal(states(another), saved)
    alone = StageModel(PACKED, CPU)
    alone.build(0, 1)
    assert run_step(alone, 0)[0] == pytest.approx(losses[0][0], rel=1e-3)
    load(alone, saved)
    assert equal(states(alone), saved)
    assert run_step(alone, 1)[0] == pytest.approx(losses[1][0], rel=1e-3)


def test_models_that_cannot_be_sharded_are_refused_before_start() -> None:
    with pytest.raises(UserError, match="--tensor-parallel 2 does not divide --gpus 3"):
        DeviceGroup((CPU,) * 3, threads=1, tensor_parallel=2)
    with pytest.raises(RunError, match=r"model\.heads 4"):
        DeviceGroup((CPU,) * 3, threads=1, tensor_parallel=3).start(LLAMA)
    with pytest.raises(RunError, match="8 rows"):
        DeviceGroup((CPU,) * 16, threads=1, tensor_parallel=2).start(LLAMA)
    with pytest.raises(RunError, match="multiples of 128"):
        DeviceGroup((CPU,) * 4, threads=1, tensor_parallel=4).start(PACKED)
