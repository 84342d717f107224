"""Asynchronous copies between a GPU and page-locked host memory.

Page-locked memory comes from torch's caching allocator, which reuses a block when its copies are done, so
nothing is allocated in the steady state.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream's queue of work."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached this point."""
        ...


class Streams(Protocol):
    """The part of `torch.cuda` that copies use; tests replace it."""

    def Event(self, *, blocking: bool = False) -> Any: ...

    def Stream(self, device: torch.device) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def current_stream(self, device: torch.device) -> Any: ...


class HostCopies:
    """Copies tensors to and from the host, on the device's current stream."""

    def __init__(self, streams: Streams = torch.cuda, *, page_locked: bool = True) -> None:
        """`page_locked` is False only without a GPU."""
        self._streams = streams
        self._page_locked = page_locked

    def rows(self, values: torch.Tensor, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`values[rows]` of a host tensor, on `device`; `rows` is int64 `[n]`."""
        host = self.room((len(rows), *values.shape[1:]), values.dtype)
        torch.index_select(values, 0, rows, out=host)
        return host.to(device, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """(host copy of `values`, mark to wait for it). The caller may drop `values` at once."""
        host = self.room(values.shape, values.dtype)
        host.copy_(values, non_blocking=True)
        done = self._streams.Event(blocking=True)
        done.record(self._streams.current_stream(values.device))
        return host, done

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """`torch.empty` on the host, page-locked."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._page_locked)
