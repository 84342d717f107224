"""Where this checkout is, and how a process that a test starts finds it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """`PYTHONPATH` for a process: this checkout first, then what this process was given, which may hold
    packages."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
