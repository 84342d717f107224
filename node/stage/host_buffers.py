"""Reuses the memory of large host tensors, so that packing and unpacking allocate nothing.

glibc maps blocks of more than 32 MiB every time, and returns them when a thread other than the first frees
them. For a boundary tensor [2, 4096, 2048] in float32, that cost 16,385 page faults, two thirds of the time
to unpack it. Making malloc keep such blocks (`mallopt`) helps the transfer thread only with a single arena,
and left up to 600 MiB in use where 475 were needed.
"""

import math
import weakref
from collections import deque

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20
"""The size from which blocks are kept here; malloc keeps smaller ones itself."""


class HostBuffers:
    """Lends memory for tensors. One thread borrows; a block returns, from any thread, when the last tensor or
    view of it is freed.

    Returned blocks are kept by size. All blocks together take at most twice the peak of lent memory; the
    oldest idle blocks are freed first.
    """

    def __init__(self) -> None:
        self.most_lent = 0
        """The peak of lent bytes."""
        self._lent = 0
        self._idle: list[Tensor] = []  # the oldest first
        # Any thread may drop a tensor at any time, so returning a block only appends.
        self._returned: deque[Tensor] = deque()

    @property
    def idle_bytes(self) -> int:
        """The bytes of the blocks that are kept for later tensors."""
        self._collect()
        return sum(block.nbytes for block in self._idle)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like `torch.empty` on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        self._collect()
        block = self._take(size)
        self._lent += size
        self.most_lent = max(self.most_lent, self._lent)
        while self._idle and self._lent + sum(idle.nbytes for idle in self._idle) > 2 * self.most_lent:
            del self._idle[0]
        # Torch keeps this array as long as a tensor uses its memory.
        array = block.numpy()
        weakref.finalize(array, self._returned.append, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _take(self, size: int) -> Tensor:
        for place in reversed(range(len(self._idle))):
            if self._idle[place].nbytes == size:
                return self._idle.pop(place)
        return torch.empty(size, dtype=torch.uint8)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._lent -= block.nbytes
            self._idle.append(block)
