"""Calls of `torch.distributed` between the processes of a node, and the collectives of tensor parallelism.

Both collectives move bytes, so that gloo takes every dtype. A reduce-scatter is an all-to-all and a sum in
float32 in the order of ranks: it moves as many bytes as a ring and neither rounds nor reorders in bfloat16.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from node.model.tensor_rank import TensorRank
from node.stage.fp8_all_reduce import all_gather
from node.stage.out_of_memory import ran_out
from wire.errors import DeviceLostError


@contextmanager
def collective() -> Iterator[None]:
    """Run a collective inside. Raises DeviceLostError with a one-line message if another process has ended.

    If this process runs out of memory, that error is raised unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if ran_out(error):
            raise
        reason = str(error).partition("\n")[0][:200]
        raise DeviceLostError(
            f"the process of another device of this node has ended, so the node ends too ({reason})"
        ) from error


class TensorRanks(TensorRank):
    """This process as one of the ranks that share blocks. All ranks make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup, index: int, count: int) -> None:
        self._group = group
        self.index = index
        self.count = count

    def gather(self, x_bsc: Tensor) -> Tensor:
        mine = x_bsc.contiguous()
        batch, length, *rest = mine.shape
        everybody = mine.new_empty((self.count, *mine.shape))
        with collective():
            all_gather(_bytes(everybody), _bytes(mine), group=self._group)
        return everybody.transpose(0, 1).reshape(batch, self.count * length, *rest)

    def reduce_scatter(self, partial_bsc: Tensor) -> Tensor:
        batch, length, *rest = partial_bsc.shape
        shares = partial_bsc.reshape(batch, self.count, length // self.count, *rest)
        sent = shares.transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        with collective():
            dist.all_to_all_single(_bytes(received), _bytes(sent), group=self._group)
        # In place if they are already float32.
        total = received[0].float()
        for part in received[1:]:
            total += part
        return total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
