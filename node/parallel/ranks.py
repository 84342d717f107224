"""The processes of one node that share a stage, joined by `torch.distributed`. Rank 0 leads, others follow.

Commands travel over gloo, which sleeps while it waits and says so when a process is gone; tensors over NCCL
between GPUs, over gloo between CPUs. Nothing is pickled: a command is eight integers, a state is a file's
bytes.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from node.parallel.fp8_all_reduce import Fp8AllReduce
from node.training.gradients import Fp8Gradients
from node.training.optimizer import StageOptimizer
from node.training.serialization import deserialize_unit, serialize_unit
from wire.errors import RunError

WAIT = timedelta(days=30)
"""Followers wait for the next command this long: a run may stand still for days."""
COLLECTIVE = timedelta(minutes=10)
"""The others are never further behind than this: they run the same commands."""
_FIELDS = 8


@contextmanager
def _together() -> Iterator[None]:
    """What torch raises when another process is gone, as one line. RunError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:200]
        raise RunError(
            f"the process of another of this node's devices is gone, and the node ends with it ({reason})"
        ) from error


class Op(IntEnum):
    """What the leader tells the others to do."""

    BUILD = 0
    LOAD = 1
    BEGIN = 2
    FORWARD = 3
    BACKWARD = 4
    FINISH = 5
    PUT_TIED = 6
    APPLY = 7
    DROP = 8
    STOP = 9


@dataclass(frozen=True)
class Command:
    """`Op` and its numbers; what each means is in `node.parallel.group`."""

    op: Op
    numbers: tuple[int, ...] = ()


class Ranks:
    """This process among those of its node. All calls on the compute thread, in the same order everywhere."""

    def __init__(self, rank: int, count: int, device: torch.device, meeting_place: Path) -> None:
        """
        Args:
            meeting_place: a path that does not exist yet, the same for all, which no other user can write to.
        """
        self.rank = rank
        self.count = count
        self.device = device
        # Never off this machine.
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
        self._reduce: tuple[StageOptimizer, Fp8AllReduce | None] | None = None

    # ---- commands

    def lead(self, op: Op, *numbers: int) -> None:
        """Tell the others."""
        fields = [op, *numbers, *([0] * (_FIELDS - 1 - len(numbers)))]
        with _together():
            dist.broadcast(torch.tensor(fields, dtype=torch.int64), src=0, group=self._commands)

    def follow(self) -> Command:
        """Wait for the leader's next command."""
        fields = torch.empty(_FIELDS, dtype=torch.int64)
        dist.broadcast(fields, src=0, group=self._commands)
        op, *numbers = fields.tolist()
        return Command(Op(op), tuple(numbers))

    def share_state(self, state: Mapping[str, Tensor] | None, size: int) -> dict[str, Tensor]:
        """A unit's state from the leader (who gives it) to all; `size` is that of `state_bytes`."""
        data = torch.empty(size, dtype=torch.uint8)
        if state is not None:
            data.copy_(torch.frombuffer(bytearray(serialize_unit(state)), dtype=torch.uint8))
        with _together():
            dist.broadcast(data, src=0, group=self._commands)
        return deserialize_unit(data.numpy().tobytes())

    # ---- tensors

    def scatter(self, whole: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's rows, of `shape`; the leader gives all of them."""
        mine = torch.empty(shape, dtype=dtype, device=self.device)
        rows = None if whole is None else list(whole.to(dtype).contiguous().chunk(self.count))
        with _together():
            dist.scatter(mine, rows, src=0)
        return mine

    def gather(self, mine: Tensor) -> Tensor | None:
        """Everybody's rows in the order of ranks, for the leader."""
        mine = mine.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.count)] if self.rank == 0 else None
        with _together():
            dist.gather(mine, parts, dst=0)
        return None if parts is None else torch.cat(parts)

    def share(self, tensor: Tensor) -> Tensor:
        """The leader's tensor; the others give one of the same shape to be filled."""
        with _together():
            dist.broadcast(tensor, src=0)
        return tensor

    # ---- gradients

    def watch_gradients(self, optimizer: StageOptimizer) -> None:
        """From here on the gradients of a new optimizer are to be summed."""
        gradients = optimizer.gradients
        reduce = None
        if isinstance(gradients, Fp8Gradients):
            # Backward makes the last layers' first.
            reduce = Fp8AllReduce(list(reversed(gradients.packed)))
        self._reduce = optimizer, reduce

    def last_backward(self, optimizer: StageOptimizer, last: bool) -> None:
        """Whether gradients of the next backward are complete once made: their sums may then begin."""
        gradients = optimizer.gradients
        if isinstance(gradients, Fp8Gradients):
            assert self._reduce is not None and self._reduce[1] is not None
            gradients.when_added = self._reduce[1].complete if last else None

    def sum_gradients(self) -> None:
        """Every gradient becomes the sum over all ranks, the same bits everywhere."""
        assert self._reduce is not None
        optimizer, reduce = self._reduce
        with _together():
            works = []
            for parameter in optimizer.parameters:
                if parameter.grad is not None:
                    works.append(dist.all_reduce(parameter.grad, async_op=True))
            if reduce is not None:
                reduce.finish()
            for work in works:
                work.wait()

    def close(self) -> None:
        dist.destroy_process_group()


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """What `Ranks.share_state` needs to know beforehand."""
    return len(serialize_unit(state))


def number(value: float) -> int:
    """A float's bits, to travel in a command."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def value(bits: int) -> float:
    """What `number` made."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
