"""Run tests/gpu and record what came out: `python scripts/gpu_tests.py --out PATH [-- ARGUMENTS OF PYTEST]`.

Needs an NVIDIA GPU; what needs more of them is skipped where they are not there, and the record says so.
Tests that share a stage between GPUs add how far their losses lie from one GPU's.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from node.lab.results import commit

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = ("failure", "error", "skipped")
"""Elements that a test which did not pass has."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests/gpu and record what came out.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={path}"]
        command += ["-o", "asyncio_default_fixture_loop_scope=function", "-o", "junit_family=xunit1"]
        code = subprocess.run([*command, *(arguments.arguments or ["tests/gpu"])], cwd=ROOT).returncode
        found = summary(path.read_text(encoding="utf-8"))
    report = {
        "experiment": "gpu_tests",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        **found,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return code


def summary(junit: str) -> dict[str, Any]:
    """Of a JUnit report: how many tests had which outcome, which did not pass, and what tests recorded."""
    outcomes: Counter[str] = Counter()
    others: dict[str, list[str]] = {}
    recorded = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
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
