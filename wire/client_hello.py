"""Reads the server name (SNI) and protocols (ALPN) that a TLS client asks for in its first message.

Several services share one port, and nothing else tells their clients apart before the first answer. The
parser is pure, reads at most `MOST_BYTES` and only these fields (RFC 8446, section 4.1.2; RFC 6066, section
3; RFC 7301, section 3.1).
"""

from dataclasses import dataclass

MOST_BYTES = 16 * 1024
"""A client hello has 200 to 2,000 bytes, or a few thousand with session tickets and post-quantum keys."""
_RECORD_HEADER = 5
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _HOST_NAME, _PROTOCOLS = 0, 0, 16


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The parts of a client hello that select a service."""

    server_name: str = ""
    """The name as the client wrote it; empty if there is none or it is not ASCII."""
    protocols: tuple[str, ...] = ()
    """The protocols in the client's order of preference."""


def read_client_hello(data: bytes) -> ClientHello | int:
    """The hello at the start of a connection's bytes, or the number of bytes needed to read it.

    Raises ValueError if the bytes are not a client hello, or if it is longer than `MOST_BYTES`.
    """
    message, position = b"", 0
    while True:
        if len(data) < position + _RECORD_HEADER:
            if data[:1] not in (b"", bytes([_HANDSHAKE])):
                raise ValueError("not TLS")
            return position + _RECORD_HEADER
        kind, major = data[position], data[position + 1]
        length = int.from_bytes(data[position + 3 : position + _RECORD_HEADER])
        if (kind, major) != (_HANDSHAKE, 3) or length == 0:
            raise ValueError("not a TLS handshake")
        end = position + _RECORD_HEADER + length
        if end > MOST_BYTES:
            raise ValueError("the client hello is too long")
        if len(data) < end:
            return end
        message += data[position + _RECORD_HEADER : end]
        position = end
        if len(message) >= 4:
            size = int.from_bytes(message[1:4])
            if message[0] != _CLIENT_HELLO or size > MOST_BYTES:
                raise ValueError("not a client hello")
            if len(message) >= 4 + size:
                return _read_body(_Reader(message[4 : 4 + size]))


class _Reader:
    """Reads fields one after another. Raises ValueError when there are too few bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def __bool__(self) -> bool:
        return self._position < len(self._data)

    def take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise ValueError("a field reaches past the end of the client hello")
        taken, self._position = self._data[self._position : end], end
        return taken

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width))

    def vector(self, width: int) -> "_Reader":
        """A field that begins with its length, a number of `width` bytes."""
        return _Reader(self.take(self.number(width)))

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._position)


def _read_body(body: _Reader) -> ClientHello:
    body.take(2 + 32)  # version and random
    body.vector(1)  # session
    body.vector(2)  # ciphers
    body.vector(1)  # compression
    name = ""
    protocols: tuple[str, ...] = ()
    extensions = body.vector(2) if body else _Reader(b"")
    while extensions:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind == _SERVER_NAME and content:
            name = _host_name(content.vector(2)) or name
        elif kind == _PROTOCOLS:
            protocols = _protocols(content.vector(2))
    return ClientHello(name, protocols)


def _host_name(names: _Reader) -> str:
    first = ""
    while names:
        kind, name = names.number(1), names.vector(2).rest()
        if kind == _HOST_NAME and name.isascii():
            first = first or name.decode()
    return first


def _protocols(offered: _Reader) -> tuple[str, ...]:
    names = []
    while offered:
        names.append(offered.vector(1).rest().decode("latin-1"))
    return tuple(names)
