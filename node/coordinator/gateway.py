"""`python -m node.coordinator.gateway`: a process that handles control sessions of a large run.

It terminates the TLS and gRPC of its sessions, and exchanges their messages with the coordinator, which
started it, as `gateway_frames`. It decides nothing. The coordinator hands over connections whose service is
known, and opens sessions. This process limits what nodes send, so that a flood stops here. It ends when the
coordinator's socket closes.
"""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, cast

import grpc

from node.coordinator.gateway_frames import (
    FrameReader,
    Kind,
    Opened,
    frame,
    messages_of,
    opened_to_bytes,
)
from node.coordinator.sessions import (
    HELLO_SECONDS,
    MOST_WAITING,
    NO_HELLO,
    Context,
    Greetings,
    MessageLimits,
    abort,
    check_limits,
    each,
    parsed,
    written,
)
from node.run_file.loader import from_json
from wire import event_loop
from wire.admission import Limits
from wire.channels import make_server, serves
from wire.descriptors import raise_limit
from wire.errors import ProtocolViolationError
from wire.front import Front, start_behind
from wire.identity.credentials import mutual_tls, peer_node_id

log = logging.getLogger(__name__)

SESSION = "/thinwire.wire.v1.Coordinator/Session"
ALIVE_SECONDS = 1.0
STOP_SECONDS = 1.0
LONGEST_HOST = 255
_HANDOVERS = 64
"""Connections to take over before other work of the event loop runs."""


@dataclass(frozen=True)
class _End:
    """The last entry of an outbox."""

    code: str = ""
    """The name of a gRPC status; "" for a normal end."""
    why: str = ""


@dataclass
class _Session:
    outbox: "asyncio.Queue[bytes | _End]" = field(default_factory=asyncio.Queue)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)


class CoreLink(asyncio.Protocol):
    """The stream to the coordinator. Frames of one iteration of the event loop are written together."""

    def __init__(self, gateway: "Gateway") -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gateway = gateway
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._room = asyncio.Event()
        self._room.set()

    def write(self, data: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(data)

    async def room(self) -> None:
        """If much data waits to be sent to the coordinator, wait until most of it has been read."""
        await self._room.wait()

    def _flush(self) -> None:
        data, self._waiting = b"".join(self._waiting), []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for kind, number, payload in self._reader.feed(data):
            self._gateway.told(kind, number, payload)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._room.set()
        if not self.closed.done():
            self.closed.set_result(None)


class Gateway:
    def __init__(self) -> None:
        self.setup: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.front: Front | None = None
        self._link: CoreLink | None = None
        self._sessions: dict[int, _Session] = {}
        self._numbers = count(1)
        self._greetings = Greetings()
        self._limits: dict[str, MessageLimits] = {}
        self._make_limits: Callable[[], MessageLimits]

    # ---- from the coordinator

    def told(self, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case Kind.SEND:
                if (session := self._sessions.get(number)) is not None:
                    session.outbox.put_nowait(payload)
            case Kind.SEND_WAITED:
                for each_number, message in messages_of(number, payload):
                    if (session := self._sessions.get(each_number)) is not None:
                        session.outbox.put_nowait(message)
            case Kind.ANSWER:
                session = self._sessions.get(number)
                if session is not None and session.outbox.qsize() < MOST_WAITING:
                    session.outbox.put_nowait(payload)
            case Kind.ACCEPT:
                if (session := self._sessions.get(number)) is not None:
                    session.accepted.set()
            case Kind.END:
                if (session := self._sessions.get(number)) is not None:
                    session.outbox.put_nowait(_End(**json.loads(payload)) if payload else _End())
            case Kind.SETUP:
                self.setup.set_result(json.loads(payload))
            case _:
                raise ProtocolViolationError(f"the coordinator sent a frame of kind {kind}")

    # ---- from nodes

    async def serve(self, link: CoreLink, handed: socket.socket) -> None:
        """Serve until the coordinator is gone."""
        self._link = link
        setup = await self.setup
        config = from_json(setup["config"])
        self._make_limits = lambda: MessageLimits(config)
        limits = Limits.of_members(raise_limit())
        # All gateways share the places for strangers.
        self.front = Front(replace(limits, handshakes=max(8, limits.handshakes // setup["gateways"])))
        # Sessions are in bytes. All other calls go to the coordinator itself.
        server = make_server([serves(SESSION, grpc.stream_stream_rpc_method_handler(self.session))])
        credentials = setup["key"].encode(), setup["certificate"].encode()
        await start_behind(self.front, server, mutual_tls(lambda: credentials, setup["ca"].encode()))
        loop = asyncio.get_running_loop()
        loop.add_reader(handed, self._take_over, handed)
        alive = loop.create_task(self._say_alive())
        link.write(frame(Kind.READY))
        try:
            await link.closed
        finally:
            alive.cancel()
            loop.remove_reader(handed)
            await server.stop(STOP_SECONDS)
            await self.front.close()

    async def _say_alive(self) -> None:
        assert self._link is not None and self.front is not None
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            self._link.write(frame(Kind.ALIVE, len(self.front.admission)))

    def _take_over(self, handed: socket.socket) -> None:
        assert self.front is not None
        for _ in range(_HANDOVERS):
            try:
                host, descriptors, _, _ = socket.recv_fds(handed, LONGEST_HOST, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.warning("a connection was not taken over: %s", error)
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                self.front.adopt(connection, host.decode())

    async def session(self, requests: AsyncIterator[bytes], context: Context) -> None:
        assert self._link is not None and self.front is not None
        link, node_id, peer = self._link, peer_node_id(context), context.peer()
        if node_id is None:
            await abort(context, grpc.StatusCode.PERMISSION_DENIED, "the certificate names no node")
        self.front.prove(peer, node_id)
        try:
            async with self._greetings.newest(node_id), asyncio.timeout(HELLO_SECONDS):
                hello = await anext(requests, None)
        except TimeoutError:
            hello = None
        if hello is None:
            await abort(context, grpc.StatusCode.UNAVAILABLE, NO_HELLO)
        number, session = next(self._numbers), _Session()
        self._sessions[number] = session
        opened = Opened(node_id=node_id, host=self.front.host(peer), hello=hello)
        link.write(frame(Kind.OPEN, number, opened_to_bytes(opened)))
        reader = asyncio.get_running_loop().create_task(self._read(number, node_id, session, requests))
        try:
            while not isinstance(message := await session.outbox.get(), _End):
                await written(context, self.front, message)
        finally:
            reader.cancel()
            del self._sessions[number]
            link.write(frame(Kind.CLOSED, number))
        if message.code:
            await abort(context, grpc.StatusCode[message.code], message.why)

    async def _read(
        self, number: int, node_id: str, session: _Session, requests: AsyncIterator[bytes]
    ) -> None:
        assert self._link is not None
        await session.accepted.wait()
        limits = self._limits.get(node_id)
        if limits is None:
            limits = self._limits[node_id] = self._make_limits()
        try:
            async for request in requests:
                for message in each(parsed(request)):
                    check_limits(message, limits)
                    self._link.write(frame(Kind.SAID, number, message.SerializeToString()))
                await self._link.room()
        except ProtocolViolationError as error:
            # The coordinator ends the session.
            self._link.write(frame(Kind.WRONG, number, str(error).encode()))
            return
        session.outbox.put_nowait(_End())


async def serve(stream: socket.socket, handed: socket.socket) -> None:
    """Run as the gateway of the coordinator at the other ends of these sockets, until it is gone."""
    gateway = Gateway()
    handed.setblocking(False)
    _, link = await asyncio.get_running_loop().create_unix_connection(lambda: CoreLink(gateway), sock=stream)
    serving = asyncio.ensure_future(gateway.serve(link, handed))
    await asyncio.wait({serving, link.closed}, return_when=asyncio.FIRST_COMPLETED)
    if link.closed.done() and not gateway.setup.done():
        serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def main() -> int:
    stream, handed = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    event_loop.run(serve(stream, handed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
