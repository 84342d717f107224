"""Users whom the machine does not know, as in containers that start with any user id."""

import pytest


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a folder of this user, and no file of users has its id."""

    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for variable in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
