"""Where this checkout is, how processes of a test find it, and folders that may not be entered."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """`PYTHONPATH` for a process: this checkout, then this process's own."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def lock_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deny this process every folder: tests may run as root, whom permissions do not stop."""

    def denied(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", denied)
