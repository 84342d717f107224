"""The coordinator's side of its gateways: processes that handle the control sessions of a large run.

With a thousand nodes, TLS, HTTP/2 and gRPC take several times the processor time of the run itself, and
Python would run them on one core. Gateways run them instead. The coordinator still accepts every connection
within the limits of its port, and reads which service it asks for. It hands the socket of each control
session to the gateway with the fewest sessions. Joins and bulk calls stay here.

If a gateway dies, its sessions are lost. Its nodes reconnect, as after a network fault, while another process
starts in its place. If no gateway is ready, the coordinator handles the session itself.
"""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import grpc

from node import program
from node.config.schema import RunConfig
from node.coordinator.gateway_frames import (
    MOST_TOGETHER,
    FrameReader,
    Kind,
    Opened,
    frame,
    opened_from_bytes,
    sent_waited,
)
from node.coordinator.sessions import NO_HELLO, ControlSession, SessionDesk, hello_from, parsed
from node.run_file.loader import to_json
from wire.admission import Limits, address_group
from wire.descriptors import raise_limit
from wire.errors import ProtocolViolationError
from wire.front import Front
from wire.identity.enrolment import Refusal
from wire.messages import CoordinatorMessage, Hello, Waiting
from wire.messages_proto import node_message_from_proto, packed, wait_head
from wire.pacing import Backoff

log = logging.getLogger(__name__)

SMALL = 128
"""The most nodes that the coordinator serves itself."""
SHARE = 64
"""The number of nodes per gateway."""
START_SECONDS = 30.0
"""The most seconds for which the coordinator waits for its gateways before it serves."""
RESTART_SECONDS = 0.2, 10.0
LOOK_SECONDS = 1.0
SILENT_LOOKS = 10
"""A gateway that sends nothing during this many checks hangs, and is ended. If this process itself was
stopped, few checks ran meanwhile."""
STOP_SECONDS = 5.0
MOST_UNREAD = 256 * 1024 * 1024
"""The most bytes that may wait for a gateway to read. Beyond it, the gateway is ended."""


def gateway_count(config: RunConfig, cores: int) -> int:
    wanted = config.coordinator.gateways
    if wanted != "auto":
        return wanted
    nodes = config.pipeline.stages * config.pipeline.most_rows
    return 0 if nodes <= SMALL else min(-(-nodes // SHARE), cores // 2)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The certificates and keys for the gateways' TLS, in PEM."""

    key: bytes
    certificate: bytes
    ca: bytes


class _Session(ControlSession):
    def __init__(self, gateway: "_Gateway", number: int, node_id: str, hello: Hello, address: str) -> None:
        super().__init__(node_id, hello, address)
        self._gateway = gateway
        self._number = number

    def send(self, message: CoordinatorMessage, waited: float | None = None) -> None:
        self._gateway.send(self._number, message, waited)

    def answer(self, message: CoordinatorMessage) -> None:
        self._gateway.write(frame(Kind.ANSWER, self._number, packed(message)))

    def close(self) -> None:
        self._gateway.write(frame(Kind.END, self._number))


def _spawn(*descriptors: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*program("coordinator.gateway"), *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,  # the coordinator handles Ctrl-C
    )


class _Gateway(asyncio.Protocol):
    def __init__(self, desk: SessionDesk, proven: Callable[[str], None]) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        """The stream has ended."""
        self.connections = 0
        """The approximate number of its connections."""
        self.heard = True
        """Whether anything has arrived since this was last set to false."""
        self.process: subprocess.Popen[bytes] | None = None
        self._handing: socket.socket | None = None
        self._desk = desk
        self._proven = proven
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._flushes = False
        self._newest: CoordinatorMessage | None = None
        """A message that further sessions may get. `_numbers` has the seconds that each has waited."""
        self._numbers: list[int] = []
        self._seconds: list[float] = []
        self._sessions: dict[int, ControlSession] = {}
        self._greeted: dict[int, asyncio.Task[None]] = {}

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    async def start(self, setup: bytes) -> None:
        """Start the process. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._handing, handed = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with theirs, handed:
            self._handing.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: self, sock=ours)
            # Without awaiting in between: a cancellation there would lose the process.
            self.process = _spawn(theirs.fileno(), handed.fileno())
        self.write(frame(Kind.SETUP, 0, setup))

    def hand_over(self, connection: socket.socket, host: str) -> bool:
        """Hand over an accepted connection. False if the gateway does not take it now."""
        if not self.ready.done() or self.lost.is_set() or self._handing is None:
            return False
        try:
            socket.send_fds(self._handing, [host.encode()], [connection.fileno()])
        except OSError:
            return False
        self.connections += 1
        return True

    async def stop(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._handing is not None:
            self._handing.close()
        if self.process is not None:
            try:
                await asyncio.to_thread(self.process.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.end()
                await asyncio.to_thread(self.process.wait)
        self.forget()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()

    # ---- to the gateway

    def write(self, data: bytes) -> None:
        self._pack()
        self._waiting.append(data)
        self._soon()

    def send(self, number: int, message: CoordinatorMessage, waited: float | None) -> None:
        """Send a message. Successive copies for many sessions, with different waits, are written once."""
        if waited is None or not isinstance(message, Waiting):
            self.write(frame(Kind.SEND, number, packed(message)))
            return
        if (message is not self._newest and message != self._newest) or len(self._numbers) >= MOST_TOGETHER:
            self._pack()
            self._newest = message
        self._numbers.append(number)
        self._seconds.append(waited)
        self._soon()

    def _pack(self) -> None:
        if isinstance(message := self._newest, Waiting):
            data = sent_waited(self._numbers, self._seconds, wait_head(message), packed(message))
            self._waiting.append(data)
        self._newest, self._numbers, self._seconds = None, [], []

    def _soon(self) -> None:
        if not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._pack()
        self._flushes = False
        data, self._waiting = b"".join(self._waiting), []
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            log.warning("a gateway does not read its messages, and is ended")
            self.end()

    # ---- from the gateway

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            for kind, number, payload in self._reader.feed(data):
                self._take(kind, number, payload)
        except ProtocolViolationError as error:
            log.error("a gateway is ended: %s", error)
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        if not self.ready.done():
            self.ready.cancel()
        self.forget()

    def forget(self) -> None:
        for task in self._greeted.values():
            task.cancel()
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            self._desk.handler.closed(session)

    def _take(self, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case Kind.SAID:
                self._heard(number, payload)
            case Kind.OPEN:
                task = asyncio.get_running_loop().create_task(self._greet(number, opened_from_bytes(payload)))
                self._greeted[number] = task
                task.add_done_callback(lambda _: self._greeted.pop(number, None))
            case Kind.CLOSED:
                if (greeted := self._greeted.get(number)) is not None:
                    greeted.cancel()
                if (session := self._sessions.pop(number, None)) is not None:
                    self._desk.handler.closed(session)
            case Kind.WRONG:
                self._wrong(number, payload.decode(errors="replace"))
            case Kind.ALIVE:
                self.connections = number
            case Kind.READY:
                if not self.ready.done():
                    self.ready.set_result(None)
            case _:
                raise ProtocolViolationError(f"it sent a frame of kind {kind}")

    def _heard(self, number: int, data: bytes) -> None:
        """Handle a node's message, which the gateway found within its limits, if its session is open."""
        if (session := self._sessions.get(number)) is not None:
            try:
                self._desk.handler.heard(session, node_message_from_proto(parsed(data)))
            except ProtocolViolationError as error:
                self._wrong(number, str(error))

    def _wrong(self, number: int, why: str) -> None:
        if (session := self._sessions.pop(number, None)) is not None:
            self._desk.wrong(session, why)
            self._desk.handler.closed(session)

    async def _greet(self, number: int, opened: Opened) -> None:
        """Do what the control service does for a session that the coordinator handles itself."""
        node_id, status = opened.node_id, grpc.StatusCode

        async def hello() -> Hello:
            return hello_from(parsed(opened.hello))

        refusal = await self._desk.handler.refusal_for(node_id)
        if refusal is not None:
            self._end(number, status.PERMISSION_DENIED, refusal.message)
            return
        self._proven(opened.host)
        try:
            session = await self._desk.greet(
                node_id, opened.host, hello, lambda *what: _Session(self, number, *what)
            )
        except ProtocolViolationError as error:
            self._end(number, status.INVALID_ARGUMENT, str(error))
            return
        except TimeoutError:
            self._end(number, status.UNAVAILABLE, NO_HELLO)
            return
        if isinstance(session, Refusal):
            self.write(frame(Kind.SEND, number, packed(session)))
            self.write(frame(Kind.END, number))
            return
        self._sessions[number] = session
        self._desk.handler.opened(session)
        self.write(frame(Kind.ACCEPT, number))

    def _end(self, number: int, code: grpc.StatusCode, why: str) -> None:
        self.write(frame(Kind.END, number, json.dumps({"code": code.name, "why": why}).encode()))


class Gateways:
    """All gateways of a coordinator, and the front that accepts their connections."""

    def __init__(self, count: int, config: RunConfig, desk: SessionDesk, own: Front) -> None:
        """
        Args:
            own: accepts the connections that no gateway takes.
        """
        self.front = Front(Limits.of_members(raise_limit()), pass_on=self._pass_on)
        self._desk = desk
        self._own = own
        self._config_json = to_json(config)
        self._gateways: list[_Gateway | None] = [None] * count
        self._keeping: list[asyncio.Task[None]] = []
        self.restarts = 0
        """The number of processes that replaced one that had ended."""

    @property
    def sessions(self) -> list[int]:
        """The number of sessions of each gateway; 0 for one that does not run."""
        return [0 if gateway is None else gateway.sessions for gateway in self._gateways]

    async def start(self, credentials: Credentials) -> None:
        """Start all gateways, and wait for a limited time until they are ready."""
        fields = {"key": credentials.key, "certificate": credentials.certificate, "ca": credentials.ca}
        texts = {name: text.decode() for name, text in fields.items()}
        setup = {**texts, "config": self._config_json, "gateways": len(self._gateways)}
        data, loop = json.dumps(setup).encode(), asyncio.get_running_loop()
        ready = [asyncio.Event() for _ in self._gateways]
        self._keeping = [loop.create_task(self._keep(at, data, ready[at])) for at in range(len(ready))]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                for event in ready:
                    await event.wait()

    async def close(self) -> None:
        """End all processes after their last messages are sent."""
        await self.front.close()
        for task in self._keeping:
            task.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)

    async def _keep(self, at: int, setup: bytes, ready: asyncio.Event) -> None:
        """Keep a process running in this place."""
        backoff = Backoff(*RESTART_SECONDS)
        while True:
            gateway = _Gateway(self._desk, self._known)
            try:
                await gateway.start(setup)
                self._gateways[at] = gateway
                looks = asyncio.get_running_loop().create_task(self._watch(gateway))
                try:
                    await asyncio.wait([gateway.ready])
                    if not gateway.ready.cancelled():
                        ready.set()
                        backoff.reset()
                    await gateway.lost.wait()
                finally:
                    looks.cancel()
                log.warning("a gateway of control sessions ended; its nodes reconnect")
            except OSError as error:
                log.warning("a gateway could not be started: %s", error)
            finally:
                self._gateways[at] = None
                await gateway.stop()
            await asyncio.sleep(backoff.advance())
            self.restarts += 1

    async def _watch(self, gateway: _Gateway) -> None:
        silent = 0
        while silent < SILENT_LOOKS:
            gateway.heard = False
            await asyncio.sleep(LOOK_SECONDS)
            silent = 0 if gateway.heard or not gateway.ready.done() else silent + 1
        log.warning("a gateway hangs, and is ended")
        gateway.end()

    def _known(self, host: str) -> None:
        self.front.admission.known.add(address_group(host))

    def _pass_on(self, connection: socket.socket) -> "asyncio.Future[None]":
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        try:
            host = str(connection.getpeername()[0]).removeprefix("::ffff:")
        except OSError:  # it was reset meanwhile
            connection.close()
            return done
        ready = [gateway for gateway in self._gateways if gateway is not None]
        for gateway in sorted(ready, key=lambda each: each.connections):
            if gateway.hand_over(connection, host):
                connection.close()
                return done
        self._own.adopt(connection, host)
        return done
