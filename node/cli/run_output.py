"""The output of `coordinator` and `resume`: events during the run, and the page after it."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.config.schema import RunConfig
    from node.telemetry.events import Event

_log = logging.getLogger(__name__)


class Emit:
    """Passes each event to every sink."""

    def __init__(self, *sinks: "Callable[[Event], None]") -> None:
        self._sinks = sinks

    def __call__(self, event: "Event") -> None:
        for sink in self._sinks:
            sink(event)


@contextlib.contextmanager
def emitter(config: "RunConfig", *, json: bool) -> Iterator[Emit]:
    """Write events to history, loggers and screen. Restores the terminal at the end."""
    from node.display.loggers import loggers
    from node.display.render import make_renderer
    from node.telemetry.history import HistoryWriter
    from node.view.checkpoint import refresh

    with (
        contextlib.closing(HistoryWriter(_log.warning, index=refresh)) as history,
        loggers(config) as further,
        make_renderer(json=json) as renderer,
    ):
        yield Emit(history, *further, renderer)


def serve_finished(directory: Path, emit: "Callable[[Event], None]") -> int:
    """Serve the finished run's page at its usual address until Ctrl-C or SIGTERM, for service managers that
    restart a process that ends."""
    from node.coordinator.store import Store
    from node.dashboard.pages import page_tls, serve_recorded
    from node.processes.locks import run_lock
    from node.run_file.addresses import page_listen
    from node.run_file.loader import stored_config
    from node.telemetry.events import PageServed
    from wire.identity.authority import CertificateAuthority

    with Store.open(directory) as store:
        config = stored_config(store.run().config_json)
    listen = page_listen(config)
    if listen is None:
        return 0
    tls = None
    if config.dashboard.tls:
        authority = CertificateAuthority.load(directory / "authority")
        tls = page_tls(config, listen[0], authority, directory)
    # With the lock, `resume` names this process instead of complaining about the page's port.
    with run_lock(directory, page_only=True):
        serve_recorded(directory, *listen, lambda url: emit(PageServed(url=url, key_file="")), tls)
    return 0
