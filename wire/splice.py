"""Two connections joined: what one receives, the other sends, in bounded memory."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import cast

from wire.pacing import Pacer

CLOSE_SECONDS = 5.0
"""A closed connection's last bytes may take this long."""
_BUFFER_BYTES = 256 * 1024
"""Stop reading from one end while the other has this much left to send."""


class Pipe:
    """Give `outer` and `inner` to the two connections as their protocols. `on_close` is called once."""

    def __init__(self, on_close: Callable[[], None], pacer: Pacer | None = None) -> None:
        """`pacer` limits what passes, both ways together; pipes may share one."""
        self.pacer = pacer
        self.outer, self.inner = _End(self), _End(self)
        self.outer.other, self.inner.other = self.inner, self.outer
        self.carried = 0
        """Bytes, both ways together."""
        self._on_close = on_close
        self._closed = False

    def closed(self) -> None:
        """One end is closed: close the other after its last bytes, within `CLOSE_SECONDS`."""
        if not self._closed:
            self._closed = True
            self._on_close()
            for end in (self.outer, self.inner):
                if end.transport is not None and not end.transport.is_closing():
                    end.transport.close()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.abort)

    def abort(self) -> None:
        self._closed = True
        for end in (self.outer, self.inner):
            if end.transport is not None:
                end.transport.abort()


class _End(asyncio.Protocol):
    other: "_End"

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.transport: asyncio.Transport | None = None
        self._early = b""
        """What came before the other end was there."""
        self._full = self._paced = False
        """Why nothing is read here: the other end has much left to send; the pacer's rate is used up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        if self.other.transport is not None:
            self.transport.write(self.other._early)
            self.other._early = b""
            self.other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self._pipe.carried += len(data)
            self.other.transport.write(data)
            if self._pipe.pacer is not None:
                delay = self._pipe.pacer.reserve(len(data), time.monotonic())
                if delay > 0:
                    self._paced = True
                    self._read_or_not()
                    asyncio.get_running_loop().call_later(delay, self._go_on)
        else:
            self._early += data
            if self.transport is not None:
                self.transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._pipe.closed()

    def pause_writing(self) -> None:
        self.other._full = True
        self.other._read_or_not()

    def resume_writing(self) -> None:
        self.other._full = False
        self.other._read_or_not()

    def _go_on(self) -> None:
        self._paced = False
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._full or self._paced:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


async def splice(one: socket.socket, other: socket.socket, pipe: Pipe) -> None:
    """Join two connected sockets by `pipe`, which owns them from now on."""
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(lambda: pipe.inner, sock=other)
        await loop.create_connection(lambda: pipe.outer, sock=one)
    except BaseException:
        pipe.abort()
        one.close()
        other.close()
        raise
