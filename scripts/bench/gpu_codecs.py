"""Bits and speed of the Triton kernels on this GPU: `python -m scripts.bench.gpu_codecs --out PATH`.

First compares every kernel's bits with the CPU reference (`gpu_codecs.parts`); failures are printed and
counted, and the rest continues. Then times the kernels against a copy on the device (`gpu_codecs.timing`),
and tries other launch settings (`gpu_codecs.sweep`).

`--sanitize --out scripts/results/sanitizer.json` instead runs a few small tensors of every codec, `trellis`
too, under compute-sanitizer, and records its findings (`gpu_codecs.sanitizer`).

The checks run in parts, one process each, because compiling takes most of the time."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from kernels.common.dispatch import Launch
from node.lab.results import commit
from scripts.bench.gpu_timing import SHAPES, graph_seconds, time_size
from scripts.checks import sanitizer
from scripts.checks.gpu_codecs import Checks, check_fixed, check_graph, check_tah
from scripts.checks.gpu_kernels import calls, cases, sample
from scripts.checks.sanitizer import SANITIZED, run_sanitized
from wire.codecs.registry import codec
from wire.spec import TensorSpec

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
    """Record what compute-sanitizer reports for the small tensors. Return 1 on any error."""
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


PROGRAM = (sys.executable, "-m", "scripts.bench.gpu_codecs")
PARTS = ("tah-bf16", "tah-fp32", "tah-fp16", "fixed-flat", "fixed-dtypes", "fixed-odd", "graph")


def run_part(part: str) -> Checks:
    checks = Checks()
    few = [Launch(16, 1), Launch(32, 4)]
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    if part.startswith("tah-"):
        variants = [{"launch": few[0], "look_up": True}, {"launch": few[1], "look_up": False}]
        for name, x in cases(dtypes[part[4:]]):
            checks.guard(f"tah {name}", lambda name=name, x=x: check_tah(checks, name, x, 2.0, variants))
            if name in ("mixed", "width 200") and part == "tah-fp32":
                for tau in (0.0, 4.0, float("inf")):
                    checks.guard(
                        f"tah {name} tau {tau}",
                        lambda name=name, x=x, tau=tau: check_tah(checks, name, x, tau, variants[:1]),
                    )
    elif part == "fixed-flat":
        for width in range(2, 11):
            for name, x in cases(torch.bfloat16):
                if x.shape[-1] % 64 == 0 and x.is_contiguous():
                    launches = few if width in (4, 8) else few[:1]
                    checks.guard(
                        name, lambda n=name, x=x, w=width, s=launches: check_fixed(checks, n, x, w, 1.0, s)
                    )
    elif part in ("fixed-dtypes", "fixed-odd"):
        for dtype in dtypes.values():
            for name, x in cases(dtype):
                flat = x.shape[-1] % 64 == 0 and x.is_contiguous()
                if flat == (part == "fixed-dtypes"):
                    for width, constant in ((4, 1.0), (9, 3.0)):
                        checks.guard(
                            name,
                            lambda n=name, x=x, w=width, c=constant: check_fixed(checks, n, x, w, c, few[:1]),
                        )
    elif part == "graph":
        check_graph(checks)
    elif part in SANITIZED:
        run_sanitized(part, checks)
        print(f"{part}: {checks.cases} cases")
    print(f"{part}: {checks.done} checks, {len(checks.failed)} failed", flush=True)
    return checks


def check_all(parts: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Run every part in its own process, in parallel."""
    started = time.monotonic()
    children = {
        part: subprocess.Popen(
            [*PROGRAM, "--part", part],
            env={**os.environ, "OMP_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in parts
    }
    found = {}
    for part, child in children.items():
        try:
            output, _ = child.communicate(timeout=max(1.0, seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            output += f"\nFAILED: {part} took more than {seconds} s"
        failures = output.count("FAILED:")
        if child.returncode not in (0, 1) and not failures:
            failures = 1
        print(f"--- {part} (exit {child.returncode})\n{output[-3500:]}", flush=True)
        found[part] = {
            "failures": failures,
            "exit": child.returncode,
            "last": output.strip().splitlines()[-1:],
        }
    print(f"checks took {time.monotonic() - started:.0f} s", flush=True)
    return found


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
