"""Collectives after which gloo has let go of what it moved, for tests that count bytes.

A worker thread of gloo drops its tensors some time after those who wait were told. When it is the last to
hold one, memory is freed on a thread that torch's profiler does not follow, and counts as taken for ever.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from node.parallel import tensor_ranks

COLLECTIVES = ("all_to_all_single", "broadcast", "gather", "scatter")


def settle_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a stage's devices wait for return once only the caller holds the tensors."""
    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, _settled(getattr(dist, name)))
    monkeypatch.setattr(tensor_ranks, "all_gather", _settled(tensor_ranks.all_gather))


def _settled(collective: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*given: Any, **options: Any) -> Any:
        if options.get("async_op"):  # buffers that are kept
            return collective(*given, **options)
        tensors = [tensor for value in (*given, *options.values()) for tensor in _tensors(value)]
        before = [_holders(tensor) for tensor in tensors]
        # Gloo gets tensors of its own on the same storages, so that a storage's count tells of them.
        collective(*map(_alias, given), **{name: _alias(value) for name, value in options.items()})
        while any(_holders(tensor) > count for tensor, count in zip(tensors, before, strict=True)):
            pass
        return None

    return waiting


def _tensors(value: object) -> list[Tensor]:
    many = value if isinstance(value, list) else [value]
    return [tensor for tensor in many if isinstance(tensor, Tensor)]


def _alias(value: Any) -> Any:
    if isinstance(value, list):
        return [_alias(one) for one in value]
    return value.detach() if isinstance(value, Tensor) else value


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[no-any-return,attr-defined]
