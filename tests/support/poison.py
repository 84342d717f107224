"""Memory that torch leaves unwritten, filled so that reading it shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


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
