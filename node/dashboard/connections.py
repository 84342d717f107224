"""Limits connections to the page's server: their number, the number per address, and how long they wait.

A connection is idle while none of its requests is being answered. When all slots are taken, a new connection
replaces the one that has been idle longest. One address gets only part of the slots, so a crowd there shuts
nobody else out. Behind a proxy all clients share one address.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

MOST_CONNECTIONS = 256
MOST_OF_AN_ADDRESS = 192
REQUEST_SECONDS = 5.0
"""The limit from the start of a connection to its first request."""


class Connections:
    """All connections of one server. With TLS they count from the end of the handshake."""

    def __init__(self, serve: Callable[[], asyncio.Protocol]) -> None:
        """`serve` creates the protocol that answers a connection."""
        self._serve = serve
        self._idle: dict[asyncio.BaseTransport, _Connection] = {}
        """The longest idle connection comes first."""
        self._answered: dict[asyncio.BaseTransport, _Connection] = {}

    def protocol(self) -> asyncio.Protocol:
        return _Connection(self, self._serve())

    def __len__(self) -> int:
        return len(self._idle) + len(self._answered)

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Mark the connection as busy while a request is answered in this context."""
        connection = self._idle.pop(transport, None) if transport is not None else None
        if transport is None or connection is None:
            yield  # the connection was just closed
            return
        connection.asked()
        self._answered[transport] = connection
        try:
            yield
        finally:
            if self._answered.pop(transport, None) is not None:
                self._idle[transport] = connection

    def admit(self, transport: asyncio.BaseTransport, connection: "_Connection") -> bool:
        """Give a new connection a slot, and close an idle one if needed. Returns False if there is none."""
        everybody = [*self._idle.values(), *self._answered.values()]
        crowd = sum(other.address == connection.address for other in everybody) >= MOST_OF_AN_ADDRESS
        if crowd or len(everybody) >= MOST_CONNECTIONS:
            for other, held in self._idle.items():
                if held.address == connection.address or not crowd:
                    del self._idle[other]
                    held.end()
                    break
            else:
                return False
        self._idle[transport] = connection
        return True

    def forget(self, transport: asyncio.BaseTransport) -> None:
        self._idle.pop(transport, None)
        self._answered.pop(transport, None)


class _Connection(asyncio.Protocol):
    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        """None if the connection was not admitted."""
        self._deadline: asyncio.TimerHandle | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._connections.admit(transport, self):
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_SECONDS, self.end)
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.asked()
        if self._transport is not None:
            self._connections.forget(self._transport)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def asked(self) -> None:
        """Cancel the deadline, because a request arrived or the connection ended."""
        if self._deadline is not None:
            self._deadline.cancel()

    def end(self) -> None:
        """Close at once, without waiting for the peer."""
        if self._transport is not None:
            self._transport.abort()
