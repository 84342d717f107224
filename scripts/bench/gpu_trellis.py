"""Time `trellis-R` on this GPU: `python -m scripts.bench.gpu_trellis --out FILE`.

The tensors are like a boundary's: low rank plus noise, rows of different sizes, bf16. Times are wall time
around synchronised calls of `pack` and `unpack`, wall time of replays of a graph of `pack`, and kernel time
from a trace, which also counts launches. The copy is device to device, timed in the same run.

`--cpu --out scripts/results/trellis_cpu.json` instead times two threads on a machine without a GPU, because
a GPU machine has more cores than a two-core node. It records the median and minimum wall time, CPU time of
all threads (valid on a busy machine too) and the load before each row.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from node.lab.results import commit, hardware
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.spec import TensorSpec

SHAPES = ((1, 1024, 768), (8, 1024, 768), (2, 4096, 2048), (64, 1024, 768))
CPU_SHAPES = ((1, 256, 256), (1, 1024, 768), (4, 1024, 1024))
THREADS = 2
RATES = ("trellis-3.45", "trellis-4.41")


def boundary(shape: tuple[int, ...], device: str) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    x = normal(*shape[:-1], 24) @ normal(24, shape[-1]) * 0.1 + normal(*shape)
    return (x * (1 + 0.3 * normal(*shape[:-1], 1))).bfloat16()


def graph_of(name: str, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that packs the contents of x at replay, and its output tensor."""
    codec(name).pack(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = codec(name).pack(x)
    return graph, packed


def wall_and_processor(call: Callable[[], object], runs: int) -> dict[str, float]:
    """Seconds of a call on a CPU: the median and the least wall time, and of all threads' processor time."""
    taken, busy = [], []
    for _ in range(runs):
        started, before = time.perf_counter(), time.process_time()
        call()
        busy.append(time.process_time() - before)
        taken.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(taken),
        "least_seconds": min(taken),
        "processor_seconds": statistics.median(busy),
    }


def wall(call: Callable[[], object], runs: int, wait: Callable[[], None]) -> float:
    taken = []
    for _ in range(runs):
        wait()
        started = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def on_device(call: Callable[[], object]) -> dict[str, Any]:
    """Seconds of all kernels, copies and fills of a call, their number, and microseconds by name, the most
    first."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = [event for event in trace.key_averages() if event.device_time_total > 0]
    taken = {event.key: event.device_time_total for event in events}
    return {
        "kernel_seconds": sum(taken.values()) / 1e6,
        "launches": sum(event.count for event in events),
        "kernels_microseconds": dict(sorted(taken.items(), key=lambda item: -item[1])),
    }


def time_one(name: str, x: torch.Tensor, runs: int) -> dict[str, Any]:
    which, spec = codec(name), TensorSpec(x.dtype, tuple(x.shape))
    load = os.getloadavg()[0]
    packed = which.pack(x)
    header = replace(which._header(spec), exponent=int(packed[EXPONENT].view(torch.int32)))
    decoded = which.unpack(packed, spec, header)
    error = (decoded.double() - x.double()).norm() / x.double().norm()
    row: dict[str, Any] = {
        "device": x.device.type,
        "shape": list(x.shape),
        "codec": name,
        "bits_per_element": which.bits_per_element(spec),
        "relative_error": float(f"{error.item():.4g}"),
        "load_before": load,
    }
    ways = {"encode": lambda: which.pack(x), "decode": lambda: which.unpack(packed, spec, header)}
    for way, call in ways.items():
        if x.is_cuda:
            row[f"{way}_seconds"] = wall(call, runs, torch.cuda.synchronize)
        else:
            row |= {f"{way}_{key}": value for key, value in wall_and_processor(call, runs).items()}
    if x.is_cuda:
        graph, again = graph_of(name, x)
        row["encode_graph_seconds"] = wall(graph.replay, runs, torch.cuda.synchronize)
        row["bits_equal"] = torch.equal(again, packed)
        for way, call in ways.items():
            row |= {f"{way}_{key}": value for key, value in on_device(call).items()}
        room = torch.empty_like(x)
        row["copy_seconds"] = wall(lambda: room.copy_(x), runs, torch.cuda.synchronize)
    return row


def printed(row: dict[str, Any]) -> str:
    elements = TensorSpec(torch.bfloat16, tuple(row["shape"])).elements
    return (
        f"{row['device']:4} {row['shape']!s:18} {row['codec']:13} error {row['relative_error']:.4f} "
        f"encode {row['encode_seconds'] * 1e3:7.2f} ms, graph "
        f"{row.get('encode_graph_seconds', 0) * 1e3:.2f}, kernels "
        f"{row.get('encode_kernel_seconds', 0) * 1e3:.2f} in {row.get('encode_launches', 0)} launches, "
        f"decode {row['decode_seconds'] * 1e3:6.2f} ms "
        f"({row.get('decode_kernel_seconds', 0) * 1e3:.2f}), "
        f"{elements / (row['encode_seconds'] + row['decode_seconds']) / 1e6:.0f} M elements/s both ways"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Time trellis-R on this GPU, or two threads.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=9, help="timed calls of each")
    parser.add_argument("--cpu", action="store_true", help="time two threads of this CPU only")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, or --cpu")
    torch.set_num_threads(THREADS)
    report: dict[str, Any] = {
        "commit": commit(),
        "hardware": hardware() if arguments.cpu else torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runs": arguments.runs,
    }
    device, shapes = ("cpu", CPU_SHAPES) if arguments.cpu else ("cuda", SHAPES)
    report["rows"] = [
        time_one(name, boundary(shape, device), arguments.runs) for shape in shapes for name in RATES
    ]
    print(*map(printed, report["rows"]), sep="\n")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("bits_equal", True) for row in report["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
