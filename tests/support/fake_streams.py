"""Streams and events of a GPU that is not here: a log of what it would do, in order."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log, self.name = log, "nothing"

    def record(self, stream: FakeStream) -> None:
        self.name = stream.name
        self.log.append(f"mark on {stream.name}")

    def synchronize(self) -> None:
        self.log.append(f"thread waits for {self.name}")


class FakeStreams:
    """Stands in for `torch.cuda`; `log` is the order of what a GPU would do."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._made = iter(("packing", "unpacking"))
        self._current = threading.local()
        """Of each thread, as in torch."""

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.log, next(self._made))

    def Event(self, *, blocking: bool) -> FakeEvent:
        assert blocking, "an event that spins keeps Python's lock from the other threads"
        return FakeEvent(self.log)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        self._current.stream = stream
        yield
        del self._current.stream

    def current_stream(self, device: torch.device) -> Any:
        return getattr(self._current, "stream", FakeStream(self.log, "compute"))
