"""TLS on a socket for a few messages, after which the socket carries plain bytes again.

A relay must know who asks, but what it carries is already encrypted. So both ends first agree over mutual
TLS and then use the bare socket. Only whole TLS records are read, so no byte after the last one is lost.
"""

import asyncio
import contextlib
import socket
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from wire.identity.names import is_node_id

_HEADER = 5
_MOST_RECORD = 16 * 1024 + 256

Result = TypeVar("Result")


def mutual_context(
    *, server_side: bool, key_pem: bytes, certificate_pem: bytes, ca_pem: bytes, protocol: str
) -> ssl.SSLContext:
    """A TLS 1.3 context that presents the certificate, requires one of the CA, and offers one ALPN."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca_pem.decode())
    context.set_alpn_protocols([protocol])
    if server_side:
        context.num_tickets = 0  # a ticket would come between the last message and the plain bytes
    # The ssl module reads keys from files only.
    with tempfile.TemporaryDirectory(prefix="thinwire-") as directory:  # mode 0700
        path = Path(directory, "key.pem")
        path.write_bytes(key_pem + certificate_pem)
        context.load_cert_chain(path)
    return context


class TlsSocket:
    """One end of the connection. Methods raise OSError, such as ssl.SSLError, if the peer fails or leaves."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None
    ) -> None:
        """`connection` must be non-blocking. With a `server_name`, this is the client and checks it."""
        self.socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )

    async def handshake(self) -> None:
        await self._run(self._tls.do_handshake)

    async def read(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = b""
        while len(data) < size:
            piece = await self._run(lambda: self._tls.read(size - len(data)))  # noqa: B023
            if not piece:
                raise ConnectionError("the peer hung up")
            data += piece
        return data

    async def write(self, data: bytes) -> None:
        await self._run(lambda: self._tls.write(data))

    def write_now(self, data: bytes) -> None:
        """Write a few bytes without waiting. Raises OSError if the socket has no room for them."""
        self._tls.write(data)
        record = self._outgoing.read()
        if self.socket.send(record) != len(record):
            raise ConnectionError("the socket is full")

    @property
    def peer_node_id(self) -> str:
        """The node id in the peer's certificate; "" if it names no node."""
        subject: Any = (self._tls.getpeercert() or {}).get("subject", ())
        names = [str(value) for part in subject for key, value in part if key == "commonName"]
        return names[0] if len(names) == 1 and is_node_id(names[0]) else ""

    async def _run(self, operation: Callable[[], Result]) -> Result:
        while True:
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    return operation()
            finally:
                if self._outgoing.pending:
                    await asyncio.get_running_loop().sock_sendall(self.socket, self._outgoing.read())
            self._incoming.write(await self._record())

    async def _record(self) -> bytes:
        header = await self._exactly(_HEADER)
        length = int.from_bytes(header[3:])
        if length > _MOST_RECORD:
            raise ConnectionError("the peer does not speak TLS")
        return header + await self._exactly(length)

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await asyncio.get_running_loop().sock_recv(self.socket, size - len(data))
            if not piece:
                raise ConnectionError("the peer hung up")
            data += piece
        return data
