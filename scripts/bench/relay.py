"""What a relay carries: `python -m scripts.bench.relay [--out PATH]`. Needs socat.

Bytes between two members through one relay process, in turn with the same through one `socat`, on loopback.
The relay's memory with 100 idle links, and with 20 of them full because their receivers read nothing.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from node.lab.results import commit, hardware
from scripts.report import RESULTS, write
from tests.support.pki import new_authority, new_node
from wire import event_loop
from wire.admission import Limits
from wire.door import Door
from wire.identity.credentials import NodeIdentity
from wire.relay import ACCEPT, DIAL, PROTOCOL_NAME, Relay
from wire.relay_client import RelayClient
from wire.splice import STORE_BYTES
from wire.tls_socket import mutual_context

OUT = RESULTS / "relay.json"
RUNS = 5
LOOPBACK_SECONDS, WARM_SECONDS = 2.0, 0.5
IDLE_LINKS, BUSY_LINKS = 100, 20
CONNECTIONS = 2
"""Of a link."""
CHUNK = 1 << 20
LATER = 60.0
"""Limit of every wait, in seconds."""


class RelayProcess:
    """A relay in a process of its own."""

    def __init__(self, folder: Path, identity: NodeIdentity, listen: str, prefix: Sequence[str] = ()) -> None:
        """`folder` is made and gets the identity; `prefix` comes before the command."""
        folder.mkdir()
        for name in ("key_pem", "certificate_pem", "ca_pem"):
            (folder / name).write_bytes(getattr(identity, name))
        self.identity = identity
        self.child = subprocess.Popen(
            [*prefix, sys.executable, "-m", "scripts.bench.relay", "--serve", str(folder), listen],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout is not None
        self.address = f"{listen.rpartition(':')[0]}:{int(self.child.stdout.readline())}"

    def allow(self, nodes: Sequence[str]) -> None:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps(list(nodes)) + "\n")
        self.child.stdin.flush()
        assert self.child.stdout.readline().strip() == "allowed"

    @property
    def memory(self) -> int:
        """Bytes of its resident set."""
        pages = Path(f"/proc/{self.child.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def client(self, node: NodeIdentity) -> RelayClient:
        return RelayClient(node, self.address, node.server_name(self.identity.node_id))

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


async def serve(folder: Path, listen: str) -> None:
    key_pem, certificate_pem, ca_pem = (
        (folder / name).read_bytes() for name in ("key_pem", "certificate_pem", "ca_pem")
    )
    context = mutual_context(
        server_side=True,
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=ca_pem,
        protocol=PROTOCOL_NAME,
    )
    relay, door = (
        Relay(lambda: context, lambda why: sys.stderr.write(f"{why}\n")),
        Door(Limits.of_members(10**5)),
    )
    door.serve_protocol(PROTOCOL_NAME, relay.front)
    print(door.front.listen(listen), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        relay.allow(json.loads(line))
        print("allowed", flush=True)


# ---- bytes


def rate(source: socket.socket, sink: socket.socket, seconds: float, warm: float) -> float:
    """Bits a second from one socket to the other; the first `warm` seconds do not count."""
    source.setblocking(True)
    sink.setblocking(True)
    over = threading.Event()

    def send() -> None:
        data = bytes(CHUNK)
        with contextlib.suppress(OSError):
            while not over.is_set():
                source.sendall(data)

    sending = threading.Thread(target=send)
    sending.start()
    buffer = bytearray(CHUNK)
    began = time.monotonic()
    while time.monotonic() < began + warm:
        sink.recv_into(buffer)
    counted, began = 0, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        counted += sink.recv_into(buffer)
    over.set()
    sink.close()
    source.close()
    sending.join()
    return 8 * counted / (now - began)


async def joined(relay: RelayProcess, ends: Sequence[NodeIdentity]) -> tuple[socket.socket, socket.socket]:
    """Two sockets that the relay has joined."""
    clients = [relay.client(end) for end in ends]
    roles = (DIAL, ACCEPT)
    found = await asyncio.gather(
        *(
            client._ask(role, other.node_id, LATER)
            for client, role, other in zip(clients, roles, ends[::-1], strict=True)
        )
    )
    return found[0][0], found[1][0]


def through(listen: int, dial: int) -> tuple[socket.socket, socket.socket]:
    """Two sockets with a program between that listens at port `dial` and connects to port `listen`."""
    with socket.create_server(("127.0.0.1", listen)) as server:
        source = dial_late(dial)
        sink, _ = server.accept()
    return source, sink


@contextlib.contextmanager
def costed(process: int, costs: list[float], rates: list[float]) -> Iterator[None]:
    """Append to `costs` what a process took for a gigabyte at the rate that the block appends to `rates`."""
    before = processor_seconds(process)
    yield
    carried = rates[-1] / 8 * (LOOPBACK_SECONDS + WARM_SECONDS)
    costs.append((processor_seconds(process) - before) / (carried / 1e9))


def processor_seconds(process: int) -> float:
    """Of a process that lives or has just ended, so far."""
    words = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def loopback(relay: RelayProcess, ends: Sequence[NodeIdentity]) -> dict[str, Any]:
    ours, theirs = [], []
    costs: dict[str, list[float]] = {"relay": [], "socat": []}
    for _ in range(RUNS):
        with costed(relay.child.pid, costs["relay"], ours):
            ours.append(rate(*asyncio.run(joined(relay, ends)), LOOPBACK_SECONDS, WARM_SECONDS))
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            entry, exit_ = one.getsockname()[1], other.getsockname()[1]
        socat = subprocess.Popen(
            [
                "socat",
                "-b",
                str(CHUNK),
                f"TCP-LISTEN:{entry},bind=127.0.0.1,reuseaddr",
                f"TCP:127.0.0.1:{exit_}",
            ]
        )
        try:
            with costed(socat.pid, costs["socat"], theirs):
                theirs.append(rate(*through(exit_, entry), LOOPBACK_SECONDS, WARM_SECONDS))
        finally:
            socat.kill()
            socat.wait()
    return {
        "relay_bits_per_second": ours,
        "socat_bits_per_second": theirs,
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "processor_seconds_per_gigabyte": {name: statistics.median(found) for name, found in costs.items()},
    }


def dial_late(port: int) -> socket.socket:
    """Connect to a program that may not listen yet."""
    deadline = time.monotonic() + LATER
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# ---- memory


async def memory(folder: Path) -> dict[str, Any]:
    authority = new_authority()
    relay = RelayProcess(folder / "memory", new_node(authority), "127.0.0.1:0")
    nodes = [(new_node(authority), new_node(authority)) for _ in range(IDLE_LINKS)]
    relay.allow([node.node_id for pair in nodes for node in pair])
    report: dict[str, Any] = {"without_links": relay.memory}
    sockets: list[socket.socket] = []
    try:
        for pair in nodes:
            for _ in range(CONNECTIONS):
                sockets += await joined(relay, pair)
        await asyncio.sleep(1)
        report[f"{IDLE_LINKS}_idle_links"] = relay.memory
        for source in sockets[: 2 * CONNECTIONS * BUSY_LINKS : 2]:
            fill(source)
        await asyncio.sleep(1)
        report[f"{IDLE_LINKS}_links_{BUSY_LINKS}_full"] = relay.memory
    finally:
        for one in sockets:
            one.close()
        relay.end()
    return report


def fill(source: socket.socket) -> None:
    """Send until nobody takes more for half a second."""
    source.setblocking(False)
    last = time.monotonic()
    while time.monotonic() < last + 0.5:
        try:
            source.send(bytes(CHUNK))
            last = time.monotonic()
        except BlockingIOError:
            time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a relay carries.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        event_loop.run(serve(Path(arguments.serve[0]), arguments.serve[1]))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = new_authority()
        relay_node, *ends = (new_node(authority) for _ in range(3))
        relay = RelayProcess(folder / "loopback", relay_node, "127.0.0.1:0")
        relay.allow([end.node_id for end in ends])
        try:
            on_loopback = loopback(relay, ends)
        finally:
            relay.end()
        report = {
            "experiment": "relay",
            "commit": commit(),
            "hardware": hardware(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "event_loop": event_loop.loop_name(),
            "runs": RUNS,
            "loopback": on_loopback,
            "kernel_bytes_of_a_direction": STORE_BYTES,
            "memory_bytes": asyncio.run(memory(folder)),
        }
    write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
