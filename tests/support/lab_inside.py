"""A small laboratory, for tests: `python -m tests.support.lab_inside CASE [KEY=VALUE…]` in private
namespaces.

Says what happened as one line of JSON.
"""

import asyncio
import contextlib
import json
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from node.lab import namespaces, tools
from node.lab.calibration import ATTEMPTS, Measured, measure
from node.lab.network import Network
from node.lab.shape import LinkShape, Shape, shaper_commands, uniform
from node.lab.support import delay_method
from node.lab.topology import Topology, lay_out, node_address, node_name
from tests.support.fake_igd import fake_igd
from wire.errors import RunError
from wire.port_mapping import MappedPort, routers_to_ask

ENDS = ((0, 1),)
TOLERANCE = 0.05


def main() -> None:
    case, *settings = sys.argv[1:]
    values = dict(setting.split("=") for setting in settings)
    namespaces.furnish()
    sys.stdout.write(json.dumps(CASES[case](values)) + "\n")


def measured(values: dict[str, str]) -> Any:
    """Two stages at one shape: every direction as found. `delay` is as in a profile."""
    method = delay_method(values["delay"]) if "delay" in values else "none"
    plan = lay_out(
        2,
        ENDS,
        topology=values.get("topology", "links"),
        relay=method == "relay",
        congestion_control=values.get("congestion_control", ""),
    )
    with network(plan, values, method) as laboratory:
        wires = len(laboratory.topology.wires)
        shape = uniform(values["rate"], float(values.get("rtt", 0)), wires)
        laboratory.shape(shape)
        # As often as `calibrate` does, which is also strict about round trips: other work may disturb one.
        for _ in range(ATTEMPTS):
            found = measure(laboratory, shape, ENDS)
            if all(abs(one.share - 1) <= TOLERANCE for one in found):
                break
        counts = laboratory.relayed()
        resumes = [tools.inside(name, _slow_start_after_idle) for name in plan.namespaces]
    return {
        "links": [described(one) for one in found],
        "method": method,
        "relay": counts,
        "slow_start_after_idle": resumes,
    }


def _slow_start_after_idle() -> str:
    return Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text().strip()


def off(values: dict[str, str]) -> Any:
    """The shaper of one end is set wrong behind the lab's back."""
    with network(lay_out(2, ENDS, topology="links", relay=False), values) as laboratory:
        shape = uniform("8", 0.0, 1)
        laboratory.shape(shape)
        device = laboratory.topology.wires[0].up
        tools.tc(device.namespace, "qdisc", "del", "dev", device.name, "root")
        for command in shaper_commands(device.name, float(values["wrong"]), 0.0, netem=False):
            tools.tc(device.namespace, *command)
        try:
            laboratory.check(shape)
        except RunError as error:
            complaint = str(error)
        return {
            "links": [described(one) for one in measure(laboratory, shape, ENDS)],
            "check": complaint,
        }


def again(values: dict[str, str]) -> Any:
    """One network after the other in the same place: the second finds nothing of the first."""
    seen = []
    for relay in (True, False, True):
        with network(lay_out(2, ENDS, topology="interfaces", relay=relay), values) as laboratory:
            laboratory.shape(uniform("50", 0.0, 2))
            seen.append(
                sorted(tools.ip("", "-o", "link").count(name) for name in laboratory.topology.lab_devices)
            )
    left = tools.ip("", "-o", "link").splitlines()
    return {
        "seen": seen,
        "devices": [line.split(":")[1].strip() for line in left],
        "namespaces": tools.ip("", "netns"),
    }


BURST = 300
DATAGRAM_BYTES = 1400
PORT = 7700
QUEUED_RTT_MS = 400.0


def burst(values: dict[str, str]) -> Any:
    """A burst from a fast interface to one of 8 Mbit/s: 0.4 MB wait there, where 0.5 have room."""
    plan = lay_out(2, ENDS, topology="interfaces", relay=True)
    with network(plan, values, "relay") as laboratory:
        fast, slow = (
            LinkShape(up_mbit=1000, down_mbit=1000),
            LinkShape(up_mbit=8, down_mbit=8, rtt_ms=QUEUED_RTT_MS),
        )
        laboratory.shape(Shape(label="burst", links=(fast, slow)))
        sender, receiver = (
            tools.inside(name, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            for name in map(node_name, (0, 1))
        )
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * BURST * DATAGRAM_BYTES)
        receiver.settimeout(5.0)
        receiver.bind((node_address(1), PORT))
        # While an address is looked up, few packets wait for the answer.
        sender.sendto(b"", (node_address(1), PORT))
        receiver.recv(DATAGRAM_BYTES)
        began = time.monotonic()
        for index in range(BURST):
            sender.sendto(index.to_bytes(2, "big").ljust(DATAGRAM_BYTES), (node_address(1), PORT))
        arrived = []
        with contextlib.suppress(TimeoutError):
            while len(arrived) < BURST:
                arrived.append(int.from_bytes(receiver.recv(DATAGRAM_BYTES)[:2], "big"))
        seconds = time.monotonic() - began
        return {"arrived": arrived, "seconds": seconds, "relay": laboratory.relayed()}


def upnp(values: dict[str, str]) -> Any:
    """A machine asks the router between it and the internet for a port, which the router answers by UPnP."""
    router, host, port = "router", "192.168.7.1", 7001
    tools.ip("", "netns", "add", router)
    tools.ip("", "link", "add", "wan", "type", "veth", "peer", "name", "lan", "netns", router)
    for where, device, address in (("", "wan", "192.168.7.2/24"), (router, "lan", f"{host}/24")):
        tools.ip(where, "address", "add", address, "dev", device)
        tools.ip(where, "link", "set", device, "up")
    tools.ip("", "route", "add", "default", "via", host)

    async def ask() -> MappedPort:
        mapped = MappedPort(await routers_to_ask("0.0.0.0:0", "198.18.0.2:7700"), lambda line: None)
        await mapped.open(port)
        return mapped

    with contextlib.ExitStack() as stack:
        igd = tools.inside(router, lambda: stack.enter_context(fake_igd(host, searched=True)))
        mapped = asyncio.run(ask())
        seen = {"by": mapped.by, "outside": mapped.outside, "why_not": mapped.why_not}
        seen |= {"mapped": dict(igd.mapped), "searches": igd.searches}
        asyncio.run(mapped.close())
        return seen | {"left": dict(igd.mapped)}


def network(topology: Topology, values: dict[str, str], method: str = "") -> Network:
    return Network(
        topology,
        method=method or ("relay" if topology.ways else "none"),
        socket_buffer=8_000_000,
        slow_start_after_idle=values.get("slow_start_after_idle", "1") == "1",
    )


def described(one: Measured) -> dict[str, Any]:
    return {**asdict(one), "share": one.share, "fault": one.fault()}


CASES = {"measured": measured, "off": off, "again": again, "burst": burst, "upnp": upnp}


if __name__ == "__main__":
    main()
