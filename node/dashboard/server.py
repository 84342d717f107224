"""The page's HTTP server: `/`, `/api/view`, `/api/stream`, `/api/operator`, `/metrics`, `/healthz`.

It shares the event loop of whoever serves it and is bounded in everything, so that a crowd at the page takes
nothing from the run: connections, streams, request sizes, how often a view is made.
"""

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from node.dashboard.access import Asking, Gate, connection_denied, is_loopback
from node.dashboard.assets import Asset, assets
from node.dashboard.connections import REQUEST_SECONDS, Connections
from node.dashboard.feed import Feed
from node.dashboard.operator import Operator
from node.dashboard.patch import difference
from node.run_file.validate import why_not_bound
from node.telemetry.metrics import CONTENT_TYPE
from wire.errors import UserError
from wire.identity.names import join_address

log = logging.getLogger(__name__)

MOST_STREAMS = 64
"""Open pages; a further one is told to come again."""
STREAM_SECONDS = 1.0
"""A page is sent something new at most so often."""
KEEPALIVE_SECONDS = 15.0
"""A page that nothing new comes for is sent an empty line, so that proxies keep its connection."""
WRITE_SECONDS = 20.0
"""A page that takes in nothing for so long is let go, and comes again if it lives."""
MOST_REQUEST_BYTES = 4096
IDLE_SECONDS = 30.0
CLOSE_SECONDS = 2.0

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Only the page's own files, no inline code, and no text that becomes HTML."""
HEADERS = {
    "Server": "thinwire",  # and not of which version of what
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What is served."""

    feed: Feed
    metrics: Callable[[], bytes] | None = None
    """In Prometheus' text format; None where there are none."""
    operator: Operator | None = None
    gate: Gate | None = None
    """Both or none: without them the page only shows."""


@contextlib.asynccontextmanager
async def serve_page(
    page: Page, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve `page` at `host`:`port` (0: any free one) inside the block; gives the port.

    Raises UserError when the address cannot be had.
    """

    def serve() -> asyncio.Protocol:
        assert runner.server is not None, "set up before anybody can connect"
        return runner.server()

    connections = Connections(serve)
    app = web.Application(
        middlewares=[_counted(connections), _guard(is_loopback(host))], client_max_size=MOST_REQUEST_BYTES
    )
    app.on_response_prepare.append(_add_headers)
    routes = _Routes(page)
    for path, asset in assets().items():
        app.router.add_get(path, _asset_handler(asset))
    app.router.add_get("/api/view", routes.view)
    app.router.add_get("/api/stream", routes.stream)
    app.router.add_get("/api/operator", routes.operator)
    app.router.add_post("/api/operator", routes.act)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/healthz", routes.health)
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=CLOSE_SECONDS,
        handler_cancellation=True,  # a page that was closed frees its stream at once
    )
    await runner.setup()
    try:
        server = await _listen(connections, host, port, tls)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            page.feed.close()
    finally:
        await runner.cleanup()


async def _listen(
    connections: Connections, host: str, port: int, tls: ssl.SSLContext | None
) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            connections.protocol,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else REQUEST_SECONDS,
            backlog=64,
            reuse_address=True,
        )
    except OSError as error:
        raise UserError(
            f"cannot serve the page at {join_address(host, port)} ({why_not_bound(error)}): name an address "
            "of this machine whose port is free ([dashboard] listen, or --listen)"
        ) from None


class _Routes:
    def __init__(self, page: Page) -> None:
        self._page = page
        self._feed = page.feed
        self._streams = 0

    async def view(self, request: web.Request) -> web.Response:
        return _json(self._message(self._feed.newest()[1]))

    async def health(self, request: web.Request) -> web.Response:
        """Answered by the loop that drives the run: an answer says that it turns."""
        return _json({"state": self._feed.view().state})

    async def metrics(self, request: web.Request) -> web.Response:
        if self._page.metrics is None:
            raise web.HTTPNotFound(text="no metrics here\n")
        return web.Response(body=self._page.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: `view`, the whole; then `patch`, what changed; `end` when the server ends."""
        if self._streams >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text="too many open pages\n", headers={"Retry-After": "10"})
        self._streams += 1
        try:
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            try:
                await self._tell(response)
            except (TimeoutError, ConnectionError):
                # Nothing more can be said to it, not even goodbye.
                if request.transport is not None:
                    request.transport.abort()
            return response
        finally:
            self._streams -= 1

    async def _tell(self, response: web.StreamResponse) -> None:
        version, sent = self._feed.newest()
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
            # As it is now: an end that comes while this is being written is told in a turn of its own.
            over = self._feed.closed
            version, newest = self._feed.newest()
            if patch := difference(sent, newest):
                await _send(response, "patch", self._message(patch))
            sent = newest
        await _send(response, "end", self._message({}))

    def _message(self, view: Mapping[str, Any]) -> dict[str, Any]:
        """`coordinated`: the run's coordinator itself says so, rather than a reader of its history."""
        return {"now": time.time(), "coordinated": self._page.operator is not None, "view": view}

    async def operator(self, request: web.Request) -> web.Response:
        """Whether this connection could change the run, and if not, why."""
        if self._page.operator is None:
            return _json({"available": False, "reason": "this page only shows: no coordinator serves it"})
        denied = connection_denied(_asking(request))
        return _json({"available": denied is None, "reason": denied.reason if denied else ""})

    async def act(self, request: web.Request) -> web.Response:
        """A change: JSON with `action` and, for some, `id`. Needs the operator's key."""
        operator, gate = self._page.operator, self._page.gate
        if operator is None or gate is None:
            return _json({"error": "this page only shows: no coordinator serves it"}, status=403)
        asking = _asking(request)
        if (denied := gate.check(asking, time.monotonic())) is not None:
            log.warning("a change from %s was refused: %s", asking.remote, denied.reason)
            return _json({"error": denied.reason}, status=denied.status)
        try:
            wanted = json.loads(await request.read())
            action, subject = wanted["action"], wanted.get("id", "")
            if not isinstance(action, str) or not isinstance(subject, str):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _json({"error": 'expected JSON such as {"action": "snapshot"}'}, status=400)
        try:
            return _json(await operator.act(action, subject))
        except UserError as error:
            return _json({"error": str(error)}, status=400)


def _counted(connections: Connections) -> Any:
    """Connections hear of their requests."""

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        with connections.answering(request.transport):
            return await handler(request)

    return counted


def _guard(own_machine_only: bool) -> Any:
    """Where only this machine may ask, it is asked under this machine's own names.

    A page on loopback is asked by browsers alone that mean it: a stranger's site whose name was made to point
    here (DNS rebinding) comes with that name.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if own_machine_only and not is_loopback(_host_name(request.host)):
            raise web.HTTPMisdirectedRequest(text="this page is served on loopback alone\n")
        return await handler(request)

    return guard


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _asset_handler(asset: Asset) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        headers = {"ETag": asset.etag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == asset.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=asset.body, headers={**headers, "Content-Type": asset.content_type})

    return handler


def _asking(request: web.Request) -> Asking:
    return Asking(
        remote=request.remote or "", secure=request.secure, host=request.host, headers=dict(request.headers)
    )


def _host_name(host: str) -> str:
    """A Host header without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _json(value: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.json_response(value, status=status, headers={"Cache-Control": "no-store"})


async def _send(response: web.StreamResponse, event: str, message: Mapping[str, Any]) -> None:
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    await _write(response, f"event: {event}\ndata: {data}\n\n".encode())


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(data)
