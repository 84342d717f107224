"""What it costs to take in layers of a snapshot, or to give them out, and how late the event loop is.

    python -m scripts.bench.layer_rates [--between] [--before TREE] [--nodes 2] [--layers 6] [--megabytes 64]

Nodes, each a process, upload layers of random bytes over loopback by the program's own client; the
coordinator hashes and drops them. With `--between` they fetch them from another node's disk. Processor
seconds are those a GB (10^9 bytes) of the one process that all others deal with, TLS included. Its loop's
delay is how late a timer of 5 ms is. `--before` measures another tree first. Writes
scripts/results/layer_rates.json, or FILE.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from node.config.schema import CoordinatorSection
from node.coordinator.control_service import ControlService
from node.coordinator.ports import open_ports
from node.coordinator.snapshot_handler import UploadPermit
from node.lab.results import commit, hardware
from node.stage.coordinator_client import CoordinatorClient
from node.stage.layer_peers import LayerPeers, LayerPlace, LayersHeld
from node.stage.sums_kept import SumsKept
from node.state.manifest import LayerFile
from node.state.snapshot_cache import SnapshotCache
from scripts.report import RESULTS, write
from tests.support.pki import RUN_ID, new_authority, new_node
from wire import event_loop
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import NodeIdentity
from wire.layer_exchange import LayerServer
from wire.link_server import LinkServer
from wire.messages import PlacedStage

TICK_SECONDS = 0.005
STEP = 1
Told = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what uploads of layers cost.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="of each node")
    parser.add_argument("--megabytes", type=int, default=64, help="of each layer")
    parser.add_argument("--between", action="store_true", help="nodes fetch from a node")
    parser.add_argument("--before", type=Path, metavar="TREE")
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_rates.json", metavar="FILE")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "node":
        event_loop.run(_exchange(args))
        return 0
    if args.part == "one":
        print(json.dumps(event_loop.run(_with_all(args))))
        return 0
    trees = {"before": args.before.absolute()} if args.before else {}
    report = {
        "bench": "layer_rates",
        "commit": commit(),
        "hardware": hardware(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "runs": 1,
        "between_nodes": args.between,
        "nodes": args.nodes,
        "layers": args.layers,
        "megabytes": args.megabytes,
        **{name: _measured(args, tree) for name, tree in (trees | {"now": Path.cwd()}).items()},
    }
    write(args.out, report)
    print(json.dumps(report, indent=1))
    return 0


def _measured(args: argparse.Namespace, tree: Path) -> dict[str, float]:
    sizes = ["--nodes", str(args.nodes), "--layers", str(args.layers), "--megabytes", str(args.megabytes)]
    sizes += ["--between"] * args.between
    # This module of this tree, and all else of the other.
    code = f"import runpy; runpy.run_path({str(Path(__file__).absolute())!r}, run_name='__main__')"
    found = subprocess.run(
        [sys.executable, "-c", code, *sizes, "--part", "one"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))},
        cwd=tree,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(found.stdout))


class _Handler:
    """Takes every layer."""

    def __init__(self, most: int) -> None:
        self._most = most

    async def refusal_for(self, node_id: str) -> None:
        return None

    def upload_permit(self, node_id: str, step: int, unit: str) -> UploadPermit:
        agreed = asyncio.get_running_loop().create_future()
        return UploadPermit(
            node_id=node_id, step=step, unit=unit, most_bytes=self._most, hosts={}, agreed=agreed
        )

    async def store_layer(self, permit: UploadPermit, data: bytes, digest: str = "") -> None:
        # Trees that do not sum the hash as bytes come do it afterwards.
        assert digest or await asyncio.to_thread(hashlib.sha256, data)


@contextlib.asynccontextmanager
async def _coordinator(args: argparse.Namespace, authority: CertificateAuthority) -> AsyncIterator[Told]:
    """Takes layers in; what nodes need to know of it."""
    service: Any = _Handler(args.megabytes << 20)
    settings = CoordinatorSection(listen="127.0.0.1:0")
    async with open_ports(settings, authority, Mock(), lambda front: ControlService(service, front)) as ports:
        yield {"port": ports.port}


@contextlib.asynccontextmanager
async def _holder(args: argparse.Namespace, authority: CertificateAuthority) -> AsyncIterator[Told]:
    """Gives layers out; what nodes need to know of it."""
    identity, size = new_node(authority), args.megabytes << 20
    data = os.urandom(size)
    with tempfile.TemporaryDirectory() as folder:
        cache = SnapshotCache(Path(folder, "cache"), 2 * args.layers * size)
        for number in range(args.layers):
            cache.put(STEP, _unit(number), data)
        sums = SumsKept(Path(folder, "sums"), 0)
        server = LinkServer(identity=identity, run_id=RUN_ID)
        server.layers = LayerServer(LayersHeld(cache, sums, None, lambda: False))
        port = await server.start("127.0.0.1:0")
        yield {"port": port, "holder": identity.node_id, "sha256": hashlib.sha256(data).hexdigest()}
        await server.stop()
        sums.close()


async def _with_all(args: argparse.Namespace) -> dict[str, float]:
    """All nodes' exchanges, as the one process that they deal with sees them."""
    authority = new_authority()
    async with (_holder if args.between else _coordinator)(args, authority) as told:
        late: list[float] = []
        ticking = asyncio.create_task(_tick(late))
        nodes = [await _node(args, told, new_node(authority)) for _ in range(args.nodes)]
        for node in nodes:
            assert node.stdout is not None
            await node.stdout.readline()  # it has made its layers
        late.clear()
        began, spent = time.monotonic(), time.process_time()
        for node in nodes:
            assert node.stdin is not None
            node.stdin.write(b"go\n")
        codes = [await node.wait() for node in nodes]
        wall, spent = time.monotonic() - began, time.process_time() - spent
        ticking.cancel()
    assert codes == [0] * args.nodes, codes
    total = args.nodes * args.layers * (args.megabytes << 20) / 1e9
    return {
        "gigabytes": total,
        "seconds": wall,
        "processor_seconds_a_gb": spent / total,
        "longest_delay_of_the_loop_seconds": max(late),
        "mean_delay_of_the_loop_seconds": sum(late) / len(late),
    }


async def _tick(late: list[float]) -> None:
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        late.append(time.monotonic() - due)


async def _node(args: argparse.Namespace, told: Told, identity: NodeIdentity) -> asyncio.subprocess.Process:
    sizes = ["--layers", str(args.layers), "--megabytes", str(args.megabytes)]
    code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    pipe = asyncio.subprocess.PIPE
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *sizes, "--part", "node"), stdin=pipe, stdout=pipe
    )
    own = {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in asdict(identity).items()
    }
    assert node.stdin is not None
    node.stdin.write(json.dumps({"told": told, "own": own}).encode() + b"\n")
    return node


async def _exchange(args: argparse.Namespace) -> None:
    """One node's."""
    given = json.loads(sys.stdin.readline())
    told, own = given["told"], given["own"]
    identity = NodeIdentity(
        **{name: value.encode() if name.endswith("_pem") else value for name, value in own.items()}
    )
    address, size, turn = f"127.0.0.1:{told['port']}", args.megabytes << 20, asyncio.Semaphore(2)
    closing: CoordinatorClient | LayerPeers
    if "holder" in told:
        peers = closing = LayerPeers(identity)
        holders = (PlacedStage(node_id=told["holder"], address=address),)

        async def exchange(unit: str) -> None:
            place = LayerPlace(step=STEP, unit=unit, bytes=size, sha256=told["sha256"], holders=holders)
            await peers.fetch(place, size, set())

    else:
        client = closing = CoordinatorClient(address, lambda: identity, 60.0)
        file = LayerFile.of(os.urandom(size))

        async def exchange(unit: str) -> None:
            await client.put_layer(STEP, unit, file)

    async def in_turn(number: int) -> None:
        async with turn:
            await exchange(_unit(number))

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(in_turn(number) for number in range(args.layers)))
    await closing.close()


def _unit(number: int) -> str:
    return f"block.{number:04d}"


if __name__ == "__main__":
    sys.exit(main())
