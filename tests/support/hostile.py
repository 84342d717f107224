"""Hostile connections to a coordinator's one port: what each kind says, and that it then stays.

`KINDS` has them by name. A `Crowd` opens them, each from the address that it is given.
"""

import asyncio
import contextlib
import random
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.support.pki import new_authority, new_node
from wire.identity.names import JOIN_NAME, control_server_name, coordinator_server_name
from wire.relay import PROTOCOL_NAME
from wire.tls_socket import TlsSocket, mutual_context

GRPC = "h2"
OTHER_RUN = "other-run"
SLOW_SECONDS = 1.0
"""Between two bytes of a slow connection."""
_BIND_ADDRESS_NO_PORT = 24
"""Linux: the port is chosen at `connect`, so that one of our ports serves many addresses."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _HEADERS = 4, 1
_END_OF_HEADERS = 4


@dataclass
class Guest:
    """One connection, with what it knows of the run."""

    connection: socket.socket
    crowd: "Crowd"
    number: int
    draw: random.Random

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def stay(self) -> None:
        """Read until the other end hangs up."""
        while await asyncio.get_running_loop().sock_recv(self.connection, 65536):
            pass

    async def secure(self, context: ssl.SSLContext, server_name: str) -> TlsSocket:
        tls = TlsSocket(self.connection, context, server_name=server_name)
        await tls.handshake()
        return tls


async def _garbage(guest: Guest) -> None:
    """Random bytes; every second time they begin as TLS does."""
    begin = b"\x16\x03\x01" if guest.draw.random() < 0.5 else b""
    await guest.say(begin + guest.draw.randbytes(guest.draw.randint(1, 2000)))


async def _cut(guest: Guest) -> None:
    """The first half of a client hello."""
    hello = guest.crowd.hello
    await guest.say(hello[: guest.draw.randint(1, len(hello) - 1)])


async def _slow(guest: Guest) -> None:
    """A client hello, one byte a second."""
    for byte in guest.crowd.hello:
        await guest.say(bytes([byte]))
        await asyncio.sleep(SLOW_SECONDS)


async def _wrong_name(guest: Guest) -> None:
    """TLS with a name and a protocol that nobody here has."""
    context = _anonymous(f"no-{guest.draw.randrange(1000)}")
    await guest.secure(context, f"{guest.draw.randrange(1000)}.example.org")


async def _other_run(guest: Guest) -> None:
    """TLS with the certificate of another run's node, as a member or as one who wants to be relayed."""
    crowd = guest.crowd
    if guest.draw.random() < 0.5:
        tls = await guest.secure(crowd.other_member, control_server_name(crowd.run_id))
        await tls.write(_call("/thinwire.wire.v1.Coordinator/Session"))
    else:
        tls = await guest.secure(crowd.other_relayed, control_server_name(crowd.run_id))
        await tls.write(b"Dnode-aaaaaaaaaa")


async def _http(guest: Guest) -> None:
    """HTTP that no client sends: half a request, a header without end, or no such method."""
    text = guest.draw.choice(
        (
            b"GET /",
            b"GET / HTTP/1.1\r\nX: " + b"x" * 4000,
            b"POST /set HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\nx",
            b"GARBAGE \x00\xff HTTP/9.9\r\n\r\n",
            b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n\r\n",
        )
    )
    await guest.say(text)


async def _wrong_path(guest: Guest) -> None:
    """gRPC with a path that there is not, where nodes join."""
    tls = await guest.secure(guest.crowd.anonymous, coordinator_server_name(guest.crowd.run_id))
    await tls.write(_call(f"/thinwire.wire.v1.No{guest.draw.randrange(1000)}/Such"))


async def _silent(guest: Guest) -> None:
    """Nothing."""


KINDS: dict[str, Callable[[Guest], Awaitable[None]]] = {
    "silent": _silent,
    "garbage": _garbage,
    "cut": _cut,
    "slow": _slow,
    "wrong-name": _wrong_name,
    "other-run": _other_run,
    "http": _http,
    "wrong-path": _wrong_path,
}


class Crowd:
    """Opens connections of the given kinds by turns. Call everything on the event loop."""

    def __init__(self, port: int, run_id: str, kinds: Sequence[str]) -> None:
        self.run_id = run_id
        self.hello = _client_hello()
        self.anonymous = _anonymous(GRPC)
        stranger = new_node(new_authority(OTHER_RUN))
        self.other_member, self.other_relayed = (
            _unchecked(
                mutual_context(
                    server_side=False,
                    key_pem=stranger.key_pem,
                    certificate_pem=stranger.certificate_pem,
                    ca_pem=stranger.ca_pem,
                    protocol=protocol,
                )
            )
            for protocol in (GRPC, PROTOCOL_NAME)
        )
        self._port = port
        self._kinds = [KINDS[kind] for kind in kinds]
        self._opened = 0

    def open(self, source: str) -> "asyncio.Task[None]":
        """A connection from this address; cancel the task to close it."""
        number, self._opened = self._opened, self._opened + 1
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        connection.bind((source, 0))
        return asyncio.create_task(self._visit(Guest(connection, self, number, random.Random(number))))

    async def _visit(self, guest: Guest) -> None:
        with guest.connection, contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_connect(guest.connection, ("127.0.0.1", self._port))
            await self._kinds[guest.number % len(self._kinds)](guest)
            await guest.stay()


def _anonymous(protocol: str) -> ssl.SSLContext:
    context = _unchecked(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.set_alpn_protocols([protocol])
    return context


def _unchecked(context: ssl.SSLContext) -> ssl.SSLContext:
    """It takes whatever certificate the server shows."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _client_hello() -> bytes:
    """The first message of a node that wants to join."""
    outgoing = ssl.MemoryBIO()
    tls = _anonymous(GRPC).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=JOIN_NAME)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def _call(path: str) -> bytes:
    """HTTP/2 up to the headers of a gRPC call (RFC 9113; RFC 7541, section 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        "x-noise": secrets.token_hex(8),
    }
    block = b"".join(
        b"\0" + b"".join(bytes([len(word)]) + word.encode() for word in field) for field in fields.items()
    )
    return _HTTP2_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_OF_HEADERS, 1, block)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body
