"""Where a run's page is served, and what to call that."""

from node.config.schema import RunConfig
from node.coordinator.ports import own_hosts
from node.run_file.validate import parse_listen
from wire.identity.names import join_address

AUTO = "auto"


def listen_address(config: RunConfig) -> tuple[str, int] | None:
    """Host and port of the page; port 0 stands for any free one; None when there is no page."""
    listen = config.dashboard.listen
    if not listen:
        return None
    if listen != AUTO:
        return parse_listen(listen)
    host, port = parse_listen(config.coordinator.listen)
    # The next port is the one for nodes that hold a certificate.
    return host, port + 2 if port else 0


def page_url(host: str, port: int, *, tls: bool) -> str:
    """What to type into a browser; an address of this machine stands for "any"."""
    return f"{'https' if tls else 'http'}://{join_address(own_hosts(host)[0], port)}/"
