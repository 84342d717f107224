"""On Windows the command says in one line where it runs instead."""

import importlib
import sys

import pytest

import node.cli as cli


def test_windows_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        importlib.reload(cli)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "WSL" in said
