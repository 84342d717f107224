"""Speed of the Triton kernels on this GPU: `python -m scripts.bench.gpu_codecs --out PATH`.

Times the kernels against a copy on the device (`gpu_timing`), and tries other launch settings, whose bits it
compares with the CPU's. tests/gpu/test_gpu_codecs.py compares the bits of the usual ones.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from kernels.common.dispatch import Launch
from node.lab.results import commit
from scripts.bench.gpu_timing import SHAPES, calls, graph_seconds, sample, time_size
from wire.codecs.registry import codec
from wire.spec import TensorSpec


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the Triton kernels on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=25, help="timed replays of each, at least 20")
    parser.add_argument("--no-sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    if arguments.runs < 20:
        parser.error("a median of fewer than 20 replays says little: use --runs 20 or more")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    import triton

    report: dict[str, Any] = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "runs": arguments.runs,
        "dtype": "bf16",
        "graphs": True,
    }
    started = time.monotonic()
    report["times"] = []
    for size in SHAPES:
        report["times"] += time_size(size, arguments.runs)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if not arguments.no_sweep:
        report["sweep"] = sweep(20, started + 225)
    report["seconds"] = time.monotonic() - started
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    for row in report.get("sweep", []):
        if "microseconds" in row:
            print(
                f"{row['codec']:8} {row['way']} {row['microseconds']:8.1f} us {row['bits_equal']!s:5} "
                f"{row['options']}"
            )
    for row in report["times"]:
        if "failed" not in row:
            print(
                f"{row['size']} {row['codec']:8} {row['way']} {row['seconds'] * 1e6:7.1f} us "
                f"({row['eager_seconds'] * 1e6:.0f} eager) {row['of_copy']:.3f} of copy at "
                f"{row['copy_bytes_per_second'] / 1e12:.2f} TB/s, target {row['target']}: "
                f"{row['kernels_microseconds']}"
            )
    failures = sum("failed" in row or row.get("bits_equal") is False for row in report.get("sweep", []))
    failures += sum("failed" in row for row in report["times"])
    print(f"{failures} failures, {report['seconds']:.0f} s, report in {arguments.out}")
    return 1 if failures else 0


def sweep(runs: int, deadline: float) -> list[dict[str, Any]]:
    """Time other launch settings at the large size, and compare their bits with the CPU's."""
    tensors = [sample(SHAPES["large"], seed).bfloat16() for seed in range(3)]
    host = tensors[0].cpu()
    whole = {name: codec(name).encode(host) for name in ("fixed-4", "tah")}
    wanted = {name: packed[64:].cuda() for name, packed in whole.items()}
    spec = TensorSpec(host.dtype, tuple(host.shape))
    values = {name: codec(name).decode(packed, spec).cuda() for name, packed in whole.items()}
    shapes = [(16, 1), (32, 1), (32, 2), (64, 4), (128, 4)]
    plans: list[tuple[str, str, dict[str, Any]]] = []
    for plan in shapes:
        plans.append(("fixed-4", "encode", {"launch": Launch(*plan)}))
        plans.append(("fixed-4", "decode", {"launch": Launch(*plan)}))
        plans.append(("tah", "encode", {"quantize": Launch(*plan)}))
        plans.append(("tah", "decode", {"launch": Launch(*plan)}))
    for plan in ((64, 2), (64, 4), (128, 4)):
        plans.append(("tah", "encode", {"measure": Launch(*plan)}))
        plans.append(("tah", "encode", {"measure": Launch(*plan), "look_up": False}))
    for plan in ((4096, 8), (2048, 16), (4096, 32), (8192, 32)):
        plans.append(("tah", "encode", {"select": Launch(*plan)}))
    for plan in ((2048, 8), (4096, 16), (4096, 32), (8192, 32)):
        plans.append(("fixed-4", "encode", {"finish": Launch(*plan)}))
    rows = []
    for name, way, options in plans:
        if time.monotonic() > deadline:
            print(f"no time left for {name} {way} {options}", flush=True)
            continue
        row: dict[str, Any] = {"codec": name, "way": way, "options": str(options)}
        try:
            made = [calls(name, x, **{way: options}) for x in tensors]
            for steps, _, _ in made:
                steps[0]()
                steps[1]()
            right = bool(torch.equal(made[0][1], wanted[name]))
            taken = graph_seconds([steps[way == "decode"] for steps, _, _ in made], runs)
            row |= {"microseconds": statistics.median(taken) * 1e6, "bits_equal": right}
            if way == "decode":
                row["bits_equal"] = right and bool(
                    torch.equal(made[0][2].view(torch.int16), values[name].view(torch.int16))
                )
            if not row["bits_equal"]:
                print(f"FAILED: bits differ: {row}", flush=True)
        except Exception:  # record it; the other codecs are still timed
            row["failed"] = traceback.format_exc()[-800:]
            print(f"FAILED: {row}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
