"""Addresses in run files and options: their form, and the rules between the addresses of one run."""

import errno
import os
from collections.abc import Iterator

from node.config.schema import CoordinatorSection, DashboardSection, RunConfig
from wire.errors import ConfigError
from wire.identity.token import MAX_ADDRESS_BYTES, MAX_ADDRESSES, MAX_ADDRESSES_BYTES


def parse_listen(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises ConfigError for any other text."""
    shown = repr(address) if len(address) <= 80 else repr(address[:77] + "...")
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in host and bare == host) or any(char.isspace() for char in address):
        raise ConfigError(f"{shown} is not host:port, for example 0.0.0.0:7700 or [::]:7700")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ConfigError(f"{shown} has no port from 0 to 65535 after the colon")
    if not can_be_looked_up(bare):
        raise ConfigError(
            f"{shown} names no host: between its dots must be 1 to 63 letters, digits and hyphens each"
        )
    return bare, int(port)


def page_listen(config: RunConfig) -> tuple[str, int] | None:
    """Host and port of the page; port 0 means any free one; None when the page is off."""
    listen = config.dashboard.listen
    if not listen:
        return None
    if listen != "auto":
        return parse_listen(listen)
    host, port = parse_listen(config.coordinator.listen)
    if config.coordinator.one_port:
        return host, port
    # Port + 1 is the one for nodes that hold a certificate.
    return host, port + 2 if port else 0


def shares_port(config: RunConfig) -> bool:
    """Whether the page is at the coordinator's own port."""
    return config.coordinator.one_port and config.dashboard.listen == "auto"


def can_be_looked_up(host: str) -> bool:
    """Whether `host` can be resolved at all. Looking up other names raises UnicodeError or ValueError."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isprintable()


def why_not_bound(error: OSError) -> str:
    """The system's reason why an address cannot be bound, without asyncio's text around it."""
    # From Python 3.13 on, asyncio skips addresses of other machines and gives no error number.
    return os.strerror(error.errno or errno.EADDRNOTAVAIL)


def coordinator_problems(coordinator: CoordinatorSection) -> Iterator[str]:
    """What is wrong with the coordinator's addresses and times, one line each."""
    for name, address in (
        ("coordinator.listen", coordinator.listen),
        *(("coordinator.advertise", address) for address in coordinator.advertise),
    ):
        try:
            _, port = parse_listen(address)
        except ConfigError as error:
            yield f"{name}: {error}"
            continue
        if name == "coordinator.advertise" and port == 0:
            yield f"{name}: {address!r} must carry the port that nodes dial, not 0"
        if name == "coordinator.advertise" and len(address.encode()) > MAX_ADDRESS_BYTES:
            yield (
                f"{name}: {address[:37] + '...'!r} is longer than the {MAX_ADDRESS_BYTES} bytes that a join "
                "token holds"
            )
        if name == "coordinator.listen" and port == 65535 and not coordinator.one_port:
            yield f"{name}: {address!r} leaves no next port for certified nodes; use 65534 or lower"
    whole = sum(1 + len(address.encode(errors="replace")) for address in coordinator.advertise)
    if len(coordinator.advertise) > MAX_ADDRESSES or whole > MAX_ADDRESSES_BYTES:
        yield (
            f"coordinator.advertise has {len(coordinator.advertise)} addresses, {whole} bytes together, and "
            f"a join token holds at most {MAX_ADDRESSES}, {MAX_ADDRESSES_BYTES} bytes together: name fewer"
        )
    if coordinator.silent_seconds <= coordinator.heartbeat_seconds:
        yield (
            f"coordinator.silent_seconds ({coordinator.silent_seconds}) must be above "
            f"coordinator.heartbeat_seconds ({coordinator.heartbeat_seconds}), or live nodes count as dead"
        )


def dashboard_problems(dashboard: DashboardSection, coordinator: CoordinatorSection) -> Iterator[str]:
    """What is wrong with the page's address, one line each."""
    if not dashboard.listen:
        if dashboard.tls:
            yield "dashboard.tls is true, but dashboard.listen is empty: there is no page to serve"
        return
    try:
        host, port = parse_listen(coordinator.listen)
    except ConfigError:
        return  # reported for coordinator.listen
    if dashboard.listen == "auto":
        if port == 65534 and not coordinator.one_port:
            yield "dashboard.listen: there is no port two above coordinator.listen's; name one, or lower that"
        return
    try:
        own = parse_listen(dashboard.listen)
    except ConfigError as error:
        yield f"dashboard.listen: {error}; `auto` chooses, and an empty string turns the page off"
        return
    if coordinator.one_port:
        if port and own == (host, port):
            yield f"dashboard.listen: port {own[1]} is the coordinator's; `auto` shares it"
    elif port and own in ((host, port), (host, port + 1)):
        yield f"dashboard.listen: port {own[1]} is one of the coordinator's two; choose another"
