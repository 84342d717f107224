"""Activations that blocks keep for backward, in host memory until backward needs them.

Forward copies a block's saved tensors out while the next blocks compute. It frees them on the device when the
next block that moves is done. Backward requests a block's tensors when the next moved block above it begins,
so that they arrive while the blocks between compute. So the device holds at most two moved blocks of all
microbatches in flight (double buffering, as in LLMQ, arXiv 2512.15306, section 3.1).
`node.tuning.memory_columns` says how long compute waits for the copies.

Whole storages are copied, and return with the same strides and offsets. Kernels read the same values as
without copies, so no bit changes. Weights, tables and the chunk's input stay on the device, because they are
in memory anyway.
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
"""Tensors with fewer bytes stay on the device."""
ALL = "all"
"""Stands for all kinds: everything that a block keeps is moved."""

_marked: ContextVar[dict[int, str] | None] = ContextVar("marked", default=None)
"""The kinds of marked tensors of the block that is going forward, by the address of their storage."""


def mark(kind: str, tensors: Iterable[Tensor]) -> None:
    """Declare these tensors to be of this kind (`node.model.storage.KINDS`), before autograd saves them."""
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
    """The tensors that one block keeps of one microbatch. It lives while autograd may ask for any of them."""

    def __init__(self, memory: HostMemory, moves: frozenset[str], stays: frozenset[int]) -> None:
        """
        Args:
            moves: the kinds that are moved.
            stays: the addresses of storages that are not moved.
        """
        self._memory = memory
        self._moves = moves
        self._stays = stays
        self._numbers: dict[int, int] = {}
        self._on_device: list[Tensor] = []
        """Whole storages as bytes. It is empty while they are only on the host."""
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
        """Start copying the tensors out. Forward is done."""
        self._numbers.clear()
        self._on_host = [self._memory.lend(self, whole.nbytes) for whole in self._on_device]
        self._sent = self._memory.copy_out(zip(self._on_device, self._on_host, strict=True))

    def release(self) -> None:
        """Free the device's copy; only the host's is left."""
        self._memory.wait(self._sent)
        self._on_device = []

    def keep(self) -> None:
        """Keep the device's copy, because backward begins before it was freed."""
        # From now on autograd may free it.
        self._memory.wait(self._sent)

    def fetch(self) -> None:
        """Start copying back if the tensors are not on the device. `tensors` waits for the copy."""
        if len(self._on_device) == len(self._on_host):
            return
        self._on_device = [torch.empty_like(host, device=self._memory.device) for host in self._on_host]
        # In a tuple, because a CPU's mark is None.
        self._coming = (self._memory.copy_in(zip(self._on_host, self._on_device, strict=True)),)


class Offload:
    """Moves the activations of a stage's blocks. The backward passes of its microbatches must not overlap."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._leaving: _Block | None = None
        """The block that is being copied out. It is still on the device."""

    def begin_step(self) -> None:
        """Drop the microbatches of an unfinished step."""
        self.memory.settle()
        self._leaving = None

    def end_block(self, block: _Block) -> None:
        """Move out the tensors of a block whose forward is done. Those of the one before leave the device."""
        if self._leaving is not None:
            self._leaving.release()
        block.send()
        self._leaving = block

    def fetch(self, block: _Block) -> None:
        """Bring back a block that backward needs soon."""
        if self._leaving is block:
            block.keep()
            self._leaving = None
            return
        if self._leaving is not None:
            self._leaving.release()
            self._leaving = None
        block.fetch()


class Passing:
    """One forward pass through a chunk's layers."""

    def __init__(self, offload: Offload, x: Tensor) -> None:
        self._offload = offload
        self._source = x.untyped_storage().data_ptr()
        self._below: weakref.ref[_Block] | None = None

    def through(
        self, layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, moves: frozenset[str]
    ) -> Tensor:
        """`run(x)`, the forward of `layer`. Kept tensors whose kind is in `moves` are moved."""
        if not moves:
            return run(x)
        output, block = self._moving(layer, run, x, moves)
        reference = weakref.ref(block)
        self.ask_above(output, reference, self._below)
        self._below = reference
        return output

    def ask_above(self, output: Tensor, *wanted: "weakref.ref[_Block] | None") -> None:
        """Request these blocks' tensors when backward arrives at `output`."""
        # Weak references, because hooks live until the whole backward is over, and a block's tensors must
        # not.
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
        """Request the tensors of the last moved block when backward arrives at `output`, a tensor that
        depends on it."""
        self.ask_above(output, self._below)

    def _moving(
        self, layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, moves: frozenset[str]
    ) -> tuple[Tensor, _Block]:
        own = [*layer.parameters(), *layer.buffers()]
        stays = frozenset(tensor.untyped_storage().data_ptr() for tensor in own) | {self._source}
        block = _Block(self._offload.memory, moves, stays)
        with _marking(block.kinds), saved_tensors_hooks(block.pack, block.unpack):
            output = run(x)
        self._offload.end_block(block)
        return output, block


@contextmanager
def _marking(kinds: dict[int, str]) -> Iterator[None]:
    before = _marked.set(kinds)
    try:
        yield
    finally:
        _marked.reset(before)
