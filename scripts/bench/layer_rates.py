"""What it costs a coordinator to take in layers of a snapshot, and how long its event loop stands still.

    python -m scripts.bench.layer_rates [--before TREE] [--runs 1] [--nodes 2] [--layers 6] [--megabytes 64]

Nodes, each a process, upload layers of random bytes over loopback by the program's own client; the
coordinator hashes and drops them. Processor seconds are those a GB (10^9 bytes) of its process, TLS included,
and those of the nodes. The loop's delay is how late a timer of 5 ms is. `--before` measures another tree in
turn with this one. The same bytes go by gRPC alone, and over bare TLS sockets, each with two streams a node
as the program has. Writes medians to scripts/results/layer_rates.json, or FILE.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc

from node.config.schema import CoordinatorSection
from node.coordinator.control_service import ControlService
from node.coordinator.ports import open_ports
from node.coordinator.snapshot_handler import UploadPermit
from node.lab.results import commit, hardware
from node.stage.coordinator_client import CoordinatorClient
from node.state.manifest import LayerFile
from scripts.report import RESULTS, write
from tests.support.pki import new_authority, new_node
from wire import event_loop
from wire.channels import make_threaded_server
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import NodeIdentity
from wire.tls_socket import mutual_context

TICK_SECONDS = 0.005
UPLOADS, *RAW = "uploads", "grpc", "tls"
STREAMS = 2
"""Of each node."""
PIECE = 1 << 20
METHOD = "/raw/Put"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what uploads of layers cost.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="of each node")
    parser.add_argument("--megabytes", type=int, default=64, help="of each layer")
    parser.add_argument("--before", type=Path, metavar="TREE")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "layer_rates.json", metavar="FILE")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default=UPLOADS, choices=[UPLOADS, *RAW], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "node":
        event_loop.run(_upload(args))
        return 0
    if args.part == "coordinator":
        print(json.dumps(event_loop.run(_take_in(args))))
        return 0
    # Here: the parts, which are processes of their own, do without.
    from scripts.experiments.pipeline_floor import head

    ways = {"now": (Path.cwd(), UPLOADS), **{way: (Path.cwd(), way) for way in RAW}}
    if args.before:
        ways = {"before": (args.before.absolute(), UPLOADS), **ways}
    runs = [{name: _measured(args, *way) for name, way in ways.items()} for _ in range(args.runs)]
    medians = {
        name: {key: statistics.median(run[name][key] for run in runs) for key in runs[0][name]}
        for name in ways
    }
    report = {
        "bench": "layer_rates",
        "commit": commit(),
        **({"before_commit": head(args.before)} if args.before else {}),
        "hardware": hardware(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "runs": args.runs,
        "nodes": args.nodes,
        "layers": args.layers,
        "megabytes": args.megabytes,
        **medians,
    }
    write(args.out, report)
    print(json.dumps(report, indent=1))
    return 0


def _measured(args: argparse.Namespace, tree: Path, way: str) -> dict[str, float]:
    sizes = ["--nodes", str(args.nodes), "--layers", str(args.layers), "--megabytes", str(args.megabytes)]
    # This module of this tree, and all else of the other.
    code = f"import runpy; runpy.run_path({str(Path(__file__).absolute())!r}, run_name='__main__')"
    found = subprocess.run(
        [sys.executable, "-c", code, *sizes, "--part", "coordinator", "--way", way],
        env={**os.environ, "PYTHONPATH": str(tree)},
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

    def upload_permit(
        self, node_id: str, step: int, unit: str, *, weights_alone: bool = False
    ) -> UploadPermit:
        agreed = asyncio.get_running_loop().create_future()
        return UploadPermit(
            node_id=node_id, step=step, unit=unit, most_bytes=self._most, hosts={}, agreed=agreed
        )

    async def weights_ahead(self, permit: UploadPermit) -> bytes:
        raise NotImplementedError

    async def store_layer(self, permit: UploadPermit, data: bytes, digest: str = "") -> None:
        # Trees that do not sum the hash as bytes come do it afterwards.
        assert digest or await asyncio.to_thread(hashlib.sha256, data)


@contextlib.asynccontextmanager
async def _opened(
    args: argparse.Namespace, authority: CertificateAuthority
) -> AsyncIterator[tuple[int, str]]:
    """A port where bytes are taken in and dropped, in the way that is measured; and the name of who does."""
    identity = new_node(authority)
    name = identity.server_name(identity.node_id)
    if args.way == UPLOADS:
        service: Any = _Handler(args.megabytes << 20)
        settings = CoordinatorSection(listen="127.0.0.1:0")
        async with open_ports(
            settings, authority, Mock(), lambda front: ControlService(service, front)
        ) as ports:
            yield ports.port, name
    elif args.way == "grpc":
        put = grpc.stream_unary_rpc_method_handler(lambda pieces, _: str(sum(map(len, pieces))).encode())
        handler = grpc.method_handlers_generic_handler("raw", {"Put": put})
        server = make_threaded_server([handler], 2 * STREAMS * args.nodes, message_bytes=2 * PIECE)
        chain = [(identity.key_pem, identity.certificate_pem)]
        credentials = grpc.ssl_server_credentials(chain, identity.ca_pem, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield port, name
        server.stop(None).wait()
    else:
        with socket.create_server(("127.0.0.1", 0), backlog=STREAMS * args.nodes) as listener:
            takers = [
                threading.Thread(target=_take_tls, args=(listener, _context(identity, server_side=True)))
                for _ in range(STREAMS * args.nodes)
            ]
            for taker in takers:
                taker.start()
            yield listener.getsockname()[1], name
            for taker in takers:
                taker.join()


def _context(identity: NodeIdentity, *, server_side: bool) -> ssl.SSLContext:
    return mutual_context(
        server_side=server_side,
        key_pem=identity.key_pem,
        certificate_pem=identity.certificate_pem,
        ca_pem=identity.ca_pem,
        protocol="raw",
    )


def _take_tls(listener: socket.socket, context: ssl.SSLContext) -> None:
    buffer = bytearray(PIECE)
    with context.wrap_socket(listener.accept()[0], server_side=True) as stream:
        while stream.recv_into(buffer):
            pass


async def _take_in(args: argparse.Namespace) -> dict[str, float]:
    size, authority = args.megabytes << 20, new_authority()
    async with _opened(args, authority) as place:
        late: list[float] = []
        ticking = asyncio.create_task(_tick(late))
        nodes = [await _node(args, place, new_node(authority)) for _ in range(args.nodes)]
        for node in nodes:
            assert node.stdout is not None
            await node.stdout.readline()  # it has made its layers
        late.clear()
        began, spent = time.monotonic(), time.process_time()
        for node in nodes:
            assert node.stdin is not None
            node.stdin.write(b"go\n")
        told = [await node.communicate() for node in nodes]
        codes = [node.returncode for node in nodes]
        wall, spent = time.monotonic() - began, time.process_time() - spent
        ticking.cancel()
    assert codes == [0] * args.nodes, codes
    total = args.nodes * args.layers * size / 1e9
    return {
        "gigabytes": total,
        "seconds": wall,
        "processor_seconds_a_gb": spent / total,
        "nodes_processor_seconds_a_gb": sum(float(out) for out, _ in told) / total,
        "longest_delay_of_the_loop_seconds": max(late),
        "mean_delay_of_the_loop_seconds": sum(late) / len(late),
    }


async def _tick(late: list[float]) -> None:
    while True:
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        late.append(time.monotonic() - due)


async def _node(
    args: argparse.Namespace, place: tuple[int, str], identity: NodeIdentity
) -> asyncio.subprocess.Process:
    sizes = ["--layers", str(args.layers), "--megabytes", str(args.megabytes), "--way", args.way]
    code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    pipe = asyncio.subprocess.PIPE
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *sizes, "--part", "node"), stdin=pipe, stdout=pipe
    )
    fields = asdict(identity).items()
    told = {name: value.decode() if isinstance(value, bytes) else value for name, value in fields}
    assert node.stdin is not None
    node.stdin.write(json.dumps({"place": place, **told}).encode() + b"\n")
    return node


async def _upload(args: argparse.Namespace) -> None:
    told = json.loads(sys.stdin.readline())
    port, name = told.pop("place")
    pems = {name: value.encode() if name.endswith("_pem") else value for name, value in told.items()}
    identity = NodeIdentity(**pems)
    file = LayerFile.of(os.urandom(args.megabytes << 20))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    spent = time.process_time()
    if args.way == UPLOADS:
        await _put_layers(args, port, identity, file)
    else:
        send = _send_grpc if args.way == "grpc" else _send_tls
        await asyncio.gather(
            *(asyncio.to_thread(send, args, (port, name), identity, file.data) for _ in range(STREAMS))
        )
    print(time.process_time() - spent)


async def _put_layers(args: argparse.Namespace, port: int, identity: NodeIdentity, file: LayerFile) -> None:
    client = CoordinatorClient(f"127.0.0.1:{port}", lambda: identity, 60.0)
    turn = asyncio.Semaphore(STREAMS)

    async def put(number: int) -> None:
        async with turn:
            await client.put_layer(1, f"block.{number:04d}", file)

    await asyncio.gather(*(put(number) for number in range(args.layers)))
    await client.close()


def _pieces(args: argparse.Namespace, data: bytes) -> Iterator[memoryview]:
    """What one stream sends."""
    for _ in range(args.layers // STREAMS):
        for start in range(0, len(data), PIECE):
            yield memoryview(data)[start : start + PIECE]


def _send_tls(args: argparse.Namespace, place: tuple[int, str], identity: NodeIdentity, data: bytes) -> None:
    port, name = place
    context = _context(identity, server_side=False)
    with (
        socket.create_connection(("127.0.0.1", port)) as bare,
        context.wrap_socket(bare, server_hostname=name) as stream,
    ):
        for piece in _pieces(args, data):
            stream.sendall(piece)


def _send_grpc(args: argparse.Namespace, place: tuple[int, str], identity: NodeIdentity, data: bytes) -> None:
    port, name = place
    credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.certificate_pem)
    options = [("grpc.ssl_target_name_override", name)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        put = channel.stream_unary(METHOD)
        taken = put(bytes(piece) for piece in _pieces(args, data))
    assert int(taken) == args.layers // STREAMS * len(data)


if __name__ == "__main__":
    sys.exit(main())
