"""Run tests/gpu and record the outcomes.

    python -m scripts.checks.gpu_tests --out PATH [--jobs N] [FILE ...]
    python -m scripts.checks.gpu_tests --out PATH --plain tah,storage [--seconds S] [FILE ...]

Needs an NVIDIA GPU; tests that need more GPUs than there are are skipped, and the record lists them. Each
test file runs in a process of its own, several at a time, because they mostly wait for Triton to compile.
Tests that share a stage between GPUs record the difference of their losses from one GPU's.

With `--plain` they run without the kernels of one part at a time, whose work plain torch does then, as on a
device that fails its self-test. Without a FILE, for each part those that use it.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from node.lab.results import commit
from scripts.report import write

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("failure", "error", "skipped")
"""Elements of a JUnit report that mark a test as not passed."""
USES = {
    "attention": ("layers", "reach", "chunks", "passes"),
    "experts": ("experts",),
    "fixed": ("codecs", "together", "transfer"),
    "fp8": ("fp8", "rows", "products", "passes"),
    "layers": ("layers", "storage", "passes"),
    "orthogonal": ("orthogonal",),
    "storage": ("storage", "layers", "host_memory"),
    "tah": ("codecs", "transfer", "run"),
    "trellis": ("trellis", "together", "transfer"),
}
"""The test files that use each part of the kernels."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests/gpu and record what came out.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--jobs", type=int, default=4, help="files of tests at a time (default 4)")
    parser.add_argument("--plain", default="", help="parts of the kernels to do without, one at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin and wait for no file after them")
    parser.add_argument("files", nargs="*", type=Path, help="instead of all in tests/gpu")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    parts = arguments.plain.split(",") if arguments.plain else [""]
    if unknown := set(parts) - {*USES, ""}:
        parser.error(f"no kernels are called {', '.join(sorted(unknown))}: {', '.join(USES)} are")
    ends = time.monotonic() + arguments.seconds
    work = [(part, path) for part in parts for path in arguments.files or files_of(part)]
    report: dict[str, Any] = {
        "experiment": "gpu_tests",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    junits: dict[str, list[str]] = {}
    silent: dict[str, list[str]] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        done = pool.map(lambda item: run(item[1], item[0], ends), work)
        for (part, path), (code, junit) in zip(work, done, strict=True):
            if not junit:
                silent.setdefault(part, []).append(path.name)
                print(f"no record: {path.name} ended without a report, with {code}", file=sys.stderr)
            junits.setdefault(part, []).extend([junit] if junit else [])
            found = {each: summary(texts) for each, texts in junits.items()}
            for each, names in silent.items():
                found.setdefault(each, {})["without_report"] = names
            report |= {"plain": found} if arguments.plain else found[""]
            write(arguments.out, report)
    failed = any(kind in each.get("others", {}) for each in found.values() for kind in ("failure", "error"))
    return 1 if failed or silent else 0


def files_of(part: str) -> list[Path]:
    """The test files that use a part of the kernels, or all; the largest first, else it ends last, alone."""
    names = [f"test_gpu_{name}.py" for name in USES[part]] if part else ["test_*.py"]
    paths = [path for name in names for path in (ROOT / "tests" / "gpu").glob(name)]
    return sorted(paths, key=lambda path: -path.stat().st_size)


def run(tests: Path, plain: str, ends: float) -> tuple[int, str]:
    """Run one test file without the kernels of a part, and print its output; the exit status, and the JUnit
    report, empty if it wrote none before `ends`, a moment of the monotonic clock."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}"]
        command += ["-o", "asyncio_default_fixture_loop_scope=function", "-o", "junit_family=xunit1"]
        command += ["-p", "no:cacheprovider", str(tests)]
        environment = {**os.environ, "THINWIRE_PLAIN": plain} if plain else None
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(0.1, ends - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            return -1, ""
        print(f"{tests.name}{plain and ', without ' + plain}:\n{done.stdout}", end="", flush=True)
        return done.returncode, junit.read_text(encoding="utf-8") if junit.exists() else ""


def summary(junits: Iterable[str]) -> dict[str, Any]:
    """Summarize JUnit reports: tests by outcome, names of tests that did not pass, recorded properties."""
    outcomes: Counter[str] = Counter()
    others: dict[str, list[str]] = {}
    recorded = []
    for case in (case for junit in junits for case in ElementTree.fromstring(junit).iter("testcase")):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        outcome = next((kind for kind in OUTCOMES if case.find(kind) is not None), "passed")
        outcomes[outcome] += 1
        if outcome != "passed":
            others.setdefault(outcome, []).append(name)
        said = {each.get("name", ""): float(each.get("value", "nan")) for each in case.iter("property")}
        if said:
            recorded.append({"test": name, "outcome": outcome, **said})
    return {"outcomes": dict(outcomes), "others": others, "recorded": recorded}


if __name__ == "__main__":
    sys.exit(main())
