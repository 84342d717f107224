"""The page of a run that is on, beside its coordinator."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from node.analysis.view import RunViewBuilder
from node.config.schema import RunConfig
from node.coordinator.store import Store
from node.dashboard.access import KEY_FILE, Gate, OperatorKey
from node.dashboard.address import listen_address, page_url
from node.dashboard.feed import Feed
from node.dashboard.operator import Controls, Operator
from node.dashboard.server import Page, serve_page
from node.dashboard.tls import page_tls
from node.telemetry import events
from node.telemetry.history import read_history
from wire.errors import RunError
from wire.identity.authority import CertificateAuthority

log = logging.getLogger(__name__)


def past(
    directory: Path, end: int | None = None, given_up: Callable[[], bool] = lambda: False
) -> RunViewBuilder:
    """What earlier coordinators of the run in `directory` told; nothing for a new run. RunError.

    Args:
        end: where the history of this coordinator begins.
        given_up: asked between events; what was read so far is given once it says so.
    """
    builder = RunViewBuilder()
    for entry in read_history(directory, end):
        if given_up():
            break
        builder.apply(entry.event, entry.at)
    return builder


@contextlib.asynccontextmanager
async def past_read(directory: Path, end: int, feed: Feed) -> AsyncIterator[None]:
    """While the block runs, read the run's past up to the byte `end`, and put it before what `feed` shows.

    On a thread, however long it takes: nodes wait for the coordinator's answers and for no page.
    """
    over = threading.Event()

    async def read() -> None:
        try:
            seen = await asyncio.to_thread(past, directory, end, over.is_set)
        except RunError as error:
            log.warning("%s; the page shows what happens from now on", error)
            seen = RunViewBuilder()
        if not over.is_set():
            feed.put_before(seen)

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
    metrics: Callable[[], bytes] | None,
    emit: Callable[[events.Event], None],
) -> AsyncIterator[None]:
    """Serve the page inside the block, unless the run file turns it off. UserError when it cannot be."""
    listen = listen_address(config)
    if listen is None:
        yield
        return
    host, port = listen
    page = Page(
        feed=feed,
        metrics=metrics,
        operator=Operator(controls, store, emit),
        gate=Gate(OperatorKey.load_or_create(directory)),
    )
    tls = page_tls(config, host, authority, directory) if config.dashboard.tls else None
    async with serve_page(page, host, port, tls) as bound:
        url = page_url(host, bound, tls=config.dashboard.tls)
        emit(events.PageServed(url=url, key_file=str(directory / KEY_FILE)))
        yield
