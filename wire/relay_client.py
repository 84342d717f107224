"""A member's way through a relay: dial a neighbour, or take the connections that a neighbour dials.

gRPC dials a Unix socket here, and its bytes go to the relay; connections that come from the relay go to the
link port's front as if it had accepted them. So nothing needs to listen on the network.
"""

import asyncio
import logging
import shutil
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from wire.channels import LinkIdentity
from wire.dialing import connect
from wire.errors import LinkError
from wire.front import private_directory
from wire.pacing import RECONNECT_SECONDS, Backoff
from wire.relay import ACCEPT, DIAL, PROTOCOL_NAME, YES, keep_alive
from wire.splice import Pipe, splice
from wire.tls_socket import TlsSocket, mutual_context

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""For the connection to the relay, TLS and the request."""
PARTNER_SECONDS = 10.0
"""How long a dialler waits for the neighbour to come to the relay."""
SPARES = 2
"""Connections that wait at the relay for a neighbour: a link has two."""
_BACKLOG = 16


class RelayClient:
    """Reaches neighbours through one relay. Call everything on the event loop."""

    def __init__(self, identity: LinkIdentity, address: str, server_name: str) -> None:
        """
        Args:
            address: the relay's host:port.
            server_name: what its certificate must name.
        """
        self._identity = identity
        self._address = address
        self._server_name = server_name
        self._directory = ""
        self._listeners: dict[str, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pipes: set[Pipe] = set()
        self.trouble: dict[str, str] = {}
        """By neighbour: why the newest attempt failed; empty after a success."""

    def local_address(self, peer: str) -> str:
        """Where gRPC dials to reach `peer` through the relay."""
        if not self._directory:
            self._directory = private_directory()
        path = Path(self._directory, peer)
        if peer not in self._listeners:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(str(path))
                listener.listen(_BACKLOG)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
            self._listeners[peer] = listener
            self._start(self._accept(peer, listener))
        return f"unix:{path}"

    async def offer(self, peer: str, take: Callable[[socket.socket], None]) -> None:
        """Wait at the relay for connections of `peer` and give each to `take`, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(SPARES):
                group.create_task(self._offer_one(peer, take))

    async def close(self) -> None:
        """Drop every connection."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for pipe in list(self._pipes):
            pipe.abort()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""

    # ---- inside

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, peer: str, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            local, _ = await loop.sock_accept(listener)
            local.setblocking(False)
            self._start(self._lead(peer, local))

    async def _lead(self, peer: str, local: socket.socket) -> None:
        """Join a connection of this process's gRPC to the relay."""
        try:
            outer = await self._ask(DIAL, peer, PARTNER_SECONDS)
        except BaseException as error:
            local.close()
            if isinstance(error, LinkError):
                self.trouble[peer] = str(error)
                return
            raise
        self.trouble[peer] = ""
        pipe = Pipe(lambda: self._pipes.discard(pipe))
        self._pipes.add(pipe)
        try:
            await splice(outer, local, pipe)
        except OSError:
            self._pipes.discard(pipe)

    async def _offer_one(self, peer: str, take: Callable[[socket.socket], None]) -> None:
        backoff = Backoff(0.1, RECONNECT_SECONDS)
        while True:
            try:
                connection = await self._ask(ACCEPT, peer, None)
            except LinkError as error:
                if self.trouble.get(peer) != str(error):
                    self.trouble[peer] = str(error)
                    log.debug("no connection of %s by the relay: %s", peer, error)
                await asyncio.sleep(backoff.advance())
                continue
            backoff.reset()
            self.trouble[peer] = ""
            take(connection)

    async def _ask(self, role: bytes, peer: str, seconds: float | None) -> socket.socket:
        """A socket that is joined to one of `peer`. Raises LinkError."""
        identity, name = self._identity, self._address
        context = mutual_context(
            server_side=False,
            key_pem=identity.key_pem,
            certificate_pem=identity.certificate_pem,
            ca_pem=identity.ca_pem,
            protocol=PROTOCOL_NAME,
        )
        connection: socket.socket | None = None
        late = f"the relay at {name} did not answer in time"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await connect(self._address)
                keep_alive(connection)
                tls = TlsSocket(connection, context, server_name=self._server_name)
                await tls.handshake()
                await tls.write(role + peer.encode())
            late = f"{peer} did not come to the relay at {name} in time"
            async with asyncio.timeout(seconds):
                answer = await tls.read(1)
            if answer != YES:
                raise LinkError(f"the relay at {name} refused: it knows of no link to {peer}")
            joined, connection = connection, None
            return joined
        except TimeoutError:
            raise LinkError(late) from None
        except OSError as error:
            raise LinkError(f"the relay at {name} cannot be used ({error.strerror or error})") from None
        finally:
            if connection is not None:
                connection.close()
