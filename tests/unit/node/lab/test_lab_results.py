"""From results to tables, plots and archives; parts, and what may go on in one file."""

import builtins
import json
import math
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from node.cli.lab import figure_folders
from node.cli.main import main
from node.lab.figures import (
    Compute,
    PhaseSteps,
    cell_figures,
    cell_floor,
    compute_times,
    floor_figures,
    plan_figures,
    plans_of,
    transfer_seconds,
)
from node.lab.network import WireBytes
from node.lab.plan import CellKey, plan_runs
from node.lab.plots import draw
from node.lab.profile import load_profile
from node.lab.results import Results, read_results
from node.lab.shape import PAYLOAD_SHARE, uniform
from node.lab.table import all_tables, provenance, tables_text
from node.lab.topology import Wire, lay_out
from node.telemetry.clock import TimeKind
from node.telemetry.events import StageCost, StepCosts, WindowsPlanned
from tests.support.lab_results import calibration, cell, results
from tests.support.paths import lock_folders
from wire.errors import UserError
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

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


# ---- the laboratory's recorded results: each can be measured again by a known command, and reads as it is


ROOT = Path(__file__).resolve().parents[4]

LAB = ROOT / "deploy" / "lab"
FILES = sorted((ROOT / "scripts" / "results").glob("lab_*.json"))


def documented(name: str) -> tuple[str, list[str], list[str]]:
    """Profile, overrides and cells of the command that the document has for a file."""
    text = (ROOT / "scripts" / "results" / "network.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^\| `{re.escape(name)}` \| \w+ \| `thinwire lab run ([^`]+)` \|$", text, re.MULTILINE
    )
    assert found, f"neither {name} nor the document has the command that measured it"
    profile, *words = shlex.split(found[1])
    overrides = [word for word in words if "=" in word]
    return profile, overrides, [words[i + 1] for i, word in enumerate(words) if word == "--only"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_file_can_be_measured_again(path: Path) -> None:
    recorded = read_results(path)
    if "overrides" in recorded:
        file, overrides, only = recorded["profile_file"], recorded["overrides"], recorded["only"]
        assert f"thinwire lab run {file}" in provenance(recorded)
    else:
        file, overrides, only = documented(path.name)
    profile = load_profile(LAB / file, overrides)
    network = {**asdict(profile.network), "delay_method": recorded["network"]["delay_method"]}
    again = Results.new(path, profile, recorded["machine"], network).values

    for key in ("profile", "text", "stages", "device", "seeds", "warmup_steps"):
        assert again[key] == recorded[key], key
    # Keys may have been added since; they have a default then, which is what was measured.
    for section in ("model", "training", "network"):
        differ = {
            key: (value, again[section][key])
            for key, value in recorded[section].items()
            if key in again[section] and again[section][key] not in (value, list_of(value))
        }
        assert differ == {}, section
    planned = {cell.key: cell.steps for run in plan_runs(profile, only=only) for cell in run.cells}
    measured = {CellKey(**cell["key"]): cell["measured_steps"] for cell in recorded["cells"]}
    assert measured and measured.items() <= planned.items()
    narrowed = bool(recorded.get("only")) and len(planned) < recorded["planned_cells"]
    if recorded["finished"] or narrowed:
        assert measured == planned
    # A time limit may have left some out where all were asked for.
    for words in only:
        asked = {cell.key for run in plan_runs(profile, only=[words]) for cell in run.cells}
        assert asked & measured.keys(), words


def list_of(value: Any) -> Any:
    """Tuples come back from JSON as lists."""
    return tuple(value) if isinstance(value, list) else value


# ---- from steps and counters to a cell's figures


MEGABYTE = 1_000_000


def costs(step: int, seconds: float, busy: float = 1.0) -> StepCosts:
    """Two stages: a megabyte out and half of one back, in 4 microbatches."""

    def stage(number: int) -> StageCost:
        spent = dict.fromkeys((kind.value for kind in TimeKind), 0.0)
        spent |= {"forward": 0.2 * busy, "backward": 0.4 * busy, "encode": 0.1 * busy, "decode": 0.1 * busy}
        spent |= {"optimizer": 0.2 * busy, "wait-downstream": seconds - busy}
        return StageCost(stage=number, node_id=f"n{number}", wall_seconds=seconds, seconds=spent)

    def link(source: int, target: int, direction: Direction, size: int) -> LinkFigures:
        flow = FlowFigures(direction=direction, codec="tah", bytes=size, elements=2 * size)
        return LinkFigures(
            source=source,
            target=target,
            bytes=size + 1000,
            flows=(flow,),
            busy_seconds=0.0,
            capacity=0.0,
            round_trip_seconds=0.0,
            retransmits=0,
            rejects=0,
            queued_bytes=0,
        )

    links = (link(0, 1, Direction.ACTIVATION, MEGABYTE), link(1, 0, Direction.GRADIENT, MEGABYTE // 2))
    return StepCosts(step=step, seconds=seconds, aborted=False, stages=(stage(0), stage(1)), links=links)


def phase(
    *seconds: float, wires: tuple[WireBytes, ...] = (WireBytes(0, 0),), busy: float = 1.0
) -> PhaseSteps:
    steps = tuple(costs(number, value, busy) for number, value in enumerate(seconds))
    return PhaseSteps(costs=steps, wires=wires, seconds=sum(seconds))


def wires(topology: str = "links") -> tuple[Wire, ...]:
    return lay_out(2, ((0, 1),), topology=topology, relay=False).wires


def test_figures_are_those_of_the_counters_and_the_steps() -> None:
    shape = uniform("8", 0.0, 1)
    counted = (WireBytes(3 * 1_100_000, 3 * 550_000),)
    figures = cell_figures(
        phase(2.0, 4.0, 3.0, wires=counted), shape, wires(), tokens_per_step=1200, losses=[1]
    )
    assert figures["step_seconds"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert figures["tokens_per_second"] == {"median": 400.0, "least": 300.0, "most": 600.0}
    assert figures["idle"] == pytest.approx([(1 / 2 + 3 / 4 + 2 / 3) / 3] * 2)
    assert figures["bits_forward"] == pytest.approx(4.0)
    for spent in figures["stage_seconds"]:
        assert set(spent) == set(TimeKind)
        assert spent["backward"] == pytest.approx(0.4) and spent["wait-downstream"] == pytest.approx(2.0)
        assert sum(spent.values()) == pytest.approx(3.0)
    up, down = figures["wires"]
    assert (up["sender"], up["own_bytes"], up["wire_bytes"]) == (0, 3 * 1_001_000, 3_300_000)
    assert up["overhead"] == pytest.approx(1_100_000 / 1_001_000 - 1)
    assert up["use"] == pytest.approx(3_300_000 * 8e-6 / 9 / 8)
    assert down["use"] == pytest.approx(up["use"] / 2)


def test_an_interface_carries_all_that_its_node_sends() -> None:
    shape = uniform("8/4", 0.0, 2)
    counted = (WireBytes(1_100_000, 600_000), WireBytes(600_000, 1_100_000))
    figures = cell_figures(
        phase(2.0, wires=counted), shape, wires("interfaces"), tokens_per_step=1, losses=[1]
    )
    own = [(wire["wire"], wire["own_bytes"]) for wire in figures["wires"]]
    assert own == [
        ("interface of 0", 1_001_000),
        ("interface of 0", 501_000),
        ("interface of 1", 501_000),
        ("interface of 1", 1_001_000),
    ]


def test_compute_is_the_least_time_seen_for_a_microbatch() -> None:
    slow, fast = costs(0, 3.0, busy=2.0), costs(1, 2.0, busy=1.0)
    phases = [PhaseSteps(costs=(each,), wires=(), seconds=5.0) for each in (slow, fast)]
    compute = compute_times(phases, microbatches=4)
    assert compute.forward == pytest.approx((0.075, 0.075))
    assert compute.backward == pytest.approx((0.125, 0.125))
    assert compute.after == pytest.approx(0.2)


def test_the_floor_of_a_cell_is_its_bytes_at_the_measured_rate() -> None:
    shape = uniform("8", 0.0, 1)
    measured = phase(3.0)
    compute = Compute(forward=(0.001, 0.001), backward=(0.001, 0.001), after=0.25)
    floor = cell_floor(measured, compute, shape, wires(), calibration(shape), microbatches=4, chunks=1)
    seconds = MEGABYTE / (1e6 * PAYLOAD_SHARE)
    # A megabyte goes out; the last gradient comes back; two forwards and two backwards cannot be hidden.
    assert floor.seconds == pytest.approx(seconds + seconds / 8 + 0.004 + 0.25)
    figures = floor_figures(floor, measured, compute)
    assert figures["binds"] == "link 0 to 1"
    assert figures["share"] == pytest.approx(floor.seconds / 3.0)
    assert json.loads(json.dumps(figures))["compute"] == {
        **asdict(compute),
        "forward": [0.001] * 2,
        "backward": [0.001] * 2,
    }


def test_a_steps_bytes_over_another_shape_take_as_long_as_the_busiest_direction() -> None:
    found = phase(0.5, 0.7)
    # 1,001,000 bytes out and 501,000 back in each step.
    assert transfer_seconds(found, uniform("8", 0.0, 1), wires()) == pytest.approx(1.001)
    assert transfer_seconds(found, uniform("8/2", 0.0, 1), wires()) == pytest.approx(4 * 0.501)
    shared = phase(0.5, wires=(WireBytes(0, 0),) * 2)
    assert transfer_seconds(shared, uniform("8", 0.0, 2), wires("interfaces")) == pytest.approx(1.001)


def test_the_floor_counts_the_way_of_a_shared_interface_once() -> None:
    shape = uniform("8", 40.0, 2)
    compute = Compute(forward=(0.0, 0.0), backward=(0.0, 0.0), after=0.0)
    floor = cell_floor(
        phase(3.0), compute, shape, wires("interfaces"), calibration(shape), microbatches=4, chunks=1
    )
    seconds = MEGABYTE / (1e6 * PAYLOAD_SHARE)
    # One round trip of 40 ms: out with the last activation, back with the last gradient.
    assert floor.seconds == pytest.approx(seconds + seconds / 8 + 0.040)


def test_a_cell_has_the_windows_that_its_steps_may_have_had() -> None:
    def planned(step: int) -> WindowsPlanned:
        one = (1.0,)
        rates = dict.fromkeys(("round_trips", "rates_up", "rates_down", "lines_up", "lines_down"), one)
        return WindowsPlanned(
            epoch=1,
            step=step,
            windows=(step,),
            forward=one,
            backward=one,
            activation_bytes=8.0,
            gradient_bytes=8.0,
            **rates,
        )

    plans = [planned(step) for step in (2, 4, 6, 9)]
    assert [plan.step for plan in plans_of(plans, first=5, last=9)] == [4, 6]
    assert [plan.step for plan in plans_of(plans, first=6, last=10)] == [4, 6, 9]
    assert plans_of(plans, first=1, last=2) == [] == plans_of([], first=1, last=5)
    figures = plan_figures(plans[0])
    assert figures["windows"] == (2,) and figures["lines_down"] == (1.0,)
    assert "epoch" not in figures and "replica" not in figures
