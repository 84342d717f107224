"""Tests of Triton kernels on a CPU, under Triton's interpreter.

The interpreter is chosen when kernels are defined, so such tests run in a process of their own: one test of
their file starts it with `run_interpreted`, the others are marked `inside`. Without Triton (torch for CPUs
does not bring it) nothing runs: `needs_triton`.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
inside = pytest.mark.skipif(not INTERPRETED, reason="in the interpreter's process")
outside = pytest.mark.skipif(INTERPRETED, reason="this is the process")


def run_interpreted(file: str, seconds: float) -> None:
    """Run the tests of `file` that are marked `inside`; fails as they do."""
    # No other plugin that happens to be installed: some warn, and a warning is an error here.
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    made = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, file],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert made.returncode == 0 and " passed" in made.stdout, made.stdout[-5000:] + made.stderr[-2000:]
