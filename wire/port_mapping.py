"""Maps a port of the router to this machine, by NAT-PMP (RFC 6886) or else by UPnP.

NAT-PMP takes two packets with the default gateway. UPnP needs the optional package miniupnpc. A router's
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
from typing import Any, TypeVar

from wire.dialing import proxy_for
from wire.errors import UserError
from wire.identity.names import split_address
from wire.interfaces import default_source, is_private

log = logging.getLogger(__name__)

LIFETIME_SECONDS = 7200
"""The lifetime of a mapping, as RFC 6886 recommends. It is renewed long before its end."""
RENEW_SECONDS = 600.0
"""The most seconds between two renewals, because a router that restarts forgets its mappings."""
ANSWER_SECONDS = 0.25
"""The limit for a gateway's answer to the first try. It doubles with each of the `TRIES`."""
TRIES = 4
NAT_PMP_PORT = 5351
UPNP_SECONDS = 10.0
"""The limit for finding and asking the router by UPnP."""
DISCOVER_MILLISECONDS = 2000
CLOSE_SECONDS = 3.0
Result = TypeVar("Result")

_ROUTES = Path("/proc/net/route")
_GATEWAY_FLAG = 0x2
_MAP_TCP, _ANSWER = 2, 128
_REQUEST, _REPLY = struct.Struct("!BBHHHI"), struct.Struct("!BBHIHHI")
_RESULTS = {
    1: "it uses another version",
    2: "its owner has turned this off",
    3: "it has no internet connection",
    4: "it has no free port",
    5: "it does not map TCP",
}


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """The mapping that a router promised."""

    outside: int
    """The router's port that leads here."""
    seconds: float
    """How long the mapping lasts; 0 if it lasts until it is removed."""


class NatPmp:
    """The default gateway, by NAT-PMP. Methods raise OSError, with a message for people, on failure."""

    name = "NAT-PMP"

    def __init__(self, gateway: str, port: int = NAT_PMP_PORT) -> None:
        self._gateway = gateway, port

    async def map(self, port: int, outside: int) -> Mapping:
        """Map a port of the router, `outside` if free, to TCP `port` here, or renew the mapping."""
        return await self._ask(port, outside, LIFETIME_SECONDS)

    async def unmap(self, port: int, outside: int) -> None:
        await self._ask(port, 0, 0)

    async def _ask(self, port: int, outside: int, seconds: int) -> Mapping:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.connect(self._gateway)  # so that only the gateway's answers arrive
            for number in range(TRIES):
                try:
                    async with asyncio.timeout(ANSWER_SECONDS * 2**number):
                        await loop.sock_sendall(asking, _REQUEST.pack(0, _MAP_TCP, 0, port, outside, seconds))
                        while (mapping := _read_reply(await loop.sock_recv(asking, 64), port)) is None:
                            pass
                        return mapping
                except TimeoutError:
                    continue
                except ConnectionRefusedError:
                    break
        raise OSError("the gateway does not answer")


def _read_reply(packet: bytes, port: int) -> Mapping | None:
    """The mapping that the gateway promises for `port`; None if the packet is not an answer to that. Raises
    OSError if the gateway refuses."""
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
        """`description_url`: the device's URL, if known. Otherwise the device is searched for."""
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
            # Some routers only map ports for ever. `unmap` removes the mapping at the end.
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
        except Exception:  # the message may be "Success"
            raise OSError("no router answers") from None
        return device


Router = NatPmp | Upnp


class MappedPort:
    """Asks routers for a port mapping and keeps it. Call everything on the event loop."""

    def __init__(self, routers: Sequence[Router], tell: Callable[[str], None] = log.info) -> None:
        """
        Args:
            routers: the routers to ask, in this order.
            tell: called with a line when a mapping is made or changes.
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
        """The router's port that leads here; 0 if there is none."""
        return self._mapping.outside if self._mapping is not None else 0

    @property
    def by(self) -> str:
        """The name of the protocol that made the mapping."""
        return self._router.name if self._router is not None else ""

    async def open(self, port: int) -> None:
        """Ask for a port that leads to `port` here. Failure is no error: most routers offer none."""
        self._port = port
        reasons = []
        for router in self._routers:
            try:
                self._mapping = await router.map(port, port)
            except OSError as error:
                reasons.append(f"{router.name}: {error}")
                continue
            self._router, self.why_not = router, ""
            self._tell(f"the router maps its port {self.outside} to this node ({router.name})")
            return
        self.why_not = "; ".join(reasons) or self.why_not

    async def keep(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Renew the mapping until cancelled. Returns if there is none."""
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
                self._tell(f"the router now maps its port {self.outside} to this node, no longer {before}")

    async def close(self) -> None:
        router, self._router, outside = self._router, None, self.outside
        self._mapping = None
        if router is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await router.unmap(self._port, outside)


async def routers_to_ask(listen: str, coordinator: str) -> list[Router]:
    """The routers between this machine and a coordinator on the internet; empty if they cannot help.

    Args:
        listen: host:port where this node listens; empty if it does not.
        coordinator: the coordinator's host:port.
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
        infos = await loop.getaddrinfo(where, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UserError, ValueError):
        return []
    if any(is_private(str(place[4][0])) for place in infos):
        return []  # it is in this machine's own network
    gateway = default_gateway()
    return [*([NatPmp(gateway)] if gateway else ()), Upnp()]


def default_gateway(routes: Path = _ROUTES) -> str:
    """The IPv4 default gateway; "" if there is none, or on systems other than Linux, which lack the file."""
    with contextlib.suppress(OSError, ValueError):
        for line in routes.read_text(encoding="ascii").splitlines()[1:]:
            _, target, gateway, flags, *_ = line.split()
            if int(target, 16) == 0 and int(flags, 16) & _GATEWAY_FLAG:
                return socket.inet_ntoa(struct.pack("=I", int(gateway, 16)))
    return ""
