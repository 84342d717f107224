"""Which connections to the page's server stay open when there are too many, or one asks nothing.

A connection is silent while no request of it is being answered. Whoever comes gets a place: where all are
taken, the connection that has been silent longest gives up its own. No address has more than a part of the
places, so that a crowd there shuts nobody else out; behind a proxy all come from one, and are treated alike.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

MOST_CONNECTIONS = 256
MOST_OF_AN_ADDRESS = 192
REQUEST_SECONDS = 5.0
"""From a connection's opening until its first request is here."""


class Connections:
    """All of one server. They are counted from their protocol's beginning, which with TLS follows the
    handshake.
    """

    def __init__(self, serve: Callable[[], asyncio.Protocol]) -> None:
        """`serve` makes the protocol that answers on one connection."""
        self._serve = serve
        self._silent: dict[asyncio.BaseTransport, _Connection] = {}
        """The one that has been silent longest comes first."""
        self._answered: dict[asyncio.BaseTransport, _Connection] = {}

    def protocol(self) -> asyncio.Protocol:
        """For a connection that has come."""
        return _Connection(self, self._serve())

    def __len__(self) -> int:
        return len(self._silent) + len(self._answered)

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Inside the block a request of this connection is answered."""
        connection = self._silent.pop(transport, None) if transport is not None else None
        if transport is None or connection is None:
            yield  # it was just closed
            return
        connection.asked()
        self._answered[transport] = connection
        try:
            yield
        finally:
            if self._answered.pop(transport, None) is not None:
                self._silent[transport] = connection

    def admit(self, transport: asyncio.BaseTransport, connection: "_Connection") -> bool:
        """Give a new connection a place, at another's cost if need be."""
        everybody = [*self._silent.values(), *self._answered.values()]
        crowd = sum(other.address == connection.address for other in everybody) >= MOST_OF_AN_ADDRESS
        if crowd or len(everybody) >= MOST_CONNECTIONS:
            for other, held in self._silent.items():
                if held.address == connection.address or not crowd:
                    del self._silent[other]
                    held.end()
                    break
            else:
                return False
        self._silent[transport] = connection
        return True

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """It is closed."""
        self._silent.pop(transport, None)
        self._answered.pop(transport, None)


class _Connection(asyncio.Protocol):
    """Stands before the protocol that answers."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        """None if it was never let in."""
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
        """The deadline no longer counts: a request has come, or the end."""
        if self._deadline is not None:
            self._deadline.cancel()

    def end(self) -> None:
        """Close at once: nothing is waited for, least of all that it reads."""
        if self._transport is not None:
            self._transport.abort()
