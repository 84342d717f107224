"""The checks in parts, each of which fits a process of its own: compiling takes most of the time."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpu_codecs.check import Checks, check_fixed, check_tah
from gpu_codecs.check_graph import check_graph
from gpu_codecs.sanitized import SANITIZED, run_sanitized
from gpu_codecs.tensors import cases
from kernels.common.dispatch import Launch

PROGRAM = Path(__file__).resolve().parents[1] / "bench_gpu_codecs.py"
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
    """Every part in a process of its own, side by side."""
    started = time.monotonic()
    children = {
        part: subprocess.Popen(
            [sys.executable, str(PROGRAM), "--part", part],
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
