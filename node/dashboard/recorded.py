"""The page of a run from its history on disk: over, or going on in another process, which is followed."""

import asyncio
import signal
import ssl
from collections.abc import Callable
from pathlib import Path

from node.analysis.view import RunViewBuilder
from node.coordinator.metrics import RunMetrics
from node.dashboard.address import page_url
from node.dashboard.feed import Feed
from node.dashboard.server import Page, serve_page
from node.display.status import coordinator_alive, read_status
from node.telemetry import events
from node.telemetry.history import HistoryTail
from wire import event_loop
from wire.errors import RunError

FOLLOW_SECONDS = 1.0
"""Between two looks at the file."""
GONE = "its coordinator is gone"
"""Why a run is over whose coordinator died before it could say so."""


def serve_recorded(
    run_dir: Path, host: str, port: int, tell: Callable[[str], None], tls: ssl.SSLContext | None = None
) -> None:
    """Serve the page of the run in `run_dir` until Ctrl-C or SIGTERM; `tell` is called with its address.

    Raises UserError when it cannot be served there, RunError when the history cannot be read.
    """
    event_loop.run(_serve(run_dir, host, port, tell, tls))


async def _serve(
    run_dir: Path, host: str, port: int, tell: Callable[[str], None], tls: ssl.SSLContext | None
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    tail = HistoryTail(run_dir)
    builder = RunViewBuilder()
    feed = Feed(builder)
    await follow(run_dir, builder, feed, tail, stopped)
    if stopped.is_set():
        return  # a long history takes a while, and whoever waits for its page may not want to
    # Its counters stay at nothing; what the view tells of is there, the state above all.
    metrics = RunMetrics(feed.view)
    async with serve_page(Page(feed=feed, metrics=metrics.render), host, port, tls) as bound:
        tell(page_url(host, bound, tls=tls is not None))
        while not stopped.is_set():
            try:
                async with asyncio.timeout(FOLLOW_SECONDS):
                    await stopped.wait()
            except TimeoutError:
                await follow(run_dir, builder, feed, tail, stopped)


async def follow(
    run_dir: Path, builder: RunViewBuilder, feed: Feed, tail: HistoryTail, stopped: asyncio.Event
) -> None:
    """Take in what was appended since the last time; a coordinator that died without a word has ended, too.

    `feed` is of `builder`, and `tail` of `run_dir`; what is left is left once `stopped` is set. RunError when
    the history cannot be read.
    """
    await _catch_up(feed, tail, stopped)
    if stopped.is_set() or builder.over or not await asyncio.to_thread(_coordinator_is_gone, run_dir):
        return
    # What it said last may have come in between.
    await _catch_up(feed, tail, stopped)
    if not stopped.is_set() and not builder.over:
        feed.apply(events.RunFinished(reason=GONE, failed=False), builder.updated)


def _coordinator_is_gone(run_dir: Path) -> bool:
    """Whether its process, on this machine, is known to have ended."""
    try:
        status = read_status(run_dir)
    except RunError:
        return False
    return status is not None and coordinator_alive(status) is False


async def _catch_up(feed: Feed, tail: HistoryTail, stopped: asyncio.Event) -> None:
    while not stopped.is_set() and (entries := await asyncio.to_thread(tail.read)):
        for entry in entries:
            feed.apply(entry.event, entry.at)
