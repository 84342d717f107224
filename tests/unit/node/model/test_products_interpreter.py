"""Products of projections with one input, on a CPU that stands for a GPU: its kernels run under Triton's
interpreter, in a process of their own (`tests.support.interpreter`)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common import dispatch
from kernels.common.matrices import empty_together, following, side_by_side, stacked
from node.config.schema import ModelSection, StorageSection, TrainingSection
from node.model import blocks, products
from node.model.chunk import build_chunk, compute_precision
from node.model.storage import configured
from node.training.optimizer import StageOptimizer
from tests.support.interpreter import in_interpreter, outside

CPU = torch.device("cpu")


@outside
def test_matrices_that_lie_together_are_joined_without_a_copy() -> None:
    parts = empty_together([torch.empty(3, 4), torch.empty(1, 4), torch.empty(2, 4)], torch.bfloat16)
    for part in parts:
        part.normal_()
    whole = following(parts)
    assert whole is not None and torch.equal(whole, torch.cat(parts))
    assert stacked(parts, torch.bfloat16).data_ptr() == parts[0].data_ptr()
    apart = [part.clone() for part in parts]
    assert following(apart) is None and following([parts[1], parts[0]]) is None
    assert torch.equal(stacked(apart, torch.bfloat16), whole)
    assert torch.equal(stacked(parts, torch.float32), whole.float())


@outside
def test_neighbouring_columns_are_joined_without_a_copy() -> None:
    wide = torch.randn(2, 5, 9)
    parts = wide.split((4, 3, 2), dim=-1)
    assert side_by_side(parts).data_ptr() == wide.data_ptr()
    assert torch.equal(side_by_side(parts), wide.view(10, 9))
    for others in ([parts[1], parts[0]], [parts[0], parts[2]], [part.clone() for part in parts]):
        assert torch.equal(side_by_side(others), torch.cat([part.reshape(10, -1) for part in others], 1))


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for tensors on the CPU, and cuBLAS' product that adds in float32, which a CPU does not have."""
    plain = torch.addmm

    def addmm(whole: Tensor, first: Tensor, second: Tensor, **options: Any) -> Tensor:
        assert options == {"out_dtype": torch.float32, "out": whole}
        return plain(whole, first.float(), second.float(), out=whole)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(dispatch, "has_kernels", lambda *_: True)


@in_interpreter
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("family", "filled", "preset", "gradients", "compute"),
    [
        ("llama", 0, "off", "float32", "precision"),
        ("llama", 1000, "agoq", "fp8", "precision"),
        ("gpt2", 1000, "agoq", "fp8", "fp8"),
        ("llama", 1000, "off", "float32", "fp8, weights too"),
        ("gpt2", 0, "agoq", "fp8", "fp8, weights too"),
    ],
)
def test_a_block_adds_its_weight_gradients_to_main_gradients(
    family: str,
    filled: int,
    preset: str,
    gradients: str,
    compute: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two microbatches of a fused block, against those of the plain block in float32. Projections are one
    product where their results are few."""
    monkeypatch.setattr(products, "FILLED", filled)
    model = ModelSection(family=family, layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, sequence=5)
    compute, _, more = compute.partition(", ")
    training = TrainingSection(
        precision="bfloat16",
        gradients=gradients,
        compute=compute,
        weight_gradients="fp8" if more else "precision",
    )
    x, upstream = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)

    def run(fused: bool) -> list[Tensor]:
        monkeypatch.setattr(blocks.Block, "fuses", fused)
        stored = configured(StorageSection(preset=preset if fused else "off"))
        chunk = build_chunk(model, ("block.0000",), 3, CPU, storage=stored)
        used = training if fused else TrainingSection()
        optimizer = StageOptimizer([chunk], used)
        made: list[Tensor] = []
        for fed, grad in zip(x, upstream, strict=True):
            leaf = fed.clone().requires_grad_()
            with compute_precision(used.precision, CPU):
                result = chunk(leaf)
            torch.autograd.backward(result, grad)
            assert leaf.grad is not None
            made += [result.detach(), leaf.grad]
        found = optimizer.gradients
        return made + [found.get(parameter).clone() for parameter in optimizer.parameters]

    wanted, found = run(False), run(True)
    if preset == "agoq" and compute == "precision":
        assert all(torch.equal(one, other) for one, other in zip(found, run(True), strict=True))
    allowed = (
        {"off": 0.02, "agoq": 0.2}[preset]
        + (0.03 if gradients == "fp8" else 0)
        + (0.1 if compute == "fp8" else 0)
    )
    assert [
        round(distance(a, b), 3) for a, b in zip(found, wanted, strict=True) if distance(a, b) > allowed
    ] == []
