"""Copies between a device and host memory while the device computes.

Copies run on two streams, one per direction, so that the copy engines work while the stage computes. A copy
starts after all work that was submitted before it. Later work sees the copy once it has waited for the copy's
mark. The source and the target of a copy must stay in memory until then.

A CPU has no other memory: copies are made at once, to another buffer. Tests of bits run there.
"""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from wire.codecs.host_copies import Streams

Copy = tuple[Tensor, Tensor]
"""Source and target, of the same shape and dtype. One is on the device, the other on the host."""


class HostMemory(ABC):
    """Host memory for one device's tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._idle: dict[int, list[Tensor]] = {}
        self.lent_bytes = 0
        """Bytes that are lent now."""
        self.most_lent_bytes = 0
        """The maximum of `lent_bytes` so far."""

    @abstractmethod
    def copy_out(self, copies: Iterable[Copy]) -> Any:
        """Start copies from the device and return their mark."""

    @abstractmethod
    def copy_in(self, copies: Iterable[Copy]) -> Any:
        """Start copies to the device and return their mark. Wait first for the mark of the copies that wrote
        the sources."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Make the device's later work wait for a mark. The caller does not block."""

    @abstractmethod
    def settle(self) -> None:
        """Make the device's later work wait for all copies so far."""

    @abstractmethod
    def finish(self) -> None:
        """Block until all copies so far are done. The host may then read what was copied out."""

    def wait_device(self) -> None:
        """Block until the device's work and all copies so far are done."""
        self.finish()

    def clock(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    @abstractmethod
    def _allocate(self, count: int) -> Tensor: ...

    def empty(self, count: int) -> Tensor:
        """uint8 `[count]`, uninitialized, owned by the caller."""
        return self._allocate(count)

    def lend(self, owner: object, count: int) -> Tensor:
        """uint8 `[count]`, uninitialized, which is reused once `owner` has been freed.

        By then the device must have waited for all copies of the block, or `settle` must follow.
        """
        idle = self._idle.setdefault(count, [])
        block = idle.pop() if idle else self._allocate(count)
        self.lent_bytes += count
        self.most_lent_bytes = max(self.most_lent_bytes, self.lent_bytes)
        weakref.finalize(owner, self._give_back, block).atexit = False
        return block

    def _give_back(self, block: Tensor) -> None:
        self.lent_bytes -= block.nbytes
        self._idle[block.nbytes].append(block)


class CudaHostMemory(HostMemory):
    """Page-locked memory, and a stream for each direction."""

    def __init__(
        self, device: torch.device, streams: Streams = torch.cuda, *, page_locked: bool = True
    ) -> None:
        """`page_locked` is False only where there is no GPU to lock pages for."""
        super().__init__(device)
        self._streams = streams
        self._page_locked = page_locked
        self._out, self._in = streams.Stream(device), streams.Stream(device)

    def copy_out(self, copies: Iterable[Copy]) -> Any:
        return self._copy(self._out, copies)

    def copy_in(self, copies: Iterable[Copy]) -> Any:
        return self._copy(self._in, copies)

    def wait(self, mark: Any) -> None:
        self._current.wait_event(mark)

    def settle(self) -> None:
        for stream in (self._out, self._in):
            self._current.wait_stream(stream)

    def finish(self) -> None:
        for stream in (self._out, self._in):
            stream.synchronize()

    def wait_device(self) -> None:
        self._current.synchronize()
        self.finish()

    def _allocate(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=self._page_locked)

    @property
    def _current(self) -> Any:
        return self._streams.current_stream(self.device)

    def _copy(self, stream: Any, copies: Iterable[Copy]) -> Any:
        stream.wait_stream(self._current)
        with self._streams.stream(stream), torch.no_grad():
            for source, target in copies:
                target.copy_(source, non_blocking=True)
            mark = self._streams.Event()
            mark.record(stream)
        return mark


class PlainHostMemory(HostMemory):
    """Host memory of a CPU: copies are synchronous."""

    def copy_out(self, copies: Iterable[Copy]) -> None:
        with torch.no_grad():
            for source, target in copies:
                target.copy_(source)

    def copy_in(self, copies: Iterable[Copy]) -> None:
        self.copy_out(copies)

    def wait(self, mark: None) -> None:
        pass

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def _allocate(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8)


def host_memory(device: torch.device) -> HostMemory:
    return CudaHostMemory(device) if device.type == "cuda" else PlainHostMemory(device)
