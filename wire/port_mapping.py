"""A port of the router that is mapped to this machine, by NAT-PMP (RFC 6886) or else by UPnP.

NAT-PMP is two packets with the default gateway. UPnP needs the package miniupnpc, an extra. A router's
answer is not trusted: the coordinator dials the port before it tells neighbours about it.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from wire.dialing import proxy_for
from wire.errors import UserError
from wire.identity.names import split_address
from wire.interfaces import default_source, is_private

log = logging.getLogger(__name__)

LIFETIME_SECONDS = 7200
"""A mapping lasts this long, as RFC 6886 recommends, and is renewed long before."""
RENEW_SECONDS = 600.0
"""The most seconds between two renewals, because a router that restarts forgets its mappings."""
ANSWER_SECONDS = 0.25
"""A gateway's first answer may take this long, and twice as long with each of the `TRIES`."""
TRIES = 4
NAT_PMP_PORT = 5351
UPNP_SECONDS = 10.0
"""UPnP may take this long to find the router and to ask it."""
DISCOVER_MILLISECONDS = 2000
CLOSE_SECONDS = 3.0
Result = TypeVar("Result")

_ROUTES = Path("/proc/net/route")
_GATEWAY_FLAG = 0x2
_MAP_TCP, _ANSWER = 2, 128
_REQUEST, _REPLY = struct.Struct("!BBHHHI"), struct.Struct("!BBHIHHI")
_RESULTS = {
    1: "it speaks another version",
    2: "its owner has turned that off",
    3: "it has no internet itself",
    4: "it has no port left",
    5: "it does not map TCP",
}


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """The mapping that a router promised."""

    outside: int
    """Its port that leads here."""
    seconds: float
    """The seconds for which it lasts; 0: until it is removed."""


class Router(Protocol):
    """One way to ask a router. Both methods raise OSError, with words for people, if it does not help."""

    name: str

    async def map(self, port: int, outside: int) -> Mapping:
        """Lead a port of the router, `outside` if that is free, to TCP `port` here; also renews."""
        ...

    async def unmap(self, port: int, outside: int) -> None: ...


class NatPmp:
    """The default gateway, by NAT-PMP."""

    name = "NAT-PMP"

    def __init__(self, gateway: str, port: int = NAT_PMP_PORT) -> None:
        self._gateway = gateway, port

    async def map(self, port: int, outside: int) -> Mapping:
        return await self._ask(port, outside, LIFETIME_SECONDS)

    async def unmap(self, port: int, outside: int) -> None:
        await self._ask(port, 0, 0)

    async def _ask(self, port: int, outside: int, seconds: int) -> Mapping:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.connect(self._gateway)  # so that only the gateway's answers come
            for number in range(TRIES):
                try:
                    async with asyncio.timeout(ANSWER_SECONDS * 2**number):
                        await loop.sock_sendall(asking, _REQUEST.pack(0, _MAP_TCP, 0, port, outside, seconds))
                        while (found := _read_reply(await loop.sock_recv(asking, 64), port)) is None:
                            pass
                        return found
                except TimeoutError:
                    continue
                except ConnectionRefusedError:
                    break
        raise OSError("the gateway does not answer")


def _read_reply(packet: bytes, port: int) -> Mapping | None:
    """The mapping that the gateway promises for `port`; None if the packet does not answer that. Raises
    OSError."""
    if len(packet) < _REPLY.size:
        # A refusal may end after its code and time.
        packet += bytes(_REPLY.size - len(packet)) if len(packet) >= 8 else b""
        if len(packet) < _REPLY.size:
            return None
    version, code, result, _, inside, outside, seconds = _REPLY.unpack_from(packet)
    if result and code >= _ANSWER:
        raise OSError(f"the gateway refuses: {_RESULTS.get(result, f'result {result}')}")
    if version != 0 or code != _ANSWER + _MAP_TCP or inside != port:
        return None
    return Mapping(outside=outside, seconds=seconds)


class Upnp:
    """The router that answers a search for UPnP's internet gateway devices."""

    name = "UPnP"

    def __init__(self, description_url: str = "") -> None:
        """`description_url`: the device's, if it is known; else it is searched for."""
        self._url = description_url
        self._device: Any = None

    async def map(self, port: int, outside: int) -> Mapping:
        return await self._in_thread(self._map, port, outside)

    async def unmap(self, port: int, outside: int) -> None:
        await self._in_thread(self._unmap, outside)

    async def _in_thread(self, work: Callable[..., Result], *arguments: int) -> Result:
        try:
            async with asyncio.timeout(UPNP_SECONDS):
                return await asyncio.to_thread(work, *arguments)
        except TimeoutError:
            raise OSError("the router does not answer in time") from None

    def _map(self, port: int, outside: int) -> Mapping:
        if self._device is None:
            self._device = self._find()
        words = "TCP", self._device.lanaddr, port, "thinwire", ""
        try:
            self._device.addportmapping(outside, *words, LIFETIME_SECONDS)
        except Exception as error:  # the module raises nothing more exact
            # Some routers map for ever or not at all; it is removed in the end.
            try:
                self._device.addportmapping(outside, *words, 0)
            except Exception:
                raise OSError(f"the router refuses: {error}") from None
            return Mapping(outside=outside, seconds=0)
        return Mapping(outside=outside, seconds=LIFETIME_SECONDS)

    def _unmap(self, outside: int) -> None:
        if self._device is not None:
            try:
                self._device.deleteportmapping(outside, "TCP")
            except Exception as error:
                raise OSError(f"the router refuses: {error}") from None

    def _find(self) -> Any:
        try:
            import miniupnpc
        except ImportError:
            raise OSError("needs the package miniupnpc: pip install 'thinwire[upnp]'") from None
        device = miniupnpc.UPnP()
        try:
            if self._url:
                device.selectigd(self._url)
            else:
                device.discoverdelay = DISCOVER_MILLISECONDS
                device.discover()
                device.selectigd()
        except Exception:  # its words may be "Success"
            raise OSError("no router answers") from None
        return device


class MappedPort:
    """Asks routers for a port mapping and keeps it. Call everything on the event loop."""

    def __init__(self, routers: Sequence[Router], tell: Callable[[str], None] = log.info) -> None:
        """
        Args:
            routers: are asked in this order.
            tell: gets a line when a mapping comes or goes.
        """
        self._routers = routers
        self._tell = tell
        self._router: Router | None = None
        self._mapping: Mapping | None = None
        self._port = 0
        self.why_not = "" if routers else "not asked"
        """Why there is no mapping; empty while there is one."""

    @property
    def outside(self) -> int:
        """The router's port that leads here; 0: none."""
        return self._mapping.outside if self._mapping is not None else 0

    @property
    def by(self) -> str:
        """The protocol by which it was asked for."""
        return self._router.name if self._router is not None else ""

    async def open(self, port: int) -> None:
        """Ask for a port that leads to `port` here. Raises nothing: most routers offer none."""
        self._port = port
        reasons = []
        for router in self._routers:
            try:
                self._mapping = await router.map(port, port)
            except OSError as error:
                reasons.append(f"{router.name}: {error}")
                continue
            self._router, self.why_not = router, ""
            self._tell(f"the router leads its port {self.outside} to this node ({router.name})")
            return
        self.why_not = "; ".join(reasons) or self.why_not

    async def keep(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Renew what `open` got, until cancelled; returns if there is nothing to renew."""
        while self._router is not None and self._mapping is not None:
            seconds = self._mapping.seconds
            await sleep(min(RENEW_SECONDS, seconds / 2) if seconds else RENEW_SECONDS)
            before = self.outside
            try:
                self._mapping = await self._router.map(self._port, before)
            except OSError as error:
                log.info("the router did not renew its port %d (%s): asking again", before, error)
                continue
            if self.outside != before:
                self._tell(f"the router leads its port {self.outside} to this node, no longer {before}")

    async def close(self) -> None:
        """Give the port back."""
        router, self._router, outside = self._router, None, self.outside
        self._mapping = None
        if router is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await router.unmap(self._port, outside)


async def routers_to_ask(listen: str, coordinator: str) -> list[Router]:
    """The routers between this machine and a coordinator of the internet; none where they cannot help.

    Args:
        listen: host:port where this node listens; empty: nowhere.
        coordinator: its host:port.
    """
    source = default_source(socket.AF_INET)
    host = listen.rpartition(":")[0].strip("[]")
    if host not in ("0.0.0.0", "::", source) or not is_private(source):
        return []
    try:
        # Through a proxy the coordinator does not see the router's address.
        if proxy_for(coordinator) is not None:
            return []
        where, port = split_address(coordinator)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(where, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UserError, ValueError):
        return []
    if any(is_private(str(place[4][0])) for place in found):
        return []  # it is in this machine's own network
    gateway = default_gateway()
    return [*([NatPmp(gateway)] if gateway else ()), Upnp()]


def default_gateway(routes: Path = _ROUTES) -> str:
    """The IPv4 default gateway; "" if there is none, or where there is no such file: it is Linux's."""
    with contextlib.suppress(OSError, ValueError):
        for line in routes.read_text(encoding="ascii").splitlines()[1:]:
            _, target, gateway, flags, *_ = line.split()
            if int(target, 16) == 0 and int(flags, 16) & _GATEWAY_FLAG:
                return socket.inet_ntoa(struct.pack("=I", int(gateway, 16)))
    return ""
