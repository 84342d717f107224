"""Segments of a GPU's memory grow, so that a cap is lost to no more than pages that tensors fill in part."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from node.stage.allocator import VARIABLES, begin_peak, grow_segments, held
from node.stage.stage_model import StageModel
from node.tuning.device_memory import PAGE
from tests.gpu.test_gpu_passes import GPU, run_file, run_step

PIECE = 5 * PAGE
PIECES = 40


@pytest.fixture(autouse=True)
def growing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    grow_segments(GPU)
    yield
    core: Any = torch._C
    torch.cuda.empty_cache()
    core._accelerator_setAllocatorSettings("expandable_segments:False")


def test_what_is_free_in_pieces_is_there_for_a_tensor_larger_than_each() -> None:
    """Under a cap that leaves nothing else: every second piece is freed, and half of the sum is wanted at
    once."""
    total = torch.cuda.get_device_properties(GPU).total_memory
    before = torch.cuda.memory_reserved(GPU)
    torch.cuda.set_per_process_memory_fraction((before + PIECES * PIECE + 4 * PAGE) / total, GPU)
    try:
        begin_peak(GPU)
        pieces = [torch.empty(PIECE, dtype=torch.uint8, device=GPU) for _ in range(PIECES)]
        del pieces[::2]
        assert held(GPU).largest_free < 2 * PIECE
        whole = torch.empty(PIECES // 4 * PIECE, dtype=torch.uint8, device=GPU)
        found = held(GPU)
        assert found.allocated >= (PIECES // 2 + PIECES // 4) * PIECE
        assert found.most_reserved <= before + PIECES * PIECE + 4 * PAGE
        del whole, pieces
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("case", ["autocast", "agoq, fp8, bf16"])
def test_no_step_after_the_second_asks_the_device_for_memory(case: str, graphs: bool) -> None:
    """Counted by torch's allocator: calls that map or reserve memory, and what is reserved."""
    model = StageModel(run_file(case, "llama", graphs=graphs), GPU)
    model.build(0, 2)

    def counted() -> tuple[int, int]:
        torch.cuda.synchronize(GPU)
        stats = torch.cuda.memory_stats(GPU)
        return stats["num_device_alloc"], stats["reserved_bytes.all.current"]

    for step in range(2):
        run_step(model, 0, step)
    before = counted()
    for step in range(2, 8):
        run_step(model, 0, step)
    assert counted() == before
