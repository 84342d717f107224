"""One port for several services, told apart by a client's first bytes.

A TLS client names a server in its first message (`wire.client_hello`), and a browser without TLS begins
with an HTTP method. The connection then belongs to its service's `Front`, which has its own limits, so a
crowd at one service takes no places from another.
"""

from wire.admission import Limits
from wire.client_hello import read_client_hello
from wire.front import Front
from wire.mirror import REQUEST

_HTTP_METHODS = frozenset(b"GHPDOCT")
"""First letters of GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, CONNECT and TRACE."""


class Door:
    """Chooses the front for each connection. Call all methods on the event loop."""

    def __init__(self, limits: Limits) -> None:
        """`limits.silent` limits connections whose first message is not complete."""
        self.front = Front(limits, choose=self.choose)
        """The front that listens."""
        self._named: dict[str, Front] = {}
        self._protocols: dict[str, Front] = {}
        self._other: Front | None = None
        self._plain: Front | None = None
        self._mirror: Front | None = None

    def serve_protocol(self, protocol: str, front: Front) -> None:
        """Give `front` the TLS clients that offer this protocol, whatever name they ask for."""
        self._protocols[protocol] = front
        self._know(front)

    def serve_name(self, server_name: str, front: Front) -> None:
        """Give `front` the TLS clients that ask for this name."""
        self._named[server_name] = front
        self._know(front)

    def serve_other(self, front: Front | None) -> None:
        """Give `front` the TLS clients that ask for another name or for none; None drops them."""
        self._other = front
        self._know(front)

    def serve_plain(self, front: Front | None) -> None:
        """Give `front` the HTTP clients without TLS; None drops them."""
        self._plain = front
        self._know(front)

    def serve_mirror(self, front: Front) -> None:
        """Give `front` the clients that ask for their own address (see `wire.mirror`)."""
        self._mirror = front
        self._know(front)

    def choose(self, first: bytes) -> Front | int | None:
        """See `wire.front.Choose`."""
        if first[0] in _HTTP_METHODS:
            return self._plain
        if first[:1] == REQUEST[:1]:
            return self._mirror
        try:
            hello = read_client_hello(first)
        except ValueError:
            return None
        if isinstance(hello, int):
            return hello
        for protocol in hello.protocols:
            if (front := self._protocols.get(protocol)) is not None:
                return front
        # Names ignore case, unless a service uses upper case (`wire.channels.bulk_name`).
        name = hello.server_name
        return self._named.get(name) or self._named.get(name.lower(), self._other)

    def _know(self, front: Front | None) -> None:
        if front is not None and front not in self.front.behind:
            self.front.behind.append(front)
            front.admission.known = self.front.admission.known
