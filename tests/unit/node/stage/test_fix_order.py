"""A node's settings of torch."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from kernels.attention.ops import _order
from node.stage.machine_info import fix_order

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def test_a_gpu_sums_in_a_fixed_order_or_refuses() -> None:
    fix_order(torch.device("cuda", 1))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ[WORKSPACE] == ":4096:8"


def test_cpus_are_not_limited() -> None:
    fix_order(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ


@pytest.mark.parametrize(("enabled", "warns"), [(False, False), (True, True), (True, False)])
def test_attention_keeps_its_order_whatever_is_set(enabled: bool, warns: bool) -> None:
    """Where torch only warns, its operator adds in no fixed order, too."""
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    with _order(fixed=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.are_deterministic_algorithms_enabled() == enabled
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
