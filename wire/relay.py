"""A relay connects two members that cannot reach each other. It cannot read what it carries.

Both members dial the relay, present their certificates over TLS (ALPN `thinwire-relay`), and name the node
that they want to reach or from which they accept a connection. The relay answers when both are there. From
then on the sockets are plain and carry the neighbours' own mutual TLS, which the relay can neither read nor
change nor forge.

A request is 16 bytes: `D` to dial or `A` to accept, and the peer's node id. The answer is `+`, or `-`
before the relay hangs up. Two members that ask with `S` are not connected. Instead, after `+`, each is
told the other's address (its length in a byte, then host:port). Both can then dial at the same moment,
which opens each one's NAT for the other.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from wire.admission import Limits
from wire.descriptors import raise_limit
from wire.front import Front
from wire.identity.names import is_node_id, join_address
from wire.pacing import Pacer
from wire.splice import Pipe
from wire.tls_socket import TlsSocket

PROTOCOL_NAME = "thinwire-relay"
"""The ALPN protocol of a relay's clients."""
DIAL, ACCEPT, TOGETHER = b"D", b"A", b"S"
PARTNER = {DIAL: ACCEPT, ACCEPT: DIAL, TOGETHER: TOGETHER}
YES, NO = b"+", b"-"
NODE_ID_BYTES = 15
REQUEST_SECONDS = 10.0
"""How long a connection may take from its first byte to its request."""
TELL_SECONDS = 10.0
"""How long members that were told each other's addresses may stay connected, so that their NATs keep the
mappings."""
MOST_WAITING = 4
"""The most connections of one member that wait for the same peer in the same role. Beyond it, the oldest is
dropped."""
MOST_OF_A_NODE = 64
"""The most connections of one member, waiting or connected. It needs four for each neighbour."""


@dataclass(frozen=True, slots=True)
class _Wait:
    node: str
    peer: str
    role: bytes

    @property
    def partner(self) -> "_Wait":
        return _Wait(self.peer, self.node, PARTNER[self.role])


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request."""

    refused: str = ""
    """Why the request is refused, for the log; empty if it is not."""
    joined_with: int | None = None
    """The connection to join it with; None if it waits."""
    dropped: tuple[int, ...] = ()
    """The connections to close."""


@dataclass(kw_only=True)
class Rendezvous:
    """Matches members that wait for each other. A state machine without I/O; connections are numbers."""

    most: int
    """The most connections in total."""
    allowed: frozenset[str] = frozenset()
    """The nodes of the newest placement. Any two of them may be connected."""
    _waiting: dict[_Wait, list[int]] = field(default_factory=dict)
    """Waiting connections by request, the newest last."""
    _asked: dict[int, _Wait] = field(default_factory=dict)
    """The requests of all connections, waiting or connected."""

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, number: int, node: str, peer: str, role: bytes) -> Answer:
        """Handle a request on connection `number`: `node` wants `peer`. `role` is the request's letter."""
        if node == peer or not {node, peer} <= self.allowed:
            return Answer(refused=f"the placement does not name {node} and {peer}")
        wait = _Wait(node, peer, role)
        waiting = self._waiting.get(wait, [])
        dropped = tuple(waiting[:1]) if len(waiting) >= MOST_WAITING else ()
        for oldest in dropped:
            self.gone(oldest)
        if sum(asked.node == node for asked in self._asked.values()) >= MOST_OF_A_NODE:
            return Answer(refused=f"{node} has {MOST_OF_A_NODE} connections", dropped=dropped)
        if len(self._asked) >= self.most:
            return Answer(refused=f"all {self.most} connections are taken", dropped=dropped)
        self._asked[number] = wait
        if partners := self._waiting.get(wait.partner):
            newest = partners.pop()  # the likeliest to be alive
            if not partners:
                del self._waiting[wait.partner]
            return Answer(joined_with=newest, dropped=dropped)
        self._waiting.setdefault(wait, []).append(number)
        return Answer(dropped=dropped)

    def gone(self, number: int) -> None:
        """Forget a connection that has ended."""
        wait = self._asked.pop(number, None)
        if wait is not None and number in (waiting := self._waiting.get(wait, [])):
            waiting.remove(number)
            if not waiting:
                del self._waiting[wait]

    def allow(self, nodes: Collection[str]) -> list[int]:
        """Set the nodes of a new placement. Returns the connections to close, which are already forgotten."""
        self.allowed = frozenset(nodes)
        ended = [number for number, wait in self._asked.items() if not {wait.node, wait.peer} <= self.allowed]
        for number in ended:
            self.gone(number)
        return ended


@dataclass(kw_only=True)
class RelayTotals:
    """Totals since the relay was created."""

    bytes: int = 0
    """The bytes carried in both directions together."""
    joined: int = 0
    told: int = 0
    """The pairs that were told each other's addresses."""
    refused: int = 0


class Relay:
    """The relay's service behind a front. Call everything on the event loop."""

    def __init__(
        self, context: Callable[[], ssl.SSLContext], note: Callable[[str], None], rate: float = 0.0
    ) -> None:
        """
        Args:
            context: returns a server's `wire.tls_socket.mutual_context`. It is called for each connection, so
                that a renewed certificate takes effect.
            note: called with the reason for a refusal.
            rate: the most bytes per second to carry, both directions together; 0 for no limit.
        """
        descriptors = raise_limit()
        loop = asyncio.get_running_loop()
        self.front = Front(
            Limits.of_strangers(descriptors, REQUEST_SECONDS),
            lambda connection: loop.create_task(self._serve(connection)),
        )
        self._context = context
        self._note = note
        self._pacer = Pacer(rate) if rate else None
        self._rendezvous = Rendezvous(most=max(16, descriptors // 8))
        self._numbers = count()
        self._waiting: dict[int, TlsSocket] = {}
        self._pipes: dict[int, Pipe] = {}
        """Each pipe, under the numbers of both its connections."""
        self._totals = RelayTotals()

    @property
    def totals(self) -> RelayTotals:
        open_pipes = sum(pipe.carried for pipe in self._joined())
        totals = self._totals
        return replace(totals, bytes=totals.bytes + open_pipes)

    @property
    def pairs(self) -> int:
        """The number of pairs of connections that are joined now."""
        return sum(1 for _ in self._joined())

    @property
    def waiting(self) -> int:
        """The number of connections that wait for another, or for their ends to dial each other."""
        return len(self._waiting)

    def allow(self, nodes: Collection[str]) -> None:
        """Set the nodes of the newest placement. Any two of them may be joined; all other connections end."""
        for number in self._rendezvous.allow(nodes):
            self._close(number)

    async def close(self) -> None:
        await self.front.close()
        for number in [*self._waiting, *self._pipes]:
            self._close(number)

    # ---- inside

    def _joined(self) -> Iterator[Pipe]:
        seen: set[int] = set()
        for pipe in self._pipes.values():
            if id(pipe) not in seen:
                seen.add(id(pipe))
                yield pipe

    async def _serve(self, connection: socket.socket) -> None:
        try:
            tls = TlsSocket(connection, self._context())
            keep_alive(connection)
            await tls.handshake()
            request = await tls.read(1 + NODE_ID_BYTES)
            node, peer = tls.peer_node_id, request[1:].decode("ascii", "replace")
            if request[:1] not in PARTNER or not (node and is_node_id(peer)):
                raise ConnectionError("not a request")
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                return
            raise
        self._ask(tls, node, peer, request[:1])

    def _ask(self, tls: TlsSocket, node: str, peer: str, role: bytes) -> None:
        number = next(self._numbers)
        answer = self._rendezvous.ask(number, node, peer, role)
        for oldest in answer.dropped:
            self._close(oldest)
        if answer.refused:
            self._totals.refused += 1
            self._note(answer.refused)
            with contextlib.suppress(OSError):
                tls.write_now(NO)
            tls.socket.close()
            return
        self._waiting[number] = tls
        if answer.joined_with is None:
            # A waiting client sends nothing, so the socket becomes readable when it ends.
            asyncio.get_running_loop().add_reader(tls.socket, self._close, number)
        elif role == TOGETHER:
            self._tell_both(number, answer.joined_with)
        else:
            self._join(number, answer.joined_with)

    def _tell_both(self, number: int, other: int) -> None:
        """Tell each end the other's address. They hang up when they have dialled."""
        ends = self._waiting[number], self._waiting[other]
        self._totals.told += 1
        loop = asyncio.get_running_loop()
        loop.add_reader(ends[0].socket, self._close, number)
        for end, peer in (ends, ends[::-1]):
            try:
                address = _address(peer.socket).encode()
                end.write_now(YES + bytes([len(address)]) + address)
            except OSError:
                for waiter in (number, other):
                    self._close(waiter)
                return
        for waiter in (number, other):
            self._rendezvous.gone(waiter)
            loop.call_later(TELL_SECONDS, self._close, waiter)

    def _join(self, number: int, other: int) -> None:
        mine, theirs = self._waiting.pop(number), self._waiting.pop(other)
        asyncio.get_running_loop().remove_reader(theirs.socket)
        pipe = Pipe(lambda: self._ended(number, other, pipe), self._pacer)
        self._pipes[number] = self._pipes[other] = pipe
        self._totals.joined += 1
        try:
            for end in (mine, theirs):
                end.write_now(YES)
        except OSError:
            for end in (mine, theirs):
                end.socket.close()
            self._ended(number, other, pipe)
            return
        pipe.join(mine.socket, theirs.socket)

    def _ended(self, number: int, other: int, pipe: Pipe) -> None:
        if self._pipes.pop(number, None) is not None:
            self._totals.bytes += pipe.carried
        self._pipes.pop(other, None)
        self._rendezvous.gone(number)
        self._rendezvous.gone(other)

    def _close(self, number: int) -> None:
        self._rendezvous.gone(number)
        if (tls := self._waiting.pop(number, None)) is not None:
            asyncio.get_running_loop().remove_reader(tls.socket)
            tls.socket.close()
        if (pipe := self._pipes.get(number)) is not None:
            numbers = [each for each, joined in self._pipes.items() if joined is pipe]
            self._ended(numbers[0], numbers[-1], pipe)
            pipe.abort()


def _address(connection: socket.socket) -> str:
    """The host:port that a connection comes from."""
    host, port, *_ = connection.getpeername()
    return join_address(str(host).removeprefix("::ffff:"), port)


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect a dead peer, and routers remember an idle connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPALIVE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
    ):
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
