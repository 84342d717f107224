"""Everything here needs an NVIDIA GPU and Triton; memory that torch leaves unwritten is filled with NaN."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.poison import poisoned_memory

HERE = Path(__file__).resolve().parent
READY = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # The first test of a kernel compiles it.
            item.add_marker(pytest.mark.timeout(300))
            # Torch warns once a process about set_sync_debug_mode, and when a matrix product is the first
            # thing that autograd's thread runs.
            for said in ("Synchronization debug mode is a prototype", "Attempting to run cuBLAS"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{said}"))
            if not READY:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU, or no Triton"))


# The same as in nodes; cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield
