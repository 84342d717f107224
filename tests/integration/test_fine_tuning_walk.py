"""The commands of deploy/FINE_TUNING.md, in their order: a model goes in, a better one comes out."""

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from node.cli.main import main
from node.telemetry.events import HeldOutLoss, SnapshotStored
from tests.support.documents import saved_files
from tests.support.fault_prefork import Prefork
from tests.support.memory_pipeline import TEXT
from tests.support.paths import ROOT
from tests.support.run_harness import Run

PAGE = (ROOT / "deploy" / "FINE_TUNING.md").read_text(encoding="utf-8")


def commands() -> Iterator[list[str]]:
    """Every command line, in order."""
    for line in PAGE.splitlines():
        if re.match(r"    (python|thinwire) ", line):
            yield shlex.split(line)


def by_python(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a script of the page prints."""
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(arguments[0], run_name="__main__")
    return capsys.readouterr().out.strip()


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.timeout(300)
def test_the_walk_continues_a_model_and_gives_a_better_one(
    prefork: Prefork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    saved = saved_files(PAGE)
    assert saved.keys() == {"make_model.py", "generate.py", "fine-tune.toml"}
    for name, contents in saved.items():
        Path(name).write_text(contents, encoding="utf-8")
    text = TEXT * 4
    Path("text.txt").write_bytes(text)
    steps = [(key, list(lines)) for key, lines in groupby(commands(), key=lambda line: line[0])]
    assert [key for key, _ in steps] == ["python", "thinwire", "python"]
    (make, before), told, (after,) = (lines for _, lines in steps)
    by_python(make[1:], monkeypatch, capsys)
    said_before = by_python(before[1:], monkeypatch, capsys)

    (start, *joins), looks = told[:3], told[3:]
    assert [line[1] for line in looks] == ["eval", "sample", "export"]
    assert joins == [["thinwire", "join", "TOKEN"]] * 2
    with Run(tmp_path, text=text, launch=prefork.popen) as run:
        run.run_file, run.run_dir = Path(start[2]).absolute(), Path(start[4]).absolute()
        coordinator = run.start("coordinator.listen=127.0.0.1:0", "run.steps=30", "run.snapshot_every=15")
        run.add_nodes(len(joins))
        assert coordinator.wait_exit() == 0
        losses = {one.step: one.uncompressed for one in coordinator.all(HeldOutLoss)}
        assert list(losses) == [10, 20, 30]
        assert losses[30] < losses[10] - 0.3
        assert {one.step for one in coordinator.all(SnapshotStored)} >= {15, 30}
    said = {}
    for line in looks:
        assert main(line[1:]) == 0
        said[line[1]] = capsys.readouterr().out.strip()
    best = min(losses, key=lambda step: losses[step])
    assert said["eval"].startswith(f"step {best}: held-out loss {losses[best]:.3f}"[:-1])
    assert said["sample"].startswith("The line") and said["sample"] != said_before
    assert by_python(after[1:], monkeypatch, capsys) == said["sample"]
