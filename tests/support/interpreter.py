"""Tests of Triton kernels on a CPU, under Triton's interpreter.

The interpreter is chosen when kernels are defined, so such tests run in a process of their own: one test of
their file starts it with `run_interpreted`, the others are marked `inside`. Without Triton (torch for CPUs
does not bring it) nothing runs: `needs_triton`.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

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


def _patch_once() -> None:
    """Spare the interpreter a third of its time: it looks through all of Triton's language at each call of a
    device function, of which a program has hundreds, to replace what the kernel's launch has replaced already.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return  # another Triton, which does it another way

    def patch_once(fn: Callable[..., object]) -> object:
        """What was replaced, for a launch to put back; a call within one puts nothing back."""
        # Whatever a kernel can call finds its language in one of these.
        if all(lang.static_print is print for lang in (tl, tl.core)):
            return scope()
        return patch(fn)

    interpreter._patch_lang = patch_once


if INTERPRETED and importlib.util.find_spec("triton") is not None:
    _patch_once()
