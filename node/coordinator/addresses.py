"""Where this machine can be reached."""

import socket

from wire.identity.names import join_address


def own_addresses(host: str, port: int) -> tuple[str, ...]:
    """What others may dial to reach `host` (perhaps "any") at `port`, the likeliest first."""
    return tuple(join_address(name, port) for name in own_hosts(host))


def own_hosts(host: str) -> tuple[str, ...]:
    """`host` itself, or for "any" the address of the default route and loopback."""
    if host not in ("0.0.0.0", "::"):
        return (host,)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    outside = "2001:db8::1" if host == "::" else "192.0.2.1"
    loopback = "::1" if host == "::" else "127.0.0.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: connecting a datagram socket only picks the address of the default route.
            probe.connect((outside, 9))
            own = probe.getsockname()[0]
        except OSError:
            own = loopback
    return tuple(dict.fromkeys((own, loopback)))
