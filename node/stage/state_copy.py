"""A stage's state after a step, which is read during the next step's passes.

The state does not change between two optimizer steps, so nothing waits for a copy of it. Threads read it in
slices, hash it and write it to disk, and only the next change waits for them (`settle`). They hold at most
`AHEAD` slices of a GPU's state in page-locked memory, whatever the size of the state.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from node.model.optimizers import Layout
from node.state.manifest import JoinedFile, LayerFile, LayerSource
from node.state.snapshot_cache import LayerWriter
from node.state.unit_state import PARAMETER_PREFIX, SLICE, LayerDigest, slices
from node.training.optimizer import StateTensor, copy_to_cpu
from wire.codecs.host_copies import HostCopies, Mark
from wire.errors import RunError
from wire.messages import UnitHash

READERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that read a state while training continues."""
AHEAD = 32
"""How many slices (512 MB in float32) may be copied from a GPU before they are hashed and written. The next
change waits only for these copies."""
AT_ONCE_BYTES = 8 << 20
"""A state of at most this size is copied at once, because that is faster than starting threads."""
PATIENCE = 2.0
"""The seconds for which the next change of the state waits for its readers, which may wait for a disk. Then
the rest is copied, whatever memory that takes."""

UnitTensors = Mapping[str, StateTensor]


class _Slice(NamedTuple):
    """A part of a tensor that is on the host or being copied there."""

    name: str
    part: Tensor
    mark: Mark | None
    """Marks the end of the copy."""
    saved: torch.dtype

    def give(self, take: Callable[[str, np.ndarray], object]) -> None:
        if self.mark is not None:
            self.mark.synchronize()
        take(self.name, self.part.to(self.saved).numpy())


class StateCopy:
    """The state of some layer units. Create and `settle` it on the compute thread; read it on any thread."""

    weights_first = False
    """Whether the file of only the weights is hashed too."""

    def __init__(self, units: Iterable[tuple[str, UnitTensors]], *, stays: bool = True) -> None:
        """
        Args:
            units: each unit's tensors, which are requested one unit after another.
            stays: whether they stay in place until `settle`. If not, they are copied now.
        """
        self._units: dict[str, UnitTensors] = {}
        for unit, tensors in units:
            self._units[unit] = tensors if stays else _copied(tensors)
        self._locks = {unit: threading.Lock() for unit in self._units}
        """Held while a slice of the unit is in use."""
        self._changed = threading.Condition()
        self._left = set(self._units) if stays else set[str]()
        """Units that are being read in place, or will be."""
        self._finished = set[str]()
        """Units that have been read and may change now."""
        self._closed = False
        self._copies = HostCopies()
        self._ahead = threading.Semaphore(AHEAD)
        devices = {kept.tensor.device for tensors in self._units.values() for kept in tensors.values()}
        self._device = next((device for device in devices if device.type == "cuda"), None)
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self.bytes <= AT_ONCE_BYTES:
            self.settle(0.0)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(self._units)

    @property
    def bytes(self) -> int:
        """The bytes of the complete state, as it is saved."""
        return sum(
            kept.tensor.numel() * kept.saved.itemsize
            for state in self._units.values()
            for kept in state.values()
        )

    def layout(self, unit: str) -> Layout:
        """dtype and shape by name, as saved."""
        return {
            name: (str(kept.saved).removeprefix("torch."), tuple(kept.tensor.shape))
            for name, kept in self._units[unit].items()
        }

    def digest(self, unit: str, *, reports: int | None = None) -> LayerDigest:
        """A digest into which the unit's tensors are read. `reports`: as for `LayerDigest`."""
        return LayerDigest(self.layout(unit), reports=reports, weights_first=self.weights_first)

    def read(self, unit: str, names: Iterable[str], take: Callable[[str, np.ndarray], object]) -> None:
        """Call `take` with these tensors slice by slice, as they are saved. Arrays are reused when `take` has
        returned. Blocks. Call `done` afterwards.

        Raises RunError once the copy is closed.
        """
        begun: deque[_Slice] = deque()
        held = 0
        for name, first, count in self._slices(unit, names):
            with self._locks[unit]:
                begun.append(self._begin(unit, name, first, count))
                # On a CPU, slices are read in place. From a GPU, they are copied ahead of `take`.
                while len(begun) > held:
                    if (
                        self._device is not None
                        and held < self._share()
                        and self._ahead.acquire(blocking=False)
                    ):
                        held += 1
                    else:
                        begun.popleft().give(take)
        if begun and begun[-1].mark is not None:
            begun[-1].mark.synchronize()
            self.done(unit)
        while begun:
            begun.popleft().give(take)
            self._ahead.release()

    def _share(self) -> int:
        """The number of slices that one reader may copy ahead."""
        return max(1, AHEAD // max(1, min(READERS, len(self._left))))

    def done(self, unit: str) -> None:
        """The unit has been read, or is not needed: nothing waits for its readers."""
        with self._changed:
            if unit in self._left:
                self._finished.add(unit)
            self._left.discard(unit)
            self._changed.notify_all()

    def is_done(self, unit: str) -> bool:
        """Whether the unit may have changed since it was read."""
        return self._closed or unit in self._finished

    def whole(self, unit: str) -> dict[str, Tensor]:
        """A copy of the unit's tensors, as they are saved. Blocks."""
        with self._locks[unit]:
            return {name: copy.tensor for name, copy in _copied(self._units[unit]).items()}

    def settle(self, patience: float = PATIENCE) -> None:
        """The state is about to change: wait until it has been read, and copy the rest. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, patience)
            left = list(self._left)
        for unit in left:
            with self._locks[unit]:
                if self._device is not None:
                    self._stream.synchronize()
                if not self._closed and unit not in self._finished:
                    self._units[unit] = _copied(self._units[unit])
            with self._changed:
                self._left.discard(unit)

    def close(self) -> None:
        """Stop the reading, so that nothing waits for it."""
        self._closed = True
        with self._changed:
            self._left.clear()
            self._changed.notify_all()

    # ---- inside

    def _slices(self, unit: str, names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
        for name in names:
            for part in slices(name, prod(self._units[unit][name].tensor.shape), SLICE):
                yield name, *part

    def _begin(self, unit: str, name: str, first: int, count: int) -> "_Slice":
        """Start to copy a slice to the host, unless it is there."""
        if self._closed:
            raise RunError("this state is no longer read")
        tensor, saved = self._units[unit][name]
        part = tensor.reshape(-1)[first : first + count]
        if part.device.type != "cuda":
            return _Slice(name, part.cpu(), None, saved)
        with torch.cuda.stream(self._stream):
            return _Slice(name, *self._copies.fetch(part), saved)


def weights_of(state: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """Only the weights of a unit's tensors."""
    return {name: kept for name, kept in state.items() if name.startswith(PARAMETER_PREFIX)}


def _copied(tensors: UnitTensors) -> UnitTensors:
    return {
        name: StateTensor(copy_to_cpu(kept.tensor).to(kept.saved), kept.saved)
        for name, kept in tensors.items()
    }


class ReadLayer(NamedTuple):
    file: LayerSource
    hash: UnitHash
    weights_sha256: str
    """The SHA-256 of the weights' file; empty unless it is reported."""
    weights: LayerSource | None
    """Only the weights, if they are to be sent first."""
    rest: LayerSource | None
    """Everything except the weights, if these are to be sent first."""
    weights_at: int
    """The offset of the weights in the complete file."""


def read_layer(state: StateCopy, unit: str, file: LayerWriter | None, reports: int | None) -> ReadLayer:
    """Read a unit into a file, by default in memory. Blocks.

    `reports`: as for `LayerDigest`. Raises RunError, or OSError for the file.
    """
    digest, data = state.digest(unit, reports=reports), bytearray()
    write = data.extend if file is None else file.write
    write(digest.head)
    state.read(unit, digest.order, lambda name, array: write(digest.add(name, array)))
    state.done(unit)
    known = digest.hash
    # A file that nothing relies on need not survive a sudden stop of the machine.
    durable = reports is not None
    kept = LayerFile(bytes(data), known.sha256) if file is None else file.keep(known.sha256, durable=durable)
    weights = rest = None
    if (alone := digest.weights) is not None:
        at, length = digest.weights_at, alone.bytes - len(alone.head)
        head = LayerFile(alone.head, "")
        weights = JoinedFile([(head, 0, head.size), (kept, at, at + length)], known.weights_sha256)
        rest = JoinedFile([(kept, 0, at), (kept, at + length, kept.size)], known.sha256)
    reported = "" if reports is None else digest.weights_sha256
    return ReadLayer(kept, known, reported, weights, rest, digest.weights_at)


def hash_layer(state: StateCopy, unit: str) -> UnitHash:
    """The hash of the unit's file if it were written. Blocks. Raises RunError once the copy is closed."""
    digest = state.digest(unit)
    state.read(unit, digest.order, digest.add)
    state.done(unit)
    return digest.hash
