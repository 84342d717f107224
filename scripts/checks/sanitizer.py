"""Run the parts of `gpu_codecs.sanitized` under compute-sanitizer in parallel and summarize its output.

Every part first runs without the sanitizer, which compiles its kernels and checks their bits, then under
memcheck, then, if there is time, under racecheck.

A sanitizer is slow, so the tensors are few and small, but take every path.

Results are compared with the CPU's bit for bit, in buffers between poisoned guards. Scratch buffers of
`trellis` have guards too, unless every tensor is an allocation of its own, whose ends the sanitizer knows.
Each of the three parts runs in a process of its own.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kernels.common.dispatch import Launch
from scripts.checks.gpu_codecs import Checks, check_fixed, check_tah
from scripts.checks.gpu_kernels import Guarded, GuardedScratch, bits, cases, on_gpu
from wire.codecs.header import EXPONENT, HEADER_BYTES
from wire.codecs.registry import codec
from wire.codecs.trellis import TrellisCodec
from wire.spec import TensorSpec

SANITIZED = ("sanitized-tah", "sanitized-fixed", "sanitized-trellis")
OWN_ALLOCATIONS = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Environment variable that switches torch's caching allocator off: every tensor is its own allocation."""
LAUNCHES = (Launch(16, 1), Launch(32, 4))
_PATHS = ("mixed", "outliers", "width 200", "every other row", "wide", "zeros")
# Another dtype compiles all kernels again, so it takes fewer paths.
_SHORT = ("mixed", "width 200", "vector", "fp16's range")


def run_sanitized(part: str, checks: Checks) -> None:
    """Run one of `SANITIZED`."""
    if part == "sanitized-trellis":
        for name, x, rate in trellis_cases():
            check_trellis(checks, name, x, rate)
        return
    for dtype, paths, launches, widths in (
        (torch.bfloat16, _PATHS, LAUNCHES, (4, 8, 10)),
        (torch.float32, _SHORT, LAUNCHES[:1], (9,)),
        (torch.float16, _SHORT, LAUNCHES[1:], (3,)),
    ):
        for name, x in cases(dtype):
            if name not in paths:
                continue
            if part == "sanitized-tah":
                variants: list[dict[str, Any]] = [{"launch": launch} for launch in launches]
                check_tah(checks, name, x, 2.0, variants)
            else:
                for width in widths:
                    check_fixed(checks, name, x, width, 1.0, list(launches[:1]))


def trellis_cases() -> Iterator[tuple[str, torch.Tensor, str]]:
    """Name, tensor on the CPU and codec: odd shapes, all dtypes, with and without a prediction, one lane, two
    groups, escapes, zeros."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    low_rank = normal(141, 5) @ normal(5, 133) + 0.05 * normal(141, 133)
    far = normal(3, 41, 67)
    far[..., 17] = 3000
    far[1, 7, 9] = -1e6
    yield "low rank", low_rank, "trellis-4.41"
    yield "low rank", low_rank.bfloat16(), "trellis-3.45"
    yield "outliers", far, "trellis-2"
    yield "odd", normal(33, 31).bfloat16(), "trellis-4.41"
    yield "a vector", normal(77).half(), "trellis-8.125"
    yield "a column", normal(5003, 1).half(), "trellis-3.45"
    yield "one element", torch.tensor([-3.25]), "trellis-10"
    yield "two groups", normal(2, 271, 131).bfloat16(), "trellis-3.45"
    yield "not contiguous", normal(40, 30, 9).transpose(0, 2)[:, :, ::3], "trellis-4.41"
    yield "zeros", torch.zeros(5, 64, dtype=torch.bfloat16), "trellis-4.41"
    yield "subnormal", normal(13, 64) * 1e-43, "trellis-4.41"


def guarded(device: str) -> AbstractContextManager[GuardedScratch | None]:
    """Guards around scratch buffers, if the sanitizer cannot see a write behind them."""
    return nullcontext() if os.environ.get(OWN_ALLOCATIONS) else GuardedScratch(device)


def check_trellis(checks: Checks, name: str, x: torch.Tensor, rate: str, device: str = "cuda") -> None:
    """Encode and decode x of the CPU on `device`; check for the CPU's bits and for writes outside."""
    which, spec = codec(rate), TensorSpec(x.dtype, tuple(x.shape))
    assert isinstance(which, TrellisCodec)
    expected = which.encode(x)
    decoded = which.decode(expected, spec)
    what = f"{rate} {name} {x.dtype}"

    def work() -> None:
        there = on_gpu(x) if device == "cuda" else x
        made = Guarded(expected.numel() - HEADER_BYTES, device)
        with guarded(device) as scratch:
            exponent = int(which._pack(there, made.payload))
        wanted = int(expected[EXPONENT].view(torch.int32))
        checks.that(exponent == wanted, f"{what}: exponent {exponent}, not {wanted}")
        checks.that(torch.equal(made.payload.cpu(), expected[HEADER_BYTES:]), f"{what}: encode differs")
        checks.that(made.intact(), f"{what}: encode wrote outside")
        if scratch is not None:
            checks.that(scratch.made > 0 and scratch.intact(), f"{what}: encode wrote outside its scratch")
        target = Guarded(x.numel() * x.element_size(), device)
        out = target.payload.view(x.dtype).view(x.shape)
        with guarded(device) as scratch:
            which._unpack(expected[HEADER_BYTES:].to(device), out, exponent)
        checks.that(torch.equal(bits(out), bits(decoded)), f"{what}: decode differs")
        checks.that(target.intact(), f"{what}: decode wrote outside")
        if scratch is not None:
            checks.that(scratch.intact(), f"{what}: decode wrote outside its scratch")

    checks.guard(what, work)


PROGRAM = (sys.executable, "-m", "scripts.bench.gpu_codecs")
PLACES = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
MEMCHECK, RACECHECK = "memcheck", "racecheck"
_OPTIONS = {
    # Check this process only, not the compiler that Triton starts.
    "--target-processes": "application-only",
    # Space between allocations, so that a write behind one does not land in the next.
    "--padding": "512",
}
_CASES = re.compile(r"^sanitized-\w+: (\d+) cases$", re.M)
_CHECKS = re.compile(r"^sanitized-\w+: (\d+) checks, (\d+) failed$", re.M)
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazard")

Run = Callable[[Sequence[str], dict[str, str], float], tuple[int | None, str]]
"""Runs a command with more environment variables and a time limit in seconds; returns its exit code (None
after the limit) and its output."""


def find() -> str | None:
    """The sanitizer's program, on PATH or where CUDA puts it."""
    return next((found for place in PLACES if (found := shutil.which(place))), None)


def run(command: Sequence[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str]:
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            said, _ = child.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            # The sanitizer's child holds the pipe too.
            os.killpg(child.pid, signal.SIGKILL)
            return None, child.communicate()[0]
    return child.returncode, said


def sanitize(program: str, seconds: float, run: Run = run) -> dict[str, Any]:
    """The record: the sanitizer's version, and one row per part and tool."""
    deadline = time.monotonic() + seconds
    _, version = run([program, "--version"], {}, 20)
    _, known = run([program, "--help"], {}, 20)
    options = [word for name, value in _OPTIONS.items() if name in known for word in (name, value)]

    def rows(part: str) -> list[dict[str, Any]]:
        own = [*PROGRAM, "--part", part]
        found, taken = [], 0.0
        for tool in (None, MEMCHECK, RACECHECK):
            left = deadline - time.monotonic()
            # Racecheck takes about as long as memcheck did.
            if tool == RACECHECK and left < 1.5 * taken:
                continue
            started = time.monotonic()
            command = own if tool is None else [program, "--tool", tool, *options, *own]
            environment = {} if tool is None else {OWN_ALLOCATIONS: "1"}
            status, said = run(command, environment, left)
            taken = time.monotonic() - started
            found.append(
                {"part": part, "tool": tool, "seconds": round(taken, 1), **outcome(tool, status, said)}
            )
        return found

    with ThreadPoolExecutor(len(SANITIZED)) as pool:
        parts = [row for rows_of in pool.map(rows, SANITIZED) for row in rows_of]
    number = re.search(r"Version (\S+)", version)
    return {"sanitizer": number[1] if number else version.strip()[-80:], "options": options, "parts": parts}


def outcome(tool: str | None, status: int | None, said: str) -> dict[str, Any]:
    """Parse a run's output. Errors are None if the sanitizer printed no summary."""
    cases, checks = _CASES.search(said), _CHECKS.search(said)
    row: dict[str, Any] = {
        "exit": status,
        "cases": int(cases[1]) if cases else 0,
        "checks": int(checks[1]) if checks else 0,
        "failed": int(checks[2]) if checks else 1,
    }
    if tool is not None:
        summary = (_HAZARDS if tool == RACECHECK else _ERRORS).findall(said)
        row["errors"] = sum(map(int, summary)) if summary else None
    if bad(row):
        row["last"] = said[-3000:]
    return row


def bad(row: dict[str, Any]) -> bool:
    """Whether the run failed, found errors or did not finish."""
    return bool(row["failed"] or row["exit"] != 0 or row.get("errors", 0) != 0)
