"""The self-test of a node's device on a GPU: right kernels pass, plain torch passes, zeros are caught."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common import dispatch
from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    TrainingSection,
)
from node.stage.self_test import checks_of, failing_parts

DEVICE = torch.device("cuda")
DENSE = RunConfig(
    pipeline=PipelineSection(forward_codec="auto", backward_codec="tah", sequence_chunks=2),
    training=TrainingSection(
        precision="bfloat16", optimizer="muon", gradients="fp8", moments="fp8", compute="fp8"
    ),
    storage=StorageSection(preset="agoq"),
)
MIXTURE = RunConfig(
    model=ModelSection(family="mixture", experts=8, experts_per_token=2, sinks=True),
    training=TrainingSection(precision="bfloat16"),
)
Results = Callable[[Sequence[Any], Any], Sequence[Tensor]]


def returned(args: Sequence[Any], found: Any) -> Sequence[Tensor]:
    return [found] if isinstance(found, Tensor) else found


KERNELS: dict[str, tuple[str, str, Results]] = {
    "attention": ("kernels.attention.triton", "backward", returned),
    "experts": ("kernels.experts.triton", "matmul", returned),
    "fixed": ("kernels.fixed.triton", "encode", lambda args, found: args[1:4]),
    "fp8": ("kernels.fp8.triton", "accumulate_gradient", lambda args, found: [args[0].codes]),
    "layers": ("kernels.blockfloat.triton.ffn", "activation", returned),
    "orthogonal": ("kernels.orthogonal.triton", "orthogonal", returned),
    "storage": ("kernels.blockfloat.triton.ffn", "ffn_store", returned),
    "tah": ("kernels.tah.triton.encode", "encode", lambda args, found: args[1:8]),
    "trellis": ("kernels.trellis.triton.encode", "encode", lambda args, found: [args[1]]),
}
"""What launches kernels of each part, and the tensors that they write."""


@pytest.fixture(autouse=True)
def nothing_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_withdrawn", set[str]())
    monkeypatch.setenv("THINWIRE_PLAIN", "")


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_right_kernels_and_plain_torch_pass(config: RunConfig) -> None:
    checks = checks_of(config)
    assert failing_parts(checks, DEVICE) == []
    for part in dispatch.PARTS:
        dispatch.withdraw(part)
    assert failing_parts(checks, DEVICE) == []


@pytest.mark.parametrize("part", KERNELS)
def test_a_kernel_that_computes_zeros_is_withdrawn(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a compiler does not know a device well: no error is reported."""
    module, name, results = KERNELS[part]
    right = getattr(importlib.import_module(module), name)

    def zeros(*args: Any, **named: Any) -> Any:
        found = right(*args, **named)
        for result in results(args, found):
            result.zero_()
        return found

    monkeypatch.setattr(f"{module}.{name}", zeros)
    assert failing_parts(checks_of(MIXTURE if part == "experts" else DENSE), DEVICE) == [part]
    assert dispatch.withdrawn() == [part]
