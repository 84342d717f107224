"""The self-test of a device with its kernels, under Triton's interpreter, on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common import dispatch
from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    TrainingSection,
)
from node.stage.self_test import checks_of, failing_parts
from tests.support.cases import each
from tests.support.interpreter import inside
from wire.errors import RunError

pytestmark = inside
CPU = torch.device("cpu")
CONFIG = RunConfig(
    pipeline=PipelineSection(forward_codec="fp32", backward_codec="fp32"),
    training=TrainingSection(precision="float32", gradients="fp8", moments="fp8"),
    storage=StorageSection(preset="agoq"),
)
MIXTURE = RunConfig(
    model=ModelSection(family="mixture", experts=8, experts_per_token=2, sinks=True),
    pipeline=CONFIG.pipeline,
    training=TrainingSection(precision="float32", compute="fp8"),
    lora=LoraSection(rank=4, base="4"),
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_withdrawn", set[str]())
    monkeypatch.setenv("THINWIRE_PLAIN", "")
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)


class Zeros:
    """A kernel on a GPU that its compiler does not know well: it writes zeros, and reports no error."""

    def __init__(self, kernel: Any, dtype: torch.dtype) -> None:
        self._kernel, self._dtype = kernel, dtype

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launched(*args: Any, **named: Any) -> None:
            self._kernel[grid](*args, **named)
            for one in args:
                if isinstance(one, Tensor) and one.dtype == self._dtype:
                    one.zero_()

        return launched


@pytest.mark.usefixtures("kernels")
@each("config", [CONFIG, MIXTURE])
def test_right_kernels_pass(config: RunConfig) -> None:
    assert failing_parts(checks_of(config), CPU) == []


@pytest.mark.usefixtures("kernels")
def test_kernels_that_compute_zeros_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is withdrawn; plain torch computes what it should."""
    from kernels.blockfloat.triton import store
    from kernels.fp8 import triton as fp8

    monkeypatch.setattr(store, "_pack", Zeros(store._pack, torch.uint8))
    monkeypatch.setattr(fp8, "_accumulate", Zeros(fp8._accumulate, torch.uint8))
    assert failing_parts(checks_of(CONFIG), CPU) == ["storage", "fp8"]
    assert dispatch.withdrawn() == ["fp8", "storage"]
    assert failing_parts(checks_of(CONFIG), CPU) == []


@pytest.mark.usefixtures("kernels")
def test_what_plain_torch_computes_wrong_too_refuses_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.blockfloat import ops

    monkeypatch.setattr(ops, "restore", lambda packed, shape, bits, dtype: torch.zeros(shape, dtype=dtype))
    with pytest.raises(RunError, match="storage in 4 bits"):
        failing_parts(checks_of(CONFIG), CPU)
