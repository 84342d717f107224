"""What a link carries after a pause: `python -m scripts.bench.pauses [--out PATH]`.

Two processes in the laboratory's namespaces (`node.lab`), a link between them shaped and delayed. One sends
bursts, as a stage sends a step's tensors, and pauses after each; the time of a burst is from its first send
until the last tensor has arrived. The first burst, in which TCP finds the rate, does not count. Three modes
take turns: links as they are; without the keep-alive bytes of `wire.pacing`; without them, but with
net.ipv4.tcp_slow_start_after_idle at 0, which needs root.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from node.lab import namespaces, tools
from node.lab.network import Network
from node.lab.results import commit, hardware
from node.lab.shape import uniform
from node.lab.topology import lay_out, node_address, node_name
from scripts.report import RESULTS
from tests.support.pki import RUN_ID, new_authority, new_node
from wire import pacing
from wire.identity.credentials import NodeIdentity
from wire.link import Link, LinkSettings, dial_link
from wire.link_server import LinkServer
from wire.spec import Direction, TensorKey

OUT = RESULTS / "pauses.json"
SHAPES = (("300", 100.0), ("1000", 100.0), ("1000", 20.0))
"""Mbit/s, and the round trip in ms."""
PAUSES = (0.4, 1.5)
WAYS = ("as links are", "not kept warm", "not kept warm, no slow start after idle")
TENSORS, BYTES, BURSTS, RUNS = 32, 900_000, 5, 3
"""Tensors of a burst: GPT-2 XL's activations of 1024 tokens in `tah` have about so many bytes."""
PORT = 7700
SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Time bursts over a link after pauses.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.end is not None:
        asyncio.run(end(arguments.end, arguments.plan, json.loads(arguments.plan.read_text("utf-8"))))
    elif arguments.inside is not None:
        arguments.inside.write_text(json.dumps(all_bursts()), encoding="utf-8")
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder, "rows.json")
            again = [sys.executable, "-m", "scripts.bench.pauses", "--inside", str(rows)]
            subprocess.run([tools.tool("unshare"), *namespaces.working_flags(), *again], check=True)
            report = {
                "experiment": "pauses",
                "commit": commit(),
                "hardware": hardware(),
                "kernel": platform.release(),
                "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
                "tensors": TENSORS,
                "bytes": BYTES,
                "runs": RUNS,
                "bursts": BURSTS,
                "rows": json.loads(rows.read_text(encoding="utf-8")),
            }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def all_bursts() -> list[dict[str, Any]]:
    """Measure every shape, pause and mode."""
    namespaces.furnish()
    rows = []
    for mbit, round_trip in SHAPES:
        for pause in PAUSES:
            for way in WAYS:
                found = [bursts(mbit, round_trip, pause, way) for _ in range(RUNS)]
                least = TENSORS * BYTES * 8 / 1e6 / float(mbit) + round_trip / 2e3
                rows.append(
                    {
                        "mbit": float(mbit),
                        "round_trip_ms": round_trip,
                        "pause": pause,
                        "way": way,
                        "least_seconds": least,
                        "seconds": statistics.median(statistics.median(times[1:]) for times, _ in found),
                        "times": [times for times, _ in found],
                        "lost_frames": [lost for _, lost in found],
                    }
                )
                print(rows[-1], flush=True)
    return rows


def bursts(mbit: str, round_trip: float, pause: float, way: str) -> tuple[list[float], float]:
    """Seconds of each burst, including the first, and the number of lost frames."""
    authority = new_authority()
    nodes = [new_node(authority), new_node(authority)]
    topology = lay_out(2, ((0, 1),), topology="interfaces", relay=True, congestion_control="cubic")
    with (
        tempfile.TemporaryDirectory() as folder,
        Network(
            topology,
            method="relay",
            kind="tbf",
            socket_buffer=32 << 20,
            slow_start_after_idle=not way.endswith("no slow start after idle"),
        ) as network,
    ):
        network.shape(uniform(mbit, round_trip, len(topology.wires)))
        for index, node in enumerate(nodes):
            node.save(Path(folder, str(index)))
        plan = Path(folder, "plan.json")
        plan.write_text(json.dumps({"pause": pause, "warm": way == WAYS[0]}), encoding="utf-8")
        words = [sys.executable, "-m", "scripts.bench.pauses", "--plan", str(plan), "--end"]
        ends = [subprocess.Popen([*tools.prefix(node_name(index)), *words, str(index)]) for index in (1, 0)]
        codes = [process.wait(SECONDS) for process in ends]
        if any(codes):
            raise SystemExit(f"the link's ends ended with {codes}")
        relayed = network.relayed()
        lost = relayed["missed"] + relayed["refused"]
        began: list[float] = json.loads(Path(folder, "began.json").read_text(encoding="utf-8"))
        ended: list[float] = json.loads(Path(folder, "ended.json").read_text(encoding="utf-8"))
    return [last - first for first, last in zip(began, ended, strict=True)], lost


async def end(index: int, plan: Path, values: dict[str, Any]) -> None:
    """One end of the link: 0 sends, 1 receives. Identities lie beside the plan; both write wall-clock times
    there."""
    if not values["warm"]:
        pacing.LEAST_ROUND_TRIP = SECONDS
    ours, theirs = (NodeIdentity.load(plan.with_name(str(of))) for of in (index, 1 - index))
    assert ours is not None and theirs is not None, "both were saved"
    settings, address = LinkSettings(), f"{node_address(1)}:{PORT}"
    arrived: asyncio.Queue[TensorKey] = asyncio.Queue()

    def on_tensor(key: TensorKey, _: bytearray) -> None:
        link.release(key)
        arrived.put_nowait(key)

    server: LinkServer | None = None
    link: Link
    if index == 1:
        server = LinkServer(identity=ours, run_id=RUN_ID, settings=settings)
        await server.start(address)
        link = server.expect_peer(
            epoch=1,
            stage=1,
            peer_node_id=theirs.node_id,
            peer_stage=0,
            expect=lambda _: BYTES,
            on_tensor=on_tensor,
        )
    else:
        link = dial_link(
            identity=ours,
            run_id=RUN_ID,
            epoch=1,
            stage=0,
            peer_node_id=theirs.node_id,
            peer_stage=1,
            peer_address=address,
            expect=lambda _: BYTES,
            on_tensor=on_tensor,
            settings=settings,
        )
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        group.create_task(link.run())
        await link.ready(SECONDS)
        if index == 0:
            times = await _send(link, values["pause"])
        else:
            times = [await _receive(arrived) for _ in range(BURSTS)]
            # The last acknowledgements are still queued; the sender closes first.
            await asyncio.sleep(values["pause"] + 1.0)
        name = "began.json" if index == 0 else "ended.json"
        plan.with_name(name).write_text(json.dumps(times), encoding="utf-8")
        await link.close()
    if server is not None:
        await server.stop()


async def _send(link: Link, pause: float) -> list[float]:
    # Until the link's round trip is known.
    await asyncio.sleep(4 * LinkSettings().ping_seconds)
    data, began = os.urandom(BYTES), []
    for burst in range(BURSTS):
        began.append(time.time())
        for microbatch in range(TENSORS):
            link.send(TensorKey(1, burst, microbatch, 0, Direction.ACTIVATION), data)
        while link.queued_bytes:  # noqa: ASYNC110 - acknowledged tensors have no event
            await asyncio.sleep(0.005)
        await asyncio.sleep(pause)
    return began


async def _receive(arrived: asyncio.Queue[TensorKey]) -> float:
    for _ in range(TENSORS):
        await arrived.get()
    return time.time()


if __name__ == "__main__":
    sys.exit(main())
