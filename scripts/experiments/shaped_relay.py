"""A TCP relay with a rate and a delay: a slow link on one machine, without root.

It uses threads and blocking sockets, which release Python's lock while bytes move and need no event loop.
All connections through one relay share its rate, separately in each direction; a byte is delivered `delay`
seconds after it was sent on the simulated wire. The relay's queue is bounded, so senders are slowed down as
by a network interface with a short queue. TCP ends at the relay: losses and congestion control over the delay
are not simulated; flow control of HTTP/2 and of thinwire acts over the delay as usual.

    with ShapedRelay(target_port, rate=12.5e6, delay=0.05) as relay:
        connect to relay.port; relay.shape(rate=3.75e6, delay=0.0) at any time
"""

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

QUEUE_SECONDS = 0.02
"""Length of the queue in front of the wire, in seconds at the rate."""
SLICE_SECONDS = 0.002
"""Length of one slice, in seconds at the rate; connections take turns slice by slice."""
LEAST_SLICE = 4096
MOST_SLICE = 256 * 1024


class Wire:
    """One direction: schedules when a slice is sent and delivered. Thread-safe."""

    def __init__(self, rate: float, delay: float) -> None:
        self.rate = rate
        self.delay = delay
        self.carried = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def slice_bytes(self) -> int:
        return max(LEAST_SLICE, min(MOST_SLICE, int(self.rate * SLICE_SECONDS)))

    def book(self, size: int) -> tuple[float, float]:
        """When the slice is sent completely and when it is delivered, in seconds of `time.monotonic`."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
            self.carried += size
            return self._free_at, self._free_at + self.delay


@dataclass
class _Pipe:
    """One connection in one direction: slices on their way, in order."""

    slices: deque[tuple[float, bytes]] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    over: bool = False


class ShapedRelay:
    """Forwards `port` on loopback to `target`; `up` carries what clients send, `down` the answers."""

    def __init__(self, target: int, *, rate: float, delay: float = 0.0) -> None:
        """`rate` in bytes a second each way, `delay` in seconds one way."""
        self.up = Wire(rate, delay)
        self.down = Wire(rate, delay)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def shape(self, *, rate: float, delay: float) -> None:
        """Change rate and delay for new slices; slices on their way keep their time."""
        for wire in (self.up, self.down):
            wire.rate, wire.delay = rate, delay

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _spawn(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(end)
            for source, target, wire in ((client, server, self.up), (server, client, self.down)):
                pipe = _Pipe()
                self._spawn(self._take, source, wire, pipe)
                self._spawn(self._give, target, pipe)

    @staticmethod
    def _take(source: socket.socket, wire: Wire, pipe: _Pipe) -> None:
        """Read at the wire's rate, at most a short queue ahead."""
        while True:
            try:
                data = source.recv(wire.slice_bytes)
            except OSError:
                data = b""
            if data:
                ahead, due = wire.book(len(data))
            with pipe.changed:
                if data:
                    pipe.slices.append((due, data))
                else:
                    pipe.over = True
                pipe.changed.notify()
            if not data:
                return
            if (pause := ahead - time.monotonic() - QUEUE_SECONDS) > 0:
                time.sleep(pause)

    @staticmethod
    def _give(target: socket.socket, pipe: _Pipe) -> None:
        while True:
            with pipe.changed:
                pipe.changed.wait_for(lambda: pipe.slices or pipe.over)
                if not pipe.slices:
                    break
                due, data = pipe.slices.popleft()
            if (pause := due - time.monotonic()) > 0:
                time.sleep(pause)
            try:
                target.sendall(data)
            except OSError:
                break
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
