"""The laboratory's records of its runs, and its checks of the machine before it begins."""

import json
import sqlite3
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.cli.main import main
from node.config.schema import RunConfig
from node.coordinator.store import DATABASE_FILE, Store
from node.lab import support
from node.lab.laboratory import _Run, keep_run
from node.lab.plan import PlannedRun
from node.lab.profile import load_profile
from node.telemetry.history import read_history
from node.telemetry.trace_files import TraceWriter, read_batches
from tests.support.recorded_run import write_run
from wire.errors import ConfigError, RunError, UserError
from wire.telemetry import Span, StepSpans

LAB = Path(__file__).parents[4] / "deploy" / "lab"


def run_directory(directory: Path) -> Path:
    """As a coordinator leaves it that was killed."""
    write_run(directory, steps_done=20)
    with Store.open(directory) as store:
        store.create_token(1_763_700_000.0, timedelta(hours=1), 4)
    spans = StepSpans(
        epoch=1,
        step=19,
        stage=0,
        clock_offset=1_763_700_000.0,
        clock_error=0.001,
        dropped=0,
        spans=(Span("forward", 5.0, 0.5),),
    )
    writer = TraceWriter(directory, 1_000_000)
    writer.add("node-aaaaaaaaaa", spans)
    writer.write(writer.take())
    (directory / "operator.key").write_text("secret")
    (directory / "snapshots").mkdir()
    return directory


def test_a_kept_run_can_be_traced_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, place = run_directory(tmp_path / "run"), tmp_path / "out" / "runs" / "00-run"
    assert keep_run(run, place)
    assert {path.name for path in place.iterdir()} == {"history.jsonl", "run.db", "trace"}
    assert list(read_history(place)) == list(read_history(run)) != []
    assert [batch.spans.step for batch in read_batches(place, 0, 30)] == [19]

    assert main(["trace", str(place), "--steps", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spans"] == 1
    # Against itself as the coordinator left it: everything that is told of a run is in what was kept.
    assert main(["compare", str(place), str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == [20, 20] and told["config"] == {}
    assert told["tokens_per_second"][0] == told["tokens_per_second"][1] > 0


def test_archives_hold_no_secret_and_replace_older_ones(tmp_path: Path) -> None:
    run, place = run_directory(tmp_path / "run"), tmp_path / "kept"
    with sqlite3.connect(run / DATABASE_FILE) as database:
        ((secret,),) = database.execute("SELECT secret_hash FROM tokens").fetchall()
    place.mkdir()
    (place / "trace-1-1.json").write_text("of an earlier try")
    assert keep_run(run, place)
    assert not (place / "trace-1-1.json").exists()
    assert secret not in (place / DATABASE_FILE).read_bytes()
    assert not keep_run(tmp_path / "none", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_run_that_cannot_be_kept_costs_no_figure(tmp_path: Path) -> None:
    said: list[str] = []
    lab: Any = SimpleNamespace(_out=tmp_path, _tell=said.append)
    nothing: Any = None
    run = _Run(lab, nothing, PlannedRun(name="fp32", config=RunConfig(), cells=()), nothing, 0)
    directory = run_directory(tmp_path / "run")
    (tmp_path / "runs").write_text("no folder")
    run._keep(directory)
    (line,) = said
    assert line.startswith("00-fp32: its history and trace could not be kept (")
    (tmp_path / "runs").unlink()
    run._keep(directory)
    assert said == [line]
    assert (tmp_path / "runs" / "00-fp32" / "run.db").exists()


@pytest.mark.parametrize(("here", "words"), [(0, "sees none here"), (3, "sees 3 here")])
def test_a_profile_for_gpus_begins_only_where_every_stage_has_one(
    here: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    monkeypatch.setattr(
        "node.lab.namespaces.run_inside", lambda arguments: pytest.fail("the lab was started")
    )
    out = tmp_path / "out"
    assert main(["lab", "run", str(LAB / "gpt2-xl-4gpu.toml"), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs 4 GPUs" in line and words in line
    assert not out.exists()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    support.check_devices(load_profile(LAB / "gpt2-xl-4gpu.toml"))
    support.check_devices(load_profile(LAB / "smoke.toml"))


def test_stages_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = load_profile(LAB / "nanogpt.toml")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    support.check_devices(shared)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=r"nanogpt\.toml needs a GPU, and .* sees none here"):
        support.check_devices(shared)
    with pytest.raises(ConfigError, match=r"lab\.gpus must be at least 0"):
        load_profile(LAB / "nanogpt.toml", ["lab.gpus=-1"])


@pytest.mark.parametrize(("writes", "left"), [(False, []), (True, ["lab", "lab/smoke", "lab/smoke/raw"])])
def test_a_run_that_is_refused_leaves_no_empty_folder(
    writes: bool, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: list[str]) -> int:
        assert Path("lab/smoke").is_dir()
        if writes:
            Path("lab/smoke/raw").touch()
        return 2

    monkeypatch.setattr("node.lab.namespaces.run_inside", refuse)
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "run", str(LAB / "smoke.toml")]) == 2
    assert sorted(str(path) for path in Path().rglob("*")) == left


def _works() -> None:
    pass


def _missing() -> None:
    raise RunError("this kernel has none")


@pytest.mark.parametrize(
    ("wanted", "netem", "relay", "found"),
    [
        ("auto", _works, _works, "netem"),
        ("auto", _missing, _works, "relay"),
        ("auto", _missing, _missing, ""),
        ("netem", _works, _missing, "netem"),
        ("netem", _missing, _works, ""),
        ("relay", _works, _works, "relay"),
    ],
)
def test_delay_is_the_kernels_own_where_it_has_it_and_is_never_left_out(
    wanted: str,
    netem: Callable[[], None],
    relay: Callable[[], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "_netem", netem)
    monkeypatch.setattr(support, "_packet_sockets", relay)
    if found:
        assert support.delay_method(wanted) == found
    else:
        with pytest.raises(RunError):
            support.delay_method(wanted)
