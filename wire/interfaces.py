"""This machine's own addresses that others may dial."""

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

SIOCGIFADDR, SIOCGIFFLAGS, IFF_UP = 0x8915, 0x8913, 0x1
"""Linux's requests for an interface's address and state."""
_TENTATIVE, _DEPRECATED, _TEMPORARY = 0x40, 0x20, 0x01
"""Flags of IPv6 addresses (IFA_F_...)."""
_SIX = Path("/proc/net/if_inet6")
_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
    )
)
"""IPv4 networks that are not routed on the internet."""


def default_source(family: socket.AddressFamily) -> str:
    """The source address for connections to the internet; "" without a default route."""
    outside = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # This sends nothing: connecting a datagram socket only selects the source address.
            probe.connect((outside, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def dialled_from_anywhere() -> tuple[str, ...]:
    """This machine's public addresses: at most one IPv6 and one IPv4 address."""
    four = default_source(socket.AF_INET)
    six = [address for address in ipv6_addresses() if not is_private(address)]
    return (*six[:1], *((four,) if four and not is_private(four) else ()))


def is_private(host: str) -> bool:
    """Whether the address is unreachable from the internet: private, carrier-grade NAT or loopback."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_loopback or address.is_link_local or (address.packed[0] & 0xFE) == 0xFC
    return any(address in network for network in _PRIVATE)


def ipv4_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of interfaces that are up, without loopback. Empty on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return ()
    import fcntl

    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                flags = struct.unpack_from("H", fcntl.ioctl(asking, SIOCGIFFLAGS, request), 16)[0]
                address = socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, request)[20:24])
                if flags & IFF_UP and not address.startswith("127."):
                    addresses.append(address)
    return tuple(addresses)


def ipv6_addresses() -> tuple[str, ...]:
    """The IPv6 addresses that others can dial: global ones first, then private ones, each with temporary ones
    last, and no link-local ones. On systems other than Linux, only the default route's address."""
    try:
        lines = _SIX.read_text(encoding="ascii").splitlines()
    except OSError:
        source = default_source(socket.AF_INET6)
        return (source,) if source and not ipaddress.ip_address(source).is_link_local else ()
    return _usable(lines)


def _usable(lines: list[str]) -> tuple[str, ...]:
    """The usable addresses in /proc/net/if_inet6. A line has address, index, prefix, scope and flags
    (hexadecimal), and interface."""
    usable = []
    for line in lines:
        digits, _, _, scope, flags, _ = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if int(scope, 16) != 0 or int(flags, 16) & (_TENTATIVE | _DEPRECATED) or address.is_loopback:
            continue
        private = (address.packed[0] & 0xFE) == 0xFC
        usable.append((private, bool(int(flags, 16) & _TEMPORARY), str(address)))
    return tuple(address for _, _, address in sorted(usable, key=lambda entry: entry[:2]))
