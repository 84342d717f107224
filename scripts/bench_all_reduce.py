"""All-reduce of e4m3 gradients beside torch's of bf16 and fp32: NCCL over NVLink, gloo over slow links.

    python scripts/bench_all_reduce.py [--gpus 2 4] [--links 10000 1000] [--ranks 2]

`--gpus` times each size on so many GPUs. `--links` puts every rank in a network namespace of its own behind a
`tbf` of so many Mbit/s both ways (needs root and iproute2) and times gloo on the CPU. All ways are timed in
turns in the same processes; a figure is the median of the slowest rank's times.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.fp8 import Fp8Gradient, pack_gradient, unpack_gradient
from node.lab.results import commit
from node.parallel.fp8_all_reduce import Fp8AllReduce

OUT = Path(__file__).resolve().parent / "results" / "all_reduce.json"
GPU_SIZES = [1 << power for power in (14, 17, 20, 23, 25, 27, 28, 29)]
"""Elements: 32 KiB to 1 GiB of bf16."""
LINK_SIZES = [1 << power for power in (17, 20, 22)]
BRIDGE = "thinwire-ar"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the all-reduce of e4m3 gradients.")
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--links", type=int, nargs="*", default=[], help="Mbit/s")
    parser.add_argument("--ranks", type=int, default=2, help="with --links")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank(arguments)
        return 0
    rows = []
    for count in arguments.gpus:
        rows += [{"link": "NVLink", **row} for row in ranks(count, "nccl", [[] for _ in range(count)])]
    for mbit in arguments.links:
        with namespaces(arguments.ranks, mbit) as prefixes:
            rows += [{"link": f"{mbit} Mbit/s", **row} for row in ranks(arguments.ranks, "gloo", prefixes)]
    report = {
        "experiment": "all_reduce",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)
    return 0


@contextlib.contextmanager
def namespaces(count: int, mbit: int) -> Iterator[list[list[str]]]:
    """Ranks' hosts on one switch, shaped both ways; yields what to put before their commands."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def shape(namespace: str, device: str) -> None:
        burst = max(32_000, mbit * 125)  # a millisecond's worth
        words = f"qdisc add dev {device} root tbf rate {mbit}mbit burst {burst} latency 50ms".split()
        subprocess.run(["ip", "netns", "exec", namespace, "tc", *words], check=True)

    names = [f"{BRIDGE}-{index}" for index in range(count)]
    try:
        ip("netns", "add", BRIDGE)
        ip("-n", BRIDGE, "link", "add", "switch", "type", "bridge")
        ip("-n", BRIDGE, "link", "set", "switch", "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            ip(
                "-n",
                BRIDGE,
                "link",
                "add",
                f"to{index}",
                "type",
                "veth",
                "peer",
                "name",
                "net0",
                "netns",
                name,
            )
            ip("-n", BRIDGE, "link", "set", f"to{index}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape(name, "net0")
            shape(BRIDGE, f"to{index}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in (*names, BRIDGE):
            subprocess.run(["ip", "netns", "del", name], check=False)


def ranks(count: int, backend: str, prefixes: list[list[str]]) -> list[dict[str, Any]]:
    """Run one process a rank; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for index, prefix in enumerate(prefixes):
            words = ["--rank", str(index), "--world", str(count), "--meet", folder, "--backend", backend]
            environment = {**os.environ, "OMP_NUM_THREADS": "4"}
            if backend == "gloo":
                environment["GLOO_SOCKET_IFNAME"] = "net0"
            workers.append(subprocess.Popen([*prefix, sys.executable, __file__, *words], env=environment))
        codes = [worker.wait(500) for worker in workers]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
        return rows


def rank(arguments: argparse.Namespace) -> None:
    """One rank: all sizes, all ways."""
    gpu = arguments.backend == "nccl"
    device = torch.device("cuda", arguments.rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        arguments.backend,
        init_method=f"file://{arguments.meet}/meet",
        rank=arguments.rank,
        world_size=arguments.world,
    )
    rows = [measure(elements, device, arguments.world) for elements in (GPU_SIZES if gpu else LINK_SIZES)]
    if arguments.rank == 0:
        Path(arguments.meet, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def measure(elements: int, device: torch.device, world: int) -> dict[str, Any]:
    """Milliseconds of each way at one size, and the error of each against a sum in fp64."""
    generator = torch.Generator(device=device).manual_seed(7 + dist.get_rank())
    values = torch.randn(elements, generator=generator, device=device)
    gradient = Fp8Gradient.zeros(elements, device)
    pack_gradient(values, gradient)
    start = Fp8Gradient(gradient.codes.clone(), gradient.exponents.clone())
    reduce = Fp8AllReduce([gradient])
    half, full = values.bfloat16(), values.clone()

    ways: dict[str, Callable[[], object]] = {
        "fp8": reduce.finish,
        "bf16": lambda: dist.all_reduce(half),
        "fp32": lambda: dist.all_reduce(full),
    }
    truth = values.double()
    dist.all_reduce(truth)

    def reset() -> None:
        gradient.codes.copy_(start.codes)
        gradient.exponents.copy_(start.exponents)
        half.copy_(values)
        full.copy_(values)

    reset()
    for way in ways.values():
        way()
    norm = torch.linalg.vector_norm(truth)
    results = {"fp8": unpack_gradient(gradient), "bf16": half, "fp32": full}
    errors = {
        name: (torch.linalg.vector_norm(found.double() - truth) / norm).item()
        for name, found in results.items()
    }
    rounds = 20 if device.type == "cuda" else 5
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            reset()
            times[name].append(timed(way, device))
    row: dict[str, Any] = {
        "ranks": world,
        "elements": elements,
        "runs": rounds,
        "milliseconds": {name: 1e3 * statistics.median(of) for name, of in times.items()},
        "error_against_fp64": errors,
        "bytes_sent": {
            "fp8": reduce.wire_bytes,
            "bf16": int(2 * (world - 1) / world * 2 * elements),
            "fp32": int(2 * (world - 1) / world * 4 * elements),
        },
    }
    if dist.get_rank() == 0:
        print(row, flush=True)
    return row


def timed(way: Callable[[], object], device: torch.device) -> float:
    """Seconds that the slowest rank took."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took.item())


if __name__ == "__main__":
    sys.exit(main())
