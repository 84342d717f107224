"""The namespaces, wires, addresses and routes of a lab, as `ip` commands. Has no side effects.

Every node has a namespace, and one address on its loopback device that its neighbours and the coordinator
dial. A separate wire that is never shaped connects each node to the coordinator, so batches and heartbeats do
not use the links' bandwidth.

    links         node 0 ══ node 1 ══ node 2     a wire for each pair of neighbours, shaped at both ends
    interfaces    node 0 ══ the lab ══ node 1    a wire for each node, shaped at both ends; the lab forwards
                              ║
                            node 2

With the relay, packets between two nodes pass through the lab's own namespace, where the relay delays them.
With netem, the delay is below the shaper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LAB = ""
"""The lab's own private namespace. It needs no name, because the lab's process runs in it."""
COORDINATOR = "coordinator"
COORDINATOR_ADDRESS = "10.77.255.1"
GATEWAY_ADDRESS = "10.77.254.1"
NETWORK = "10.77.0.0/24"


@dataclass(frozen=True)
class Device:
    """One end of a veth pair."""

    namespace: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A shaped wire: a link between two stages, or a node's interface."""

    name: str
    lower: int
    """The stage whose sent data goes up."""
    higher: int
    """The stage at the other end; -1 for an interface."""
    up: Device
    """The device that shapes the data that goes up."""
    down: Device


@dataclass(frozen=True, kw_only=True)
class Way:
    """A path of the relay: frames from port `source` go to port `target`."""

    source: str
    target: str
    mac: str
    """Forward only frames for this address, and broadcasts. Empty forwards all."""
    wires: tuple[int, ...]
    """The wires whose delays apply; the largest is used."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The plan of a lab's network."""

    namespaces: tuple[str, ...]
    commands: tuple[tuple[str, tuple[str, ...]], ...]
    """(namespace, arguments of `ip`), in order."""
    forwards: bool
    """Whether the lab's namespace routes between the nodes."""
    wires: tuple[Wire, ...]
    ways: tuple[Way, ...]
    """The paths of the relay; empty without one."""

    @property
    def lab_devices(self) -> tuple[str, ...]:
        """Devices in the lab's own namespace; their other ends are in the nodes' namespaces."""
        ends = (device for wire in self.wires for device in (wire.up, wire.down))
        names = [device.name for device in ends if device.namespace == LAB]
        return tuple(dict.fromkeys((*names, *(way.source for way in self.ways))))


def node_name(stage: int) -> str:
    return f"node{stage}"


def node_address(stage: int) -> str:
    return f"10.77.0.{stage + 1}"


def mac_address(stage: int) -> str:
    """A locally administered address by which the relay finds a node's interface."""
    return f"02:00:0a:4d:00:{stage + 1:02x}"


def lay_out(
    stages: int,
    ends: Sequence[tuple[int, int]],
    *,
    topology: str,
    relay: bool,
    congestion_control: str = "",
) -> Topology:
    """Plan the lab of a pipeline.

    Args:
        ends: The two stages that each link connects. `interfaces` does not use it.
        topology: `links` or `interfaces`.
        relay: Whether packets between nodes go through the relay.
        congestion_control: That of TCP between nodes. Empty means the kernel's default.
    """
    # It is set per route, because a new namespace may not change the kernel's default, and gRPC does not set
    # it.
    control = ("congctl", congestion_control) if congestion_control else ()
    commands: list[tuple[str, tuple[str, ...]]] = [(LAB, ("link", "set", "lo", "up"))]
    names = [COORDINATOR, *map(node_name, range(stages))]
    for name in names:
        address = COORDINATOR_ADDRESS if name == COORDINATOR else node_address(names.index(name) - 1)
        commands.append((name, ("link", "set", "lo", "up")))
        commands.append((name, ("address", "add", f"{address}/32", "dev", "lo")))
    for stage in range(stages):
        node = Device(node_name(stage), "control")
        desk = Device(COORDINATOR, f"node{stage}")
        commands += _veth(node, desk)
        commands.append(_route(node, COORDINATOR_ADDRESS, node_address(stage)))
        commands.append(_route(desk, node_address(stage), COORDINATOR_ADDRESS))
    if topology == "links":
        more, wires, ways = _links(ends, relay, control)
    else:
        more, wires, ways = _interfaces(stages, relay, control)
    return Topology(
        namespaces=tuple(names),
        commands=(*commands, *more),
        forwards=topology == "interfaces" and not relay,
        wires=tuple(wires),
        ways=tuple(ways),
    )


_Commands = list[tuple[str, tuple[str, ...]]]


def _links(
    ends: Sequence[tuple[int, int]], relay: bool, control: tuple[str, ...]
) -> tuple[_Commands, list[Wire], list[Way]]:
    commands: _Commands = []
    wires, ways = [], []
    for number, (lower, higher) in enumerate(ends):
        low = Device(node_name(lower), f"link{number}")
        high = Device(node_name(higher), f"link{number}")
        if relay:
            below, above = Device(LAB, f"relay{number}a"), Device(LAB, f"relay{number}b")
            commands += [*_veth(low, below), *_veth(high, above)]
            for source, target in ((below, above), (above, below)):
                ways.append(Way(source=source.name, target=target.name, mac="", wires=(number,)))
        else:
            commands += _veth(low, high)
        commands.append(_route(low, node_address(higher), node_address(lower), *control))
        commands.append(_route(high, node_address(lower), node_address(higher), *control))
        name = f"link {lower} to {higher}"
        wires.append(Wire(name=name, lower=lower, higher=higher, up=low, down=high))
    return commands, wires, ways


def _interfaces(
    stages: int, relay: bool, control: tuple[str, ...]
) -> tuple[_Commands, list[Wire], list[Way]]:
    commands: _Commands = []
    if not relay:
        commands.append((LAB, ("address", "add", f"{GATEWAY_ADDRESS}/32", "dev", "lo")))
    wires, ways = [], []
    for stage in range(stages):
        node, port = Device(node_name(stage), "interface"), Device(LAB, f"port{stage}")
        commands += _veth(node, port, mac_address(stage))
        via = () if relay else ("via", GATEWAY_ADDRESS, "onlink")
        how = (*via, "dev", node.name, "src", node_address(stage), *control)
        commands.append((node.namespace, ("route", "add", NETWORK, *how)))
        if not relay:
            commands.append(_route(port, node_address(stage), GATEWAY_ADDRESS))
        wires.append(Wire(name=f"interface of {stage}", lower=stage, higher=-1, up=node, down=port))
        for other in range(stages):
            if relay and other != stage:
                target = f"port{other}"
                way = Way(source=port.name, target=target, mac=mac_address(other), wires=(stage, other))
                ways.append(way)
    return commands, wires, ways


def _veth(near: Device, other: Device, mac: str = "") -> _Commands:
    """Create a pair of devices and turn them on. Without IPv6 addresses, only the run's own packets are
    counted."""
    address = ("address", mac) if mac else ()
    adding: tuple[str, ...] = ("link", "add", near.name, *address)
    for device, before in ((near, ()), (other, ("type", "veth", "peer", "name", other.name))):
        adding += (*before, *(("netns", device.namespace) if device.namespace else ()))
    commands: _Commands = [(LAB, adding)]
    for device in (near, other):
        commands.append((device.namespace, ("link", "set", device.name, "addrgenmode", "none")))
        commands.append((device.namespace, ("link", "set", device.name, "up")))
    return commands


def _route(device: Device, target: str, source: str, *control: str) -> tuple[str, tuple[str, ...]]:
    way = ("dev", device.name, "src", source, *control)
    return device.namespace, ("route", "add", f"{target}/32", *way)
