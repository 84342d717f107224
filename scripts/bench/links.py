"""What a link costs: `python -m scripts.bench.links [--before CHECKOUT] [--out PATH]`.

Two processes on loopback, joined by a real link with mutual TLS, send each other tensors in both directions
at once. Each reports its bytes and the processor seconds of its process, all threads together, and of some of
them. A GB counts once where it is sent and once where it is received. `--before` measures another checkout in
turn with this one, so that a busy machine slows both alike.
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
from pathlib import Path
from typing import Any

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
    parser.add_argument("--end", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.end is not None:
        from wire import event_loop

        event_loop.run(end(Path(arguments.end), arguments.seconds, arguments.rate))
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


def measure(checkout: Path, seconds: float, rate: float) -> dict[str, float]:
    """Both ends of a link of this checkout's program, for so many seconds."""
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
                [*command, "--rate", str(rate), "--end", str(Path(folder, str(number)))],
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


async def end(folder: Path, seconds: float, rate: float) -> None:
    """One end, in a process of its own."""
    from wire.identity.credentials import NodeIdentity
    from wire.link import LinkSettings, dial_link
    from wire.link_server import LinkServer
    from wire.pacing import Pacer
    from wire.spec import Direction, TensorKey

    keys = {name: (folder / name).read_bytes() for name in ("key_pem", "certificate_pem", "ca_pem")}
    node_id, peer = ((folder / name).read_text(encoding="ascii") for name in ("node", "peer"))
    identity = NodeIdentity(node_id=node_id, run_id=RUN, **keys)
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
        address.with_suffix(".new").write_text(f"127.0.0.1:{port}", encoding="ascii")
        address.with_suffix(".new").rename(address)
    else:
        while not address.exists():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.02)
        where = address.read_text(encoding="ascii")
        link = dial_link(identity=identity, run_id=RUN, peer_address=where, **common)
    sent = 0

    def send() -> None:
        nonlocal sent
        # Steps grow, so that keys are new and old ones are forgotten.
        key = TensorKey(EPOCH, sent // 1000, sent % 1000, 0, Direction.ACTIVATION)
        sent += 1
        link.send(key, payload, SIZE)
        link.after_delivery(send)

    running = asyncio.create_task(link.run())
    await link.ready(30)
    for _ in range(AHEAD):
        send()
    await asyncio.sleep(WARM_SECONDS)

    figures, processor, threads, began = link.figures, time.process_time(), of_threads(), time.monotonic()
    await asyncio.sleep(seconds)
    took, newer = time.monotonic() - began, link.figures
    report = {
        "seconds": took,
        "processor": time.process_time() - processor,
        "threads": {name: spent - threads.get(name, 0.0) for name, spent in of_threads().items()},
        "sent": newer.bytes - figures.bytes,
        "received": newer.bytes_received - figures.bytes_received,
    }
    print(json.dumps(report), flush=True)
    await asyncio.sleep(0.5)  # the other end measures still
    running.cancel()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
