"""The page of a run that is on, beside its coordinator."""

import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

from node.config.schema import RunConfig
from node.config.validate import parse_listen
from node.coordinator.addresses import own_hosts
from node.coordinator.store import Store
from node.dashboard.access import KEY_FILE, Gate, OperatorKey
from node.dashboard.address import listen_address, page_url
from node.dashboard.feed import Feed
from node.dashboard.operator import Controls, Operator
from node.dashboard.server import Page, serve_page
from node.telemetry import events
from node.telemetry.history import read_history
from node.telemetry.view import RunViewBuilder
from wire.identity.authority import CertificateAuthority
from wire.identity.files import write_private

CERTIFICATE_LIFETIME = timedelta(days=365)
"""Browsers refuse certificates that last much longer; each start of a coordinator makes another."""


def past(directory: Path) -> RunViewBuilder:
    """What earlier coordinators of the run in `directory` told; nothing for a new run. RunError."""
    builder = RunViewBuilder()
    for entry in read_history(directory):
        builder.apply(entry.event, entry.at)
    return builder


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
    tls = _tls(config, host, authority, directory) if config.dashboard.tls else None
    async with serve_page(page, host, port, tls) as bound:
        url = page_url(host, bound, tls=config.dashboard.tls)
        emit(events.PageServed(url=url, key_file=str(directory / KEY_FILE)))
        yield


def _tls(config: RunConfig, host: str, authority: CertificateAuthority, directory: Path) -> ssl.SSLContext:
    """A certificate for every name that the page may be asked under."""
    advertised = (parse_listen(address)[0] for address in config.coordinator.advertise)
    names = dict.fromkeys((*own_hosts(host), *advertised, socket.gethostname(), "localhost"))
    key, certificate = authority.page_credentials(tuple(names), CERTIFICATE_LIFETIME, time.time())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The standard library reads keys from files alone.
    path = directory / "page.pem"
    write_private(path, key + certificate + authority.certificate_pem)
    try:
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context
