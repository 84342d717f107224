"""The accepting side of links: one port for all neighbours that dial this node.

A caller is identified by its certificate. An expected neighbour of the current epoch is admitted; a caller
from an epoch that this node does not know yet is asked to try again; anybody else is refused for good.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

import grpc
import grpc.aio

from wire.admission import Limits
from wire.byte_stream import REFUSAL_KEY, BulkServer, ServerContext, ServerStream, StreamDroppedError
from wire.channels import (
    BULK_MESSAGE_BYTES,
    BULK_THREADS,
    LinkIdentity,
    bulk_name,
    make_server,
    make_threaded_server,
    serves,
)
from wire.connection import NO_FRAMES, Connection, now
from wire.descriptors import raise_limit
from wire.door import Door
from wire.errors import ProtocolViolationError, RefusalCode, UserError
from wire.event_loop import on_thread
from wire.front import Front, listen_or_advise, start_behind
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
_NUMBERS = {
    "protocol": 2**32,
    "epoch": 2**32,
    "stage": 2**32,
    "rows": 2**32,
    "session": 2**64,
    "attempt": 2**32,
}
"""Numbers in a call's metadata, each with its exclusive upper limit."""


_HUNG_UP = StreamDroppedError("the neighbour hung up")
ADMIT_SECONDS = 30.0
"""The event loop may take this long to say whether a bulk stream is admitted."""
STOP_SECONDS = 10.0
"""When the server stops, calls may take this long to end."""

AnyContext = ServerContext | grpc.ServicerContext


class _NotAdmitted(Exception):
    """The answer to a caller that is not admitted, or is no longer."""

    def __init__(self, status: grpc.StatusCode, message: str, refusal: RefusalCode | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.refusal = refusal


class AcceptedLink(Link):
    """The link at the higher stage, which accepts the neighbour's connections."""

    def __init__(self, *, peer_node_id: str, state: LinkState) -> None:
        super().__init__(peer_node_id=peer_node_id, state=state)
        self._session: int | None = None
        self._bulk: BulkServer | None = None
        self._control: ServerStream | None = None
        """Both streams of the newest connection."""
        self._arrived = asyncio.Event()
        self.path = DIRECT
        self._ended_at: dict[str, list[float]] = {}
        """When connections of a relayed path were ended because it was slow, by path."""

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
            self._bulk = self._control = None
        if attempt < newest.attempt or newest.ended:
            raise _NotAdmitted(grpc.StatusCode.ABORTED, "this connection has ended")
        return newest

    def attach(self, connection: Connection, stream: ServerStream | BulkServer, path: str) -> None:
        """Add an open stream, which came by `path`, to its connection, which runs once it has both."""
        if connection is not self._connection:
            return
        self.path = path
        if isinstance(stream, BulkServer):
            self._bulk = stream
        else:
            self._control = stream
        if self._bulk is not None and self._control is not None:
            self._arrived.set()

    def _leaves_relay(self, times: float) -> bool:
        if not times:
            return False
        # The end that dials chooses the path: it takes another after so many connections that broke.
        at = now()
        ended = [time for time in self._ended_at.get(self.path, ()) if at - time < LONGEST_LOOK_SECONDS]
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
            connection, bulk, control = self._connection, self._bulk, self._control
            if connection is not None and bulk is not None and control is not None and not connection.ended:
                await connection.run(bulk, control)


class LinkServer:
    """Accepts neighbours' connections at one address, with mutual TLS, for expected links."""

    def __init__(self, *, identity: LinkIdentity, run_id: str, settings: LinkSettings | None = None) -> None:
        self._identity = identity
        self._run_id = run_id
        self._settings = settings or LinkSettings()
        self._loop = asyncio.get_running_loop()
        self._server: grpc.aio.Server | None = None
        self._bulk_server: grpc.Server | None = None
        self._front: Front | None = None
        self._bulk_front: Front | None = None
        """One before each server."""
        self._door: Door | None = None
        """Listens for both, and for the relay that this node may be."""
        self._mirror: Front | None = None
        self._epoch = -1
        self._links: dict[str, AcceptedLink] = {}  # of the newest epoch, by neighbour
        self.layers: LayerServer | None = None
        """Serves this node's layers of snapshots, once it is a member of the run."""
        self.probes: ProbeServer | None = None
        """Lets other nodes measure their line to this one, in a run that is placed by measurement."""
        self.shut_out: Collection[str] = frozenset()
        """Nodes that get no layer, although they hold a certificate of the run."""

    async def start(self, listen: str, relay: Front | None = None) -> int:
        """Listen on `listen` ("host:port"; port 0 picks one); returns the port.

        Clients that ask for a relay (`wire.relay`) go to `relay`, if this node is one.

        With an empty `listen` nothing listens on the network, 0 is returned, and connections come by `adopt`.
        Raises `UserError` when the address cannot be bound.
        """
        identity, unread_bytes = self._identity, self._settings.unread_bytes
        # No serializers: messages are bytes.
        stream = grpc.stream_stream_rpc_method_handler
        handlers = [
            serves(CONTROL_METHOD, stream(self._serve)),
            serves(PROBE_METHOD, stream(self._serve_probe)),
            serves(LAYER_METHOD, grpc.unary_stream_rpc_method_handler(self._serve_layer)),
        ]
        self._server = make_server(handlers, unread_bytes=unread_bytes)
        self._bulk_server = make_threaded_server(
            [serves(BULK_METHOD, stream(self._serve_bulk))],
            BULK_THREADS,
            message_bytes=BULK_MESSAGE_BYTES,
            unread_bytes=unread_bytes,
        )
        limits = Limits.of_members(raise_limit())
        self._front, self._bulk_front, self._door = Front(limits), Front(limits), Door(limits)
        for front, server in ((self._front, self._server), (self._bulk_front, self._bulk_server)):
            # Each server reads the certificate by credentials of its own.
            credentials = mutual_tls(lambda: (identity.key_pem, identity.certificate_pem), identity.ca_pem)
            await start_behind(front, server, credentials)
        self._door.serve_name(bulk_name(identity.server_name(identity.node_id)), self._bulk_front)
        self._door.serve_other(self._front)
        if relay is not None:
            self._door.serve_protocol(RELAY_PROTOCOL, relay)
            self._mirror = make_mirror()
            self._door.serve_mirror(self._mirror)
        if not listen:
            return 0
        try:
            return listen_or_advise(
                self._door.front, listen, "take a free port and an address of this machine"
            )
        except UserError:
            await self.stop()
            raise

    def adopt(self, connection: socket.socket, path: str) -> None:
        """Take a connection that came by another path than the port, such as a relay."""
        if self._door is None:
            connection.close()
        else:
            self._door.front.adopt(connection, f"{_BY}{path}")

    async def stop(self) -> None:
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
        if self._bulk_server is not None:
            # With a grace it does not block the loop, which calls that end may need.
            stopping = self._bulk_server.stop(grace=0.0)
            await on_thread(lambda: stopping.wait(STOP_SECONDS), "bulk-stop")
            self._bulk_server = None
        for front in (self._front, self._bulk_front):
            if front is not None:
                await front.close()
        self._front = self._bulk_front = None

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
        rows: int = 0,
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
            rows=rows,
        )
        if epoch > self._epoch:
            self._epoch, self._links = epoch, {}
        link = AcceptedLink(peer_node_id=peer_node_id, state=state)
        self._links[peer_node_id] = link
        return link

    async def _serve(self, _requests: object, context: ServerContext) -> None:
        try:
            link, connection = self._admit(self._front, context)
        except _NotAdmitted as refused:
            await _abort(context, refused.status, str(refused), refused.refusal)
        try:
            # Tells the caller that it is admitted; must come before any message.
            await context.send_initial_metadata(())
            link.attach(connection, ServerStream(context), _path(self._front, context))
            await connection.finished.wait()
        finally:
            connection.end(_HUNG_UP)
        if (answer := _last_words(connection)) is not None:
            await _abort(context, answer.status, str(answer), answer.refusal)

    def _serve_bulk(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve a bulk stream on its own thread, which writes what the connection sends."""

        async def admit() -> tuple[AcceptedLink, Connection]:
            return self._admit(self._bulk_front, context)

        def later(call: Callable[..., None], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(call, *arguments)

        def abort(answer: _NotAdmitted) -> NoReturn:
            if answer.refusal is not None:
                context.set_trailing_metadata(((REFUSAL_KEY, answer.refusal.value),))
            context.abort(answer.status, str(answer))

        try:
            link, connection = asyncio.run_coroutine_threadsafe(admit(), self._loop).result(ADMIT_SECONDS)
        except _NotAdmitted as refused:
            abort(refused)
        try:
            if not context.add_callback(functools.partial(later, connection.end, _HUNG_UP)):
                return
            context.send_initial_metadata(())
            path = _path(self._bulk_front, context)
            later(link.attach, connection, BulkServer(requests), path)
            yield from connection.frames()
        finally:
            later(connection.end, _HUNG_UP)
        if (answer := _last_words(connection)) is not None:
            abort(answer)

    async def _serve_layer(self, message: bytes, context: ServerContext) -> None:
        peer = await self._member(context)
        if self.layers is None:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "this node is not in the run yet", None)
        assert self._front is not None, "it has passed the connection on"
        await self.layers.serve(peer, message, context, functools.partial(self._front.end, context.peer()))

    async def _serve_probe(self, _requests: object, context: ServerContext) -> None:
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

    def _admit(self, front: Front | None, context: AnyContext) -> tuple[AcceptedLink, Connection]:
        peer, numbers = peer_node_id(context) or "", _numbers(context)
        if peer and front is not None:
            front.prove(context.peer(), peer)
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
        if link is None and any((numbers["rows"], *(other.rows for other in self._links.values()))):
            # Where there are several rows, this node may be about to hear that it has a seat beside that one.
            raise _NotAdmitted(
                grpc.StatusCode.UNAVAILABLE, f"node {peer} is not known there as a neighbour yet"
            )
        if link is None:
            raise _NotAdmitted(
                grpc.StatusCode.PERMISSION_DENIED,
                f"node {peer} is no neighbour of node {self._identity.node_id} in epoch {epoch}",
                RefusalCode.NOT_A_NEIGHBOUR,
            )
        if numbers["rows"] != link.rows:
            # One of the two has left its seat for one in another row, and the other has not heard of it.
            raise _NotAdmitted(grpc.StatusCode.UNAVAILABLE, f"node {peer} or this one has another seat now")
        return link, link.join(numbers["session"], numbers["attempt"])


def _path(front: Front | None, context: AnyContext) -> str:
    host = front.host(context.peer()) if front is not None else ""
    return host.removeprefix(_BY) if host.startswith(_BY) else DIRECT


def _last_words(connection: Connection) -> _NotAdmitted | None:
    """The last message for a neighbour whose connection was ended here."""
    if str(connection.error) in (TOO_SLOW, NO_FRAMES):
        return _NotAdmitted(grpc.StatusCode.UNAVAILABLE, TOO_SLOW)
    if isinstance(connection.error, ProtocolViolationError):
        return _NotAdmitted(grpc.StatusCode.INVALID_ARGUMENT, str(connection.error), RefusalCode.BAD_REQUEST)
    return None


def _numbers(context: AnyContext) -> dict[str, int]:
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
