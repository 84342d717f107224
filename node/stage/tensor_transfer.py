"""Packing and unpacking beside the stage's compute: a thread of its own, the transfer thread.

The compute thread hands over a tensor and goes on; what is packed goes straight to the link. A tensor that
has arrived is unpacked ahead of its turn, when it is one of the next that the stage needs. Jobs run one at a
time in the order in which they were handed over, so codecs with a memory see their tensors in one order, and
none of them waits for the network. `settle` ends them all: nothing of a step outlives it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from node.stage.device_transfer import DeviceTransfer
from node.telemetry.clock import WorkKind
from wire.codecs.base import Codec
from wire.codecs.host_copies import Mark
from wire.errors import (
    CodecError,
    MemoryMismatchError,
    NonFiniteError,
    PackedMismatchError,
    ProtocolViolationError,
)
from wire.spec import TensorKey, TensorSpec

log = logging.getLogger(__name__)


class PackedIO(Protocol):
    """The network, as far as packed tensors go: uint8 [n] on the CPU. From any thread."""

    def holds(self, key: TensorKey) -> bool:
        """Whether `take` would not wait."""
        ...

    def wait_any(self, keys: Sequence[TensorKey]) -> None:
        """Wait until `holds` is true of one of these, each of a neighbour of its own."""
        ...

    def take(self, key: TensorKey) -> Tensor:
        """Wait for the packed tensor under `key`."""
        ...

    def release(self, key: TensorKey) -> None:
        """The packed tensor has been unpacked; its memory may be used again."""
        ...

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        """Queue a packed tensor; never waits for the network."""
        ...

    def interrupt(self, error: Exception) -> None:
        """End the wait of `take`, now or later: it may be for what depends on a tensor that was not sent."""
        ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A tensor that the stage will need."""

    key: TensorKey
    spec: TensorSpec


class BadTensorError(ProtocolViolationError):
    """A tensor came as no correct stage packs one: its frames were sound, so it is its sender's work."""

    def __init__(self, key: TensorKey, error: CodecError) -> None:
        super().__init__(_told(key, "received", error))
        self.key = key


Beside = Callable[[str, TensorKey], AbstractContextManager[None]]
"""Notes what the thread does for a tensor (`node.telemetry.clock.StageClock.beside`)."""


class TensorTransfer:
    """One stage's. All methods are called on the compute thread."""

    def __init__(self, device: DeviceTransfer, beside: Beside) -> None:
        self._device = device
        self._beside = beside
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer")
        self._unpacking: dict[TensorKey, Future[tuple[Tensor, Mark | None]]] = {}
        self._packing: list[Future[None]] = []

    def rehearse(self, codecs: Iterable[Codec], like: Tensor) -> None:
        """Pack and unpack `like` with each codec once, so that no step waits for what first use compiles.

        What goes wrong is only logged, since the first step will meet it, too.
        """
        mark = self._device.mark()
        spec = TensorSpec(like.dtype, tuple(like.shape))

        def job() -> None:
            for codec in codecs:
                try:
                    self._device.unpack(codec, self._device.pack(codec, like, mark), spec)
                except Exception as error:
                    log.warning("packing by %s failed when it was tried: %s", codec.name, error)

        self._thread.submit(job)

    def computed(self) -> Mark | None:
        """Behind all that the compute thread has given the device to do."""
        return self._device.mark()

    def send(self, key: TensorKey, codec: Codec, tensor: Tensor, mark: Mark | None, io: PackedIO) -> None:
        """Pack `tensor`, as it is at `mark`, and queue it. It must not change before `drain` has returned.

        Raises the error of an earlier tensor that could not be packed.
        """
        self._raise_failures()

        def job() -> None:
            try:
                with self._beside(WorkKind.PACK, key):
                    packed = self._device.pack(codec, tensor, mark)
            except Exception as error:
                is_named = isinstance(error, NonFiniteError)
                named = NonFiniteError(_told(key, "to be sent", error)) if is_named else error
                io.interrupt(named)
                raise named from error
            io.send(key, packed, tensor.numel())

        self._packing.append(self._thread.submit(job))

    def look_ahead(
        self, needed: Sequence[Incoming], codec_of: Callable[[TensorKey], Codec], io: PackedIO
    ) -> None:
        """Begin to unpack those of the next tensors that have arrived already."""
        for tensor in needed:
            if tensor.key not in self._unpacking and io.holds(tensor.key):
                self._begin(tensor, codec_of(tensor.key), io)

    def begun(self, key: TensorKey) -> bool:
        """Whether the tensor has arrived and is being unpacked."""
        return key in self._unpacking

    def ready(self, needed: Incoming | None, io: PackedIO) -> bool:
        """Whether nothing has to come over the network before this can be had."""
        return needed is None or self.begun(needed.key) or io.holds(needed.key)

    def begin(self, needed: Incoming, codec: Codec, io: PackedIO) -> None:
        """Wait for a tensor to arrive, and begin to unpack it. Raises what `io.take` raises."""
        if needed.key not in self._unpacking:
            self._begin(needed, codec, io)

    def finish(self, key: TensorKey) -> Tensor:
        """The tensor that `begin` or `look_ahead` began. Raises what kept it from being unpacked.

        That is a BadTensorError for what no encoder makes, and a MemoryMismatchError where the ends remember
        different activations, of which nobody can say whose fault it is.
        """
        tensor, mark = self._unpacking.pop(key).result()
        self._device.wait(tensor, mark)
        return tensor

    def drain(self) -> None:
        """Wait until all that was sent is packed and queued. Raises the first error."""
        for future in self._packing:
            future.result()
        self._packing.clear()

    def settle(self) -> None:
        """Wait for all jobs and forget them, errors too."""
        for packing in self._packing:
            packing.exception()
        for unpacking in self._unpacking.values():
            unpacking.exception()
        self._packing.clear()
        self._unpacking.clear()

    def _begin(self, needed: Incoming, codec: Codec, io: PackedIO) -> None:
        key, packed = needed.key, io.take(needed.key)

        def job() -> tuple[Tensor, Mark | None]:
            try:
                with self._beside(WorkKind.UNPACK, key):
                    result = self._device.unpack(codec, packed, needed.spec)
            except MemoryMismatchError:
                raise
            except (PackedMismatchError, NonFiniteError) as error:
                raise BadTensorError(key, error) from error
            io.release(key)
            return result

        self._unpacking[key] = self._thread.submit(job)

    def _raise_failures(self) -> None:
        while self._packing and self._packing[0].done():
            self._packing.pop(0).result()


def _told(key: TensorKey, way: str, error: Exception) -> str:
    """What is wrong, after the tensor's name."""
    return (
        f"the {key.direction.name.lower()} {way} over boundary {key.boundary}, "
        f"microbatch {key.microbatch} ({error})"
    )
