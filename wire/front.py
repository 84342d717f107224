"""The accepting side of every port: limits connections before TLS, then passes them on.

gRPC accepts every connection, and one costs a stranger nothing. So a `Front` listens in its place and keeps
only as many connections as `Admission` allows. One that has sent its first byte is spliced to gRPC, which
listens on a Unix socket in a private directory; the page's connections go to an asyncio protocol.

gRPC then sees a Unix socket as its peer. The socket's name is the connection's number: `host` returns the
address behind a call, and `prove` marks a connection whose call carried a certificate.
"""

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import cast

import grpc
import grpc.aio

from wire.admission import Admission, Limits
from wire.descriptors import EXHAUSTED, Spare
from wire.errors import UserError
from wire.identity.names import split_address

log = logging.getLogger(__name__)

_BACKLOG = 512
_ACCEPTS = 64
"""Connections to accept before other work of the loop gets its turn."""
_LOOK_SECONDS = 0.5
"""Between two looks for connections that took too long."""
_CLOSE_SECONDS = 5.0
"""A closed connection's last bytes may take this long."""
_BUFFER_BYTES = 256 * 1024
_TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection."""
_LONGEST_DIRECTORY = 80
"""A Unix socket's path has at most 103 bytes on macOS, 107 on Linux."""

PassOn = Callable[[socket.socket], "asyncio.Future[None] | asyncio.Task[None]"]
"""Takes over an accepted socket; done when the front no longer needs to count it."""


class Front:
    """One listening port. Call everything on the event loop."""

    def __init__(self, limits: Limits, pass_on: PassOn | None = None) -> None:
        """
        Args:
            pass_on: takes over every connection at once. Without it, one that has spoken is spliced to
                `backend`.
        """
        self._admission = Admission(limits)
        self._pass_on = pass_on
        self._directory = "" if pass_on else _private_directory()
        self._numbers = count()
        self._hosts: dict[int, str] = {}
        self._silent: dict[int, socket.socket] = {}
        self._pipes: dict[int, _Pipe] = {}
        self._tasks: dict[asyncio.Future[None], int] = {}
        self._listeners: list[socket.socket] = []
        self._spare = Spare()
        self._look: asyncio.TimerHandle | None = None

    @property
    def backend(self) -> str:
        """Where gRPC is to listen."""
        return f"unix:{self._directory}/server"

    @property
    def admission(self) -> Admission:
        return self._admission

    def listen(self, address: str) -> int:
        """Accept connections at `address` ("host:port"; port 0 picks one); returns the port.

        Raises OSError when the address cannot be bound, ValueError when it is no address.
        """
        port = 0
        host, _, text = address.rpartition(":")
        if text != "0":
            host, port = split_address(address)
        for found in _resolved(host.strip("[]"), port):
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(found[0], socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if found[0] == socket.AF_INET6:
                    both = host.strip("[]") in _ANY
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
                listener.bind((found[1], port))
                listener.listen(_BACKLOG)
                stack.pop_all()
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self._listeners.append(listener)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._expire()
        return port

    def host(self, peer: str) -> str:
        """The IP address behind a call whose gRPC peer is `peer`; "" if the connection has ended."""
        return self._hosts.get(_number(peer), "")

    def prove(self, peer: str, owner: str) -> None:
        """A call of gRPC peer `peer` carried the certificate of node `owner`."""
        self._drop(self._admission.proved(_number(peer), owner, self._now()))

    async def close(self) -> None:
        """Stop listening and drop every connection. Stop gRPC first, so that its last words are sent."""
        loop = asyncio.get_running_loop()
        if self._look is not None:
            self._look.cancel()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=_CLOSE_SECONDS)
        self._drop([*self._silent, *self._pipes])
        self._spare.give_up()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    # ---- accepting

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._exhausted(listener)
                    return
                continue  # the peer hung up in the queue
            connection.setblocking(False)
            number = next(self._numbers)
            host = str(address[0]).removeprefix("::ffff:")
            self._silent[number], self._hosts[number] = connection, host
            self._drop(self._admission.accepted(number, host, self._now()))
            asyncio.get_running_loop().add_reader(connection, self._spoke, number)
            if self._pass_on is not None:
                self._go_on(number)

    def _exhausted(self, listener: socket.socket) -> None:
        """No descriptor is left: drop strangers, and one connection from the queue so that it moves on."""
        self._drop(self._admission.shed())
        if self._spare.give_up():
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
        self._spare.take_back()

    def _spoke(self, number: int) -> None:
        try:
            first = self._silent[number].recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        if first == _TLS_HANDSHAKE:
            self._go_on(number)
        else:
            self._drop([number])

    def _go_on(self, number: int) -> None:
        connection, loop = self._silent.pop(number), asyncio.get_running_loop()
        loop.remove_reader(connection)
        self._drop(self._admission.spoke(number, self._now()))
        task = (
            self._pass_on(connection) if self._pass_on else loop.create_task(self._splice(number, connection))
        )
        self._tasks[task] = number
        task.add_done_callback(self._passed_on)

    def _passed_on(self, task: "asyncio.Future[None]") -> None:
        number = self._tasks.pop(task)
        if self._pass_on is not None:
            self._forget(number)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not isinstance(error, OSError)
        ):
            raise error

    async def _splice(self, number: int, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pipe = _Pipe(lambda: self._forget(number))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inner = self._connect_backend(number)
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._drop(self._admission.shed())
            connection.close()
            self._forget(number)
            return
        self._pipes[number] = pipe
        try:
            await loop.create_unix_connection(lambda: pipe.inner, sock=inner)
            await loop.connect_accepted_socket(lambda: pipe.outer, connection)
        except BaseException:
            pipe.abort()
            inner.close()
            connection.close()
            self._forget(number)
            raise
        if number not in self._pipes:  # dropped meanwhile
            pipe.abort()

    def _connect_backend(self, number: int) -> socket.socket:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A name for the calling end: gRPC shows it as the peer.
            path = Path(self._directory, str(number))
            inner.bind(str(path))
            path.unlink()
            inner.setblocking(False)
            inner.connect(f"{self._directory}/server")
        except OSError:
            inner.close()
            raise
        return inner

    # ---- ending

    def _expire(self) -> None:
        self._drop(self._admission.expired(self._now()))
        self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._expire)

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            if (connection := self._silent.pop(number, None)) is not None:
                asyncio.get_running_loop().remove_reader(connection)
                connection.close()
            if (pipe := self._pipes.get(number)) is not None:
                pipe.abort()
            for task in [task for task, of in self._tasks.items() if of == number]:
                task.cancel()
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._admission.closed(number)
        self._hosts.pop(number, None)
        self._pipes.pop(number, None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class _Pipe:
    """Two connections joined: what one receives, the other sends."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        self.outer, self.inner = _End(self), _End(self)
        self.outer.other, self.inner.other = self.inner, self.outer
        self._on_close = on_close
        self._closed = False

    def closed(self) -> None:
        """One end is closed: close the other after its last bytes, within `_CLOSE_SECONDS`."""
        if not self._closed:
            self._closed = True
            self._on_close()
            for end in (self.outer, self.inner):
                if end.transport is not None and not end.transport.is_closing():
                    end.transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self.abort)

    def abort(self) -> None:
        self._closed = True
        for end in (self.outer, self.inner):
            if end.transport is not None:
                end.transport.abort()


class _End(asyncio.Protocol):
    other: "_End"

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._pipe.closed()

    def pause_writing(self) -> None:
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()


_ANY = ("0.0.0.0", "::")


def _resolved(host: str, port: int) -> list[tuple[int, str]]:
    """(family, address) to bind. For "any" one socket serves IPv4 and IPv6, as gRPC's does."""
    if host in _ANY:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
            return [(socket.AF_INET6, "::")]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _private_directory() -> str:
    """A new directory (mode 0700) with a path short enough for a Unix socket."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="thinwire-", dir=parent if len(parent) < _LONGEST_DIRECTORY else "/tmp")


def _number(peer: str) -> int:
    """The connection's number in gRPC's name of its peer; -1 if it has none."""
    name = peer.rpartition("/")[2]
    return int(name) if name.isdecimal() else -1


async def serve_behind(
    front: Front, server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials, advice: str
) -> int:
    """Start `server` behind `front`, and accept connections at `listen` (host:port); returns the port.

    Raises UserError, which ends in `advice`, when the address cannot be bound.
    """
    server.add_secure_port(front.backend, credentials)
    await server.start()
    try:
        return front.listen(listen)
    except (OSError, ValueError) as error:
        await server.stop(None)
        await front.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {listen} ({reason}): {advice}") from None
