"""All-reduce of e4m3 gradients beside torch's of bf16 and fp32: NCCL over NVLink, gloo over slow links.

    python -m scripts.bench.all_reduce --gpus 2 4
    python -m scripts.bench.all_reduce --links 1000 10000 --ranks 2 4 [--on-gpus]

`--gpus` times each size on that many GPUs. `--links` runs every rank in a network namespace of the laboratory
(`node.lab`), shaped to that many Mbit/s both ways. Ranks compute on CPUs, or with `--on-gpus` on one GPU
each, over NCCL's sockets. Each mode writes its own results.

All methods take turns in the same processes, and their results are checked. A figure is the median of the
slowest rank's times. CPU time covers all threads of a rank. The shaper counts the bytes.

With `--gpus`, torchft's `allreduce_quantized` of bf16 is timed too if torchft and Triton are installed.
Its time includes quantizing and dequantizing, which e4m3 gradients do not need.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.fp8.reference import Fp8Gradient, pack_gradient, unpack_gradient
from node.lab import namespaces, tools
from node.lab.network import Network
from node.lab.results import commit, hardware
from node.lab.shape import uniform
from node.lab.topology import LAB, Device, lay_out, node_address, node_name
from node.stage.fp8_all_reduce import Fp8AllReduce
from scripts.bench.torchft_all_reduce import Torchft, version
from scripts.report import RESULTS

GPU_SIZES = [1 << power for power in (14, 17, 20, 23, 25, 27, 28, 29)]
"""Elements: 32 KiB to 1 GiB of bf16."""
LINK_SIZES = [1 << power for power in (14, 17, 20, 22, 24)]
INTERFACE = "interface"
"""A node's device in the laboratory."""
SOCKET_BUFFER = 16 << 20
WAYS = ("fp8", "bf16", "fp32")
RANK_SECONDS = 900
PROGRAM = (sys.executable, "-m", "scripts.bench.all_reduce")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the all-reduce of e4m3 gradients.")
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--links", type=int, nargs="*", default=[], help="Mbit/s")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2], help="with --links")
    parser.add_argument("--on-gpus", action="store_true", help="with --links: a GPU a rank, NCCL's sockets")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="elements")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--out", type=Path, help="of one part")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank(arguments)
    elif arguments.inside is not None:
        arguments.inside.write_text(json.dumps(linked(arguments)), encoding="utf-8")
    elif not (arguments.gpus or arguments.links):
        parser.error("nothing to time: give --gpus or --links")
    else:
        if arguments.gpus:
            rows: list[dict[str, Any]] = []
            for count in arguments.gpus:
                found = ranks(arguments, [[]] * count, backend="nccl")
                rows += [{"link": "NVLink", **row} for row in found]
            versions = {"torchft": rival_version(rows)}
            report(arguments.out or RESULTS / "all_reduce.json", rows, on_gpus=True, more=versions)
        if arguments.links:
            rows = [row for count in arguments.ranks for row in in_the_laboratory(count)]
            report(arguments.out or RESULTS / "all_reduce_links.json", rows, on_gpus=arguments.on_gpus)
    return 0


def report(
    path: Path, rows: list[dict[str, Any]], *, on_gpus: bool, more: dict[str, str] | None = None
) -> None:
    values = {
        "experiment": path.stem,
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if on_gpus else hardware(),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **(more or {})},
        "rows": rows,
    }
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def rival_version(rows: list[dict[str, Any]]) -> str:
    """torchft's version, or why it was not measured."""
    if not rows or any("torchft" in row["milliseconds"] for row in rows):
        return version()
    return f"{version()}, no figures: {rows[0]['torchft']}"


def in_the_laboratory(count: int) -> list[dict[str, Any]]:
    """Rerun for `count` ranks in private namespaces, which end with the process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        again = [*PROGRAM, *sys.argv[1:], "--ranks", str(count), "--inside", str(out)]
        subprocess.run([tools.tool("unshare"), *namespaces.working_flags(), *again], check=True)
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return rows


def linked(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one number of ranks at every rate."""
    namespaces.furnish()
    rows: list[dict[str, Any]] = []
    (count,) = arguments.ranks
    topology = lay_out(count, [], topology="interfaces", relay=False)
    with Network(topology, method="none", kind="tbf", socket_buffer=SOCKET_BUFFER) as network:
        for index in range(count):
            # gloo and NCCL take the address of the device that they are configured to use.
            tools.ip(node_name(index), "address", "add", f"{node_address(index)}/32", "dev", INTERFACE)
        for mbit in arguments.links:
            network.shape(uniform(str(mbit), 0.0, count))
            prefixes = [tools.prefix(node_name(index)) for index in range(count)]
            found = ranks(arguments, prefixes, backend="nccl" if arguments.on_gpus else "gloo")
            rows += [{"link": f"{mbit} Mbit/s", "mbit": mbit, **row} for row in found]
    return rows


def ranks(
    arguments: argparse.Namespace, prefixes: Sequence[Sequence[str]], *, backend: str
) -> list[dict[str, Any]]:
    """Run one process per rank; return rank 0's results."""
    count = len(prefixes)
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for index, prefix in enumerate(prefixes):
            words = ["--rank", str(index), "--world", str(count), "--meet", folder, "--backend", backend]
            words += ["--runs", str(arguments.runs), "--sizes", *map(str, arguments.sizes)]
            threads = max(1, (os.cpu_count() or 1) // count)
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            if prefix:
                environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
                # Use the network even if the GPUs can reach each other directly.
                environment |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
            workers.append(subprocess.Popen([*prefix, *PROGRAM, *words], env=environment))
        codes = [worker.wait(RANK_SECONDS) for worker in workers]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
        return rows


def rank(arguments: argparse.Namespace) -> None:
    """Run one rank: all sizes, all methods."""
    gpu = arguments.backend == "nccl"
    shaped = "GLOO_SOCKET_IFNAME" in os.environ
    device = torch.device("cuda", arguments.rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        arguments.backend,
        init_method=f"file://{arguments.meet}/meet",
        rank=arguments.rank,
        world_size=arguments.world,
    )
    sizes = arguments.sizes or (LINK_SIZES if shaped else GPU_SIZES)
    runs = arguments.runs or (7 if shaped else 20)
    rival = Torchft(device) if gpu and not shaped else None
    rows = [measure(elements, device, runs, shaped=shaped, rival=rival) for elements in sizes]
    if arguments.rank == 0:
        Path(arguments.meet, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def measure(
    elements: int, device: torch.device, runs: int, *, shaped: bool, rival: Torchft | None
) -> dict[str, Any]:
    """Milliseconds of each method at one size, and its error against a sum in fp64."""
    world = dist.get_world_size()
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
        if "torchft" in ways and rival is not None:
            rival.tensor.copy_(values.view_as(rival.tensor))

    reset()
    for way in ways.values():
        way()
    norm = torch.linalg.vector_norm(truth)
    results = {"fp8": unpack_gradient(gradient), "bf16": half, "fp32": full}
    if rival is not None and rival.prepare(values):
        results["torchft"] = rival.tensor.view(-1)
    errors = {
        name: (torch.linalg.vector_norm(found.double() - truth) / norm).item()
        for name, found in results.items()
    }
    if rival is not None and "torchft" in errors and rival.check(errors["torchft"]):
        ways["torchft"] = rival
    # Compare with each method's own input: the rounding of the input to bf16 or fp8 does not count.
    given = unpack_gradient(start).double()
    dist.all_reduce(given)
    of_sum = (
        torch.linalg.vector_norm(results["fp8"].double() - given) / torch.linalg.vector_norm(given)
    ).item()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    sent: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in list(ways.items()):
            reset()
            before = tools.sent_bytes(Device(LAB, INTERFACE)) if shaped else 0
            times[name].append(timed(way, device))
            if shaped:
                sent[name].append(tools.sent_bytes(Device(LAB, INTERFACE)) - before)
        if "torchft" in ways and rival is not None and not rival.agree():
            for of in (ways, times):
                of.pop("torchft")
    if rival is not None and rival.reason:
        errors.pop("torchft", None)
    row: dict[str, Any] = {
        "ranks": world,
        "elements": elements,
        "runs": runs,
        "milliseconds": {name: 1e3 * statistics.median(t for t, _ in of) for name, of in times.items()},
        "processor_milliseconds": {
            name: 1e3 * statistics.median(t for _, t in of) for name, of in times.items()
        },
        "error_against_fp64": errors,
        "error_of_fp8_sum": of_sum,
        "bytes_sent": {
            "fp8": reduce.wire_bytes,
            "bf16": int(2 * (world - 1) / world * 2 * elements),
            "fp32": int(2 * (world - 1) / world * 4 * elements),
        },
    }
    if rival is not None:
        if rival.reason:
            row["torchft"] = rival.reason
        else:
            row["bytes_sent"]["torchft"] = rival.wire_bytes
    if shaped:
        row["bytes_on_the_wire"] = {name: int(statistics.median(of)) for name, of in sent.items()}
    if dist.get_rank() == 0:
        print(row, flush=True)
    return row


def timed(way: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Wall seconds of the slowest rank and CPU seconds of the busiest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    busy, began = time.process_time(), time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = [time.perf_counter() - began, time.process_time() - busy]
    took = torch.tensor(spent, dtype=torch.float64, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    seconds, processor = took.tolist()
    return seconds, processor


if __name__ == "__main__":
    sys.exit(main())
