"""The accepting side of every port: limits connections before TLS, then passes them on.

gRPC accepts every connection, and connections cost a stranger nothing. So a `Front` listens instead, and
keeps only as many connections as `Admission` allows. A connection that has sent its first byte is spliced to
gRPC, which listens on a Unix socket in a private directory. The page's connections go to an asyncio protocol.

gRPC then sees a Unix socket as its peer, and the socket's name is the connection's number. From it, `host`
finds the address behind a call, and `prove` marks a connection whose call carried a certificate.
"""

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import grpc
import grpc.aio

from wire.admission import Admission, Limits
from wire.descriptors import EXHAUSTED, Spare
from wire.errors import UserError
from wire.identity.names import split_address
from wire.pacing import Pacer
from wire.splice import CLOSE_SECONDS, Pipe, settled

_BACKLOG = 4096
"""How many connections may wait in the kernel, within its own limit, while the loop is busy."""
_ACCEPTS = 64
"""How many connections to accept before the loop's other work gets a turn."""
_LOOK_SECONDS = 0.5
"""The interval of the check for connections that took too long."""
TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection."""
_LONGEST_DIRECTORY = 80
"""The longest directory used for sockets: a Unix socket's path has at most 103 bytes (macOS) or 107."""

PassOn = Callable[[socket.socket], "asyncio.Future[None] | asyncio.Task[None]"]
"""Takes over an accepted socket. The future is done when the front no longer needs to count it."""
Choose = Callable[[bytes], "Front | int | None"]
"""Chooses the front for a connection from its first bytes. It may also return how many bytes it needs to
decide, or None to drop the connection."""


class Front:
    """One listening port. Call everything on the event loop."""

    def __init__(
        self,
        limits: Limits,
        pass_on: PassOn | None = None,
        *,
        choose: Choose | None = None,
        pacer: Callable[[], Pacer | None] = lambda: None,
    ) -> None:
        """
        Args:
            pass_on: takes over every connection at once. Without it, a connection is spliced to `backend`
                after its first byte.
            choose: passes every connection to another front after its first bytes (see `wire.door`).
            pacer: limits the rate of each spliced connection.
        """
        self._admission = Admission(limits)
        self._pass_on = pass_on
        self._choose = choose
        self._pacer = pacer
        self._directory = "" if pass_on or choose else private_directory()
        self._peeked: dict[int, int] = {}
        """The number of bytes seen, by connection, while more are needed to choose the front."""
        self._closed = False
        self._numbers = count()
        self._hosts: dict[int, str] = {}
        self._silent: dict[int, socket.socket] = {}
        self._pipes: dict[int, Pipe] = {}
        self._tasks: dict[asyncio.Future[None], int] = {}
        self._listeners: list[socket.socket] = []
        self.behind: list[Front] = []
        """Fronts that get connections from this one. Their strangers too are dropped without descriptors."""
        self._spare = Spare()
        self._look: asyncio.TimerHandle | None = None

    @property
    def backend(self) -> str:
        """The address at which gRPC must listen."""
        return f"unix:{self._directory}/server"

    @property
    def admission(self) -> Admission:
        return self._admission

    def listen(self, address: str) -> int:
        """Accept connections at `address` ("host:port"; port 0 picks a free one). Returns the port.

        Raises OSError when the address cannot be bound, ValueError when it is not an address.
        """
        port = 0
        host, _, text = address.rpartition(":")
        if text != "0":
            host, port = split_address(address)
        for family, local in _resolved(host.strip("[]"), port):
            with contextlib.ExitStack() as stack:
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    both = host.strip("[]") in _ANY
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
                listener.bind((local, port))
                listener.listen(_BACKLOG)
                stack.pop_all()
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self._listeners.append(listener)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._expire()
        return port

    def adopt(self, connection: socket.socket, host: str) -> None:
        """Take over a connection from `host` that another front accepted. It has sent its first byte, unless
        this front has `choose`."""
        if self._closed:
            connection.close()
            return
        if self._look is None:
            self._expire()
        number = self._enter(connection, host)
        if self._choose is None:
            self._go_on(number)
        else:
            asyncio.get_running_loop().add_reader(connection, self._spoke, number)

    def host(self, peer: str) -> str:
        """The IP address behind a call whose gRPC peer is `peer`; "" if the connection has ended."""
        return self._hosts.get(_number(peer), "")

    def prove(self, peer: str, owner: str) -> None:
        """Record that a call of gRPC peer `peer` carried the certificate of node `owner`."""
        self._drop(self._admission.proved(_number(peer), owner, self._now()))

    def unpace(self, peer: str) -> None:
        """Lift the rate limit of the connection of gRPC peer `peer`, whose call carried a valid token."""
        if (pipe := self._pipes.get(_number(peer))) is not None:
            pipe.pacer = None

    def end(self, peer: str) -> None:
        """Drop the connection of gRPC peer `peer`."""
        self._drop([_number(peer)])

    def shed(self) -> None:
        """Drop the older half of the strangers, because descriptors have run out."""
        self._drop(self._admission.shed())

    async def close(self) -> None:
        """Stop listening and drop every connection. Stop gRPC first, so that its last messages are sent."""
        loop = asyncio.get_running_loop()
        self._closed = True
        if self._look is not None:
            self._look.cancel()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=CLOSE_SECONDS)
        self._drop([*self._silent, *self._pipes])
        await settled()
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
            number = self._enter(connection, str(address[0]).removeprefix("::ffff:"))
            asyncio.get_running_loop().add_reader(connection, self._spoke, number)
            if self._pass_on is not None:
                self._go_on(number)

    def _enter(self, connection: socket.socket, host: str) -> int:
        if (oldest := self._admission.next_out) is not None:
            # It may have sent a byte that the busy loop has not seen yet.
            self._spoke(oldest)
        number = next(self._numbers)
        self._silent[number], self._hosts[number] = connection, host
        self._drop(self._admission.accepted(number, host, self._now()))
        return number

    def _exhausted(self, listener: socket.socket) -> None:
        """No descriptor is left: drop strangers, and one queued connection so that the queue moves on."""
        for front in (self, *self.behind):
            front.shed()
        if self._spare.give_up():
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
        self._spare.take_back()

    def _spoke(self, number: int) -> None:
        connection, wanted = self._silent[number], 1
        while True:
            try:
                first = connection.recv(wanted, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                first = b""
            chosen = self._whose(first)
            if not isinstance(chosen, int):
                break
            if len(first) == wanted:
                wanted = chosen
                continue
            if len(first) <= self._peeked.get(number, 0):
                chosen = None  # no new bytes, so the connection has ended
                break
            # The bytes stay in the kernel. Without a low-water mark they would wake the loop endlessly.
            self._peeked[number] = len(first)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, chosen)
            return
        if chosen is None:
            self._drop([number])
        elif chosen is self:
            self._go_on(number)
        else:
            host = self._hosts[number]
            del self._silent[number]
            asyncio.get_running_loop().remove_reader(connection)
            self._forget(number)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            chosen.adopt(connection, host)

    def _whose(self, first: bytes) -> "Front | int | None":
        if self._choose is not None:
            return self._choose(first) if first else None
        return self if first == TLS_HANDSHAKE else None

    def _go_on(self, number: int) -> None:
        connection, loop = self._silent.pop(number), asyncio.get_running_loop()
        loop.remove_reader(connection)
        self._drop(self._admission.spoke(number, self._now()))
        if self._pass_on is None:
            self._splice(number, connection)
            return
        task = self._pass_on(connection)
        self._tasks[task] = number
        task.add_done_callback(self._passed_on)

    def _passed_on(self, task: "asyncio.Future[None]") -> None:
        number = self._tasks.pop(task)
        self._forget(number)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not isinstance(error, OSError)
        ):
            raise error

    def _splice(self, number: int, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inner = self._connect_backend(number)
        except OSError as error:
            if error.errno in EXHAUSTED:
                self.shed()
            connection.close()
            self._forget(number)
            return
        pipe = self._pipes[number] = Pipe(lambda: self._forget(number), self._pacer())
        pipe.join(connection, inner)

    def _connect_backend(self, number: int) -> socket.socket:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The name of the calling end, which gRPC reports as the peer.
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
        self._peeked.pop(number, None)
        self._pipes.pop(number, None)

    def _now(self) -> float:
        return time.monotonic()


_ANY = ("0.0.0.0", "::")


def _resolved(host: str, port: int) -> list[tuple[int, str]]:
    """(family, address) pairs to bind. For "any", one socket serves IPv4 and IPv6, as in gRPC."""
    if host in _ANY:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
            return [(socket.AF_INET6, "::")]
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in infos))


def private_directory() -> str:
    """A new directory (mode 0700) whose path is short enough for a Unix socket."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="thinwire-", dir=parent if len(parent) < _LONGEST_DIRECTORY else "/tmp")


def _number(peer: str) -> int:
    """The connection's number in gRPC's peer name; -1 if there is none."""
    name = peer.rpartition("/")[2]
    return int(name) if name.isdecimal() else -1


async def start_behind(
    front: Front, server: grpc.aio.Server | grpc.Server, credentials: grpc.ServerCredentials
) -> None:
    """Start `server` behind `front`, which does not listen yet."""
    server.add_secure_port(front.backend, credentials)
    if (started := server.start()) is not None:
        await started


def listen_or_advise(front: Front, listen: str, advice: str) -> int:
    """`front.listen`, but raises UserError, which ends with `advice`, when the address cannot be bound."""
    try:
        return front.listen(listen)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {listen} ({reason}): {advice}") from None
