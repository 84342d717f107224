"""What the coordinator does with a control session, whichever process ends its TLS: checks who may open one
and where neighbours reach the node, and takes its messages within their limits."""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from node.coordinator.reports import REPORTING, Reported
from node.coordinator.sessions import ControlSession, Measured, MessageLimits
from wire.dialing import knock
from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Refusal
from wire.identity.names import join_address, split_address
from wire.messages import Hello, NodeMessage
from wire.node_messages_proto import node_message_from_proto
from wire.v1 import control_pb2
from wire.version import PROTOCOL, VERSION

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
REACH_SECONDS = 5.0
RECONNECT_SECONDS = 2.0
"""A node that connects too often is held up for this."""
MOST_LOOKUPS = 16
"""Concurrent DNS look-ups. A node chooses the name, and its name server may take minutes to answer."""
NO_HELLO = "no hello came in time, or this node connects too often"
NO_MESSAGE = "bytes came that are no message"


class SessionHandler(Protocol):
    """What sessions need of the coordinator."""

    async def refusal_for(self, node_id: str) -> Refusal | None:
        """Why this node may not take part, if it may not."""
        ...

    def opened(self, session: ControlSession) -> None: ...

    def heard(self, session: ControlSession, message: NodeMessage, reported: Reported | None = None) -> None:
        """`reported`: what a gateway took out of the message, if one did."""
        ...

    def refused(self, node_id: str, why: str) -> None:
        """The node sent what no correct node sends."""
        ...

    def closed(self, session: ControlSession) -> None: ...


class Names:
    """Looks up host names that nodes gave, on its own threads: the loop's threads write the run's records."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_LOOKUPS, thread_name_prefix="names")
        self._under_way: dict[str, Future[Any]] = {}

    async def look_up(self, node_id: str, host: str) -> list[str]:
        """The IP addresses of `host`. Raises OSError, also while an earlier name of this node is looked up.

        A look-up cannot be cancelled, so each node has at most one: slow ones must not use up the threads.
        """
        with contextlib.suppress(ValueError):
            if "%" not in host:
                return [str(ipaddress.ip_address(host))]
        if node_id in self._under_way:
            raise OSError("an earlier name is still being looked up")
        found = self._threads.submit(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        self._under_way[node_id] = found
        found.add_done_callback(lambda _: self._under_way.pop(node_id))
        return [str(place[4][0]) for place in await asyncio.wrap_future(found)]


class Greetings:
    """Sessions that are not open yet: of each node only the newest goes on."""

    def __init__(self) -> None:
        self._newest: dict[str, asyncio.Timeout] = {}

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._newest

    def __len__(self) -> int:
        return len(self._newest)

    def of(self, node_id: str) -> asyncio.Timeout | None:
        """The newest session of a node."""
        return self._newest.get(node_id)

    @asynccontextmanager
    async def newest(self, node_id: str) -> AsyncIterator[None]:
        """While the block runs its session is the node's newest; the one before gets TimeoutError."""
        older = self._newest.get(node_id)
        if older is not None and not older.expired():
            older.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(None) as turn:
            self._newest[node_id] = turn
            try:
                yield
            finally:
                if self._newest[node_id] is turn:
                    del self._newest[node_id]


class SessionDesk:
    """Call everything on the event loop."""

    def __init__(
        self,
        handler: SessionHandler,
        limits: Callable[[], MessageLimits] | None = None,
        *,
        relays: bool = False,
    ) -> None:
        """
        Args:
            limits: makes the bounds of what one member may send; None: there are none.
            relays: nodes that cannot be reached take part by a relay.
        """
        self.handler = handler
        self.greetings = Greetings()
        self.names = Names()
        self._make_limits = limits
        self._limits: dict[str, MessageLimits] = {}
        """By node."""
        self._relays = relays

    def limits_of(self, node_id: str) -> MessageLimits | None:
        if self._make_limits is not None and node_id not in self._limits:
            self._limits[node_id] = self._make_limits()
        return self._limits.get(node_id)

    async def greet(
        self,
        node_id: str,
        source: str,
        said: Callable[[], Awaitable[Hello]],
        make: Callable[[str, Hello, str], ControlSession] = ControlSession,
    ) -> ControlSession | Refusal:
        """The session that a member opens, or why it may not take part.

        Args:
            source: the IP address that it dials from.
            said: waits for its hello.
            make: makes the session of a node's id, its hello and where neighbours dial it.

        Raises:
            ProtocolViolationError: what came is no hello.
            TimeoutError: it may try again: no hello came, a newer session did, or it connects too often.
        """
        async with self.greetings.newest(node_id):
            limits = self.limits_of(node_id)
            if limits is not None and not limits.connections.take(time.monotonic()):
                await asyncio.sleep(RECONNECT_SECONDS)
                raise TimeoutError
            hello = await said()
            found = await self._look_at(node_id, hello, source)
        return found if isinstance(found, Refusal) else make(node_id, hello, found)

    def take(self, session: ControlSession, request: control_pb2.NodeMessage) -> None:
        """A message of an open session. Raises ProtocolViolationError if no correct node sends it."""
        for one in each(request):
            self._check_limits(session, measured(one))
            self.handler.heard(session, node_message_from_proto(one))

    def take_reported(self, session: ControlSession, reported: Reported) -> None:
        """As `take`, of a message whose report a gateway has checked. Raises ProtocolViolationError."""
        request = parsed(reported.body)
        size = len(reported.body) + reported.report.size
        self._check_limits(session, Measured(request.WhichOneof("body") or "message", size, reported.links))
        self.handler.heard(session, node_message_from_proto(request), reported)

    def _check_limits(self, session: ControlSession, found: Measured) -> None:
        limits = self.limits_of(session.node_id)
        why = None if limits is None else limits.refusal(found, time.monotonic())
        if why is not None:
            raise ProtocolViolationError(why)

    def wrong(self, session: ControlSession, why: str) -> None:
        """Its node has sent what no correct node sends: the session ends, and the coordinator knows."""
        log.warning("closed the session of %s: %s", session.node_id, why)
        self.handler.refused(session.node_id, why)
        session.close()

    async def _look_at(self, node_id: str, hello: Hello, source: str) -> str | Refusal:
        """host:port where neighbours dial the node, "" if they need a relay, or why it may not take part."""
        refusal = await self.handler.refusal_for(node_id) or _version_refusal(hello)
        if refusal is not None:
            return refusal
        if not hello.peer_address and self._relays:
            return ""
        for address in dialled_addresses(hello, source):
            try:
                host, port = split_address(address)
                async with asyncio.timeout(REACH_SECONDS):
                    hosts = await self.names.look_up(node_id, host)
                    # Only where the node itself dials from: a member must not make the coordinator knock on
                    # other machines. Neighbours find out whether another address is right.
                    if source in hosts:
                        await knock((source,), port)
            except (ValueError, OSError):  # a TimeoutError is one, too
                continue
            return address
        if self._relays:
            log.info("%s cannot be reached at %s: it needs a relay", node_id, address[:80])
            return ""
        return Refusal(
            RefusalCode.UNREACHABLE,
            f"neighbours cannot reach this node at {address[:80]!r}: open that TCP port, or join with "
            "--listen and --advertise HOST:PORT",
        )


def hello_from(first: control_pb2.NodeMessage) -> Hello:
    """The first message of a session. Raises ProtocolViolationError if it is not a hello."""
    hello = node_message_from_proto(first)
    if not isinstance(hello, Hello):
        raise ProtocolViolationError("a session must begin with hello")
    return hello


def parsed(data: bytes) -> control_pb2.NodeMessage:
    """Raises ProtocolViolationError for bytes that do not parse."""
    try:
        return control_pb2.NodeMessage.FromString(data)
    except DecodeError:
        raise ProtocolViolationError(NO_MESSAGE) from None


def each(request: control_pb2.NodeMessage) -> Sequence[control_pb2.NodeMessage]:
    """The messages that came as one. Raises ProtocolViolationError if there is none."""
    if request.WhichOneof("body") != "several":
        return (request,)
    if not request.several.messages:
        raise ProtocolViolationError("a node sent an empty control message")
    return request.several.messages


def measured(message: control_pb2.NodeMessage) -> Measured:
    """What the bounds of a member's messages look at."""
    kind, size = message.WhichOneof("body") or "message", message.ByteSize()
    if kind == "step_spans":
        spans = message.step_spans
        return Measured(kind, size, step=spans.step, spans=len(spans.lengths))
    return Measured(kind, size, len(getattr(message, kind).telemetry.links) if kind in REPORTING else 0)


def dialled_addresses(hello: Hello, source: str) -> tuple[str, ...]:
    """Where a node that calls from `source` may be reached, the likeliest first."""
    address = hello.peer_address
    if not address.startswith(":"):
        return (address,)
    # If the node named no host, use the one it dials from.
    host = join_address(source, 1).rpartition(":")[0]
    mapped = (f"{host}:{hello.mapped_port}",) if hello.mapped_port and ":" not in source else ()
    return tuple(dict.fromkeys((*mapped, f"{host}{address}")))


def _version_refusal(hello: Hello) -> Refusal | None:
    if (hello.version, hello.protocol) == (VERSION, PROTOCOL):
        return None
    return Refusal(
        RefusalCode.VERSION_MISMATCH,
        f"the coordinator runs thinwire {VERSION} (protocol {PROTOCOL}) and this node {hello.version[:40]!r} "
        f"(protocol {hello.protocol}): install thinwire {VERSION}",
    )
