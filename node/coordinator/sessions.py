"""The control sessions of a run, one per node, whichever process ends their TLS.

This module decides which node may open one, where neighbours reach the node, what it may send, and what is
queued for it. A correct node stays far below all limits. The process that terminates a session's TLS refuses
messages beyond the limits before it decodes them.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from node.config.schema import CoordinatorSection, RunConfig
from node.coordinator.enrolment import version_refusal
from node.coordinator.enrolment_service import RateLimit, RateLimits
from node.coordinator.reports import REPORTING
from node.model.units import unit_names
from node.run_state.stage_assignment import Candidate
from node.telemetry.events import NodeJoined
from node.telemetry.trace_files import TracedSteps
from node.tuning.device_memory import Devices, devices_of
from wire.dialing import knock
from wire.errors import ProtocolViolationError, RefusalCode, without_folders
from wire.front import Front
from wire.identity.enrolment import Refusal
from wire.identity.names import join_address, split_address
from wire.messages import (
    CoordinatorMessage,
    Finish,
    HeartbeatReply,
    Hello,
    NodeMessage,
    ShutOut,
    with_wait,
)
from wire.messages_proto import node_message_from_proto
from wire.v1 import control_pb2

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
REACH_SECONDS = 5.0
RECONNECT_SECONDS = 2.0
"""The delay in seconds for a node that connects too often."""
MOST_LOOKUPS = 16
"""Concurrent DNS look-ups. A node chooses the name, and its name server may take minutes."""
NO_HELLO = "no hello arrived in time, or this node connects too often"
NO_MESSAGE = "bytes arrived that cannot be parsed"
WRITE_SECONDS = 60.0
"""The most seconds for which a node may leave its messages unread."""
MOST_WAITING = 64
"""The queued messages of a node beyond which answers to its heartbeats are dropped."""

Context = grpc.aio.ServicerContext[Any, Any]


class ControlSession:
    """The open control connection of one node."""

    def __init__(self, node_id: str, hello: Hello, address: str) -> None:
        self.node_id = node_id
        self.hello = hello
        self.address = address
        """host:port where neighbours reach the node."""
        self._outbox: asyncio.Queue[CoordinatorMessage | None] = asyncio.Queue()

    @property
    def joined(self) -> NodeJoined:
        hello = self.hello
        return NodeJoined(
            node_id=self.node_id,
            device=hello.hardware.device,
            address=self.address,
            name=hello.name,
            listens=bool(hello.peer_address),
        )

    @property
    def offer(self) -> Candidate:
        """The node as a host of stages."""
        hardware = self.hello.hardware
        return Candidate(
            node_id=self.node_id,
            memory_bytes=hardware.memory_bytes,
            devices=devices_of(hardware),
            kind=f"{hardware.device}, {hardware.arithmetic}",
            flops=self.hello.flops,
            owner=self.hello.name,
        )

    def send(self, message: CoordinatorMessage, waited: float | None = None) -> None:
        """`waited`: the seconds that the node has waited for others, for messages that report it."""
        self._outbox.put_nowait(message if waited is None else with_wait(message, waited))

    def answer(self, message: CoordinatorMessage) -> None:
        """Send a reply, unless the node keeps asking without reading replies."""
        if self._outbox.qsize() < MOST_WAITING:
            self.send(message)

    def close(self) -> None:
        """End the connection after sending everything that is queued."""
        self._outbox.put_nowait(None)

    async def next(self) -> CoordinatorMessage | None:
        return await self._outbox.get()


class Sessions:
    """The open sessions. Messages to a node without a session are dropped, because it gets what it missed
    when it reconnects."""

    def __init__(self, settings: CoordinatorSection | None = None) -> None:
        self._settings = settings or CoordinatorSection()
        self._newest: dict[str, ControlSession] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._shut_out = ShutOut(node_ids=())

    def __iter__(self) -> Iterator[ControlSession]:
        return iter(self._newest.values())

    def __contains__(self, session: ControlSession) -> bool:
        """Whether the session is open. It is not once a newer session of the same node is open."""
        return self._newest.get(session.node_id) is session

    def add(self, session: ControlSession) -> None:
        """Add a session. Close an older one of the same node."""
        if (older := self._newest.get(session.node_id)) is not None:
            if older.hello.process_nonce != session.hello.process_nonce:
                # Otherwise two live processes of one node would keep closing each other's session.
                older.send(Finish(reason="another process has joined as this node", failed=True))
            older.close()
        self._newest[session.node_id] = session
        self._deserted.clear()
        if self._shut_out.node_ids and session.node_id not in self._shut_out.node_ids:
            session.send(self._shut_out)

    def shut_out(self, nodes: Collection[str]) -> None:
        """These nodes have been removed from the run: tell all others, unless they know it."""
        news = ShutOut(node_ids=tuple(sorted(nodes)))
        if news != self._shut_out:
            self._shut_out = news
            for session in self:
                if session.node_id not in nodes:
                    session.send(news)

    def remove(self, session: ControlSession) -> None:
        del self._newest[session.node_id]
        if not self._newest:
            self._deserted.set()

    def send(self, node_id: str, message: CoordinatorMessage, waited: float | None = None) -> bool:
        """Queue a message. False if the node has no session. `waited`: as for a session."""
        session = self._newest.get(node_id)
        if session is not None:
            session.send(message, waited)
        return session is not None

    def reply(self, sent_at: float) -> HeartbeatReply:
        """The answer to a heartbeat that a node sent at this time of its own clock."""
        return HeartbeatReply(
            sent_at=sent_at, at=time.time(), pause=heartbeat_pause(len(self._newest), self._settings)
        )

    def close(self, node_id: str) -> None:
        """End a node's session after sending everything that is queued."""
        if (session := self._newest.get(node_id)) is not None:
            session.close()

    async def deserted(self) -> None:
        """Wait until no session is open."""
        await self._deserted.wait()


HEARTBEATS_A_SECOND = 250.0
"""The most heartbeats per second of all members together."""
HEARTBEATS_IN_SILENCE = 3.5
"""The least number of missed heartbeats after which a node counts as dead."""

MOST_LINKS = 4
"""The most links in a report with one row: a stage has two neighbours, or three where the ring closes. Each
further row adds one."""
LINK_BYTES = 1024
"""The bytes that each further row adds to a report."""
MESSAGE_BYTES = 16 * 1024
UNIT_BYTES = 80
"""The bytes of a vote or of a state's hashes per layer unit."""
DIGEST_BYTES = 64
"""The bytes of a vote with audits per gradient group and end of its boundaries."""
HEARTBEATS_KEPT = 500
"""The burst of heartbeats, and of other messages, that is allowed after an outage."""
HEARTBEAT_TIMES = 10.0
"""The allowed multiple of the requested rate of heartbeats."""
OTHERS_A_SECOND = 200.0
PART_BYTES = 4 * 1024
"""The rate of other messages, and the bytes for which a longer one counts as one more. To read 60 kB of
digests takes as long as a hundred short messages."""
SPANS_BYTES = 512 * 1024
"""The most bytes of a message of spans: `wire.telemetry.MOST_SPANS`, with a margin."""
SPANS_A_SECOND, SPANS_AT_ONCE = 20_000.0, 50_000.0
SPAN_BYTES = 64
"""A message counts as a span for each of this many bytes, because its names take room too."""
CONNECTIONS_A_SECOND, CONNECTIONS_AT_ONCE = 0.5, 20.0
DEVICES_A_SECOND, DEVICES_AT_ONCE = 1 / 60, 4.0
"""The rate and burst at which a node may come with other devices. To estimate what a large model's stages
need on them takes the coordinator seconds."""
CALLS = {
    "renew": (0.2, 10.0),
    "hold layers": (50.0, 500.0),
    "get layer": (50.0, 500.0),
    "not due": (0.01, 10.0),
    "probe": (2.0**20, 2.0**26),
}
"""The rate and burst of calls by kind; for probes, of bytes. Calls of other kinds are only limited in
number."""
LAYER = "layer "
"""The prefix of a call's kind for one layer of one snapshot, which a node needs once."""
LAYERS_A_SECOND, LAYERS_AT_ONCE = 1 / 60, 4.0
"""The rate and burst of sending each layer to a node, over lines that break."""
LEAST_PROBE_BYTES = 16 * 1024
"""Smaller probes count as this."""


def heartbeat_pause(members: int, settings: CoordinatorSection) -> float:
    """The seconds between two heartbeats of each of this many members. All together send more than
    `HEARTBEATS_A_SECOND` only if nodes would otherwise count as dead."""
    longest = settings.silent_seconds / HEARTBEATS_IN_SILENCE
    return max(settings.heartbeat_seconds, min(members / HEARTBEATS_A_SECOND, longest))


class Measured(NamedTuple):
    """The sizes of a message before it is decoded."""

    kind: str
    size: int
    """The bytes of the complete message."""
    links: int = 0
    """The number of links in its report."""
    step: int = 0
    """The step of its spans."""
    spans: int = 0


class MessageLimits:
    """The limits of one member's messages, across its sessions."""

    def __init__(self, config: RunConfig) -> None:
        self.connections = RateLimit(CONNECTIONS_A_SECOND, CONNECTIONS_AT_ONCE)
        self._changes = RateLimit(DEVICES_A_SECOND, DEVICES_AT_ONCE)
        self._devices: Devices | None = None
        """Those with which the node came last."""
        self._traced = TracedSteps.parse(config.telemetry.trace)
        ends = 1 + 4 * (config.pipeline.chunks + 1)
        digests = DIGEST_BYTES * ends * config.pipeline.groups if config.pipeline.groups > 1 else 0
        others = config.pipeline.most_rows - 1
        self._most_links = MOST_LINKS + others
        units = UNIT_BYTES * len(unit_names(config.model))
        self._most_bytes = MESSAGE_BYTES + units + digests + LINK_BYTES * others
        self._heartbeats = RateLimit(HEARTBEAT_TIMES / config.coordinator.heartbeat_seconds, HEARTBEATS_KEPT)
        self._others = RateLimit(OTHERS_A_SECOND, HEARTBEATS_KEPT)
        self._spans = RateLimit(SPANS_A_SECOND, SPANS_AT_ONCE)
        self._calls = {kind: RateLimit(*limit) for kind, limit in CALLS.items()}
        self._layers = RateLimits(LAYERS_A_SECOND, LAYERS_AT_ONCE)

    def refusal(self, message: Measured, now: float) -> str | None:
        """Why this message is refused at `now` (seconds on any monotonic clock); None if it is accepted."""
        kind, size = message.kind, message.size
        if kind == "step_spans":
            if message.step not in self._traced:
                return f"spans of step {message.step + 1}, which is not traced"
            if size > SPANS_BYTES:
                return f"spans of {size} bytes, more than {SPANS_BYTES}"
            count = max(1, message.spans, size // SPAN_BYTES)
            return None if self._spans.take(now, count) else "more spans than steps can have"
        if size > self._most_bytes:
            return f"a {kind} of {size} bytes, more than {self._most_bytes}"
        if message.links > self._most_links:
            return f"a {kind} that names {message.links} links, more than {self._most_links}"
        if kind == "heartbeat":
            taken = self._heartbeats.take(now)
        else:
            taken = self._others.take(now, max(1.0, size / PART_BYTES))
        return None if taken else f"more {kind} messages than a node has reason to send"

    def accepts(self, devices: Devices, now: float) -> bool:
        """Whether the node may come with these devices at `now`, or has to wait."""
        if devices != self._devices and not self._changes.take(now):
            return False
        self._devices = devices
        return True

    def serves(self, kind: str, size: int, now: float) -> bool:
        """Whether a call may be answered at `now` or has to wait. `size`: calls, or a probe's bytes."""
        if kind.startswith(LAYER):
            return self._layers.take(kind, now)
        limit = self._calls.get(kind)
        return limit is None or limit.take(now, size)


class SessionHandler(Protocol):
    """What sessions need from the coordinator."""

    async def refusal_for(self, node_id: str) -> Refusal | None:
        """Why this node may not take part, if it may not."""
        ...

    def opened(self, session: ControlSession) -> None: ...

    def heard(self, session: ControlSession, message: NodeMessage) -> None: ...

    def refused(self, node_id: str, why: str) -> None:
        """The node sent something invalid."""
        ...

    def closed(self, session: ControlSession) -> None: ...


class Names:
    """Looks up host names from nodes on separate threads, because the loop's threads write the run's
    records."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_LOOKUPS, thread_name_prefix="names")
        self._under_way: dict[str, Future[Any]] = {}

    async def look_up(self, node_id: str, host: str) -> list[str]:
        """The IP addresses of `host`. Raises OSError, also while an earlier look-up of this node runs.

        A look-up cannot be cancelled, so each node has at most one: slow ones must not use up the threads.
        """
        with contextlib.suppress(ValueError):
            if "%" not in host:
                return [str(ipaddress.ip_address(host))]
        if node_id in self._under_way:
            raise OSError("an earlier name is still being looked up")
        lookup = self._threads.submit(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        self._under_way[node_id] = lookup
        lookup.add_done_callback(lambda _: self._under_way.pop(node_id))
        return [str(place[4][0]) for place in await asyncio.wrap_future(lookup)]


class Greetings:
    """Sessions that are not open yet. Only the newest of each node continues."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Timeout] = {}
        """The newest session of each node that has one."""

    @asynccontextmanager
    async def newest(self, node_id: str) -> AsyncIterator[None]:
        """While the block runs, its session is the node's newest. The previous one gets TimeoutError."""
        older = self.waiting.get(node_id)
        if older is not None and not older.expired():
            older.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(None) as turn:
            self.waiting[node_id] = turn
            try:
                yield
            finally:
                if self.waiting.get(node_id) is turn:
                    del self.waiting[node_id]


class SessionDesk:
    """Opens and closes the sessions of a run's nodes, and takes their messages. Call everything on the event
    loop."""

    def __init__(
        self,
        handler: SessionHandler,
        limits: Callable[[], MessageLimits] | None = None,
        *,
        relays: bool = False,
    ) -> None:
        """
        Args:
            limits: creates the limits of one member's messages; None: no limits.
            relays: whether nodes that cannot be reached take part through a relay.
        """
        self.handler = handler
        self.greetings = Greetings()
        self.names = Names()
        self._make_limits = limits
        self._limits: dict[str, MessageLimits] = {}
        """Limits, by node."""
        self._relays = relays

    def limits_of(self, node_id: str) -> MessageLimits | None:
        if self._make_limits is not None and node_id not in self._limits:
            self._limits[node_id] = self._make_limits()
        return self._limits.get(node_id)

    async def greet(
        self,
        node_id: str,
        source: str,
        receive_hello: Callable[[], Awaitable[Hello]],
        make: Callable[[str, Hello, str], ControlSession] = ControlSession,
    ) -> ControlSession | Refusal:
        """Open a member's session, or return why it may not take part.

        Args:
            source: the IP address from which it dials.
            receive_hello: waits for its hello.
            make: creates the session from a node's id, its hello and the address that neighbours dial.

        Raises:
            ProtocolViolationError: the first message is not a hello.
            TimeoutError: the node may retry: no hello arrived, a newer session did, or it connects, or comes
                with other devices, too often.
        """
        async with self.greetings.newest(node_id):
            limits = self.limits_of(node_id)
            if limits is not None and not limits.connections.take(time.monotonic()):
                await asyncio.sleep(RECONNECT_SECONDS)
                raise TimeoutError
            hello = await receive_hello()
            if limits is not None and not limits.accepts(devices_of(hello.hardware), time.monotonic()):
                await asyncio.sleep(RECONNECT_SECONDS)
                raise TimeoutError
            place = await self._look_at(node_id, hello, source)
        return place if isinstance(place, Refusal) else make(node_id, hello, place)

    def wrong(self, session: ControlSession, why: str) -> None:
        """The node has sent something invalid: end the session, and tell the coordinator."""
        log.warning("closed the session of %s: %s", session.node_id, why)
        self.handler.refused(session.node_id, why)
        session.close()

    async def _look_at(self, node_id: str, hello: Hello, source: str) -> str | Refusal:
        """host:port that neighbours dial, "" if the node needs a relay, or why it may not take part."""
        refusal = await self.handler.refusal_for(node_id) or version_refusal(hello)
        if refusal is not None:
            return refusal
        if not hello.peer_address and self._relays:
            return ""
        for address in dialled_addresses(hello, source):
            try:
                host, port = split_address(address)
                async with asyncio.timeout(REACH_SECONDS):
                    hosts = await self.names.look_up(node_id, host)
                    # Only dial the node's own address: a member must not make the coordinator connect to
                    # other machines. Neighbours find out whether another address works.
                    if source in hosts:
                        await knock((source,), port)
            except (ValueError, OSError):  # includes TimeoutError
                continue
            return address
        if self._relays:
            log.info("%s cannot be reached at %.80r: it needs a relay", node_id, address)
            return ""
        return Refusal(
            RefusalCode.UNREACHABLE,
            f"neighbours cannot reach this node at {address[:80]!r}: open that TCP port, or join with "
            "--listen and --advertise HOST:PORT",
        )


async def abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """End a call with this status."""
    await context.abort(code, without_folders(message))
    raise AssertionError("abort raises")


async def written(context: Context, front: Front, message: object) -> None:
    """Write a message of a session. If the node does not read for `WRITE_SECONDS`, its connection ends. Else
    a node that was shut out would stay a relay and a holder of layers while it leaves its goodbye unread."""
    late = asyncio.get_running_loop().call_later(WRITE_SECONDS, front.end, context.peer())
    try:
        await context.write(message)
    finally:
        late.cancel()


def hello_from(first: control_pb2.NodeMessage) -> Hello:
    """The first message of a session. Raises ProtocolViolationError if it is not a hello."""
    hello = node_message_from_proto(first)
    if not isinstance(hello, Hello):
        raise ProtocolViolationError("a session must begin with hello")
    return hello


def parsed(data: bytes) -> control_pb2.NodeMessage:
    """Parse a message. Raises ProtocolViolationError for invalid bytes."""
    try:
        return control_pb2.NodeMessage.FromString(data)
    except DecodeError:
        raise ProtocolViolationError(NO_MESSAGE) from None


def each(request: control_pb2.NodeMessage) -> Sequence[control_pb2.NodeMessage]:
    """The messages that were sent together. Raises ProtocolViolationError if there is none."""
    if request.WhichOneof("body") != "several":
        return (request,)
    if not request.several.messages:
        raise ProtocolViolationError("a node sent an empty control message")
    return request.several.messages


def measured(message: control_pb2.NodeMessage) -> Measured:
    """The sizes that the limits of a member's messages apply to."""
    kind, size = message.WhichOneof("body") or "message", message.ByteSize()
    if kind == "step_spans":
        spans = message.step_spans
        return Measured(kind, size, step=spans.step, spans=len(spans.lengths))
    return Measured(kind, size, len(getattr(message, kind).telemetry.links) if kind in REPORTING else 0)


def check_limits(message: control_pb2.NodeMessage, limits: MessageLimits | None) -> None:
    """Raise ProtocolViolationError for a message beyond the limits."""
    why = None if limits is None else limits.refusal(measured(message), time.monotonic())
    if why is not None:
        raise ProtocolViolationError(why)


def dialled_addresses(hello: Hello, source: str) -> tuple[str, ...]:
    """The addresses at which a node that dials from `source` may be reached, the most likely first."""
    address = hello.peer_address
    if not address.startswith(":"):
        return (address,)
    # If the node named no host, use the one from which it dials.
    host = join_address(source, 1).rpartition(":")[0]
    mapped = (f"{host}:{hello.mapped_port}",) if hello.mapped_port and ":" not in source else ()
    return tuple(dict.fromkeys((*mapped, f"{host}{address}")))
