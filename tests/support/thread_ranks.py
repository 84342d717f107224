"""Tensor-parallel ranks that are threads of one process."""

import threading

import torch
from torch import Tensor

from node.model.tensor_rank import TensorRank


class ThreadRank(TensorRank):
    """A rank that meets the others in memory."""

    def __init__(self, index: int, count: int, barrier: threading.Barrier, slots: list[Tensor]) -> None:
        self.index, self.count = index, count
        self._barrier, self._slots = barrier, slots

    def gather(self, x_bsc: Tensor) -> Tensor:
        return torch.cat(self._exchange(x_bsc), dim=1)

    def reduce_scatter(self, partial_bsc: Tensor) -> Tensor:
        parts = self._exchange(partial_bsc)
        mine = [part.chunk(self.count, dim=1)[self.index].float() for part in parts]
        return torch.stack(mine).sum(0)

    def abort(self) -> None:
        """End every rank's wait for the others."""
        self._barrier.abort()

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self._slots[self.index] = mine
        self._barrier.wait()
        everybody = list(self._slots)
        self._barrier.wait()
        return everybody


def thread_ranks(count: int) -> list[ThreadRank]:
    """Ranks that meet each other."""
    barrier, slots = threading.Barrier(count, timeout=120), [torch.empty(0)] * count
    return [ThreadRank(index, count, barrier, slots) for index in range(count)]
