"""Packed tensors between the links and the compute thread: received ones wait here by key.

Receivers are passive: whatever arrives is stored under its key, so the order in which neighbours send can
never block a stage. A link's thread puts, the compute thread takes; an interruption ends every wait at once.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from node.schedule.routing import BETWEEN_ROWS, source_stage, target_stage
from wire.errors import LinkError, LinkLostError
from wire.spec import TensorKey

STALL_SECONDS = 600.0
"""A neighbour that answers pings but sends no tensor for this long counts as stuck."""
WANT_SECONDS = 0.02
"""A tensor that comes within this time is not asked for: a full window is the exception."""


class StepInterrupted(Exception):
    """The step must stop: its epoch is over, or a link is lost (`cause`)."""

    def __init__(self, reason: str, cause: Exception | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


class Inbox:
    """Complete packed tensors by key. Thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[TensorKey, bytearray] = {}
        self._watched: dict[TensorKey, Callable[[bytearray], None]] = {}
        self._arrived = threading.Condition()
        self._interruption: StepInterrupted | None = None

    def put(self, key: TensorKey, buffer: bytearray) -> None:
        with self._arrived:
            self._buffers[key] = buffer
            call = self._watched.pop(key, None)
            self._arrived.notify_all()
        if call is not None:
            call(buffer)

    def watch(self, key: TensorKey, call: Callable[[bytearray], None]) -> None:
        """Call with a tensor that stays here, now or on the thread that puts it."""
        with self._arrived:
            buffer = self._buffers.get(key)
            if buffer is None:
                self._watched[key] = call
        if buffer is not None:
            call(buffer)

    def holds(self, key: TensorKey) -> bool:
        with self._arrived:
            return key in self._buffers

    def take(self, key: TensorKey, timeout: float = STALL_SECONDS) -> bytearray:
        """Wait for a tensor and remove it. Raises as `wait_any`."""
        with self._arrived:
            self.wait_any((key,), timeout)
            return self._buffers.pop(key)

    def comes(self, keys: Sequence[TensorKey], timeout: float) -> bool:
        """Whether one of these tensors is here within `timeout` seconds. Raises StepInterrupted."""
        with self._arrived:
            arrived = self._arrived.wait_for(
                lambda: self._interruption is not None or any(key in self._buffers for key in keys), timeout
            )
            if self._interruption is not None:
                raise self._interruption
            return arrived

    def wait_any(self, keys: Sequence[TensorKey], timeout: float = STALL_SECONDS) -> None:
        """Wait until one of these tensors is here.

        Raises StepInterrupted when the step was called off, LinkLostError after `timeout` seconds.
        """
        if not self.comes(keys, timeout):
            key = keys[0]
            raise LinkLostError(
                f"no {key.direction.name.lower()} of microbatch {key.microbatch} came over boundary "
                f"{key.boundary} within {timeout:g} s: the neighbour's stage is stuck"
            )

    def check(self) -> None:
        """Raise the pending interruption, if any; called between actions that never wait."""
        with self._arrived:
            if self._interruption is not None:
                raise self._interruption

    def interrupt(self, reason: str, cause: Exception | None = None) -> None:
        """End the running step's waits; the first reason wins until `reset`."""
        with self._arrived:
            if self._interruption is None:
                self._interruption = StepInterrupted(reason, cause)
            self._arrived.notify_all()

    def reset(self) -> None:
        """Forget everything, ready for a new epoch."""
        with self._arrived:
            self._buffers.clear()
            self._watched.clear()
            self._interruption = None


class TensorLink(Protocol):
    """The link to a neighbour, as a stage uses it. Call it from any thread."""

    def send(self, key: TensorKey, payload: memoryview, elements: int = 0) -> None: ...

    def after_delivery(self, call: Callable[[], None]) -> None: ...

    def want(self, key: TensorKey | None) -> None: ...

    def release(self, key: TensorKey) -> None: ...


class LinksIO:
    """Implements `node.stage.step_passes.StageIO` over one epoch's links, keyed by the neighbour's stage.

    Links are called on the thread that has something for them: no tensor waits for the event loop.
    """

    def __init__(
        self,
        *,
        stages: int,
        links: Mapping[int, TensorLink],
        inbox: Inbox,
        over: Callable[[], bool],
        replica: int = 0,
        rows: Mapping[int, TensorLink] | None = None,
    ) -> None:
        """
        Args:
            replica: the own row.
            over: whether the epoch has ended; the inbox then serves the next epoch.
            rows: links to the same stage in other rows, by row.
        """
        self._replica = replica
        self._rows = rows or {}
        self._stages = stages
        self._links = links
        self._inbox = inbox
        self._over = over

    def holds(self, key: TensorKey) -> bool:
        return self._inbox.holds(key)

    def wait_any(self, keys: Sequence[TensorKey]) -> None:
        """Called on the compute thread, with the key that the order needs next first. Raises as
        `Inbox.wait_any`.

        A neighbour that sends several of them is asked for the first: that one always comes.
        """
        if self._inbox.comes(keys, WANT_SECONDS):
            return
        wanted: dict[int, TensorKey] = {}
        for key in keys:
            wanted.setdefault(source_stage(key, self._stages), key)
        for stage, key in wanted.items():
            self._links[stage].want(key)
        self._inbox.wait_any(keys)
        for stage in wanted:
            self._links[stage].want(None)

    def take(self, key: TensorKey) -> Tensor:
        """Called on the compute thread, or the sync thread. Raises what `Inbox.take` raises."""
        # Tensors between rows have their credit back when they arrive: nothing waits for one to be taken.
        if source_stage(key, self._stages) != BETWEEN_ROWS and not self._inbox.holds(key):
            self._links[source_stage(key, self._stages)].want(key)
        return torch.frombuffer(self._inbox.take(key), dtype=torch.uint8)

    def watch(self, key: TensorKey, call: Callable[[Tensor], None]) -> None:
        self._inbox.watch(key, lambda buffer: call(torch.frombuffer(buffer, dtype=torch.uint8)))

    def release(self, key: TensorKey) -> None:
        self._links[source_stage(key, self._stages)].release(key)

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        self._send(
            self._links[target_stage(key, self._stages)], key, memoryview(packed.numpy().data), elements
        )

    def send_to_row(self, row: int, key: TensorKey, packed: Tensor, elements: int) -> None:
        """Behind what is queued for neighbours: the last gradients go through all stages before it, while
        nothing but the vote waits for sums. On a line that they share, each would slow the other down."""
        payload = memoryview(packed.numpy().data)
        send = functools.partial(self._send, self._rows[row], key, payload, elements)
        self._after(tuple(self._links.values()), send)

    def interrupt(self, error: Exception) -> None:
        self._inbox.interrupt(str(error), error)

    def check(self) -> None:
        self._inbox.check()

    def _after(self, links: Sequence[TensorLink], send: Callable[[], None]) -> None:
        """Send once these neighbours have what is queued for them."""
        if links:
            links[0].after_delivery(functools.partial(self._after, links[1:], send))
        else:
            send()

    def _send(self, link: TensorLink, key: TensorKey, payload: memoryview, elements: int) -> None:
        try:
            link.send(key, payload, elements)
        except LinkError as error:
            # An interrupted step leaves tensors for links that are already closed.
            if not self._over():
                self._inbox.interrupt(str(error), error)
