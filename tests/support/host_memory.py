"""Host memory whose copies come as late as they may: who does not wait for one reads noise."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from node.model.host_memory import Copy, HostMemory

CPU = torch.device("cpu")


class LateHostMemory(HostMemory):
    """A mark is the number of a batch of copies."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.copied_out = self.copied_in = 0
        """Bytes."""
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._unread: set[int] = set()
        """Addresses of host blocks that are still to be written."""
        self._on_device: list[weakref.ref[Tensor]] = []
        self.most_on_device = 0
        """Bytes of tensors that were copied in, at most."""

    def copy_out(self, copies: Iterable[Copy]) -> int:
        pairs = list(copies)
        self.copied_out += sum(source.nbytes for source, _ in pairs)
        return self._later(pairs, writes_host=True)

    def copy_in(self, copies: Iterable[Copy]) -> int:
        pairs = list(copies)
        for source, target in pairs:
            assert source.data_ptr() not in self._unread, "read before the copy out was waited for"
            target.view(torch.uint8).fill_(0xFF)  # floats that are not numbers
            self._on_device.append(weakref.ref(target))
        self.copied_in += sum(source.nbytes for source, _ in pairs)
        there = [one for one in (reference() for reference in self._on_device) if one is not None]
        self.most_on_device = max(self.most_on_device, sum(tensor.nbytes for tensor in there))
        return self._later(pairs, writes_host=False)

    def wait(self, mark: int) -> None:
        for copy in self._waiting.pop(mark, []):
            copy()

    def settle(self) -> None:
        for mark in list(self._waiting):
            for copy in self._waiting.pop(mark):
                copy()

    finish = settle

    def _allocate(self, count: int) -> Tensor:
        return torch.full((count,), 0xFF, dtype=torch.uint8)

    def _later(self, pairs: list[Copy], *, writes_host: bool) -> int:
        number = 1 + max(self._waiting, default=0)
        self._waiting[number] = [self._copy(source, target, writes_host) for source, target in pairs]
        return number

    def _copy(self, source: Tensor, target: Tensor, writes_host: bool) -> Callable[[], None]:
        # The host's side is kept by its owner; the device's must be there still.
        on_device, on_host = (source, target) if writes_host else (target, source)
        device = weakref.ref(on_device)
        if writes_host:
            self._unread.add(on_host.data_ptr())

        def copy() -> None:
            there = device()
            if writes_host:
                assert there is not None, "freed before it was copied out"
                on_host.copy_(there)
                self._unread.discard(on_host.data_ptr())
            elif there is not None:
                there.copy_(on_host)

        return copy
