"""Connects to a neighbour with a relay's help: through the relay, or by simultaneous open.

gRPC dials a local Unix socket, whose bytes go to the relay. Connections from the relay go to the link port's
front as if it had accepted them, so nothing needs to listen on the network.

For a simultaneous open (RFC 9293, figure 8), both members ask the relay from a new port. Each learns the
other's outside address for that connection, and dials it from the same port. This works if both NATs map a
port in the same way for every target: each end's outgoing packet makes its own NAT accept the other's.
"""

import asyncio
import contextlib
import logging
import shutil
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from wire.channels import LinkIdentity
from wire.dialing import again_and_again, connect, proxy_for
from wire.errors import LinkError
from wire.front import private_directory
from wire.identity.names import split_address
from wire.pacing import RECONNECT_SECONDS, Backoff
from wire.relay import ACCEPT, DIAL, PROTOCOL_NAME, TOGETHER, YES, keep_alive
from wire.splice import Pipe
from wire.telemetry import NOT_TOGETHER
from wire.tls_socket import TlsSocket, mutual_context

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""The limit for the connection to the relay, TLS and the request together."""
PARTNER_SECONDS = 10.0
"""How long a dialling member waits for its neighbour at the relay."""
TOGETHER_SECONDS = 4.0
"""How long two members try a simultaneous open."""
SPARES = 2
"""How many connections wait at the relay for a neighbour. A link has two."""
_BACKLOG = 16


class RelayClient:
    """Reaches neighbours through one relay. Call everything on the event loop."""

    def __init__(self, identity: LinkIdentity, address: str, server_name: str) -> None:
        """
        Args:
            address: the relay's host:port.
            server_name: the name that its certificate must have.
        """
        self._identity = identity
        self.address = address
        """The relay's host:port, which may change."""
        self._server_name = server_name
        self._directory = ""
        self._listeners: dict[str, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pipes: dict[Pipe, tuple[str, bool]] = {}
        """The neighbour of each pipe, and whether it is a simultaneous open."""
        self.trouble: dict[str, str] = {}
        """Why the newest attempt through the relay failed, by neighbour; empty after a success."""
        self.trouble_together: dict[str, str] = {}
        """The same for simultaneous open."""

    def local_address(self, peer: str, *, together: bool = False) -> str:
        """The address that gRPC dials to reach `peer` by relay or, with `together`, simultaneous open."""
        if not self._directory:
            self._directory = private_directory()
        name = f"{peer}.s" if together else peer
        path = Path(self._directory, name)
        if name not in self._listeners:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(str(path))
                listener.listen(_BACKLOG)
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
            self._listeners[name] = listener
            self._start(self._accept(peer, listener, together))
        return f"unix:{path}"

    async def offer(
        self, peer: str, take: Callable[[socket.socket], None], *, together: bool = False
    ) -> None:
        """Wait at the relay for connections of `peer`, or for simultaneous opens (`together`), until
        cancelled.

        `take` is called with each connection.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(SPARES):
                group.create_task(self._offer_one(peer, take, together))

    def hang_up(self, peer: str, *, together: bool = False) -> None:
        """Close this process's connections to `peer`, which gRPC may keep long after a channel was closed."""
        for pipe in [pipe for pipe, whose in self._pipes.items() if whose == (peer, together)]:
            self._pipes.pop(pipe, None)
            pipe.closed()

    async def close(self) -> None:
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

    async def _accept(self, peer: str, listener: socket.socket, together: bool) -> None:
        loop = asyncio.get_running_loop()
        while True:
            local, _ = await loop.sock_accept(listener)
            local.setblocking(False)
            self._start(self._lead(peer, local, together))

    async def _lead(self, peer: str, local: socket.socket, together: bool) -> None:
        """Join a local gRPC connection to one that leads to the neighbour."""
        trouble = self.trouble_together if together else self.trouble
        try:
            if together:
                outer = await self._dial_together(peer, PARTNER_SECONDS)
            else:
                outer, _ = await self._ask(DIAL, peer, PARTNER_SECONDS)
        except BaseException as error:
            local.close()
            if isinstance(error, LinkError):
                trouble[peer] = str(error)
                return
            raise
        trouble[peer] = ""

        def closed() -> None:
            self._pipes.pop(pipe, None)

        pipe = Pipe(closed)
        self._pipes[pipe] = peer, together
        pipe.join(outer, local)

    async def _offer_one(self, peer: str, take: Callable[[socket.socket], None], together: bool) -> None:
        trouble = self.trouble_together if together else self.trouble
        backoff = Backoff(0.1, RECONNECT_SECONDS)
        while True:
            try:
                if together:
                    connection = await self._dial_together(peer, None)
                else:
                    connection, _ = await self._ask(ACCEPT, peer, None)
            except LinkError as error:
                if trouble.get(peer) != str(error):
                    trouble[peer] = str(error)
                    log.debug("no connection from %s through the relay: %s", peer, error)
                await asyncio.sleep(backoff.advance())
                continue
            backoff.reset()
            trouble[peer] = ""
            take(connection)

    async def _dial_together(self, peer: str, seconds: float | None) -> socket.socket:
        """A connection with `peer` by simultaneous open. Raises LinkError."""
        if proxy_for(self.address) is not None:
            raise LinkError(NOT_TOGETHER["proxy"])
        asking, there = await self._ask(TOGETHER, peer, seconds)
        with contextlib.closing(asking):
            try:
                host, port = split_address(there)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
            except ValueError:
                raise LinkError(f"the relay at {self.address} gave no address for {peer}") from None
            if family != asking.family:
                raise LinkError(NOT_TOGETHER["families"])
            own = asking.getsockname()
            try:
                async with asyncio.timeout(TOGETHER_SECONDS):
                    return await again_and_again(family, own, (host, port))
            except TimeoutError:
                raise LinkError(NOT_TOGETHER["nat"]) from None

    async def _ask(self, role: bytes, peer: str, seconds: float | None) -> tuple[socket.socket, str]:
        """A socket that the relay has joined to one of `peer`, and "". Raises LinkError.

        For `TOGETHER`, the socket to the relay, whose local port can be reused, and the address of `peer`.
        """
        identity, name = self._identity, self.address
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
                connection = await connect(self.address, reused=role == TOGETHER)
                keep_alive(connection)
                tls = TlsSocket(connection, context, server_name=self._server_name)
                await tls.handshake()
                await tls.write(role + peer.encode())
            late = f"{peer} did not come to the relay at {name} in time"
            async with asyncio.timeout(seconds):
                answer = await tls.read(1)
            if answer != YES:
                raise LinkError(f"the relay at {name} refused: it knows no link to {peer}")
            there = ""
            if role == TOGETHER:
                async with asyncio.timeout(CONNECT_SECONDS):
                    length = (await tls.read(1))[0]
                    there = (await tls.read(length)).decode("ascii", "replace")
            joined, connection = connection, None
            return joined, there
        except TimeoutError:
            raise LinkError(late) from None
        except OSError as error:
            raise LinkError(f"the relay at {name} cannot be used ({error.strerror or error})") from None
        finally:
            if connection is not None:
                connection.close()
