"""Check and time `trellis-R` on this GPU: `python scripts/bench_gpu_trellis.py --out FILE`.

Tensors like a boundary's: of low rank plus noise, rows of different sizes, bf16. Bytes and values are
compared with the CPU's for the smallest. Times are wall time around synchronised calls of `pack` and
`unpack`, whose waits for the device they include, and the time of the kernels alone, from a trace. The copy
is device to device, timed in the same run; the CPU's times are of 2 threads.
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

from node.lab.results import commit
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((1, 1024, 768), (8, 1024, 768), (2, 4096, 2048), (64, 1024, 768))
CPU_SHAPES = ((1, 1024, 768), (4, 1024, 1024))
RATES = ("trellis-3.45", "trellis-4.41")


def boundary(shape: tuple[int, ...], device: str) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    x = normal(*shape[:-1], 24) @ normal(24, shape[-1]) * 0.1 + normal(*shape)
    return (x * (1 + 0.3 * normal(*shape[:-1], 1))).bfloat16()


def wall(call: Callable[[], object], runs: int, wait: Callable[[], None]) -> float:
    taken = []
    for _ in range(runs):
        wait()
        started = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def kernel_seconds(call: Callable[[], object]) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in trace.key_averages()) / 1e6


def time_one(name: str, x: torch.Tensor, runs: int) -> dict[str, Any]:
    which, spec = codec(name), TensorSpec(x.dtype, tuple(x.shape))
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
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
        "encode_seconds": wall(lambda: which.pack(x), runs, wait),
        "decode_seconds": wall(lambda: which.unpack(packed, spec, header), runs, wait),
        "load_before": os.getloadavg()[0],
    }
    if x.is_cuda:
        row["encode_kernel_seconds"] = kernel_seconds(lambda: which.pack(x))
        row["decode_kernel_seconds"] = kernel_seconds(lambda: which.unpack(packed, spec, header))
        room = torch.empty_like(x)
        row["copy_seconds"] = wall(lambda: room.copy_(x), runs, wait)
    if x.is_cuda and x.numel() < 1 << 20:
        host = x.cpu()
        expected = which.encode(host)
        row["bits_equal"] = torch.equal(which.encode(x).cpu(), expected) and torch.equal(
            decoded.cpu(), which.decode(expected, spec)
        )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time trellis-R on this GPU and this CPU.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=9, help="timed calls of each")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    rows = [
        time_one(name, boundary(shape, device), arguments.runs)
        for device, shapes in (("cuda", SHAPES), ("cpu", CPU_SHAPES))
        for shape in shapes
        for name in RATES
    ]
    for row in rows:
        elements = TensorSpec(torch.bfloat16, tuple(row["shape"])).elements
        print(
            f"{row['device']:4} {row['shape']!s:18} {row['codec']:13} error {row['relative_error']:.4f} "
            f"encode {row['encode_seconds'] * 1e3:7.2f} ms ({row.get('encode_kernel_seconds', 0) * 1e3:.2f}) "
            f"decode {row['decode_seconds'] * 1e3:6.2f} ms ({row.get('decode_kernel_seconds', 0) * 1e3:.2f}) "
            f"{elements / (row['encode_seconds'] + row['decode_seconds']) / 1e6:.0f} M elements/s both ways, "
            f"bits equal: {row.get('bits_equal', 'not compared')}"
        )
    report = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "threads": 2,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runs": arguments.runs,
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("bits_equal", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
