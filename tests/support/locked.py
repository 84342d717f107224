"""A folder that may not be entered: tests may run as root, whom permissions do not stop."""

from pathlib import Path

import pytest


def lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every folder of this process is one."""

    def denied(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", denied)
