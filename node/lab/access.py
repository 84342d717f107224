"""Ways of connecting to the internet, as namespaces, `ip` commands and nftables rules. Has no side effects.

    coordinator ── internet ── router ── node 0
                      └─────── router ── router ── node 1

Site 0 is the coordinator's, site n + 1 is node n's. A site's outermost machine has the public addresses
198.18.SITE.2 and, where it has IPv6, 2001:db8:SITE::2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from node.lab.topology import LAB
from wire.port_mapping import NAT_PMP_PORT

INTERNET = "internet"
COORDINATOR = "coordinator"
COORDINATOR_PORT = 443
PROXY_PORT = 3128
IDLE_SECONDS = 30
"""Seconds after which the firewall of the kind `idle` drops a silent flow."""

Command = tuple[str, str, tuple[str, ...]]
"""(namespace, program, arguments)"""
Setting = tuple[str, str, str]
"""(namespace, name below /proc/sys/net, value)"""


@dataclass
class Site:
    """One machine and the routers between it and the internet."""

    number: int
    machine: str
    commands: list[Command] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    helper: tuple[str, str, str] | None = None
    """(namespace, module for `node.program`, host:port) of an HTTP proxy, or of a router that maps ports."""

    def __post_init__(self) -> None:
        self._new(self.machine)

    @property
    def public(self) -> str:
        return f"198.18.{self.number}.2"

    @property
    def moved(self) -> str:
        """The public address after a change. For the coordinator it is a second address."""
        return f"198.18.{self.number}.3"

    @property
    def public6(self) -> str:
        return f"2001:db8:{self.number}::2"

    # ---- parts

    def uplink(self, namespace: str, *, four: bool = True, six: bool = False) -> None:
        """Connect `namespace` to the internet by its device `wan`."""
        there = f"site{self.number}"
        self._wire(namespace, "wan", INTERNET, there)
        if four:
            self._address(INTERNET, there, f"198.18.{self.number}.1/24")
            self._address(namespace, "wan", f"{self.public}/24")
            self._ip(namespace, "route", "add", "default", "via", f"198.18.{self.number}.1")
        if six:
            self._address(INTERNET, there, f"2001:db8:{self.number}::1/64", "nodad")
            self._address(namespace, "wan", f"{self.public6}/64", "nodad")
            self._ip(namespace, "-6", "route", "add", "default", "via", f"2001:db8:{self.number}::1")

    def router(
        self, name: str, inner: str, network: str, *, out: str = "", how: str = "", maps: bool = False
    ) -> None:
        """Add a machine `name` between `inner` (by its device `wan`) and the internet, without its uplink.

        Args:
            network: The first three numbers of the inner network's address.
            out: The nftables condition for outgoing packets. Empty lets everything out, "drop" nothing.
            how: Options after `masquerade`.
            maps: Whether its nftables map `ports` forwards ports to machines inside.
        """
        self._new(name)
        self._wire(inner, "wan", name, "lan")
        self._address(name, "lan", f"{network}.1/24")
        self._address(inner, "wan", f"{network}.2/24")
        self._ip(inner, "route", "add", "default", "via", f"{network}.1")
        self.settings.append((name, "ipv4/ip_forward", "1"))
        let_out = "" if out == "drop" else f'iifname "lan" {out} accept'
        known = "ct state established,related accept"
        led = """
            map ports { type inet_service : ipv4_addr . inet_service; }
            chain into {
                type nat hook prerouting priority -100
                iifname "wan" dnat ip to tcp dport map @ports
            }
        """
        rules = f"""
            table ip nat {{
                chain out {{
                    type nat hook postrouting priority 100
                    oifname "wan" masquerade {how}
                }}
                {led if maps else ""}
            }}
            table ip filter {{
                chain in {{
                    type filter hook input priority 0; policy drop
                    iifname != "wan" accept
                    {known}
                }}
                chain through {{
                    type filter hook forward priority 0; policy drop
                    {let_out}
                    {"ct status dnat accept" if maps else ""}
                    {known}
                }}
            }}
        """
        self.commands.append((name, "nft", (rules,)))

    # ---- small things

    def _new(self, name: str) -> None:
        self.namespaces.append(name)
        self._ip(name, "link", "set", "lo", "up")

    def _wire(self, near: str, device: str, other: str, far: str) -> None:
        ends = ("name", device, "netns", near, "type", "veth", "peer", "name", far, "netns", other)
        self._ip(LAB, "link", "add", *ends)
        for namespace, name in ((near, device), (other, far)):
            self._ip(namespace, "link", "set", name, "up")

    def _address(self, namespace: str, device: str, address: str, *words: str) -> None:
        self._ip(namespace, "address", "add", address, "dev", device, *words)

    def _ip(self, namespace: str, *arguments: str) -> None:
        self.commands.append((namespace, "ip", arguments))


def _open(site: Site) -> None:
    site.uplink(site.machine, six=True)


def _nat(site: Site, how: str = "", out: str = "", maps: bool = False) -> str:
    router = f"router{site.number}"
    site.router(router, site.machine, f"192.168.{site.number}", how=how, out=out, maps=maps)
    site.uplink(router)
    return router


def _symmetric(site: Site) -> None:
    _nat(site, "random,fully-random")


def _double(site: Site) -> None:
    home, provider = f"router{site.number}", f"provider{site.number}"
    site.router(home, site.machine, f"192.168.{site.number}")
    site.router(provider, home, f"10.64.{site.number}")
    site.uplink(provider)


def _only_443(site: Site) -> None:
    _nat(site, out="tcp dport 443")


def _only_proxy(site: Site) -> None:
    router = _nat(site, out="drop")
    address = f"192.168.{site.number}.1:{PROXY_PORT}"
    site.helper = router, "lab.proxy", address
    site.environment["HTTPS_PROXY"] = f"http://{address}"


def _mapping(site: Site) -> None:
    # Its random ports leave no direct path except a mapped port.
    router = _nat(site, "random,fully-random", maps=True)
    site.helper = router, "lab.router", f"192.168.{site.number}.1:{NAT_PMP_PORT}"


def _only_ipv6(site: Site) -> None:
    site.uplink(site.machine, four=False, six=True)


def _idle(site: Site) -> None:
    router = _nat(site)
    settings = {"nf_conntrack_tcp_timeout_established": IDLE_SECONDS, "nf_conntrack_tcp_loose": 0}
    site.settings += [(router, f"netfilter/{name}", str(value)) for name, value in settings.items()]


KINDS: dict[str, tuple[str, Callable[[Site], object]]] = {
    "open": ("a public address, IPv4 and IPv6", _open),
    "nat": ("NAT that keeps ports", _nat),
    "symmetric": ("NAT with a random port for each connection", _symmetric),
    "mapping": ("the same, but the router leads a port inside on request (NAT-PMP)", _mapping),
    "double": ("NAT behind NAT", _double),
    "443": ("NAT that lets out port 443 alone", _only_443),
    "proxy": ("an HTTP proxy alone", _only_proxy),
    "ipv6": ("a public IPv6 address alone", _only_ipv6),
    "idle": (f"NAT that forgets a flow after {IDLE_SECONDS} s of silence", _idle),
    "moving": ("NAT whose public address changes in mid-run", _nat),
}
"""For each name, a description and the function that builds it."""


def node_name(number: int) -> str:
    return f"node{number}"


def lay_out_sites(kinds: Sequence[str]) -> list[Site]:
    """The coordinator's site, which is open, and a site for a node of each kind."""
    desk = Site(0, COORDINATOR)
    _open(desk)
    # A node that tests for NAT needs two machines to dial, or one with two addresses.
    desk.commands.append((COORDINATOR, "ip", ("address", "add", f"{desk.moved}/24", "dev", "wan")))
    sites = [desk]
    for number, kind in enumerate(kinds):
        site = Site(number + 1, node_name(number))
        KINDS[kind][1](site)
        sites.append(site)
    return sites


def moves(site: Site) -> list[Command]:
    """The commands that give the site's outermost machine another public address. Its flows break."""
    router, gateway = f"router{site.number}", f"198.18.{site.number}.1"
    return [
        (router, "ip", ("address", "flush", "dev", "wan")),
        (router, "ip", ("address", "add", f"{site.moved}/24", "dev", "wan")),
        (router, "ip", ("route", "replace", "default", "via", gateway)),
    ]
