"""The accepting side of links: one port for all neighbours that dial this node.

A caller is identified by its certificate. An expected neighbour of the current epoch is admitted; a caller
from an epoch that this node does not know yet is asked to try again; anybody else is refused for good.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import NoReturn

import grpc
import grpc.aio

from wire.admission import Limits
from wire.byte_stream import REFUSAL_KEY, ServerContext, ServerStream, StreamDroppedError
from wire.channels import LinkIdentity, make_server
from wire.connection import NO_FRAMES, Connection, now
from wire.descriptors import raise_limit
from wire.door import Door
from wire.errors import ProtocolViolationError, RefusalCode, UserError
from wire.front import Front, listen_or_advise, serve_behind, start_behind
from wire.identity.credentials import mutual_tls, peer_node_id
from wire.layer_exchange import LAYER_METHOD, LayerServer
from wire.link import (
    BULK_METHOD,
    CONTROL_METHOD,
    LONGEST_LOOK_SECONDS,
    METADATA_PREFIX,
    MOST_BREAKS,
    TOO_SLOW,
    Link,
)
from wire.link_state import LinkSettings, LinkState, OnTensor
from wire.mirror import make_mirror
from wire.peer_probe import PROBE_METHOD, ProbeServer
from wire.relay import PROTOCOL_NAME as RELAY_PROTOCOL
from wire.stream_receiver import Expect
from wire.telemetry import DIRECT
from wire.version import PROTOCOL

_BY = "by "
"""Precedes a path where a front keeps the address that a connection comes from."""
_NUMBERS = {"protocol": 2**32, "epoch": 2**32, "stage": 2**32, "session": 2**64, "attempt": 2**32}
"""Numbers in a call's metadata, each with its exclusive upper limit."""


class _NotAdmitted(Exception):
    """The answer to a caller that is not admitted."""

    def __init__(self, status: grpc.StatusCode, message: str, refusal: RefusalCode | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.refusal = refusal


class AcceptedLink(Link):
    """The link at the higher stage, which accepts the neighbour's connections."""

    def __init__(self, *, peer_node_id: str, state: LinkState) -> None:
        super().__init__(peer_node_id=peer_node_id, state=state)
        self._session: int | None = None
        self._streams: dict[str, ServerStream] = {}  # of the newest connection, by method
        self._arrived = asyncio.Event()
        self.path = DIRECT
        self._ended_at: dict[str, list[float]] = {}
        """By relayed path, when its connections were ended because it was slow."""

    def join(self, session: int, attempt: int) -> Connection:
        """The connection that a stream belongs to; a newer attempt ends the previous one.

        Raises `_NotAdmitted`.
        """
        if self.lost.done():
            raise _NotAdmitted(
                grpc.StatusCode.FAILED_PRECONDITION, str(self.lost.result()), RefusalCode.BAD_REQUEST
            )
        if self._over.is_set():
            # Neighbours end an epoch one after the other; the later one must not see this as a failure.
            raise _NotAdmitted(
                grpc.StatusCode.UNAVAILABLE, f"the link of epoch {self.epoch} was closed there"
            )
        if self._session is None:
            self._session = session
            self._state.open_session(session)
        if session != self._session:
            raise _NotAdmitted(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this link of epoch {self.epoch} was opened by another process of that node, "
                "whose state is gone; a new epoch is needed",
                RefusalCode.STALE_EPOCH,
            )
        newest = self._connection
        if newest is None or attempt > newest.attempt:
            if newest is not None:
                newest.end(StreamDroppedError("the neighbour connected again"))
            newest = self._make_connection(attempt)
            self._streams = {}
        if attempt < newest.attempt or newest.ended:
            raise _NotAdmitted(grpc.StatusCode.ABORTED, "this connection has ended")
        return newest

    def attach(self, connection: Connection, method: str, context: ServerContext, path: str) -> None:
        """Add an open stream, which came by `path`, to its connection, which runs once it has both."""
        if connection is self._connection:
            self.path = path
            self._streams[method] = ServerStream(context)
            if len(self._streams) == 2:
                self._arrived.set()

    def _leaves_relay(self, times: float) -> bool:
        if not times:
            return False
        # The end that dials chooses the path: it takes another after so many connections that broke.
        at = now()
        ended = [one for one in self._ended_at.get(self.path, ()) if at - one < LONGEST_LOOK_SECONDS]
        leaves = len(ended) < MOST_BREAKS
        self._ended_at[self.path] = [*ended, at] if leaves else ended
        return leaves

    def _finish(self) -> None:
        super()._finish()
        self._arrived.set()

    async def _keep_connected(self) -> None:
        while not self._over.is_set():
            await self._arrived.wait()
            self._arrived.clear()
            connection = self._connection
            if connection is not None and len(self._streams) == 2 and not connection.ended:
                await connection.run(self._streams[BULK_METHOD], self._streams[CONTROL_METHOD])


class _Handlers(grpc.GenericRpcHandler):
    def __init__(
        self,
        serve: Callable[[str, ServerContext], Awaitable[None]],
        serve_layer: Callable[[bytes, ServerContext], Awaitable[None]],
        serve_probe: Callable[[ServerContext], Awaitable[None]],
    ) -> None:
        self._serve = serve
        self._serve_layer = serve_layer
        self._serve_probe = serve_probe

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        method = handler_call_details.method
        if method == LAYER_METHOD:
            return grpc.unary_stream_rpc_method_handler(self._serve_layer)
        if method == PROBE_METHOD:

            async def probe(_requests: object, context: ServerContext) -> None:
                await self._serve_probe(context)

            return grpc.stream_stream_rpc_method_handler(probe)
        if method not in (BULK_METHOD, CONTROL_METHOD):
            return None

        async def handle(_requests: object, context: ServerContext) -> None:
            await self._serve(method, context)

        # No serializers: messages are bytes.
        return grpc.stream_stream_rpc_method_handler(handle)


class LinkServer:
    """Accepts neighbours' connections at one address, with mutual TLS, for expected links."""

    def __init__(self, *, identity: LinkIdentity, run_id: str, settings: LinkSettings | None = None) -> None:
        self._identity = identity
        self._run_id = run_id
        self._settings = settings or LinkSettings()
        self._server: grpc.aio.Server | None = None
        self._front: Front | None = None
        self._door: Door | None = None
        """Listens in place of the front, where this node is a relay too."""
        self._mirror: Front | None = None
        self._epoch = -1
        self._links: dict[str, AcceptedLink] = {}  # of the newest epoch, by neighbour
        self.layers: LayerServer | None = None
        """Serves this node's layers of snapshots, once it is a member of the run."""
        self.probes: ProbeServer | None = None
        """Lets other nodes measure their line to this one, in a run that is placed by measurement."""
        self.shut_out: Collection[str] = frozenset()
        """Nodes that get no layer, though they hold a certificate of the run."""

    async def start(self, listen: str, relay: Front | None = None) -> int:
        """Listen on `listen` ("host:port"; port 0 picks one); returns the port.

        Clients that ask for a relay (`wire.relay`) go to `relay`, if this node is one.

        With an empty `listen` nothing listens on the network, 0 is returned, and connections come by `adopt`.
        Raises `UserError` when the address cannot be bound.
        """
        identity = self._identity
        server = make_server(
            [_Handlers(self._serve, self._serve_layer, self._serve_probe)],
            unread_bytes=self._settings.unread_bytes,
        )
        front = Front(Limits.of_members(raise_limit()))
        credentials = mutual_tls(lambda: (identity.key_pem, identity.certificate_pem), identity.ca_pem)
        port, advice = 0, "take a free port and an address of this machine"
        if listen and relay is not None:
            door = Door(Limits.of_members(raise_limit()))
            door.serve_protocol(RELAY_PROTOCOL, relay)
            self._mirror = make_mirror()
            door.serve_mirror(self._mirror)
            door.serve_other(front)
            await start_behind(front, server, credentials)
            try:
                port = listen_or_advise(door.front, listen, advice)
            except UserError:
                await server.stop(None)
                await front.close()
                await door.front.close()
                raise
            self._door = door
        elif listen:
            port = await serve_behind(front, server, listen, credentials, advice)
        else:
            await start_behind(front, server, credentials)
        self._server, self._front = server, front
        return port

    def adopt(self, connection: socket.socket, path: str) -> None:
        """Take a connection that came by another path than the port, such as a relay."""
        if self._front is None:
            connection.close()
        else:
            self._front.adopt(connection, f"{_BY}{path}")

    async def stop(self) -> None:
        """Close every link and the port."""
        for link in list(self._links.values()):
            await link.close()
        if self._door is not None:
            await self._door.front.close()
            self._door = None
        if self._mirror is not None:
            await self._mirror.close()
            self._mirror = None
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
        if self._front is not None:
            await self._front.close()
            self._front = None

    def expect_peer(
        self,
        *,
        epoch: int,
        stage: int,
        peer_node_id: str,
        peer_stage: int,
        expect: Expect,
        on_tensor: OnTensor,
        settings: LinkSettings | None = None,
    ) -> AcceptedLink:
        """A link that the neighbour of stage `peer_stage` will dial. Run it like any other.

        The first call for a new epoch ends admission to the previous one. Call this for all neighbours of an
        epoch without awaiting in between: once one is known, unknown callers are refused for good.

        `settings` replace the server's for this link, except `unread_bytes`, which belongs to the port.
        """
        state = LinkState.create(
            run_id=self._run_id,
            epoch=epoch,
            stage=stage,
            peer_stage=peer_stage,
            settings=settings or self._settings,
            expect=expect,
            on_tensor=on_tensor,
        )
        if epoch > self._epoch:
            self._epoch, self._links = epoch, {}
        link = AcceptedLink(peer_node_id=peer_node_id, state=state)
        self._links[peer_node_id] = link
        return link

    async def _serve(self, method: str, context: ServerContext) -> None:
        try:
            link, connection = self._admit(context)
        except _NotAdmitted as answer:
            await _abort(context, answer.status, str(answer), answer.refusal)
        try:
            # Tells the caller that it is admitted; must come before any message.
            await context.send_initial_metadata(())
            link.attach(connection, method, context, self._path(context))
            await connection.finished.wait()
        finally:
            connection.end(StreamDroppedError("the neighbour hung up"))
        if str(connection.error) in (TOO_SLOW, NO_FRAMES):
            await _abort(context, grpc.StatusCode.UNAVAILABLE, TOO_SLOW, None)
        if isinstance(connection.error, ProtocolViolationError):
            await _abort(
                context, grpc.StatusCode.INVALID_ARGUMENT, str(connection.error), RefusalCode.BAD_REQUEST
            )

    async def _serve_layer(self, message: bytes, context: ServerContext) -> None:
        peer = await self._member(context)
        if self.layers is None:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "this node is not in the run yet", None)
        await self.layers.serve(peer, message, context)

    async def _serve_probe(self, context: ServerContext) -> None:
        peer = await self._member(context)
        if self.probes is None:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "this node is not measured", None)
        await self.probes.serve(peer, context)

    async def _member(self, context: ServerContext) -> str:
        """The node that calls, which has not been shut out."""
        peer = peer_node_id(context)
        if peer is None:
            await _abort(context, grpc.StatusCode.PERMISSION_DENIED, "the certificate names no node", None)
        if self._front is not None:
            self._front.prove(context.peer(), peer)
        if peer in self.shut_out:
            await _abort(context, grpc.StatusCode.PERMISSION_DENIED, "you were shut out of this run", None)
        return peer

    def _path(self, context: ServerContext) -> str:
        host = self._front.host(context.peer()) if self._front is not None else ""
        return host.removeprefix(_BY) if host.startswith(_BY) else DIRECT

    def _admit(self, context: ServerContext) -> tuple[AcceptedLink, Connection]:
        peer, numbers = peer_node_id(context) or "", _numbers(context)
        if peer and self._front is not None:
            self._front.prove(context.peer(), peer)
        if numbers["protocol"] != PROTOCOL:
            raise _NotAdmitted(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"it speaks protocol {PROTOCOL}, this node {numbers['protocol']}: install the same thinwire",
                RefusalCode.VERSION_MISMATCH,
            )
        epoch = numbers["epoch"]
        if epoch > self._epoch:
            raise _NotAdmitted(grpc.StatusCode.UNAVAILABLE, f"epoch {epoch} is not known there yet")
        if epoch < self._epoch:
            raise _NotAdmitted(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {epoch} is over; this node is in epoch {self._epoch}",
                RefusalCode.STALE_EPOCH,
            )
        link = self._links.get(peer)
        if link is None:
            raise _NotAdmitted(
                grpc.StatusCode.PERMISSION_DENIED,
                f"node {peer} is no neighbour of node {self._identity.node_id} in epoch {epoch}",
                RefusalCode.NOT_A_NEIGHBOUR,
            )
        return link, link.join(numbers["session"], numbers["attempt"])


def _numbers(context: ServerContext) -> dict[str, int]:
    """The numbers in the call's metadata. Raises `_NotAdmitted` if one is missing, malformed or too large."""
    given = dict(context.invocation_metadata() or ())
    numbers = {}
    for name, end in _NUMBERS.items():
        value = given.get(METADATA_PREFIX + name, "")
        # Length first: Python refuses to parse numbers of thousands of digits.
        known = isinstance(value, str) and value.isdecimal() and len(value) <= 20
        if not known or int(value) >= end:
            raise _NotAdmitted(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the call's metadata has no number {METADATA_PREFIX}{name} below {end}",
                RefusalCode.BAD_REQUEST,
            )
        numbers[name] = int(value)
    return numbers


async def _abort(
    context: ServerContext, status: grpc.StatusCode, message: str, refusal: RefusalCode | None
) -> NoReturn:
    trailing = ((REFUSAL_KEY, refusal.value),) if refusal else ()
    await context.abort(status, message, trailing)
