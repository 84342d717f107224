"""Copies between a GPU and page-locked memory, which hold up neither a thread nor other streams.

Page-locked memory comes from torch's caching allocator, which hands a block out again when the copies from
and to it are done: in the steady state nothing is allocated.
"""

from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in a stream's queue of work."""

    def synchronize(self) -> None:
        """Hold up the calling thread until the device has come to it."""
        ...


class Streams(Protocol):
    """The part of `torch.cuda` that is used here; tests put another in its place."""

    def Event(self, *, blocking: bool) -> Any: ...

    def current_stream(self, device: torch.device) -> Any: ...


class HostCopies:
    """All copies are made on the stream that is current for the device."""

    def __init__(self, streams: Streams = torch.cuda, *, page_locked: bool = True) -> None:
        """`page_locked` is False only where there is no GPU to lock pages for."""
        self._streams = streams
        self._page_locked = page_locked

    def rows(self, values: torch.Tensor, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`values[rows]` of a tensor on the host, on `device`; `rows` is int64 `[n]`."""
        host = self.room((len(rows), *values.shape[1:]), values.dtype)
        torch.index_select(values, 0, rows, out=host)
        return host.to(device, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """A copy of `values` on the host, and when it is there. `values` may be dropped at once."""
        host = self.room(values.shape, values.dtype)
        host.copy_(values, non_blocking=True)
        there = self._streams.Event(blocking=True)
        there.record(self._streams.current_stream(values.device))
        return host, there

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `torch.empty` on the host."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._page_locked)
