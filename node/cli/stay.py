"""A finished run's page stays until it is stopped: for services that start again what has ended."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.telemetry.events import Event


def stay(directory: Path, emit: "Callable[[Event], None]") -> int:
    """Serve the page of the run in `directory` where its run file says, until Ctrl-C or SIGTERM."""
    from node.coordinator.store import Store
    from node.dashboard.address import listen_address
    from node.dashboard.recorded import serve_recorded
    from node.dashboard.tls import page_tls
    from node.processes.claims import sole_coordinator
    from node.run_file.loader import from_json
    from node.telemetry.events import PageServed
    from wire.identity.authority import CertificateAuthority

    with Store.open(directory) as store:
        config = from_json(store.run().config_json)
    listen = listen_address(config)
    if listen is None:
        return 0
    tls = None
    if config.dashboard.tls:
        authority = CertificateAuthority.load(directory / "authority")
        tls = page_tls(config, listen[0], authority, directory)
    # Whoever goes on with the run would find the page's port taken, and be told of that alone.
    with sole_coordinator(directory, page_only=True):
        serve_recorded(directory, *listen, lambda url: emit(PageServed(url=url, key_file="")), tls)
    return 0
