"""Run tests/gpu and record the outcomes.

    python -m scripts.checks.gpu_tests --out PATH [--jobs N] [FILE ...]

Needs an NVIDIA GPU; tests that need more GPUs than there are are skipped, and the record lists them. Each
test file runs in a process of its own, several at a time, because they mostly wait for Triton to compile.
Tests that share a stage between GPUs record the difference of their losses from one GPU's.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from node.lab.results import commit

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = ("failure", "error", "skipped")
"""Elements of a JUnit report that mark a test as not passed."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests/gpu and record what came out.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--jobs", type=int, default=4, help="files of tests at a time (default 4)")
    parser.add_argument("files", nargs="*", type=Path, help="instead of all in tests/gpu")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    # Start with the largest files, so that none of them runs alone at the end.
    files = arguments.files or sorted(
        (ROOT / "tests" / "gpu").glob("test_*.py"), key=lambda path: -path.stat().st_size
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        paths = [Path(folder) / f"{path.stem}.xml" for path in files]
        codes = list(pool.map(run, files, paths))
        if silent := [file.name for file, path in zip(files, paths, strict=True) if not path.exists()]:
            print(f"no record: {', '.join(silent)} ended without a report", file=sys.stderr)
            return 1
        found = summary([path.read_text(encoding="utf-8") for path in paths])
    report = {
        "experiment": "gpu_tests",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **found,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return max(codes)


def run(tests: Path, junit: Path) -> int:
    """Run one test file; write its report to `junit` and print its output when it ends."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}"]
    command += ["-o", "asyncio_default_fixture_loop_scope=function", "-o", "junit_family=xunit1"]
    command += ["-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"{tests.name}:\n{done.stdout}", end="", flush=True)
    return done.returncode


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
