"""Where received tensors wait for the compute thread.

Receivers are passive: whatever arrives lands here under its key, so the order in which neighbours send can
never block a stage. The event loop puts, the compute thread takes; an interruption ends every wait at once.
"""

import threading
from collections.abc import Sequence

from wire.errors import LinkLostError
from wire.spec import TensorKey

STALL_SECONDS = 600.0
"""A neighbour that answers pings but sends no tensor for this long is taken for stuck."""


class StepInterrupted(Exception):
    """The step must stop: its epoch is over, or a link is lost (`cause`)."""

    def __init__(self, reason: str, cause: Exception | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


class Inbox:
    """Complete packed tensors by key. Thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[TensorKey, bytearray] = {}
        self._arrived = threading.Condition()
        self._interruption: StepInterrupted | None = None

    def put(self, key: TensorKey, buffer: bytearray) -> None:
        with self._arrived:
            self._buffers[key] = buffer
            self._arrived.notify_all()

    def holds(self, key: TensorKey) -> bool:
        with self._arrived:
            return key in self._buffers

    def take(self, key: TensorKey, timeout: float = STALL_SECONDS) -> bytearray:
        """Wait for a tensor and remove it. Raises as `wait_any`."""
        with self._arrived:
            self.wait_any((key,), timeout)
            return self._buffers.pop(key)

    def wait_any(self, keys: Sequence[TensorKey], timeout: float = STALL_SECONDS) -> None:
        """Wait until one of these tensors is here.

        Raises StepInterrupted when the step was called off, LinkLostError after `timeout` seconds.
        """
        with self._arrived:
            arrived = self._arrived.wait_for(
                lambda: self._interruption is not None or any(key in self._buffers for key in keys), timeout
            )
            if self._interruption is not None:
                raise self._interruption
            if not arrived:
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
            self._interruption = None
