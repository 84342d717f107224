"""The open control sessions of a run, one a node, and what a member may send over them.

A correct node stays far below all limits. What is beyond them is refused before it is decoded.
"""

import asyncio
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from node.config.schema import CoordinatorSection, RunConfig
from node.coordinator.enrolment_service import RateLimit, RateLimits
from node.model.units import unit_names
from node.run_state.stage_assignment import Candidate
from node.telemetry.events import NodeJoined
from node.telemetry.trace_files import TracedSteps
from node.tuning.device_memory import devices_of
from wire.messages import CoordinatorMessage, Finish, HeartbeatReply, Hello, ShutOut, with_wait

MOST_WAITING = 64
"""Messages that wait to be sent to a node before answers to its heartbeats are left out."""


class ControlSession:
    """One node's open control connection."""

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
        """`waited`: seconds that the node has waited for others, for a message that says so."""
        self._outbox.put_nowait(message if waited is None else with_wait(message, waited))

    def answer(self, message: CoordinatorMessage) -> None:
        """Send a reply, unless the node keeps asking without reading its replies."""
        if self._outbox.qsize() < MOST_WAITING:
            self.send(message)

    def close(self) -> None:
        """End the connection once everything queued has been sent."""
        self._outbox.put_nowait(None)

    async def next(self) -> CoordinatorMessage | None:
        return await self._outbox.get()


class Sessions:
    """Messages to a node without a session are dropped: it is sent what it missed when it reconnects."""

    def __init__(self, settings: CoordinatorSection | None = None) -> None:
        self._settings = settings or CoordinatorSection()
        self._newest: dict[str, ControlSession] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._shut_out = ShutOut(node_ids=())

    def __iter__(self) -> Iterator[ControlSession]:
        return iter(self._newest.values())

    def __contains__(self, session: ControlSession) -> bool:
        """False once a newer session of the same node is open."""
        return self._newest.get(session.node_id) is session

    def add(self, session: ControlSession) -> None:
        """Add a session; an older one of the same node is closed."""
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
        """These nodes are no longer in the run: tell all others, unless they know it."""
        news = ShutOut(node_ids=tuple(sorted(nodes)))
        if news != self._shut_out:
            self._shut_out = news
            for session in self:
                if session.node_id not in nodes:
                    session.send(news)

    def remove(self, session: ControlSession) -> None:
        """An added session has ended."""
        del self._newest[session.node_id]
        if not self._newest:
            self._deserted.set()

    def send(self, node_id: str, message: CoordinatorMessage, waited: float | None = None) -> bool:
        """Queue a message; False if the node has no session. `waited`: as for a session."""
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
        """End a node's session once everything queued has been sent."""
        if (session := self._newest.get(node_id)) is not None:
            session.close()

    async def deserted(self) -> None:
        """Wait until no session is open."""
        await self._deserted.wait()


HEARTBEATS_A_SECOND = 250.0
"""Of all members together."""
HEARTBEATS_IN_SILENCE = 3.5
"""Heartbeats that a node misses before it counts as dead, at least."""

MOST_LINKS = 4
"""In a report of one row: a stage has two neighbours, or three where the ring closes. Each other row has one
more."""
LINK_BYTES = 1024
"""Of a report, for each other row."""
MESSAGE_BYTES = 16 * 1024
UNIT_BYTES = 80
"""Of a vote or of a state's hashes, for each layer unit."""
DIGEST_BYTES = 64
"""Of a vote with audits, for each gradient group and each end of its boundaries."""
HEARTBEATS_KEPT = 500
"""Heartbeats, and as many other messages, that may come at once after an outage."""
HEARTBEAT_TIMES = 10.0
"""As often as a node is asked to send heartbeats."""
OTHERS_A_SECOND = 200.0
SPANS_BYTES = 512 * 1024
"""Of one message: `wire.telemetry.MOST_SPANS`, with room."""
SPANS_A_SECOND, SPANS_AT_ONCE = 20_000.0, 50_000.0
CONNECTIONS_A_SECOND, CONNECTIONS_AT_ONCE = 0.5, 20.0
CALLS = {
    "renew": (0.2, 10.0),
    "hold layers": (50.0, 500.0),
    "get layer": (50.0, 500.0),
    "not due": (0.01, 10.0),
    "probe": (2.0**20, 2.0**26),
}
"""By kind: calls a second and at once, of probes bytes. Of other kinds only a few are served at a time."""
LAYER = "layer "
"""Begins the kind of calls for one layer of one snapshot, which a node needs once."""
LAYERS_A_SECOND, LAYERS_AT_ONCE = 1 / 60, 4.0
"""How often each may be sent to a node, over lines that break."""
LEAST_PROBE_BYTES = 16 * 1024
"""A smaller probe counts as this."""


def heartbeat_pause(members: int, settings: CoordinatorSection) -> float:
    """Seconds between two heartbeats of each of so many members: more often than `HEARTBEATS_A_SECOND` in all
    they come only where nodes would count as dead otherwise."""
    longest = settings.silent_seconds / HEARTBEATS_IN_SILENCE
    return max(settings.heartbeat_seconds, min(members / HEARTBEATS_A_SECOND, longest))


class Measured(NamedTuple):
    """A message, before it is decoded."""

    kind: str
    size: int
    """Bytes."""
    links: int = 0
    """In its report."""
    step: int = 0
    """Of spans."""
    spans: int = 0


class MessageLimits:
    """One member's, over all its sessions."""

    def __init__(self, config: RunConfig) -> None:
        self.connections = RateLimit(CONNECTIONS_A_SECOND, CONNECTIONS_AT_ONCE)
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
        """Why this message is refused at `now` (seconds on any monotonic clock); None if it is not."""
        kind, size = message.kind, message.size
        if kind == "step_spans":
            if message.step not in self._traced:
                return f"spans of step {message.step + 1}, which is not traced"
            if size > SPANS_BYTES:
                return f"spans of {size} bytes, more than {SPANS_BYTES}"
            return None if self._spans.take(now, message.spans) else "more spans than steps can have"
        if size > self._most_bytes:
            return f"a {kind} of {size} bytes, more than {self._most_bytes}"
        if message.links > self._most_links:
            return f"a {kind} that names {message.links} links, more than {self._most_links}"
        limit = self._heartbeats if kind == "heartbeat" else self._others
        return None if limit.take(now) else f"more {kind} messages than a node has reason to send"

    def serves(self, kind: str, size: int, now: float) -> bool:
        """Whether a call may be answered at `now`; if not, it waits. `size`: calls, or bytes of a probe."""
        if kind.startswith(LAYER):
            return self._layers.take(kind, now)
        limit = self._calls.get(kind)
        return limit is None or limit.take(now, size)
