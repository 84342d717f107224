"""Bits and speed of the Triton kernels on this GPU: `python scripts/bench_gpu_codecs.py --out PATH`.

First every kernel's bits against the CPU's reference (`gpu_codecs.parts`); whatever fails is printed and
counted, and the rest goes on. Then times against a copy on the device (`gpu_codecs.timing`), and other
launches of the kernels (`gpu_codecs.sweep`).

`--sanitize --out scripts/results/sanitizer.json` instead runs a few small tensors of every codec, `trellis`
too, under compute-sanitizer, and records what it said (`gpu_codecs.sanitizer`).
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_codecs import sanitizer
from gpu_codecs.parts import PARTS, check_all, run_part
from gpu_codecs.sanitized import SANITIZED
from gpu_codecs.sweep import sweep
from gpu_codecs.timing import SHAPES, time_size

from node.lab.results import commit

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on this GPU.")
    parser.add_argument("--out", type=Path, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=25, help="timed replays of each, at least 20")
    parser.add_argument("--part", choices=(*PARTS, *SANITIZED), help="only these checks, here")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--sanitize", action="store_true", help="run small tensors under compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=85.0, help="that --sanitize may take")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    if arguments.part:
        return 1 if run_part(arguments.part).failed else 0
    if arguments.out is None or arguments.runs < 20:
        parser.error("--out is needed, and --runs of at least 20")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.sanitize:
        program = sanitizer.find()
        if program is None:
            parser.error("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
        return _sanitize(program, arguments.seconds, arguments.out)

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
    report["checks"] = {} if arguments.no_checks else check_all(PARTS, 150.0)
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
    failures = sum(part["failures"] for part in report["checks"].values())
    failures += sum("failed" in row or row.get("bits_equal") is False for row in report.get("sweep", []))
    failures += sum("failed" in row for row in report["times"])
    print(f"{failures} failures, {report['seconds']:.0f} s, report in {arguments.out}")
    return 1 if failures else 0


def _sanitize(program: str, seconds: float, out: Path) -> int:
    """Record what compute-sanitizer says of the small tensors. 1 if anything is wrong."""
    import triton

    started = time.monotonic()
    report = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **sanitizer.sanitize(program, seconds),
        "seconds": round(time.monotonic() - started, 1),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["parts"]:
        print({key: value for key, value in row.items() if key != "last"}, row.get("last", ""))
    wrong = sum(map(sanitizer.bad, report["parts"]))
    print(f"{wrong} runs with something wrong, {report['seconds']:.0f} s, report in {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
