"""Run codecs on small tensors under compute-sanitizer: `python -m scripts.checks.sanitizer [--out PATH]`.

Every part first runs without the sanitizer, which compiles its kernels and checks their bits, then under
memcheck, then, if there is time, under racecheck.

A sanitizer is slow, so the tensors are few and small, but take every path.

Results are compared with the CPU's bit for bit, in buffers between poisoned guards. Scratch buffers have
guards too, unless every tensor is an allocation of its own, whose ends the sanitizer knows.
Each of the three parts runs in a process of its own.
"""

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from node.lab.results import commit
from scripts.report import RESULTS, one_line, write
from wire.codecs.header import EXPONENT, HEADER_BYTES
from wire.codecs.registry import codec
from wire.spec import TensorSpec

SANITIZED = ("sanitized-tah", "sanitized-fixed", "sanitized-trellis")
OWN_ALLOCATIONS = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Environment variable that switches torch's caching allocator off: every tensor is its own allocation."""
GUARD = 256
POISON = 0xA5


class Checks:
    def __init__(self) -> None:
        self.done = 0
        self.cases = 0
        self.failed: list[str] = []

    def that(self, good: bool, what: str) -> None:
        self.done += 1
        if not good:
            self.failed.append(what)
            print("FAILED:", what, flush=True)

    def guard(self, what: str, work: Callable[[], None]) -> None:
        """Run `work`; count an exception as a failure, show its last lines and go on."""
        self.cases += 1
        try:
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as problem:  # the other checks still run
            lines = traceback.format_exception(problem)
            self.that(False, f"{what}: {one_line(problem, 600)}\n{''.join(lines)[-1500:]}")


def cases_of(part: str) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Name, tensor on the CPU and codec of every case of one of `SANITIZED`."""
    if part == "sanitized-trellis":
        yield from trellis_cases()
        return
    # Another dtype compiles all kernels again, so it takes fewer tensors.
    for dtype, names, widths in (
        (torch.bfloat16, ("mixed", "outliers", "width 200", "every other row", "wide", "zeros"), (4, 8, 10)),
        (torch.float32, ("mixed", "width 200", "vector"), (9,)),
        (torch.float16, ("mixed", "width 200", "vector", "fp16's range"), (3,)),
    ):
        for name, x in tile_cases(dtype):
            if name in names:
                for rate in ("tah",) if part == "sanitized-tah" else (f"fixed-{width}" for width in widths):
                    yield name, x, rate


def tile_cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors on the CPU that take every path through the kernels of tiles."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    mixed = normal(2, 50, 256)
    mixed[0, 0, :64] = 0
    mixed[0, 1, :64] = 1.5
    mixed[0, 2] *= 1e-3
    mixed[0, 3, 64:128] *= 1e-6
    mixed[1, 4:9] *= torch.logspace(-7, -1, 5)[:, None]
    mixed[1, ::3, 70] = 100
    mixed[1, 11, 255] = -300
    found = {
        "mixed": mixed,
        "outliers": torch.eye(64).repeat(3, 1) + normal(192, 64) * 0.01,
        "width 200": normal(3, 64, 200) ** 3,
        "every other row": normal(31, 128)[::2],
        "vector": normal(1000),
        "zeros": torch.zeros(5, 64),
    }
    for name, x in found.items():
        # Keep the strides of a view: its layout is part of the test.
        yield name, x if dtype == torch.float32 else x.to(dtype)
    if dtype == torch.float16:
        wide = normal(20, 128) * torch.logspace(-7, 4, 20)[:, None]
        yield "fp16's range", wide.clamp(-65504, 65504).half()
    else:
        yield "wide", (normal(40, 64) * torch.logspace(-38, 37, 40)[:, None]).to(dtype)


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


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides on the GPU."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    store = torch.full((x.storage_offset() + span,), float("nan"), dtype=x.dtype, device="cuda")
    view = store.as_strided(x.shape, x.stride(), x.storage_offset())
    return view.copy_(x)


class Guarded:
    """A payload between guards, poisoned, on the GPU."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.whole = torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.payload = self.whole[GUARD : GUARD + nbytes]

    def intact(self) -> bool:
        return bool((self.whole[:GUARD] == POISON).all() and (self.whole[-GUARD:] == POISON).all())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8).cpu()


class GuardedScratch(TorchFunctionMode):
    """Surround the tensors that torch.empty, torch.zeros and torch.empty_like make on `device` with guards.

    Tensors that are not zeroed are poisoned, so that results cannot depend on earlier contents.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._whole: list[torch.Tensor] = []

    @property
    def made(self) -> int:
        return len(self._whole)

    def intact(self) -> bool:
        return all(
            bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all())
            for whole in self._whole
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in (torch.empty, torch.zeros, torch.empty_like) or made.device.type != self._device:
            return made
        whole = torch.full((made.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device=made.device)
        self._whole.append(whole)
        room = whole[GUARD : GUARD + made.nbytes].view(made.dtype).view(made.shape)
        return room.zero_() if func is torch.zeros else room


def guarded(device: str) -> AbstractContextManager[GuardedScratch | None]:
    """Guards around scratch buffers, if the sanitizer cannot see a write behind them."""
    return nullcontext() if os.environ.get(OWN_ALLOCATIONS) else GuardedScratch(device)


def check_codec(checks: Checks, name: str, x: torch.Tensor, rate: str, device: str = "cuda") -> None:
    """Encode and decode x of the CPU on `device`; check for the CPU's bits and for writes outside."""
    which, spec = codec(rate), TensorSpec(x.dtype, tuple(x.shape))
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
            checks.that(scratch.intact(), f"{what}: encode wrote outside its scratch")
        target = Guarded(x.numel() * x.element_size(), device)
        out = target.payload.view(x.dtype).view(x.shape)
        with guarded(device) as scratch:
            which._unpack(expected[HEADER_BYTES:].to(device), out, exponent)
        checks.that(torch.equal(bits(out), bits(decoded)), f"{what}: decode differs")
        checks.that(target.intact(), f"{what}: decode wrote outside")
        if scratch is not None:
            checks.that(scratch.intact(), f"{what}: decode wrote outside its scratch")

    checks.guard(what, work)


PROGRAM = (sys.executable, "-m", "scripts.checks.sanitizer")
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Run codecs on small tensors under compute-sanitizer.")
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitizer.json")
    parser.add_argument("--seconds", type=float, default=85.0, help="that all of it may take")
    parser.add_argument("--part", choices=SANITIZED, help="only these tensors, here, without the sanitizer")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    if arguments.part:
        checks = Checks()
        for case in cases_of(arguments.part):
            check_codec(checks, *case)
        print(f"{arguments.part}: {checks.cases} cases")
        print(f"{arguments.part}: {checks.done} checks, {len(checks.failed)} failed", flush=True)
        return 1 if checks.failed else 0
    if (program := find()) is None:
        parser.error("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    import triton

    started = time.monotonic()
    report = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **sanitize(program, arguments.seconds),
        "seconds": round(time.monotonic() - started, 1),
    }
    write(arguments.out, report)
    for row in report["parts"]:
        print({key: value for key, value in row.items() if key != "last"}, row.get("last", ""))
    wrong = sum(map(bad, report["parts"]))
    print(f"{wrong} runs with something wrong, {report['seconds']:.0f} s, report in {arguments.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
