"""A relay between two slow lines, and its death: `python -m scripts.bench.relay_lines [--out PATH]`.

Lines: three machines of the laboratory (`node.lab`), the relay in the middle, two lines of one rate with a
round trip of 50 ms each. What TCP carries over either line alone, and then through the relay.

Death: a link that knows two relays, on loopback, with a node's settings. The first relay's process is killed
or frozen while tensors flow; the longest time without a tensor is the outage.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from node.lab import namespaces, tools
from node.lab.calibration import _connect
from node.lab.network import Network
from node.lab.results import commit, hardware
from node.lab.shape import uniform
from node.lab.support import delay_method
from node.lab.topology import lay_out, node_address, node_name
from scripts.bench.relay import LATER, RelayProcess, rate
from scripts.report import RESULTS, write
from tests.support.links import content, key
from tests.support.pki import new_authority, new_node
from tests.support.relayed_link import relayed_link
from wire import event_loop
from wire.link import LinkSettings
from wire.relay import ACCEPT, DIAL
from wire.telemetry import relay_path

OUT = RESULTS / "relay_lines.json"
RATES = (10, 100, 1000)
"""Mbit/s."""
ROUND_TRIP_MS = 50.0
WARM_SECONDS, SECONDS = 4.0, 5.0
ROUNDS = 2
ENDS = ((0, 1), (1, 2))
SOCKET_BUFFER = 32_000_000
"""The laboratory's default: TCP must be able to fill the line."""

DEATHS = 5
LENGTH = 50_000
PAUSE_SECONDS = 0.005
BEFORE, AFTER_SECONDS = 40, 4.0
"""Tensors before a relay's death, and how long they flow after it."""


# ---- lines


def lines_inside() -> list[dict[str, Any]]:
    """In private namespaces: bits a second over both lines and through the relay, by rate."""
    namespaces.furnish()
    method = delay_method("auto")
    authority = new_authority()
    relay_node, lower, upper = (new_node(authority) for _ in range(3))
    found = []
    plan = lay_out(3, ENDS, topology="links", relay=method == "relay")
    with (
        Network(plan, method=method, kind="tbf", socket_buffer=SOCKET_BUFFER) as network,
        tempfile.TemporaryDirectory() as folder,
    ):
        listen = f"{node_address(1)}:0"
        relay = RelayProcess(Path(folder, "relay"), relay_node, listen, tools.prefix(node_name(1)))
        relay.allow([lower.node_id, upper.node_id])
        try:
            for mbit in RATES:
                shape = uniform(str(mbit), ROUND_TRIP_MS, len(ENDS))
                network.shape(shape)
                rounds = []
                for _ in range(ROUNDS):
                    network.relayed()
                    lines = [rate(*_connect(*pair), SECONDS, WARM_SECONDS) for pair in ENDS]
                    through = rate(*_joined(relay, lower, upper), SECONDS, WARM_SECONDS)
                    rounds.append(
                        {
                            "lines_bits_per_second": lines,
                            "relayed_bits_per_second": through,
                            "share": through / min(lines),
                            "delays": dict(network.relayed()),
                        }
                    )
                found.append({"mbit": mbit, "rounds": rounds})
        finally:
            relay.end()
    return [{"delay_by": method, **row} for row in found]


def _joined(relay: RelayProcess, lower: Any, upper: Any) -> tuple[Any, Any]:
    """Two sockets, in the outer machines, that the relay in the middle has joined."""
    sockets: dict[bytes, Any] = {}

    def ask(machine: str, role: bytes, node: Any, other: Any) -> None:
        client = relay.client(node)
        asked = tools.inside(machine, lambda: asyncio.run(client._ask(role, other.node_id, LATER)))
        sockets[role] = asked[0]

    jobs = [
        threading.Thread(target=ask, args=arguments)
        for arguments in (
            (node_name(0), DIAL, lower, upper),
            (node_name(2), ACCEPT, upper, lower),
        )
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    return sockets[DIAL], sockets[ACCEPT]


def lines() -> list[dict[str, Any]]:
    flags = namespaces.working_flags()
    command = [tools.tool("unshare"), *flags, sys.executable, "-m", "scripts.bench.relay_lines", "--inside"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout))


# ---- death


async def outage(folder: Path, how: signal.Signals) -> float:
    """Seconds without a tensor after the first of two relays got this signal."""
    authority = new_authority()
    ends = new_node(authority), new_node(authority)
    relays = [RelayProcess(folder / name, new_node(authority), "127.0.0.1:0") for name in ("first", "second")]
    for relay in relays:
        relay.allow([end.node_id for end in ends])
    places = [(relay.address, relay.identity) for relay in relays]
    try:
        async with relayed_link(ends, places, LENGTH, LinkSettings()) as link:
            await link.lower.ready(LATER)
            assert link.lower.path == relay_path(relays[0].identity.node_id)
            times: list[float] = []
            number = 0

            async def flow(until: float) -> None:
                nonlocal number
                while time.monotonic() < until:
                    link.lower.send(key(number), content(key(number), LENGTH))
                    number += 1
                    await asyncio.sleep(PAUSE_SECONDS)
                    came = len(link.at_upper.arrived)
                    times.extend([time.monotonic()] * (came - len(times)))

            await flow(time.monotonic() + BEFORE * PAUSE_SECONDS)
            os.kill(relays[0].child.pid, how)
            died = time.monotonic()
            await flow(died + AFTER_SECONDS)
            await link.at_upper.until(number)
            assert link.lower.path == relay_path(relays[1].identity.node_id)
            assert link.at_upper.arrived == [key(each) for each in range(number)]
            after = [died, *(at for at in times if at > died)]
            return max(late - early for early, late in pairwise(after))
    finally:
        for relay in relays:
            with contextlib.suppress(ProcessLookupError):
                relay.end()


def deaths() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, how in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        found[name] = []
        for _ in range(DEATHS):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(event_loop.run(outage(Path(folder), how)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a relay between slow lines, and its death.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        sys.stdout.write(json.dumps(lines_inside()) + "\n")
        return 0
    died = deaths()
    report = {
        "experiment": "relay_lines",
        "commit": commit(),
        "hardware": hardware(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "event_loop": event_loop.loop_name(),
        "round_trip_ms": ROUND_TRIP_MS,
        "seconds": SECONDS,
        "outage_seconds": died,
        "outage_median_seconds": {name: statistics.median(values) for name, values in died.items()},
        "lines": lines(),
    }
    write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
