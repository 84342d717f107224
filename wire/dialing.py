"""Outgoing TCP connections: IPv6 first, and through an HTTP proxy if the environment names one.

`HTTPS_PROXY` (or `https_proxy`) is http://[user:password@]host:port of a proxy that supports the method
CONNECT. `NO_PROXY` lists hosts to dial directly, separated by commas: `*`, domains (which include their
subdomains), addresses and networks such as 10.0.0.0/8, each with an optional port. Loopback never uses a
proxy.
"""

import asyncio
import base64
import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from wire.errors import UserError
from wire.identity.names import join_address, split_address

HEAD_START_SECONDS = 0.25
"""The delay before the next address of a host is dialled in parallel with the earlier ones (RFC 8305)."""
TRY_SECONDS, PAUSE_SECONDS = 1.5, 0.05
"""Seconds for one of several attempts to dial an address, and the pause in seconds after a refused one."""
PROXY_SECONDS = 10.0
"""The limit for a proxy's answer, which comes after it has connected to the target."""
_MOST_ANSWER = 16 * 1024
_DEFAULT_PORT = 80

Place = tuple[int, Any]
"""(address family, address to connect to)."""


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """An HTTP proxy. `secret` is the base64 form of user:password; empty without them."""

    host: str
    port: int
    secret: str = field(default="", repr=False)
    url: str = field(repr=False)
    """The URL in the environment."""

    @property
    def shown(self) -> str:
        """Its address, for people."""
        return join_address(self.host, self.port)

    @classmethod
    def parse(cls, url: str) -> "Proxy":
        """Raises UserError, whose message omits the URL because it may hold a password."""
        wanted = "HTTPS_PROXY must be http://host:port or http://user:password@host:port"
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = _DEFAULT_PORT if parts.port is None else parts.port
        except ValueError:
            raise UserError(f"{wanted}: its port is not a number from 1 to 65535") from None
        if parts.scheme != "http":
            raise UserError(f"{wanted}: proxies of the kind {parts.scheme!r} are not supported")
        if not parts.hostname or not port:
            raise UserError(f"{wanted}: it names no host")
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        secret = base64.b64encode(pair.encode()).decode() if parts.username else ""
        return cls(host=parts.hostname, port=port, secret=secret, url=url)


class ProxyError(OSError):
    """A proxy did not connect. The message says what to do."""


def proxy_for(address: str, environment: Mapping[str, str] | None = None) -> Proxy | None:
    """The proxy through which to dial `address` ("host:port"; "unix:PATH" has none).

    Raises UserError when the environment's proxy cannot be used.
    """
    values = os.environ if environment is None else environment
    # Like curl, prefer the lower-case name.
    url = values.get("https_proxy", values.get("HTTPS_PROXY", "")).strip()
    if not url or address.startswith("unix:"):
        return None
    try:
        host, port = split_address(address)
    except ValueError:
        return None
    if _excepted(host, port, values.get("no_proxy", values.get("NO_PROXY", ""))):
        return None
    return Proxy.parse(url)


def proxy_options(address: str) -> tuple[tuple[str, int | str], ...]:
    """gRPC's channel options for dialling `address`. They replace gRPC's own reading of the environment,
    which supports neither upper-case names nor networks."""
    proxy = proxy_for(address)
    if proxy is None:
        return (("grpc.enable_http_proxy", 0),)
    url = proxy.url if "://" in proxy.url else f"http://{proxy.url}"
    return ("grpc.enable_http_proxy", 1), ("grpc.http_proxy", url)


async def connect(address: str, *, reused: bool = False) -> socket.socket:
    """A non-blocking TCP connection to host:port, through a proxy if the environment names one.

    With `reused`, other connections may use its local port too. Raises OSError if none of the host's
    addresses answers, and its subclass ProxyError if the proxy refuses. The caller sets a time limit.
    """
    proxy = proxy_for(address)
    if proxy is None:
        return await _connect_host(*split_address(address), reused=reused)
    try:
        connection = await _connect_host(proxy.host, proxy.port)
    except OSError as error:
        raise ProxyError(
            f"the proxy {proxy.shown} of HTTPS_PROXY does not answer ({error.strerror or error}): correct or "
            "unset it, or list hosts to dial directly in NO_PROXY"
        ) from None
    try:
        await _ask_proxy(connection, proxy, address)
    except BaseException:
        connection.close()
        raise
    return connection


async def _connect_host(host: str, port: int, *, reused: bool = False) -> socket.socket:
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    places = [(int(family), place) for family, _, _, _, place in infos]
    if not places:
        raise OSError(f"{host} has no address")
    connection, _ = await first_to_answer(in_turn(places), reused=reused)
    return connection


def in_turn(places: Sequence[Place]) -> list[Place]:
    """Alternate between the address families, IPv6 first, so that a dead family causes little delay."""
    six = [place for place in places if place[0] == socket.AF_INET6]
    others = [place for place in places if place[0] != socket.AF_INET6]
    mixed: list[Place] = []
    for number in range(max(len(six), len(others))):
        mixed += [*six[number : number + 1], *others[number : number + 1]]
    return mixed


async def first_to_answer(places: Sequence[Place], *, reused: bool = False) -> tuple[socket.socket, int]:
    """The first connection to succeed, and its index in `places`. Raises the OSError of the last failure.

    The next address is dialled when one fails or has not answered within `HEAD_START_SECONDS`.
    """
    dials: dict[asyncio.Task[socket.socket], int] = {}
    failure: OSError = OSError("there is no address to dial")
    waiting = list(enumerate(places))
    try:
        while waiting or dials:
            if waiting:
                number, place = waiting.pop(0)
                dials[asyncio.create_task(_connect_place(place, reused))] = number
            done, _ = await asyncio.wait(
                dials, timeout=HEAD_START_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for dial in sorted(done, key=dials.__getitem__):
                number = dials.pop(dial)
                try:
                    return dial.result(), number
                except OSError as error:
                    failure = error
        raise failure
    finally:
        for dial in dials:
            dial.cancel()
            dial.add_done_callback(_close_late)


def _close_late(dial: "asyncio.Task[socket.socket]") -> None:
    if not dial.cancelled() and dial.exception() is None:
        dial.result().close()


async def knock(hosts: Iterable[str], port: int) -> None:
    """Connect to the first host that accepts, then hang up. Raises OSError if none does."""
    for host in hosts:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
    raise OSError("no connection")


async def again_and_again(family: socket.AddressFamily, own: Any, there: tuple[str, int]) -> socket.socket:
    """Dial `there` from the address `own`, which other connections use too, until that succeeds.

    The caller sets a time limit.
    """
    while True:
        try:
            async with asyncio.timeout(TRY_SECONDS):
                return await _connect_place((family, there), reused=True, own=own)
        except TimeoutError:
            continue
        except OSError:
            await asyncio.sleep(PAUSE_SECONDS)


async def dial_from(place: Place, own: tuple[str, int]) -> socket.socket:
    """A connection from the address `own`, which others may use too. Raises OSError."""
    return await _connect_place(place, reused=True, own=own)


async def _connect_place(place: Place, reused: bool = False, own: Any = None) -> socket.socket:
    family, address = place
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if reused:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # A port can be shared only by sockets that were all bound to it explicitly.
            connection.bind(own or ("::" if family == socket.AF_INET6 else "0.0.0.0", 0))
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and error.errno:
            # asyncio's own message shows the address in Python's notation and gives no reason.
            raise OSError(error.errno, os.strerror(error.errno)) from None
        raise
    return connection


async def _ask_proxy(connection: socket.socket, proxy: Proxy, address: str) -> None:
    loop = asyncio.get_running_loop()
    secret = f"Proxy-Authorization: Basic {proxy.secret}\r\n" if proxy.secret else ""
    request = f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{secret}\r\n"
    answer = b""
    try:
        async with asyncio.timeout(PROXY_SECONDS):
            await loop.sock_sendall(connection, request.encode("latin-1"))
            # Read byte by byte, because what follows the answer belongs to the target.
            while not answer.endswith(b"\r\n\r\n"):
                byte = await loop.sock_recv(connection, 1)
                if not byte or len(answer) >= _MOST_ANSWER:
                    raise ProxyError(f"the proxy {proxy.shown} of HTTPS_PROXY did not answer in HTTP")
                answer += byte
    except TimeoutError:
        raise ProxyError(
            f"the proxy {proxy.shown} did not connect to {address} within {PROXY_SECONDS:g} s"
        ) from None
    words = answer.split(b"\r\n", 1)[0].decode("latin-1").split()
    status = words[1] if len(words) > 1 and words[0].startswith("HTTP/1.") else ""
    if status.startswith("2") and len(status) == 3:
        return
    raise ProxyError(_refusal(proxy, address, status))


def _refusal(proxy: Proxy, address: str, status: str) -> str:
    port = split_address(address)[1]
    match status:
        case "407":
            advice = "it requires a user and a password: HTTPS_PROXY=http://user:password@host:port"
        case "403" | "405" if port != 443:
            advice = (
                f"many proxies allow only port 443, and this is {port}: ask the run's operator to use "
                "port 443"
            )
        case "403" | "405":
            advice = "ask its administrator to allow that host"
        case "502" | "503" | "504":
            advice = "the proxy itself cannot reach that host"
        case _:
            advice = "is it an HTTP proxy?"
    answered = f" (status {status})" if status.isdigit() else ""
    return f"the proxy {proxy.shown} does not connect to {address}{answered}: {advice}"


def _excepted(host: str, port: int, no_proxy: str) -> bool:
    """Whether `host` is dialled without the proxy."""
    name, number = host.lower().rstrip("."), None
    with contextlib.suppress(ValueError):
        number = ipaddress.ip_address(host.partition("%")[0])
    if name == "localhost" or (number is not None and number.is_loopback):
        return True
    for entry in no_proxy.lower().split(","):
        entry = entry.strip()
        if entry == "*":
            return True
        if number is not None:
            with contextlib.suppress(ValueError):
                if number in ipaddress.ip_network(entry.strip("[]"), strict=False):
                    return True
        with contextlib.suppress(ValueError):
            entry, wanted = split_address(entry)
            if wanted != port:
                continue
        entry = entry.lstrip("*").strip(".").strip("[]")
        if entry and (name == entry or name.endswith(f".{entry}")):
            return True
    return False
