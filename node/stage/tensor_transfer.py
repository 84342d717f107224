"""Packs and unpacks tensors on a second thread, the transfer thread, during the stage's compute.

The compute thread hands over a tensor and continues; the packed tensor goes directly to the link. Received
tensors that the stage needs next are unpacked on arrival, whatever the compute thread does. Jobs run one at a
time in the order of submission, and no job waits for the network. Codecs with a sample cache see their
tensors in a fixed order, in which the compute thread submits them. `settle` ends all jobs of a step.

On a GPU, packing waits until the device has computed the tensor. A third thread unpacks there, so that an
arriving tensor need not wait for that.

A tensor that is packed or unpacked faster than threads hand it over stays on the compute thread.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from node.stage.device_transfer import DeviceTransfer
from node.stage.digests import StepDigests
from node.stage.inbox import LinksIO
from node.stage.packing_meter import PackingMeter
from node.telemetry.clock import TimeKind, WorkKind
from wire.codecs.base import Codec
from wire.codecs.host_copies import Mark
from wire.errors import (
    CacheMismatchError,
    CodecError,
    NonFiniteError,
    PackedMismatchError,
    ProtocolViolationError,
)
from wire.spec import TensorKey, TensorSpec

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Unpacked = tuple[Tensor, Mark | None]

TRIALS = 2
"""How often a codec is tried when its speed is measured."""
AT_ONCE_SECONDS = 6e-4
"""The processor seconds up to which a tensor stays on the compute thread. Handing it over and getting the
result back wakes two threads, which share one lock."""
SLOWER = 1.25
"""A tensor's time counts up to this multiple of the previous one's, because a busy machine has outliers."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A tensor that the stage will need."""

    key: TensorKey
    spec: TensorSpec


class BadTensorError(ProtocolViolationError):
    """A received tensor cannot be unpacked although its frames are intact: the sender packed it wrongly."""

    def __init__(self, key: TensorKey, error: CodecError, row: int | None = None) -> None:
        """`row`: the row that sent it; None: another stage sent it."""
        super().__init__(_named(key, "received", error))
        self.key = key
        self.row = row


Beside = Callable[[str, TensorKey], AbstractContextManager[None]]
"""Records the transfer thread's work on a tensor (`node.telemetry.clock.StageClock.beside`)."""


Switch = Callable[[TimeKind, TensorKey], object]
"""Sets what the compute thread does from now on (`node.telemetry.clock.StageClock.switch`)."""


class _Later(Generic[Result]):
    """A job that runs when its result is requested, on the requesting thread."""

    def __init__(self, job: Callable[[], Result]) -> None:
        self._job = job

    def result(self) -> Result:
        return self._job()

    def exception(self) -> None:
        """Return None, because the job has not run."""


class TensorTransfer:
    """The transfer thread of one stage. Call all methods on the compute thread."""

    def __init__(
        self,
        device: DeviceTransfer,
        beside: Beside,
        packing: PackingMeter | None = None,
        switch: Switch | None = None,
        *,
        unpacks_beside: bool = False,
        in_order: bool = False,
    ) -> None:
        """
        Args:
            packing: measures the cost of packing, if it is reported.
            switch: called before the compute thread packs a tensor itself, which it does only with this, for
                tensors on the CPU and codecs without a sample cache.
            unpacks_beside: unpack while another is packed. Only for codecs without a sample cache.
            in_order: unpack in the order in which tensors are needed. For codecs with a sample cache.
        """
        self._device = device
        self._beside = beside
        self._packing_meter = packing
        self._switch = switch
        self._took: dict[tuple[WorkKind, str, int], float] = {}
        """Processor seconds of a tensor, by work, codec and elements."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transfer")
        self._unpacker = (
            ThreadPoolExecutor(1, thread_name_prefix="unpack") if unpacks_beside else self._thread
        )
        self._unpacking: dict[TensorKey, Future[Unpacked] | _Later[Unpacked]] = {}
        self._in_order = in_order
        self._lock = threading.Lock()
        self._watched: set[TensorKey] = set()
        """The tensors that are unpacked as soon as they arrive."""
        self._early: dict[TensorKey, Future[Unpacked]] = {}
        """The watched tensors that have arrived and were not yet requested by the compute thread."""
        self._packing: list[Future[None]] = []
        self.digests: StepDigests | None = None
        """Records the digests of what the running step sends and receives."""

    def compile_codecs(self, codecs: Iterable[Codec], example: Tensor, to_time: Iterable[Codec] = ()) -> None:
        """Pack and unpack `example` once with each codec, because the first use compiles; then measure the
        speed of those in `to_time` on a sample of it.

        An error is only logged, because the first step raises it too.
        """
        mark = self._device.mark()
        spec = TensorSpec(example.dtype, tuple(example.shape))

        def job() -> None:
            for codec in codecs:
                try:
                    self._device.unpack(codec, self._device.pack(codec, example, mark), spec)
                except Exception as error:  # the first real tensor raises it again, as an error of the step
                    log.warning("compiling codec %s failed: %s", codec.name, error)
            if self._packing_meter is not None:
                for codec in to_time:
                    self._time(self._packing_meter, codec, example[:1].contiguous())

        compiled = self._thread.submit(job)
        self._unpacker.submit(wait, [compiled])

    def computed(self) -> Mark | None:
        """A mark after everything that the compute thread has submitted to the device."""
        return self._device.mark()

    def send(self, key: TensorKey, codec: Codec, tensor: Tensor, mark: Mark | None, io: LinksIO) -> None:
        """Pack `tensor` as of `mark` and queue it. It must not change until `drain` returns.

        Raises the error of an earlier tensor that could not be packed.
        """
        self._raise_failures()
        digests = self.digests

        def job() -> None:
            try:
                with self._working(WorkKind.PACK, key, codec, tensor.numel()):
                    packed = self._device.pack(codec, tensor, mark)
            except Exception as error:  # end the waits of both threads, then raise it
                is_named = isinstance(error, NonFiniteError)
                named = NonFiniteError(_named(key, "to be sent", error)) if is_named else error
                io.interrupt(named)
                raise named from error
            if digests is not None:
                digests.note(key, packed, received=False)
            io.send(key, packed, tensor.numel())

        # Tensors that are being packed beside go first, because neighbours need them in order.
        if not self._packing and self._at_once(WorkKind.PACK, codec, tensor.numel()):
            assert self._switch is not None
            self._switch(TimeKind.ENCODE, key)
            job()
        else:
            self._packing.append(self._thread.submit(job))

    def look_ahead(
        self, needed: Sequence[Incoming], codec_of: Callable[[TensorKey], Codec], io: LinksIO
    ) -> None:
        """Unpack the next tensors: those that have arrived now, and the others when they arrive."""
        for tensor in needed:
            key = tensor.key
            if self.begun(key):
                continue
            codec = codec_of(key)
            if self._in_order or self._at_once(WorkKind.UNPACK, codec, tensor.spec.elements):
                if io.holds(key):
                    self._begin(tensor, codec, io)
                continue
            # Under the lock: a tensor that arrives now is either watched or begun.
            with self._lock:
                if key in self._watched or self.begun(key):
                    continue
                self._watched.add(key)
            io.watch(key, functools.partial(self._arrived, tensor, codec, io, self.digests))

    def _arrived(
        self, tensor: Incoming, codec: Codec, io: LinksIO, digests: StepDigests | None, packed: Tensor
    ) -> None:
        """Called on any thread."""
        with self._lock:
            if tensor.key in self._watched:
                self._watched.discard(tensor.key)
                job = functools.partial(self._unpack, tensor, codec, io, digests, packed)
                self._early[tensor.key] = self._unpacker.submit(job)

    def begun(self, key: TensorKey) -> bool:
        """Whether the tensor has arrived and its unpacking has started."""
        return key in self._unpacking or key in self._early

    def ready(self, needed: Incoming | None, io: LinksIO) -> bool:
        """Whether this tensor has arrived, or none is needed."""
        return needed is None or self.begun(needed.key) or io.holds(needed.key)

    def unpacked(self, needed: Incoming | None) -> bool:
        """Whether `finish` of this tensor would not wait, or none is needed."""
        if needed is None:
            return True
        job = self._unpacking.get(needed.key) or self._early.get(needed.key)
        return isinstance(job, Future) and job.done()

    def begin(self, needed: Incoming, codec: Codec, io: LinksIO) -> None:
        """Wait for a tensor and start to unpack it. Raises what `io.take` raises."""
        if needed.key not in self._unpacking:
            self._begin(needed, codec, io)

    def finish(self, key: TensorKey) -> Tensor:
        """The tensor that `begin` was called for, unpacked.

        Raises BadTensorError for an invalid tensor, and CacheMismatchError if the sample caches of the two
        ends differ, which is no evidence against either end.
        """
        job = self._unpacking.pop(key)
        others = [other for other in self._started() if isinstance(other, Future) and not other.done()]
        if isinstance(job, _Later) and others:
            wait(others)  # one at a time, on any thread
        tensor, mark = job.result()
        self._device.wait(tensor, mark)
        return tensor

    def drain(self) -> None:
        """Wait until all tensors are packed and queued. Raises the first error."""
        for future in self._packing:
            future.result()
        self._packing.clear()

    def settle(self) -> None:
        """Wait for all jobs; drop their results and errors."""
        for packing in self._packing:
            packing.exception()
        with self._lock:
            self._watched.clear()
        for unpacking in self._started():
            unpacking.exception()
        self._packing.clear()
        self._unpacking.clear()
        self._early.clear()

    def _started(self) -> list[Future[Unpacked] | _Later[Unpacked]]:
        return [*self._unpacking.values(), *tuple(self._early.values())]

    def _begin(self, needed: Incoming, codec: Codec, io: LinksIO) -> None:
        key, packed = needed.key, io.take(needed.key)
        with self._lock:
            self._watched.discard(key)
            early = self._early.pop(key, None)
        if early is not None:
            self._unpacking[key] = early
            return
        job = functools.partial(self._unpack, needed, codec, io, self.digests, packed)
        at_once = self._at_once(WorkKind.UNPACK, codec, needed.spec.elements)
        self._unpacking[key] = _Later(job) if at_once else self._unpacker.submit(job)

    def _unpack(
        self, needed: Incoming, codec: Codec, io: LinksIO, digests: StepDigests | None, packed: Tensor
    ) -> Unpacked:
        key = needed.key
        if digests is not None:
            digests.note(key, packed, received=True)
        try:
            with self._working(WorkKind.UNPACK, key, codec, needed.spec.elements):
                result = self._device.unpack(codec, packed, needed.spec)
        except CacheMismatchError:
            raise
        except (PackedMismatchError, NonFiniteError) as error:
            raise BadTensorError(key, error) from error
        io.release(key)
        return result

    def _at_once(self, kind: WorkKind, codec: Codec, elements: int) -> bool:
        """Whether the compute thread does this work itself."""
        took = self._took.get((kind, codec.name, elements))
        return self._switch is not None and took is not None and took <= AT_ONCE_SECONDS

    @contextmanager
    def _working(self, kind: WorkKind, key: TensorKey, codec: Codec, elements: int) -> Iterator[None]:
        meter = self._packing_meter
        counted = nullcontext() if meter is None else meter.spent(kind, codec.name, elements)
        began = time.thread_time()
        with self._beside(kind, key), counted:
            yield
        took, alike = time.thread_time() - began, (kind, codec.name, elements)
        self._took[alike] = min(took, SLOWER * self._took.get(alike, took))

    def _time(self, meter: PackingMeter, codec: Codec, sample: Tensor) -> None:
        """Measure a codec without other work of this node. The first of `TRIALS` compiles."""
        spec = TensorSpec(sample.dtype, tuple(sample.shape))
        took = []
        for _ in range(TRIALS):
            began = time.perf_counter()
            packed = self._device.pack(codec, sample, None)
            between = time.perf_counter()
            self._device.unpack(codec, packed, spec)
            took.append((between - began, time.perf_counter() - between))
        pack, unpack = map(min, zip(*took[1:], strict=True))
        meter.tried(codec.name, pack / sample.numel(), unpack / sample.numel())

    def _raise_failures(self) -> None:
        while self._packing and self._packing[0].done():
            self._packing.pop(0).result()


def example_tensor(spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of small whole numbers in fp32 for compiling codecs."""
    elements = torch.arange(spec.elements, device=device)
    return elements.remainder_(251).sub_(125).float().view(spec.shape)


def _named(key: TensorKey, way: str, error: Exception) -> str:
    """The error's text after the tensor's name."""
    return (
        f"the {key.direction.words} {way} over boundary {key.boundary}, microbatch {key.microbatch} ({error})"
    )
