"""Build the lab's network from a `Topology`, shape it, and read it back. All calls block: use a thread."""

import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from node import program
from node.lab import tools
from node.lab.shape import LinkShape, Shape, burst_bytes, shaper_commands
from node.lab.topology import LAB, Device, Topology, Wire
from wire.errors import RunError

QDISC = "tbf"
"""The kernel's shaper at both ends of every wire."""
RELAY_SECONDS = 10.0
"""Time limit of the relay's answers."""


@dataclass(frozen=True)
class WireBytes:
    """Bytes sent from both ends of a wire so far."""

    up: int
    down: int


class Network:
    """The lab's network, as a context manager inside the private namespaces. It disappears with them.

    Args:
        method: How packets are delayed: `none`, `netem` or `relay`.
        socket_buffer: The most bytes of a TCP socket's buffers.
        slow_start_after_idle: Whether TCP starts slowly again after a pause.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        method: str,
        socket_buffer: int,
        slow_start_after_idle: bool = True,
    ) -> None:
        self.topology = topology
        self.method = method
        self._socket_buffer = socket_buffer
        self._slow_start_after_idle = slow_start_after_idle
        self._relay: _RelayProcess | None = None
        self._shaped = False

    def __enter__(self) -> Self:
        for name in self.topology.namespaces:
            tools.ip(LAB, "netns", "add", name)
            tools.inside(name, self._set_tcp)
        for namespace, arguments in self.topology.commands:
            tools.ip(namespace, *arguments)
        if self.topology.forwards:
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        if self.topology.ways:
            self._relay = _RelayProcess(self.topology)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove devices and namespaces, so that another network can be built."""
        if self._relay is not None:
            self._relay.end()
        for name in self.topology.lab_devices:
            tools.ip(LAB, "link", "del", name)
        for name in self.topology.namespaces:
            tools.ip(LAB, "netns", "del", name)

    def _set_tcp(self) -> None:
        """Raise the limit of socket buffers in a node's namespace, so that TCP can fill a link with a long
        round trip.

        The default size stays.
        """
        settings = Path("/proc/sys/net/ipv4")
        for name in ("tcp_rmem", "tcp_wmem"):
            least, default, largest = map(int, (settings / name).read_text().split())
            largest = max(self._socket_buffer, largest)
            (settings / name).write_text(f"{least} {default} {largest}")
        (settings / "tcp_slow_start_after_idle").write_text(str(int(self._slow_start_after_idle)))

    def shape(self, shape: Shape | None) -> None:
        """Shape every wire; None removes all shaping. Checks the kernel's settings afterwards."""
        for number, wire in enumerate(self.topology.wires):
            link = shape.links[number] if shape else None
            for device in (wire.up, wire.down):
                if self._shaped:
                    tools.tc(device.namespace, "qdisc", "del", "dev", device.name, "root")
                if link is not None:
                    self._shape_device(wire, device, link)
        self._shaped = shape is not None
        if self._relay is not None:
            self._relay.ask({"delays": _delays(self.topology, shape)})
        if shape is not None:
            self.check(shape)

    def check(self, shape: Shape) -> None:
        """Compare the kernel's shapers with `shape`. Raises RunError if one differs."""
        for wire, link in zip(self.topology.wires, shape.links, strict=True):
            for device, mbit in ((wire.up, link.up_mbit), (wire.down, link.down_mbit)):
                actual = self._rate(device)
                if actual is None or abs(actual / mbit - 1) > 0.001:
                    raise RunError(
                        f"the shaper of {wire.name} is at {actual or 0:g} Mbit/s, not at {mbit:g}: something "
                        "else changes this laboratory's links"
                    )

    def relayed(self) -> Mapping[str, float]:
        """The relay's counters since the last call or change of shape (`node.lab.relay`). Empty without a
        relay."""
        return self._relay.ask({}) if self._relay is not None else {}

    def counters(self) -> tuple[WireBytes, ...]:
        """The bytes of each wire since its shaper was created."""
        return tuple(
            WireBytes(tools.sent_bytes(wire.up), tools.sent_bytes(wire.down)) for wire in self.topology.wires
        )

    def _shape_device(self, wire: Wire, device: Device, link: LinkShape) -> None:
        up = device is wire.up
        # Between two interfaces a packet passes two shapers. It is delayed only once, as it leaves its node.
        netem = self.method == "netem" and (up or wire.higher >= 0)
        mbit = link.up_mbit if up else link.down_mbit
        for command in shaper_commands(device.name, mbit, link.rtt_ms, netem=netem):
            tools.tc(device.namespace, *command)

    def _rate(self, device: Device) -> float | None:
        """Mbit/s of the device's shaper, read from the kernel."""
        qdisc = tools.root_qdisc(device)
        return None if qdisc is None else 8e-6 * float(qdisc["options"]["rate"])


def describe_shapers(shape: Shape) -> dict[str, Any]:
    """Each wire's parameters as given to the kernel, for the results."""
    return {
        "qdisc": QDISC,
        "label": shape.label,
        "wires": [
            {
                "up_mbit": link.up_mbit,
                "down_mbit": link.down_mbit,
                "rtt_ms": link.rtt_ms,
                "burst_bytes": [burst_bytes(link.up_mbit), burst_bytes(link.down_mbit)],
            }
            for link in shape.links
        ],
    }


def _delays(topology: Topology, shape: Shape | None) -> list[float]:
    """One-way seconds of each of the relay's ways."""
    if shape is None:
        return [0.0] * len(topology.ways)
    return [max(shape.links[wire].rtt_ms for wire in way.wires) / 2e3 for way in topology.ways]


class _RelayProcess:
    def __init__(self, topology: Topology) -> None:
        self._child = subprocess.Popen(
            program("lab.relay"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ways = [{"source": way.source, "target": way.target, "mac": way.mac} for way in topology.ways]
        self.ask({"ways": ways})

    def end(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(RELAY_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, float]:
        assert self._child.stdin is not None and self._child.stdout is not None
        # A relay that hangs is killed, which ends the wait for its answer.
        watch = threading.Timer(RELAY_SECONDS, self._child.kill)
        watch.start()
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
        if not answer:
            raise RunError("the delay relay ended or hung; its output is above")
        return dict(json.loads(answer))
