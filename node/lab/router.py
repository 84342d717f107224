"""A home router that forwards ports to its machines by NAT-PMP (RFC 6886), in one of the lab's networks.

    python -m node.lab.router HOST:PORT

It writes "ready" to stdout once it listens. Forwarded ports are elements of the nftables map `ip nat ports`.
"""

import asyncio
import contextlib
import struct
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast

from node.lab import tools

MOST_SECONDS = 3600
"""The longest lifetime of a mapping in seconds. A router may grant less than it is asked for."""
FIRST_FREE = 40_000
"""The first port to try if the requested one is taken."""
_MAP_TCP, _ANSWER = 2, 128


@dataclass
class NatPmpServer(asyncio.DatagramProtocol):
    port: int = 0
    taken: set[int] = field(default_factory=set)
    """Ports that it never maps."""
    refuses: int = 0
    """The result code of every answer; 0 grants requests."""
    lost: int = 0
    """The number of next requests that get no answer."""
    changed: Callable[[int, tuple[str, int] | None], None] = lambda outside, inside: None
    """Called with a port and the host and port that it now leads to, or None."""
    mapped: dict[int, tuple[str, int]] = field(default_factory=dict)
    """For each of the router's ports, the host and port inside."""
    requests: list[tuple[int, int, int]] = field(default_factory=list)
    """The requests received, as (inside, outside, seconds)."""
    _transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        if len(data) != 12 or data[:2] != bytes((0, _MAP_TCP)):
            return
        inside, outside, seconds = struct.unpack("!HHI", data[4:])
        self.requests.append((inside, outside, seconds))
        if self.lost:
            self.lost -= 1
            return
        assert self._transport is not None
        if self.refuses:
            self._transport.sendto(struct.pack("!BBHI", 0, _ANSWER + _MAP_TCP, self.refuses, 0), source)
            return
        place = source[0], inside
        for port in [port for port, known in self.mapped.items() if known == place]:
            del self.mapped[port]
            self.changed(port, None)
        if seconds:
            while outside in self.taken or outside in self.mapped:
                outside = max(FIRST_FREE, outside + 1)
            self.mapped[outside] = place
            self.changed(outside, place)
        seconds = min(seconds, MOST_SECONDS)
        self._transport.sendto(
            struct.pack("!BBHIHHI", 0, _ANSWER + _MAP_TCP, 0, 1, inside, outside, seconds), source
        )


@contextlib.asynccontextmanager
async def nat_pmp_server(listen: str = "127.0.0.1:0") -> AsyncIterator[NatPmpServer]:
    """A server that runs inside the block. `listen` is host:port."""
    host, _, number = listen.rpartition(":")
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NatPmpServer, local_addr=(host, int(number)))
    server.port = transport.get_extra_info("sockname")[1]
    try:
        yield server
    finally:
        transport.close()


def lead(outside: int, inside: tuple[str, int] | None) -> None:
    """Make nftables forward a port of this namespace's router, or stop if `inside` is None."""
    to = f" : {inside[0]} . {inside[1]}" if inside is not None else ""
    tools.call("nft", "add" if inside else "delete", "element", "ip", "nat", "ports", f"{{ {outside}{to} }}")


async def _main(listen: str) -> None:
    async with nat_pmp_server(listen) as server:
        server.changed = lead
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
