"""Large tensors on the host whose memory is used again, so that packing and unpacking allocate nothing.

glibc maps blocks of more than 32 MiB anew each time, and gives back what threads other than the first free of
them: a boundary tensor [2, 4096, 2048] in float32 cost 16,385 page faults, which took two thirds of the time
of unpacking it. To have malloc keep such blocks (`mallopt`) helps the transfer thread only if the process has
one arena for all threads, and at times left 600 MiB in use where 475 were needed. This concerns nobody else.
"""

import math
import weakref
from collections import deque

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20
"""What is smaller malloc keeps by itself."""


class HostBuffers:
    """Lends memory for tensors. One thread asks for it; it comes back by itself, from whatever thread, when
    the last tensor or view of it is gone.

    Blocks that came back are kept by size. All blocks together take at most twice what was lent at once, so
    sizes that nobody asks for any more go, the oldest first.
    """

    def __init__(self) -> None:
        self.most_lent = 0
        """Bytes lent at once, at most."""
        self._lent = 0
        self._idle: list[Tensor] = []  # the oldest first
        # Filled by whichever thread drops a tensor, in the midst of anything: appending is all it may do.
        self._returned: deque[Tensor] = deque()

    @property
    def idle_bytes(self) -> int:
        """Of the blocks that are kept for the next tensors."""
        self._collect()
        return sum(block.nbytes for block in self._idle)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `torch.empty` on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        self._collect()
        block = self._take(size)
        self._lent += size
        self.most_lent = max(self.most_lent, self._lent)
        while self._idle and self._lent + sum(idle.nbytes for idle in self._idle) > 2 * self.most_lent:
            del self._idle[0]
        # Torch keeps this array for as long as there is a tensor over its memory.
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
