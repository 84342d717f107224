"""The page's HTTP server: `/`, `/api/view`, `/api/stream`, `/api/operator`, `/metrics`, `/healthz`.

It shares the coordinator's event loop. Connections, streams, request sizes and the rate of views are limited,
so a crowd at the page does not slow the run.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohttp import web

from node.dashboard.connections import REQUEST_SECONDS, Connections
from node.dashboard.feed import Feed, json_of, make_patch
from node.dashboard.operator import (
    ChangeGuard,
    ChangeRequest,
    Operator,
    connection_denied,
    host_name,
    is_loopback,
)
from node.run_file.addresses import why_not_bound
from node.telemetry.metrics import CONTENT_TYPE
from wire.admission import Limits, address_group
from wire.descriptors import raise_limit
from wire.errors import UserError
from wire.front import TLS_HANDSHAKE, Front
from wire.identity.names import join_address

log = logging.getLogger(__name__)

MOST_STREAMS, MOST_STREAMS_OF_AN_ADDRESS = 64, 48
"""The most open pages, in total and from one address. Further ones are asked to retry."""
STREAM_SECONDS = 1.0
"""The least time between two updates of a page."""
KEEPALIVE_SECONDS = 15.0
"""A page without updates gets a comment line at this interval, so that proxies keep the connection."""
WRITE_SECONDS = 20.0
"""A page that reads nothing for this long is disconnected. A live page reconnects."""
MOST_REQUEST_BYTES = 4096
IDLE_SECONDS = 30.0
CLOSE_SECONDS = 2.0

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Allows only the page's own files: no inline code, and no text that becomes HTML."""
HEADERS = {
    "Server": "thinwire",  # without versions
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Asset:
    body: bytes
    content_type: str
    etag: str


@cache
def assets() -> MappingProxyType[str, Asset]:
    """The page's files by URL path, read once."""
    files = {}
    for file in Path(__file__).with_name("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        body = file.read_bytes()
        path = "/" if file.name == "index.html" else f"/{file.name}"
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        files[path] = Asset(body=body, content_type=CONTENT_TYPES[suffix], etag=etag)
    return MappingProxyType(files)


@dataclass(frozen=True, kw_only=True)
class Page:
    feed: Feed
    metrics: Callable[[], Awaitable[bytes]] | None = None
    """Renders metrics in Prometheus's text format."""
    operator: Operator | None = None
    guard: ChangeGuard | None = None
    """Given together with `operator`. Without them the page is read-only."""


@contextlib.asynccontextmanager
async def serve_page(
    page: Page, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve `page` at `host`:`port` (0: any free port) in this context. Yields the port.

    Raises UserError if the address cannot be bound.
    """
    async with page_front(page, host, tls, tls_only=tls is not None) as front:
        address, advice = join_address(host, port), "use an address of this machine with a free port"
        try:
            bound = front.listen(address)
        except OSError as error:
            raise UserError(
                f"cannot serve the page at {address} ({why_not_bound(error)}): {advice} "
                "([dashboard] listen, or --listen)"
            ) from None
        yield bound


@contextlib.asynccontextmanager
async def page_front(
    page: Page, host: str, tls: ssl.SSLContext | None = None, *, tls_only: bool = False
) -> AsyncIterator[Front]:
    """Serve `page` in this context to the connections that the front gets.

    Args:
        host: the host to which clients connect. On loopback, other host names are refused.
        tls: the context for clients that begin with TLS.
        tls_only: use TLS without looking at a client's first byte; otherwise that byte has arrived already.
    """

    def serve() -> asyncio.Protocol:
        assert runner.server is not None, "set up before clients can connect"
        return runner.server()

    connections = Connections(serve)
    app = web.Application(
        middlewares=[_counted(connections), _loopback_only(is_loopback(host))],
        client_max_size=MOST_REQUEST_BYTES,
    )
    app.on_response_prepare.append(_add_headers)
    routes = _Routes(page)
    for path, asset in assets().items():
        app.router.add_get(path, _asset_handler(asset))
    app.router.add_get("/api/view", routes.view)
    app.router.add_get("/api/stream", routes.stream, allow_head=False)  # its answer has no end
    app.router.add_get("/api/operator", routes.operator)
    app.router.add_post("/api/operator", routes.act)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/healthz", routes.health)
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=CLOSE_SECONDS,
        handler_cancellation=True,  # a closed page frees its stream at once
    )
    await runner.setup()
    try:
        front = _front(connections, tls, tls_only)
        try:
            yield front
        finally:
            await front.close()
            page.feed.close()
    finally:
        await runner.cleanup()


def _front(connections: Connections, tls: ssl.SSLContext | None, tls_only: bool) -> Front:
    loop = asyncio.get_running_loop()

    async def hand_over(connection: socket.socket) -> None:
        try:
            with_tls = tls_only or (tls is not None and connection.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE)
        except OSError:
            connection.close()
            return
        await loop.connect_accepted_socket(
            connections.protocol,
            connection,
            ssl=tls if with_tls else None,
            ssl_handshake_timeout=REQUEST_SECONDS if with_tls else None,
        )

    limits = Limits.of_strangers(raise_limit(), REQUEST_SECONDS)
    return Front(limits, lambda connection: loop.create_task(hand_over(connection)))


class _Routes:
    def __init__(self, page: Page) -> None:
        self._page = page
        self._feed = page.feed
        self._streams = Counter[str]()
        """The open pages by address."""

    async def view(self, request: web.Request) -> web.Response:
        message = self._message((await self._feed.newest())[1])
        text = await asyncio.to_thread(json_of, message)
        return web.json_response(text=text, headers={"Cache-Control": "no-store"})

    async def health(self, request: web.Request) -> web.Response:
        """Answer on the coordinator's event loop, which shows that the loop runs."""
        return _json({"state": (await self._feed.view()).state})

    async def metrics(self, request: web.Request) -> web.Response:
        if self._page.metrics is None:
            raise web.HTTPNotFound(text="there are no metrics here\n")
        body = await self._page.metrics()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: `view` (the whole view), then `patch` (changes), and `end` at the end."""
        address = address_group(request.remote or "")
        if self._streams.total() >= MOST_STREAMS or self._streams[address] >= MOST_STREAMS_OF_AN_ADDRESS:
            raise web.HTTPServiceUnavailable(text="too many open pages\n", headers={"Retry-After": "10"})
        self._streams[address] += 1
        try:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            try:
                await self._updates(response)
            except (TimeoutError, ConnectionError):
                # Nothing more can be written, not even a clean end.
                if request.transport is not None:
                    request.transport.abort()
            return response
        finally:
            self._streams -= Counter([address])

    async def _updates(self, response: web.StreamResponse) -> None:
        version, sent = await self._feed.newest()
        await _send(response, "view", self._message(sent))
        over = False
        while not over:
            await self._feed.pause(STREAM_SECONDS)
            try:
                async with asyncio.timeout(KEEPALIVE_SECONDS):
                    await self._feed.newer(version)
            except TimeoutError:
                await _write(response, b": still here\n\n")
                continue
            # Read once, so that a close during the write below is handled in the next iteration.
            over = self._feed.closed
            version, newest = await self._feed.newest()
            if patch := make_patch(sent, newest):
                await _send(response, "patch", self._message(patch))
            sent = newest
        await _send(response, "end", self._message({}))

    def _message(self, view: Mapping[str, Any]) -> dict[str, Any]:
        """A message with the time and a view. `coordinated` says whether the coordinator serves this page."""
        return {"now": time.time(), "coordinated": self._page.operator is not None, "view": view}

    async def operator(self, request: web.Request) -> web.Response:
        """Answer whether this connection may change the run, and if not, why."""
        if self._page.operator is None:
            return _json({"available": False, "reason": "this page is read-only: no coordinator serves it"})
        denied = connection_denied(_change_request(request))
        return _json({"available": denied is None, "reason": denied.reason if denied else ""})

    async def act(self, request: web.Request) -> web.Response:
        """Make a change: JSON with `action` and, for some, `id` or `_OPTIONS`. Needs the operator's key."""
        operator, guard = self._page.operator, self._page.guard
        if operator is None or guard is None:
            return _json({"error": "this page is read-only: no coordinator serves it"}, status=403)
        change = _change_request(request)
        if (denied := guard.check(change, time.monotonic())) is not None:
            # At most a few per minute and address, so that a flood of requests does not fill the log.
            log.log(
                logging.WARNING if denied.is_guess else logging.DEBUG,
                "a change from %s was refused: %s",
                change.remote,
                denied.reason,
            )
            return _json({"error": denied.reason}, status=denied.status)
        try:
            action, subject, options = _wanted(await request.read())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _json({"error": 'expected JSON such as {"action": "snapshot"}'}, status=400)
        try:
            return _json(await operator.act(action, subject, **options))
        except UserError as error:
            return _json({"error": str(error)}, status=400)


_OPTIONS: Mapping[str, type] = {"keep_token": bool, "uses": int, "ttl": str}
"""The options of some changes, with their types."""


def _wanted(body: bytes) -> tuple[str, str, dict[str, Any]]:
    """The action, subject and options in a request's JSON. Raises one of several errors if it is invalid."""
    content = json.loads(body)
    action, subject = content["action"], content.get("id", "")
    options = {name: content[name] for name in _OPTIONS if name in content}
    # True is also an int, but not a number of uses.
    fits = all(type(value) is _OPTIONS[name] for name, value in options.items())
    if not (isinstance(action, str) and isinstance(subject, str) and fits):
        raise TypeError
    return action, subject, options


def _counted(connections: Connections) -> Any:
    """Mark connections as busy while they have a request in progress."""

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        with connections.answering(request.transport):
            return await handler(request)

    return counted


def _loopback_only(enabled: bool) -> Any:
    """Refuse other host names on loopback, because a hostile site's name may resolve here (DNS rebinding)."""

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        if enabled and not is_loopback(host_name(request.host)):
            raise web.HTTPMisdirectedRequest(text="this page is served on loopback only\n")
        return await handler(request)

    return check_host


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _asset_handler(asset: Asset) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        headers = {"ETag": asset.etag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == asset.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=asset.body, headers={**headers, "Content-Type": asset.content_type})

    return handler


def _change_request(request: web.Request) -> ChangeRequest:
    return ChangeRequest(
        remote=request.remote or "", secure=request.secure, host=request.host, headers=dict(request.headers)
    )


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.json_response(value, status=status, headers={"Cache-Control": "no-store"})


async def _send(response: web.StreamResponse, event: str, message: dict[str, Any]) -> None:
    data = await asyncio.to_thread(json_of, message)
    await _write(response, f"event: {event}\ndata: {data}\n\n".encode())


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(data)
