"""What a link costs: `python -m scripts.bench.links [--before CHECKOUT] [--out PATH]`.

Two processes on loopback, joined by a real link with mutual TLS, send each other tensors in both directions
at once. Each reports its bytes and the processor seconds of its process, all threads together, and of some of
them. A GB counts once where it is sent and once where it is received. `--before` measures another checkout in
turn with this one, so that a busy machine slows both alike. `--floor` measures gRPC alone in turn with them:
the same sockets and TLS without a front, which carry messages as long as the link's frames were.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc

ROOT = Path(__file__).resolve().parents[2]
SIZE = 8 * 1024 * 1024
"""Bytes of a tensor."""
AHEAD = 3
"""Tensors that are queued at a time, each way."""
WARM_SECONDS, SECONDS, RUNS = 1.0, 4.0, 3
RUN, EPOCH = "test-run", 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure processor seconds a GB and the rate of a link.")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure this one too, in turn")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s that each end may send; 0: no limit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--floor", action="store_true", help="measure gRPC without links, too")
    parser.add_argument("--end", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--message", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.end is not None:
        from wire import event_loop

        folder, seconds = Path(arguments.end), arguments.seconds
        if arguments.message:
            event_loop.run(bare_end(folder, seconds, arguments.message))
        event_loop.run(end(folder, seconds, arguments.rate))
        return 0
    # Here: the ends import another checkout's modules.
    from node.lab.results import commit, hardware
    from scripts.experiments.pipeline_floor import head
    from scripts.report import RESULTS, version, write

    checkouts = {"now": ROOT, **({"before": arguments.before.resolve()} if arguments.before else {})}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(arguments.runs):
        for name, checkout in checkouts.items():
            runs[name].append(measure(checkout, arguments.seconds, arguments.rate))
            print(name, json.dumps(runs[name][-1]), flush=True)
        if arguments.floor:
            message = int(runs["now"][-1]["frame_bytes"])
            runs.setdefault("grpc", []).append(measure(ROOT, arguments.seconds, arguments.rate, message))
            print("grpc", json.dumps(runs["grpc"][-1]), flush=True)
    report: dict[str, Any] = {
        "bench": "links",
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "grpcio": version("grpcio")},
        "settings": {"tensor_bytes": SIZE, "seconds": arguments.seconds, "rate_mbit": arguments.rate},
        "runs": runs,
        "median": {
            name: {key: statistics.median(run[key] for run in found) for key in found[0]}
            for name, found in runs.items()
        },
    }
    if "before" in runs:
        after, before = report["median"]["now"], report["median"]["before"]
        report["before"] = head(checkouts["before"])
        report["ratio"] = {key: after[key] / before[key] for key in after if before[key]}
    print(json.dumps(report["median"] | {"ratio": report.get("ratio")}, indent=1))
    write(arguments.out or RESULTS / "links.json", report)
    return 0


def measure(checkout: Path, seconds: float, rate: float, message: int = 0) -> dict[str, float]:
    """Both ends of a link of this checkout's program, for so many seconds; of gRPC alone with messages of
    so many bytes, if given."""
    from tests.support.pki import new_authority, new_node

    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        authority = new_authority(RUN)
        nodes = [new_node(authority) for _ in range(2)]
        for number, node in enumerate(nodes):
            place = Path(folder, str(number))
            place.mkdir()
            (place / "peer").write_text(nodes[1 - number].node_id, encoding="ascii")
            (place / "node").write_text(node.node_id, encoding="ascii")
            for name in ("key_pem", "certificate_pem", "ca_pem"):
                (place / name).write_bytes(getattr(node, name))
        command = [sys.executable, str(Path(__file__).resolve()), "--seconds", str(seconds)]
        children = [
            subprocess.Popen(
                [
                    *command,
                    *("--rate", str(rate), "--message", str(message)),
                    *("--end", str(Path(folder, str(number)))),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        try:
            found = [json.loads(child.communicate(timeout=60 + 3 * seconds)[0]) for child in children]
        finally:
            for child in children:
                child.kill()
    moved = sum(one["sent"] + one["received"] for one in found)
    return {
        "processor_seconds_a_gb": sum(one["processor"] for one in found) * 1e9 / moved,
        "frame_bytes": moved / sum(one["frames"] for one in found),
        "mbit_each_way": 8e-6 * moved / 4 / (sum(one["seconds"] for one in found) / 2),
        **{
            f"{name}_seconds_a_gb": sum(one["threads"].get(name, 0.0) for one in found) * 1e9 / moved
            for name in ("MainThread", "carrier", "event_engine")
        },
    }


def of_threads() -> dict[str, float]:
    """Processor seconds of this process's threads so far, by name; Linux."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, _, numbers = (task / "stat").read_text(encoding="ascii").partition("(")[2].rpartition(")")
            user, system = map(int, numbers.split()[11:13])
            name = names.get(int(task.name), name)
            found[name] = found.get(name, 0.0) + (user + system) / os.sysconf("SC_CLK_TCK")
    return found


def identity_of(folder: Path) -> Any:
    from wire.identity.credentials import NodeIdentity

    keys = {name: (folder / name).read_bytes() for name in ("key_pem", "certificate_pem", "ca_pem")}
    return NodeIdentity(node_id=(folder / "node").read_text(encoding="ascii"), run_id=RUN, **keys)


async def where(address: Path) -> str:
    """The address that the other end writes."""
    while not (there := written(address)):  # noqa: ASYNC110 - by another process
        await asyncio.sleep(0.02)
    return there


def written(address: Path) -> str:
    return address.read_text(encoding="ascii") if address.exists() else ""


def listens(address: Path, port: int) -> None:
    address.with_suffix(".new").write_text(f"127.0.0.1:{port}", encoding="ascii")
    address.with_suffix(".new").rename(address)


async def report(seconds: float, figures: Callable[[], tuple[int, int, int]]) -> NoReturn:
    """Say what was sent, received and in how many frames, and what it took; then end the process."""
    await asyncio.sleep(WARM_SECONDS)
    before, processor, threads, began = figures(), time.process_time(), of_threads(), time.monotonic()
    await asyncio.sleep(seconds)
    took, after = time.monotonic() - began, figures()
    sent, received, frames = (b - a for a, b in zip(before, after, strict=True))
    found = {
        "seconds": took,
        "processor": time.process_time() - processor,
        "threads": {name: spent - threads.get(name, 0.0) for name, spent in of_threads().items()},
        "sent": sent,
        "received": received,
        "frames": frames,
    }
    print(json.dumps(found), flush=True)
    await asyncio.sleep(0.5)  # the other end measures still
    os._exit(0)


async def bare_end(folder: Path, seconds: float, size: int) -> None:
    """One end of a stream of gRPC, with the options of links and nothing of them."""
    from wire.channels import BULK_MESSAGE_BYTES, BulkChannel, make_threaded_server
    from wire.identity.credentials import mutual_tls
    from wire.link import BULK_METHOD, LinkSettings

    identity, address = identity_of(folder), folder.parent / "address"
    unread, payload = LinkSettings().unread_bytes, memoryview(os.urandom(size))
    sent = received = 0

    def send() -> Iterator[bytes]:
        nonlocal sent
        while True:
            yield bytes(payload)
            sent += 1

    def read(messages: Iterator[bytes]) -> None:
        nonlocal received
        with contextlib.suppress(grpc.RpcError):  # the other end was faster
            for _ in messages:
                received += 1

    def answer(messages: Iterator[bytes], _: object) -> Iterator[bytes]:
        threading.Thread(target=read, args=(messages,), daemon=True).start()
        yield from send()

    class Handler(grpc.GenericRpcHandler):
        def service(self, _: object) -> Any:
            return grpc.stream_stream_rpc_method_handler(answer)

    if folder.name == "1":
        most = {"message_bytes": BULK_MESSAGE_BYTES, "unread_bytes": unread}
        server = make_threaded_server([Handler()], 2, **most)
        keys = (identity.key_pem, identity.certificate_pem)
        listens(address, server.add_secure_port("127.0.0.1:0", mutual_tls(lambda: keys, identity.ca_pem)))
        server.start()
    else:
        name = identity.server_name((folder / "peer").read_text(encoding="ascii"))
        dialled = BulkChannel(
            await where(address), identity=identity, server_name=name, unread_bytes=unread
        ).channel
        messages = dialled.stream_stream(BULK_METHOD)(send())
        threading.Thread(target=read, args=(messages,), daemon=True).start()
    while not received:  # noqa: ASYNC110 - counted by a thread
        await asyncio.sleep(0.02)
    await report(seconds, lambda: (sent * size, received * size, sent + received))


async def end(folder: Path, seconds: float, rate: float) -> None:
    """One end, in a process of its own."""
    from wire.link import LinkSettings, dial_link
    from wire.link_server import LinkServer
    from wire.pacing import Pacer
    from wire.spec import Direction, TensorKey

    identity, peer = identity_of(folder), (folder / "peer").read_text(encoding="ascii")
    stage, address = int(folder.name), folder.parent / "address"
    settings = LinkSettings(pacer=Pacer(rate * 1e6 / 8) if rate else None)
    payload = os.urandom(SIZE)

    def arrived(key: TensorKey, buffer: bytearray) -> None:
        link.release(key)

    expect: Any = lambda key: SIZE  # noqa: E731
    ends = {"epoch": EPOCH, "stage": stage, "peer_node_id": peer, "peer_stage": 1 - stage}
    common: Any = {**ends, "expect": expect, "on_tensor": arrived, "settings": settings}
    server = LinkServer(identity=identity, run_id=RUN, settings=settings)
    link: Any
    if stage == 1:
        port = await server.start("127.0.0.1:0")
        link = server.expect_peer(**common)
        listens(address, port)
    else:
        there = await where(address)
        link = dial_link(identity=identity, run_id=RUN, peer_address=there, **common)
    sent = 0

    def send() -> None:
        nonlocal sent
        # Steps grow, so that keys are new and old ones are forgotten.
        key = TensorKey(EPOCH, sent // 1000, sent % 1000, 0, Direction.ACTIVATION)
        sent += 1
        link.send(key, payload, SIZE)
        link.after_delivery(send)

    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())
        await link.ready(30)
        for _ in range(AHEAD):
            send()
        await report(seconds, lambda: (link.figures.bytes, link.figures.bytes_received, sum(link.frames)))


if __name__ == "__main__":
    sys.exit(main())
