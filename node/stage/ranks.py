"""The processes of one node that share a stage, joined by `torch.distributed`. Rank 0 leads, others follow.

N ranks form N / T rows of T. The T ranks of a row share each block (tensor parallel) and the positions of the
same samples. The N / T ranks of a column hold the same shards and have different samples (data parallel).
Rank r is in row r // T and column r % T.

Commands travel over gloo, which sleeps while it waits and reports dead processes. Tensors travel over NCCL
between GPUs and over gloo between CPUs. Nothing is pickled: a command is eight integers, and a state is the
bytes of a file.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.fp8.reference import Fp8Gradient
from node.model.tensor_rank import TensorRank
from node.stage.collectives import TensorRanks, collective
from node.stage.fp8_all_reduce import Fp8AllReduce
from node.training.gradients import Fp8Gradients
from node.training.optimizer import StageOptimizer

WAIT = timedelta(days=30)
"""How long followers wait for the next command. A run may pause for days."""
COLLECTIVE = timedelta(minutes=10)
"""The time limit of a collective. All ranks run the same commands, so none is further behind."""
_FIELDS = 8


class Op(IntEnum):
    """The leader's commands."""

    BUILD = 0
    LOAD = 1
    BEGIN = 2
    FORWARD = 3
    BACKWARD = 4
    FINISH = 5
    PUT_TIED = 6
    APPLY = 7
    DROP = 8
    NORMS = 9
    STATE = 10
    STOP = 11
    TAKE = 12
    PUT = 13


@dataclass(frozen=True)
class Command:
    """An `Op` and its numbers, which `node.stage.group` defines."""

    op: Op
    numbers: tuple[int, ...] = ()


class Ranks:
    """This process among the node's processes. Make all calls on the compute thread, in the same order on all
    ranks."""

    def __init__(
        self, rank: int, count: int, device: torch.device, meeting_place: Path, tensor_parallel: int = 1
    ) -> None:
        """
        Args:
            tensor_parallel: how many ranks share each block. It divides `count`.
            meeting_place: a path that does not exist yet, the same for all, which no other user can write.
        """
        self.rank = rank
        self.count = count
        self.device = device
        # Do not leave this machine.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{meeting_place}",
            rank=rank,
            world_size=count,
            timeout=COLLECTIVE,
        )
        self._commands = dist.new_group(backend="gloo", timeout=WAIT)
        self.data_parallel = count // tensor_parallel
        self.tensor_rank, self._columns = self._make_groups(tensor_parallel)
        self._reduces: tuple[Fp8AllReduce, ...] = ()

    def _make_groups(self, tensor_parallel: int) -> tuple[TensorRank, dist.ProcessGroup | None]:
        """This rank's row and column. A column of None means all ranks."""
        if tensor_parallel == 1:
            return TensorRank(), None
        # Every process creates every group, in the same order.
        everybody = range(self.count)
        starts = range(0, self.count, tensor_parallel)
        rows = [dist.new_group(list(everybody[start : start + tensor_parallel])) for start in starts]
        columns = [
            dist.new_group(list(everybody[index::tensor_parallel])) for index in range(tensor_parallel)
        ]
        row, index = divmod(self.rank, tensor_parallel)
        return TensorRanks(rows[row], index, tensor_parallel), columns[index]

    # ---- commands

    def lead(self, op: Op, *numbers: int) -> None:
        fields = [op, *numbers, *([0] * (_FIELDS - 1 - len(numbers)))]
        with collective():
            dist.broadcast(torch.tensor(fields, dtype=torch.int64), src=0, group=self._commands)

    def follow(self) -> Command:
        """Wait for the leader's next command."""
        fields = torch.empty(_FIELDS, dtype=torch.int64)
        with collective():
            dist.broadcast(fields, src=0, group=self._commands)
        op, *numbers = fields.tolist()
        return Command(Op(op), tuple(numbers))

    def share_bytes(self, size: int, given: bytes | None = None) -> bytes:
        """Send the leader's `size` bytes to all. The leader passes them as `given`."""
        data = torch.empty(size, dtype=torch.uint8)
        if given is not None:
            data.numpy()[:] = np.frombuffer(given, dtype=np.uint8)
        with collective():
            dist.broadcast(data, src=0, group=self._commands)
        return data.numpy().tobytes() if given is None else given

    # ---- tensors

    def scatter(self, whole: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's samples and positions, of `shape`. The leader passes those of all ranks as `whole`."""
        mine = torch.empty(shape, dtype=dtype, device=self.device)
        parts = None
        if whole is not None:
            rows = whole.to(dtype).contiguous().chunk(self.data_parallel)
            parts = [part.contiguous() for row in rows for part in row.chunk(self.tensor_rank.count, dim=1)]
        with collective():
            dist.scatter(mine, parts, src=0)
        return mine

    def gather(self, mine: Tensor) -> Tensor | None:
        """All ranks' samples and positions joined, or all ranks' [1] as [ranks], on the leader; else None."""
        mine = mine.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.count)] if self.rank == 0 else None
        with collective():
            dist.gather(mine, parts, dst=0)
        if parts is None:
            return None
        positions = self.tensor_rank.count
        if positions > 1 and mine.dim() > 1:
            starts = range(0, self.count, positions)
            parts = [torch.cat(parts[start : start + positions], dim=1) for start in starts]
        return torch.cat(parts)

    def share(self, tensor: Tensor) -> Tensor:
        """Send the leader's tensor to all. The others pass a tensor of the same shape, which is filled."""
        with collective():
            dist.broadcast(tensor, src=0)
        return tensor

    # ---- shards, between the ranks of the leader's row

    def gather_norms(self, mine: list[float]) -> list[list[float]]:
        """The norms of every rank in the leader's row, on the leader; empty on the others."""
        sent = torch.tensor(mine, dtype=torch.float64)
        parts = [torch.empty_like(sent) for _ in range(self.count)] if self.rank == 0 else None
        with collective():
            dist.gather(sent, parts, dst=0, group=self._commands)
        return [part.tolist() for part in (parts or [])[: self.tensor_rank.count]]

    def gather_shards(self, state: Mapping[str, Tensor], names: Sequence[str]) -> list[dict[str, Tensor]]:
        """These tensors of every rank in the leader's row, on the leader's CPU; empty on the others."""
        if self.rank >= self.tensor_rank.count:
            return []
        if self.rank > 0:
            with collective():
                for name in names:
                    dist.send(state[name].contiguous(), dst=0, group=self._commands)
            return []
        # Shards have the same shape and dtype.
        states = [dict(state)]
        for rank in range(1, self.tensor_rank.count):
            received = {name: torch.empty_like(state[name]) for name in names}
            with collective():
                for name in names:
                    dist.recv(received[name], src=rank, group=self._commands)
            states.append(received)
        return states

    # ---- gradients

    def watch_gradients(self, optimizer: StageOptimizer) -> None:
        """Sum the gradients of this new optimizer from now on."""
        gradients = optimizer.gradients
        reduces = []
        if isinstance(gradients, Fp8Gradients):
            # Backward computes the last layers' gradients first.
            packed = list(gradients.packed.items())[::-1]
            whole = [main for parameter, main in packed if not optimizer.is_sharded(parameter)]
            shards = [main for parameter, main in packed if optimizer.is_sharded(parameter)]
            if whole:
                reduces.append(Fp8AllReduce(whole))
            if shards and self.data_parallel > 1:
                reduces.append(Fp8AllReduce(shards, self._columns))
        self._reduces = tuple(reduces)

    def forget_gradients(self) -> None:
        """Free the buffers of an old optimizer before a new one is created."""
        self.begin_step()
        self._reduces = ()

    def begin_step(self) -> None:
        """Drop the sums that an aborted step has started."""
        if self._reduces:
            with collective():
                for reduce in self._reduces:
                    reduce.reset()

    def last_backward(self, optimizer: StageOptimizer, last: bool) -> None:
        """Tell whether the next backward is the last: gradients are then complete and can be summed."""
        gradients = optimizer.gradients
        if isinstance(gradients, Fp8Gradients):
            gradients.when_added = self._complete if last else None

    def sum_gradients(self, optimizer: StageOptimizer) -> None:
        """Replace every gradient by the sum over all ranks that hold its parameter, the same bits on each.

        A replicated parameter's gradient is partial on every rank, because each has different positions; a
        shard's gradient is partial only in the samples.
        """
        with collective():
            works = []
            for parameter in optimizer.parameters:
                sharded = optimizer.is_sharded(parameter)
                gradient = optimizer.gradients.unpacked(parameter)
                if gradient is not None and not (sharded and self.data_parallel == 1):
                    group = self._columns if sharded else None
                    works.append(dist.all_reduce(gradient, group=group, async_op=True))
            for reduce in self._reduces:
                reduce.finish()
            for work in works:
                work.wait()

    def _complete(self, gradient: Fp8Gradient) -> None:
        for reduce in self._reduces:
            reduce.complete(gradient)

    def close(self) -> None:
        """Leave the group, together with all other ranks."""
        dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave a group whose other ranks do not answer."""
        # NCCL would wait for the others. On GPUs, the end of the process frees it.
        if self.device.type == "cpu":
            dist.destroy_process_group()


def arrival(meeting_place: Path, rank: int) -> Path:
    """The file that a rank creates just before it creates its `Ranks`."""
    return meeting_place.with_name(f"rank-{rank}")


def farewell(meeting_place: Path, rank: int) -> Path:
    """The file in which a rank that ran out of memory describes its device's memory before it ends."""
    return meeting_place.with_name(f"rank-{rank}-ran-out")


def number(value: float) -> int:
    """A float's bits as an integer, for a command."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def value(bits: int) -> float:
    """The inverse of `number`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
