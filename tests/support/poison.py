"""What tests on a GPU share: memory that torch leaves unwritten is filled so that reading it shows, and tests
of kernels that are withdrawn are skipped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from kernels.common import dispatch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN or the largest integer.

    Also require deterministic algorithms, as nodes do: torch refuses operations that have none.
    """
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    # Unlike `use_deterministic_algorithms` this does not import torch's compiler.
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before[0])
    settings.fill_uninitialized_memory = before[1]


def needs_kernels(part: str) -> None:
    """Skip a test of these kernels themselves where they are withdrawn: THINWIRE_PLAIN names them."""
    if part in dispatch.withdrawn():
        pytest.skip(f"plain torch does the work of {part}")
