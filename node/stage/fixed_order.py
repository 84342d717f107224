"""Sums in a fixed order on a GPU, so that a step that runs again gives the same bits (design section 2).

Without it FlashAttention's backward adds with atomics, and torch prefers cuDNN's attention, whose backward
sums in no fixed order either.
"""

import os
from typing import Any

import torch
import torch.utils.deterministic


def fix_order(device: torch.device) -> None:
    """From here on this process computes so, or refuses. Comes before the device's first matrix product."""
    if device.type != "cuda":
        return
    # Of cuBLAS's workspaces these sizes alone make it choose the same algorithm every time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # A module whose one setting is a property, which mypy does not see.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
