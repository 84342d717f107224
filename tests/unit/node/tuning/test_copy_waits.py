"""How long passes wait for copies, as the plan says and by a clock that copies and blocks run by."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.model import offload
from node.model.host_memory import Copy, HostMemory
from node.model.offload import ALL, Offload, Passing
from node.tuning.memory_columns import Column, CopyClock, CopyWaits, spread

CPU = torch.device("cpu")
BLOCK = 1 << 12
"""Bytes that a block keeps, times its size."""
FORWARD, BACKWARD = 1.0, 2.0
MICROBATCHES = 6


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


class Clocked(HostMemory):
    """A device that computes one thing at a time, and an engine for each direction. Seconds are made up."""

    def __init__(self, rate: float) -> None:
        super().__init__(CPU)
        self.now = 0.0
        self._rate = rate
        self._free = {"out": 0.0, "in": 0.0}

    def copy_out(self, copies: Iterable[Copy]) -> float:
        return self._copy("out", copies)

    def copy_in(self, copies: Iterable[Copy]) -> float:
        return self._copy("in", copies)

    def _copy(self, way: str, copies: Iterable[Copy]) -> float:
        size = 0
        for source, target in copies:
            target.copy_(source)
            size += source.nbytes
        # After all work that was submitted before it.
        self._free[way] = max(self._free[way], self.now) + size / self._rate
        return self._free[way]

    def wait(self, mark: float) -> None:
        self.now = max(self.now, mark)

    def settle(self) -> None:
        self.now = max(self.now, *self._free.values())

    finish = settle

    def _allocate(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)


class Timed(torch.autograd.Function):
    """Keeps bytes for backward, and takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Clocked, size: int) -> Tensor:
        ctx.memory = memory
        ctx.save_for_backward(torch.zeros(size * BLOCK, dtype=torch.uint8))
        memory.now += FORWARD
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors[0].numel() > 0
        ctx.memory.now += BACKWARD
        return grads[0], None, None


@dataclass(frozen=True)
class Chunk:
    """Blocks of one chunk, one size each; 0 stays on the device."""

    sizes: Sequence[int]
    head: float = 0.0
    """Seconds of its forward, and half of its backward's."""

    def forward(self, memory: Clocked, moving: Offload) -> Tensor:
        layer, x = nn.Identity(), torch.zeros(1, requires_grad=True) * 1
        passing = Passing(moving, x)
        for size in self.sizes:
            moves = frozenset({ALL}) if size else frozenset[str]()
            x = passing.through(layer, lambda x, size=size: Timed.apply(x, memory, max(size, 1)), x, moves)
        memory.now += self.head
        passing.ask_last(x)
        return x

    def seconds(self, rate: float) -> float:
        """Of a microbatch: two are between their passes, as in 1F1B, or with a head one."""
        memory = Clocked(rate)
        moving, made, ends = Offload(memory), [], []
        ahead = 1 if self.head else 2
        for number in range(MICROBATCHES):
            made.append(self.forward(memory, moving))
            if number >= ahead - 1:
                first = made.pop(0)
                first.register_hook(lambda _: setattr(memory, "now", memory.now + 2 * self.head))
                first.sum().backward()
                ends.append(memory.now)
        return (ends[-1] - ends[-3]) / 2

    def planned(self, rate: float) -> float:
        clock = CopyClock(
            forward=FORWARD,
            backward=BACKWARD,
            head_forward=self.head,
            head_backward=2 * self.head,
            out_rate=rate,
            in_rate=rate,
        )
        sizes = dict.fromkeys(self.sizes)
        waits = CopyWaits(clock, [column(size * BLOCK) for size in sizes], len(self.sizes))
        counts = np.array([[list(self.sizes).count(size) for size in sizes]])
        compute = len(self.sizes) * (FORWARD + BACKWARD) + 3 * self.head
        return compute + float(waits.seconds(counts).sum())


def column(size: int) -> Column:
    return Column(kept=0, moved=size, host=size, seconds=0.0, working=0, again=False)


def arranged(counts: dict[int, int]) -> list[int]:
    """Sizes in the order that a plan has them."""
    columns = [column(size) for size in counts]
    return [columns[k].moved for k in spread(columns, list(counts.values()))]


@pytest.mark.parametrize("rate", [0.25, 0.6, 1.0, 2.0, 8.0])
@pytest.mark.parametrize(
    "counts",
    [
        {1: 8},
        {0: 1, 1: 7},
        {0: 4, 1: 4},
        {0: 6, 1: 2},
        {0: 5, 3: 3},
        {0: 0, 1: 6, 4: 2},
        {0: 8},
        {0: 1, 2: 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("head", [0.0, 0.5])
def test_passes_take_what_the_plan_says(counts: dict[int, int], rate: float, head: float) -> None:
    """`rate` in blocks of size 1 that an engine copies in a forward. The plan is an upper bound: some
    blocks have more than a window to hide behind, and the tensors copied out last before a head are still
    on the device."""
    chunk = Chunk(arranged(counts), head)
    took, planned = chunk.seconds(rate * BLOCK), chunk.planned(rate * BLOCK)
    compute = len(chunk.sizes) * (FORWARD + BACKWARD) + 3 * head
    assert compute - 1e-9 <= took <= planned + 1e-9
    assert planned <= (1.01 if rate >= 2 else 1.5) * took


def test_copies_hide_where_the_last_block_stays_and_not_where_it_moves() -> None:
    """Eight blocks whose copies take as long as a forward: their last one is waited for, both ways."""
    all_move, one_stays = (Chunk(arranged(counts)) for counts in ({1: 8}, {0: 1, 1: 7}))
    assert all_move.seconds(BLOCK) == pytest.approx(8 * (FORWARD + BACKWARD) + 2.0)
    assert all_move.planned(BLOCK) == pytest.approx(8 * (FORWARD + BACKWARD) + 2.0)
    assert one_stays.seconds(BLOCK) == one_stays.planned(BLOCK) == pytest.approx(8 * (FORWARD + BACKWARD))


def test_a_copy_has_the_compute_of_all_blocks_up_to_the_next_that_moves() -> None:
    chunk = Chunk(arranged({0: 6, 1: 2}))
    # Three blocks' forward, and six of backward's.
    assert chunk.seconds(BLOCK / 3) == pytest.approx(8 * (FORWARD + BACKWARD))
    assert chunk.seconds(BLOCK / 6) > 8 * (FORWARD + BACKWARD) + 2.0
