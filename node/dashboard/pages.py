"""Serves a run's page, by its coordinator or from the history on disk.

This module also determines the page's address and, for TLS, its certificate from the run's CA.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

from node.config.schema import RunConfig
from node.coordinator.metrics import RunMetrics
from node.coordinator.ports import Ports, own_hosts
from node.coordinator.store import Store
from node.dashboard.feed import Feed
from node.dashboard.operator import KEY_FILE, ChangeGuard, Controls, Operator, OperatorKey
from node.dashboard.server import Page, page_front, serve_page
from node.display.status import COORDINATOR_GONE, coordinator_is_gone
from node.run_file.addresses import page_listen, parse_listen, shares_port
from node.telemetry import events
from node.telemetry.history import HistoryTail
from node.view.checkpoint import read_view
from node.view.view_builder import RunViewBuilder
from wire import event_loop
from wire.errors import RunError
from wire.identity.authority import CertificateAuthority
from wire.identity.files import write_private
from wire.identity.names import join_address

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0
"""The interval at which a growing history is read."""
CERTIFICATE_LIFETIME = timedelta(days=365)
"""The lifetime of the page's certificate. Browsers refuse much longer ones. Each start creates a new one."""


# ---- beside a coordinator


@contextlib.asynccontextmanager
async def reading_past(directory: Path, end: int, feed: Feed) -> AsyncIterator[None]:
    """Read the history up to position `end` on a thread, and put it before `feed`'s events.

    A long history then does not delay the coordinator's answers to nodes.
    """
    over = threading.Event()

    async def read() -> None:
        try:
            past, _ = await asyncio.to_thread(read_view, directory, end, over.is_set)
        except RunError as error:
            log.warning("%s; the page shows only what happens from now on", error)
            past = RunViewBuilder()
        if not over.is_set():
            feed.put_before(past)

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        over.set()
        await reading


@contextlib.asynccontextmanager
async def live_page(
    config: RunConfig,
    *,
    directory: Path,
    feed: Feed,
    controls: Controls,
    store: Store,
    authority: CertificateAuthority,
    metrics: Callable[[], Awaitable[bytes]] | None,
    emit: Callable[[events.Event], None],
    ports: Ports,
) -> AsyncIterator[None]:
    """Serve the page in this context, unless the run file turns it off. Raises UserError if that fails.

    At the coordinator's port it is served with TLS and, unless the run file requires TLS, also without. A
    browser warns about the run's certificate until the CA's certificate is imported.
    """
    listen = page_listen(config)
    if listen is None:
        yield
        return
    host, port = listen
    page = Page(
        feed=feed,
        metrics=metrics,
        operator=Operator(controls, store, emit),
        guard=ChangeGuard(OperatorKey.load_or_create(directory)),
    )
    shared = ports.door if shares_port(config) else None
    tls = page_tls(config, host, authority, directory) if config.dashboard.tls or shared else None
    async with contextlib.AsyncExitStack() as stack:
        if shared is None:
            port = await stack.enter_async_context(serve_page(page, host, port, tls))
        else:
            port = ports.port
            front = await stack.enter_async_context(page_front(page, host, tls))
            shared.serve_other(front)
            shared.serve_plain(None if config.dashboard.tls else front)
        url = page_url(host, port, tls=config.dashboard.tls)
        emit(events.PageServed(url=url, key_file=str(directory / KEY_FILE)))
        yield


# ---- from the history


def serve_recorded(
    run_dir: Path, host: str, port: int, tell: Callable[[str], None], tls: ssl.SSLContext | None = None
) -> None:
    """Serve the page of the run in `run_dir` until Ctrl-C or SIGTERM. `tell` is called with its address.

    The page follows a run that another process drives. Raises UserError if the address cannot be bound, and
    RunError if the history cannot be read.
    """
    event_loop.run(_serve(run_dir, host, port, tell, tls))


async def _serve(
    run_dir: Path, host: str, port: int, tell: Callable[[str], None], tls: ssl.SSLContext | None
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    builder, position = await asyncio.to_thread(read_view, run_dir, None, stopped.is_set)
    tail = HistoryTail(run_dir, position)
    feed = Feed(builder)
    await follow(builder, feed, tail, stopped)
    if stopped.is_set():
        return  # stopped while reading a long history
    # Gauges from the view are correct, but counters stay 0.
    metrics = RunMetrics(feed.view)
    async with serve_page(Page(feed=feed, metrics=metrics.render), host, port, tls) as bound:
        tell(page_url(host, bound, tls=tls is not None))
        while not stopped.is_set():
            try:
                async with asyncio.timeout(FOLLOW_SECONDS):
                    await stopped.wait()
            except TimeoutError:
                await follow(builder, feed, tail, stopped)


async def follow(builder: RunViewBuilder, feed: Feed, tail: HistoryTail, stopped: asyncio.Event) -> None:
    """Apply what was appended since the last call, and end the run's view if its coordinator died silently.

    `feed` shows `builder`. Returns early when `stopped` is set. Raises RunError if the history cannot be
    read.
    """
    await _catch_up(feed, tail, stopped)
    if stopped.is_set() or builder.over or not coordinator_is_gone(builder.started, tail.directory):
        return
    # Its last events may have been written between the two checks.
    await _catch_up(feed, tail, stopped)
    if not stopped.is_set() and not builder.over:
        feed.apply(events.RunFinished(reason=COORDINATOR_GONE, failed=False), builder.updated)


async def _catch_up(feed: Feed, tail: HistoryTail, stopped: asyncio.Event) -> None:
    while not stopped.is_set() and (entries := await asyncio.to_thread(tail.read)):
        for entry in entries:
            feed.apply(entry.event, entry.at)


# ---- address and certificate


def page_url(host: str, port: int, *, tls: bool) -> str:
    """The page's URL. A wildcard host becomes one of this machine's addresses."""
    return f"{'https' if tls else 'http'}://{join_address(own_hosts(host)[0], port)}/"


def page_tls(
    config: RunConfig, host: str, authority: CertificateAuthority, directory: Path
) -> ssl.SSLContext:
    """A TLS context with a certificate for every name of the page at `host`.

    Browsers trust it after the CA's certificate, `directory`/authority/ca.pem, was imported.
    """
    advertised = (parse_listen(address)[0] for address in config.coordinator.advertise)
    names = dict.fromkeys((*own_hosts(host), *advertised, socket.gethostname(), "localhost"))
    key, certificate = authority.page_credentials(tuple(names), CERTIFICATE_LIFETIME, time.time())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The ssl module reads keys from files only.
    path = directory / "page.pem"
    write_private(path, key + certificate + authority.certificate_pem)
    try:
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context
