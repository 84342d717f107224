"""What blocks keep for backward, in host memory until backward needs it.

Forward copies a block's saved tensors out while the next blocks compute, and frees them when the next one
that moves is done. Backward asks for a block's tensors when the next one above it that moves begins, so that
they come back while that one and those between compute. So the device holds at most two moved blocks of all
microbatches in flight (double buffering: LLMQ, papers/llmq.txt, section 3.1).
`node.tuning.memory_program` says how long compute waits for that.

Whole storages are copied, and come back with the same strides and offsets: every kernel reads what it would
have read, so no bit changes. Weights, tables and the chunk's input stay, because they are in memory anyway.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from node.model.host_memory import HostMemory

LEAST_BYTES = 1 << 16
"""Smaller tensors stay on the device."""
ALL = "all"
"""In place of kinds: everything that a block keeps."""

_marked: ContextVar[dict[int, str] | None] = ContextVar("marked", default=None)
"""Kinds by storage, of the block that is going forward."""


def mark(kind: str, tensors: Iterable[Tensor]) -> None:
    """Say of which kind (`node.model.storage.KINDS`) these tensors are, before autograd saves them."""
    kinds = _marked.get()
    if kinds is not None:
        kinds.update((tensor.untyped_storage().data_ptr(), kind) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Saved:
    """One saved tensor in a moved storage."""

    block: "_Block"
    number: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Block:
    """The tensors that one block keeps of one microbatch. Alive while autograd may ask for any of them."""

    def __init__(self, memory: HostMemory, moves: frozenset[str], stays: frozenset[int]) -> None:
        """
        Args:
            moves: kinds that are moved.
            stays: addresses of storages that are not.
        """
        self._memory = memory
        self._moves = moves
        self._stays = stays
        self._numbers: dict[int, int] = {}
        self._on_device: list[Tensor] = []
        """Whole storages as bytes; empty while they are on the host alone."""
        self._on_host: list[Tensor] = []
        self._sent: Any = None
        self._coming: Any = None
        self.kinds: dict[int, str] = {}

    def pack(self, tensor: Tensor) -> "Tensor | _Saved":
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        moves = ALL in self._moves or self.kinds.get(address, "") in self._moves
        if address in self._stays or storage.nbytes() < LEAST_BYTES or not moves:
            return tensor.detach()
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._on_device)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._on_device.append(whole.set_(storage, 0, (storage.nbytes(),), (1,)))
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return _Saved(self, number, tensor.dtype, offset, tensor.shape, stride)

    @staticmethod
    def unpack(saved: "Tensor | _Saved") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        whole = saved.block.tensors()[saved.number]
        tensor = torch.empty(0, dtype=saved.dtype, device=whole.device)
        return tensor.set_(whole.untyped_storage(), saved.offset, saved.shape, saved.stride)

    def tensors(self) -> list[Tensor]:
        self.fetch()
        if self._coming is not None:
            self._memory.wait(self._coming[0])
            self._coming = None
        return self._on_device

    def send(self) -> None:
        """Forward is done: copy out."""
        self._numbers.clear()
        self._on_host = [self._memory.lend(self, whole.nbytes) for whole in self._on_device]
        self._sent = self._memory.copy_out(zip(self._on_device, self._on_host, strict=True))

    def release(self) -> None:
        """Leave the host's copy alone."""
        self._memory.wait(self._sent)
        self._on_device = []

    def keep(self) -> None:
        """Backward begins before the device's copy is gone: it stays."""
        # Autograd may free it from now on.
        self._memory.wait(self._sent)

    def fetch(self) -> None:
        """Copy back what is not on the device, for `tensors` to wait for."""
        if len(self._on_device) == len(self._on_host):
            return
        self._on_device = [torch.empty_like(host, device=self._memory.device) for host in self._on_host]
        # In a tuple: a CPU's mark is None.
        self._coming = (self._memory.copy_in(zip(self._on_host, self._on_device, strict=True)),)


class Offload:
    """Moves activations of a stage's blocks. Backwards of its microbatches must not run at the same time."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._leaving: _Block | None = None
        """Copied out, still on the device."""

    def begin_step(self) -> None:
        """The microbatches of an unfinished step are dropped."""
        self._memory.settle()
        self._leaving = None

    def passing(self, x: Tensor) -> "Passing":
        """For a chunk's forward of `x`."""
        return Passing(self, x)

    def _begin_block(self, moves: frozenset[str], stays: frozenset[int]) -> _Block:
        return _Block(self._memory, moves, stays)

    def _end_block(self, block: _Block) -> None:
        if self._leaving is not None:
            self._leaving.release()
        block.send()
        self._leaving = block

    def fetch(self, block: _Block) -> None:
        """Backward will soon need this one."""
        if self._leaving is block:
            block.keep()
            self._leaving = None
            return
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None
        block.fetch()


class Passing:
    """One forward through a chunk's layers."""

    def __init__(self, offload: Offload, x: Tensor) -> None:
        self._offload = offload
        self._source = x.untyped_storage().data_ptr()
        self._below: weakref.ref[_Block] | None = None

    def through(
        self, layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, moves: frozenset[str]
    ) -> Tensor:
        """`run(x)`, the forward of `layer`; what it keeps is moved if it is of the kinds `moves`."""
        if not moves:
            return run(x)
        output, block = self._moving(layer, run, x, moves)
        reference = weakref.ref(block)
        self.ask_above(output, reference, self._below)
        self._below = reference
        return output

    def ask_above(self, output: Tensor, *wanted: "weakref.ref[_Block] | None") -> None:
        """Ask for these blocks' tensors once backward has come to `output`."""
        # Weakly: hooks live until the whole backward is over, and a block's tensors must not.
        blocks = [block for block in wanted if block is not None]
        offload = self._offload
        if not blocks or not output.requires_grad:
            return

        def ask(_: Tensor) -> None:
            for reference in blocks:
                if (block := reference()) is not None:
                    offload.fetch(block)

        output.register_hook(ask)  # type: ignore[no-untyped-call]  # torch's

    def ask_last(self, output: Tensor) -> None:
        """Ask for the tensors of the last layer that moves once backward has come to `output`, which follows
        from it."""
        self.ask_above(output, self._below)

    def _moving(
        self, layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, moves: frozenset[str]
    ) -> tuple[Tensor, _Block]:
        own = [*layer.parameters(), *layer.buffers()]
        stays = frozenset(tensor.untyped_storage().data_ptr() for tensor in own) | {self._source}
        block = self._offload._begin_block(moves, stays)
        with _marking(block.kinds), saved_tensors_hooks(block.pack, block.unpack):
            output = run(x)
        self._offload._end_block(block)
        return output, block


@contextmanager
def _marking(kinds: dict[int, str]) -> Iterator[None]:
    before = _marked.set(kinds)
    try:
        yield
    finally:
        _marked.reset(before)
