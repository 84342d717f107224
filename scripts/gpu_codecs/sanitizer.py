"""The parts of `gpu_codecs.sanitized` under compute-sanitizer, side by side, and what it said.

Every part first runs plainly, which compiles its kernels and checks their bits, then under memcheck, then,
where there is time left, under racecheck.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_codecs.sanitized import OWN_ALLOCATIONS, SANITIZED

PROGRAM = Path(__file__).resolve().parents[1] / "bench_gpu_codecs.py"
PLACES = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
MEMCHECK, RACECHECK = "memcheck", "racecheck"
_OPTIONS = {
    # Ours alone, not the compiler that Triton starts.
    "--target-processes": "application-only",
    # Between allocations, so that a write behind one does not land in the next.
    "--padding": "512",
}
_CASES = re.compile(r"^sanitized-\w+: (\d+) cases$", re.M)
_CHECKS = re.compile(r"^sanitized-\w+: (\d+) checks, (\d+) failed$", re.M)
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazard")

Run = Callable[[Sequence[str], dict[str, str], float], tuple[int | None, str]]
"""A command, what to add to the environment, seconds; gives its exit, None if it took longer, and output."""


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
            # The sanitizer's own child holds the pipe, too.
            os.killpg(child.pid, signal.SIGKILL)
            return None, child.communicate()[0]
    return child.returncode, said


def sanitize(program: str, seconds: float, run: Run = run) -> dict[str, Any]:
    """What is to be recorded: the sanitizer's version, and a row a part and tool."""
    deadline = time.monotonic() + seconds
    _, version = run([program, "--version"], {}, 20)
    _, known = run([program, "--help"], {}, 20)
    options = [word for name, value in _OPTIONS.items() if name in known for word in (name, value)]

    def rows(part: str) -> list[dict[str, Any]]:
        own = [sys.executable, str(PROGRAM), "--part", part]
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
    """What a run's output says. Errors are None where the sanitizer did not come to its summary."""
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
    """Whether a row is of a run that failed, found errors or did not finish."""
    return bool(row["failed"] or row["exit"] != 0 or row.get("errors", 0) != 0)
