"""Attention within windows and documents on a GPU: exact to rounding, the same bits every time, in graphs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention.ops import attention, attention_backward, differentiable
from kernels.attention.reach import Documents, Reach
from node.config.schema import DataSection, ModelSection, PipelineSection, RunConfig, StorageSection
from node.stage.captured_passes import CapturedPasses
from node.stage.stage_model import StageModel
from tests.support.passes import PLAIN

GPU = torch.device("cuda", 0)
LENGTH = 640


def drawn(count: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, LENGTH, count, width, generator=made, device="cuda").to(dtype).transpose(1, 2)


def starts(seed: int, share: float = 0.01) -> Tensor:
    """Where documents begin in two samples."""
    return torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed)) < share


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(64, 8, 2), (128, 3, 3), (256, 4, 1)])
@pytest.mark.parametrize(("window", "apart"), [(100, False), (0, True), (100, True)])
def test_limited_attention_is_exact_to_rounding_and_repeats_its_bits(
    window: int, apart: bool, width: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    query, key, value, grad = (
        drawn(count, width, seed, dtype) for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
    )
    reach = Reach(window=window, documents=Documents.of(starts(4), GPU) if apart else None)
    leaves = [part.double().requires_grad_() for part in (query, key, value)]
    repeated = [part.repeat_interleave(heads // part.shape[1], 1) for part in leaves]
    scores = repeated[0] @ repeated[1].transpose(2, 3) / width**0.5
    exact = torch.softmax(scores.masked_fill(~reach.allowed(LENGTH, GPU), -torch.inf), -1) @ repeated[2]
    wanted = [exact.detach(), *torch.autograd.grad(exact, leaves, grad.double())]
    seen: list[Tensor] | None = None
    for _ in range(10):
        out, sums = attention(query, key, value, reach)
        found = [out, *attention_backward(grad, query, key, value, out, sums, reach)]
        assert seen is None or all(torch.equal(one, other) for one, other in zip(found, seen, strict=True))
        seen = found
    assert seen is not None
    allowed = 0.008 if dtype == torch.bfloat16 else 1e-4
    assert all(distance(one, other) < allowed for one, other in zip(seen, wanted, strict=True))
    again = [part.detach().clone().requires_grad_() for part in (query, key, value)]
    torch.autograd.backward(differentiable(*again, reach), grad)
    for leaf, one in zip(again, seen[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, one)


@pytest.mark.parametrize("preset", ["off", "agoq"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_graphs_of_separate_documents_give_autograds_bits(family: str, preset: str) -> None:
    """Also for a microbatch of more documents than the graphs' list holds, which runs through autograd."""
    config = RunConfig(
        model=ModelSection(
            family=family, layers=2, hidden=256, heads=4, kv_heads=4, ffn=640, vocab=512, sequence=LENGTH
        ),
        training=replace(PLAIN, global_batch=8, microbatch=2),
        data=DataSection(separate_documents=True),
        storage=StorageSection(preset=preset),
        pipeline=PipelineSection(stages=1),
    )

    def run(graphs: bool) -> tuple[list[Tensor], StageModel]:
        model = StageModel(replace(config, training=replace(config.training, cuda_graphs=graphs)), GPU)
        model.build(0, 1)
        made: list[Tensor] = []
        for step in range(4):
            model.begin_step()
            for microbatch in range(4):
                generator = torch.Generator().manual_seed(10 * step + microbatch)
                tokens = torch.randint(512, (2, LENGTH), generator=generator).to(GPU)
                many = step == 3 and microbatch == 2
                apart = starts(10 * step + microbatch, 0.5 if many else 0.01)
                made.append(model.forward(0, microbatch, tokens, tokens, apart))
                model.backward(0, microbatch, None)
            made.append(torch.tensor(list(model.squared_norms().values())))
            model.apply(1e-2, 0.5)
        return [*made, *(parameter.detach().clone() for parameter in model.optimizer.parameters)], model

    wanted, _ = run(graphs=False)
    again, _ = run(graphs=False)
    assert all(torch.equal(one, other) for one, other in zip(again, wanted, strict=True))
    found, model = run(graphs=True)
    different = [k for k, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
    assert different == []
    (passes,) = model._passes
    assert isinstance(passes, CapturedPasses) and passes.slots == 1
