"""From results to tables, plots and archives; parts, and what may go on in one file."""

import builtins
import math
from pathlib import Path
from typing import Any

import pytest

from node.cli.lab import figure_folders
from node.cli.main import main
from node.lab.plots import draw
from node.lab.profile import load_profile
from node.lab.results import Results, read_results
from node.lab.table import all_tables, provenance, tables_text
from node.telemetry.clock import TimeKind
from tests.support.lab_results import cell, results
from tests.support.paths import lock_folders
from wire.errors import UserError

SMOKE = Path(__file__).parents[4] / "deploy" / "lab" / "smoke.toml"


def test_ratios_compare_the_same_setting_and_shares_are_shown() -> None:
    found = results(
        cell("fp32/fp32", 100, 200.0),
        cell("tah/fixed-6", 100, 1000.0),
        cell("tah/fixed-6", 100, 1200.0, seed=1),
        cell("fp32/fp32", 500, 900.0),
        cell("bf16/bf16", 500, 1800.0),
    )
    (measured,) = all_tables(found)
    rows = {(row[0], row[3]): dict(zip(measured.headings, row, strict=True)) for row in measured.rows}
    assert len(rows) == 4
    tah = rows["100", "tah/fixed-6"]
    assert tah["tokens/s"] == "1100 (900 to 1320)"
    assert (tah["/ fp32"], tah["/ bf16"], tah["of the floor"], tah["link use"]) == (
        "5.50",
        "-",
        "0.93",
        "97 %",
    )
    assert (tah["binding"], tah["of unthrottled"]) == ("link 0 to 1", "0.55")
    assert rows["500", "bf16/bf16"]["/ fp32"] == "2.00"


def test_results_of_two_files_are_never_pooled() -> None:
    """Results of different networks are never compared: each network has rows under its own name."""
    shared = results(cell("tah/fixed-6", 100, 900.0), cell("fp32/fp32", 100, 150.0))
    own = {**results(cell("tah/fixed-6", 100, 1500.0)), "profile": "other"}
    text = tables_text([("shared.json", shared), ("lab/own", own)])
    ratios = [line.split() for line in text.splitlines() if "tah/fixed-6" in line and "(" in line]
    assert text.index("shared.json: measured") < text.index("lab/own: measured") < text.index("other: gpt2")
    assert [line[4] for line in ratios] == ["900", "1500"]
    # 900 over 150, and nothing to divide 1500 by.
    assert "6.00" in ratios[0] and text.count("6.00") == 1
    assert "8.00" not in text and "10.00" not in text


def test_results_are_written_whole_and_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, results(cell("tah/fixed-6", 100, 1.0))).write()
    assert read_results(path)["cells"][0]["key"]["forward_codec"] == "tah"
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(ValueError):
        Results(path, {"cells": [math.nan]}).write()
    assert read_results(path) == read_results(tmp_path) and read_results(path)["profile"] == "test"
    path.write_text('{"format": "something else"}')
    with pytest.raises(UserError, match="holds no laboratory results"):
        read_results(path)
    with pytest.raises(UserError, match="no such results file"):
        read_results(tmp_path / "none.json")
    path.write_text("[" * 5000)
    with pytest.raises(UserError, match="cannot be read as results"):
        read_results(path)


def test_results_of_another_machine_or_commit_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    values = results(cell("tah/fixed-6", 100, 1.0))
    Results(path, values).write()
    profile = load_profile(SMOKE)
    values["profile_sha256"] = profile.sha256
    Results(path, values).write()
    assert len(Results.go_on(path, profile, values["machine"]).done) == 1
    with pytest.raises(UserError, match=r"measured elsewhere \(its commit, gpus differ\)"):
        Results.go_on(path, profile, {**values["machine"], "commit": "new", "gpus": ["one"]})
    with pytest.raises(UserError, match="another version of this profile"):
        Results.go_on(path, load_profile(SMOKE, ["lab.steps=9"]), values["machine"])


def test_results_name_the_text_without_this_machines_folders(tmp_path: Path) -> None:
    profile = load_profile(SMOKE, ["data.path=/some/where/books.txt.xz", "lab.text_bytes=2300"])
    found = Results.new(tmp_path / "results.json", profile, {}, {})
    assert found.values["text"] == "books.txt.xz, the first 2300 bytes"
    assert found.values["overrides"] == ["data.path=books.txt.xz", "lab.text_bytes=2300"]


def test_results_record_what_the_command_line_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    profile = load_profile(SMOKE, ["lab.steps=9"])
    found = Results.new(path, profile, {}, {}, ["fp32/fp32"])
    assert found.values["planned_cells"] == 2
    assert (found.values["profile_file"], found.values["overrides"]) == ("smoke.toml", ["lab.steps=9"])
    found.write()
    # The same command with other cells goes on in the same file; with none named it asks for all.
    again = Results.go_on(path, profile, {}, ["@10", "fp32/fp32"])
    assert again.values["only"] == ["fp32/fp32", "@10"]
    assert Results.go_on(path, profile, {}).values["only"] == []


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(
        cell("fp32/fp32", 100, 200.0),
        cell("tah/fixed-6", 100, 1000.0),
        cell("tah/fixed-6", 500, 1200.0),
        {**cell("fp32/fp32", 100, 150.0, shape="100 + 20 ms"), "rtt_ms": 20.0, "curve": [[0, 1.0, 5.0]]},
    )
    told: list[str] = []
    files = draw(found, tmp_path / "made", told.append)
    # A curve of one step is none.
    assert len(told) == 1 and "100 + 20 ms Mbit/s: " in told[0] and told[0].endswith("10 steps")
    assert {path.parent for path in files} == {tmp_path / "made"}
    assert {path.name for path in files} == {
        "tokens-microbatch-1-window-auto.svg",
        "tokens-microbatch-1-window-auto-round-trip-20-ms.svg",
        "use-microbatch-1-window-auto.svg",
        "use-microbatch-1-window-auto-round-trip-20-ms.svg",
        "loss-microbatch-1-window-auto-100-Mbit-s.svg",
        "loss-microbatch-1-window-auto-500-Mbit-s.svg",
    }
    text = (tmp_path / "made" / "tokens-microbatch-1-window-auto.svg").read_text()
    assert "tah/fixed-6" in text and "tokens/s" in text and "Mbit/s" in text
    with pytest.raises(UserError, match="nothing to draw"):
        draw(results(), tmp_path / "none", print)
    assert not (tmp_path / "none").exists()


def test_figures_are_within_the_expected_range(tmp_path: Path) -> None:
    """An output folder of `lab run` has its own; recorded results elsewhere are left as they are."""
    recorded, lab = Path("scripts/results/lab_cpu.json"), tmp_path / "smoke"
    lab.mkdir()
    assert figure_folders([lab / "results.json", lab, recorded], None) == [
        lab,
        tmp_path / "smoke-2",
        Path("lab/lab_cpu"),
    ]
    assert figure_folders([recorded], Path("here")) == [Path("here")]
    several = figure_folders([recorded, lab, Path("copy/lab_cpu.json")], Path("here"))
    assert several == [Path("here/lab_cpu"), Path("here/smoke"), Path("here/lab_cpu-2")]


def test_where_the_time_of_a_step_goes_is_a_table_of_its_own() -> None:
    spent = dict.fromkeys(TimeKind, 0.0)
    first = {**spent, "forward": 0.1, "backward": 0.25, "optimizer": 0.05, "encode": 0.01, "decode": 0.02}
    last = {**spent, "wait-upstream": 0.3, "wait-downstream": 0.1, "wait-coordinator": 0.25}
    timed = {**cell("tah/fixed-6", 100, 1000.0), "stage_seconds": [first, last]}
    tables = all_tables(results(timed, cell("fp32/fp32", 100, 200.0)))
    assert tables[1].rows == (
        ("100", "1", "auto", "tah/fixed-6", "0", "0.400", "0.030", "0.000", "0.000"),
        ("100", "1", "auto", "tah/fixed-6", "1", "0.000", "0.000", "0.400", "0.250"),
    )
    # Results of before it was recorded have none.
    assert len(all_tables(results(cell("fp32/fp32", 100, 200.0)))) == len(tables) - 1


def test_results_behind_a_folder_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock_folders(monkeypatch)
    for action in ("table", "plot"):
        assert main(["lab", action, str(tmp_path / "locked")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path / 'locked'} cannot be read as results: Permission denied" in line


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'thinwire\[lab\]'"):
        draw(results(cell("fp32/fp32", 100, 200.0)), tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_the_text_says_where_figures_come_from() -> None:
    found = results(cell("fp32/fp32", 100, 200.0), {**cell("tah/fixed-6", 100, 9.0), "measured_steps": 2})
    found |= {"profile_file": "cpu.toml", "overrides": ["lab.steps=3"], "only": ["@10 + 100 ms"]}
    text = tables_text([("results.json", found)])
    line = text.splitlines()[-1]
    assert line == provenance(found)
    for words in (
        "each figure the median of 2 to 3 steps",
        "by `thinwire lab run cpu.toml lab.steps=3 --only '@10 + 100 ms'`",
        "text books.txt, the first 2300 bytes",
        "tbf",
        "bbr",
        "kernel 6.1",
        "no delay",
        "1 runs, 1 seed",
        "commit 0123456789ab with changes",
    ):
        assert words in line
