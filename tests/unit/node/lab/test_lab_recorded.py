"""The laboratory's recorded results: each can be measured again by a known command, and reads as it is.

A file holds its command; scripts/results/network.md has those from before it was recorded.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from node.lab.plan import CellKey, plan_runs
from node.lab.profile import load_profile
from node.lab.results import Results, read_results
from node.lab.table import all_tables, provenance
from scripts.docs import network

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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_file_reads_as_it_is(path: Path) -> None:
    recorded = read_results(path)
    words = provenance(recorded)
    assert ("not finished" in words) != recorded["finished"]
    assert "each figure the median of " in words
    table = all_tables(recorded)[0]
    rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert len(rows) == len(recorded["cells"])
    for row, cell in zip(rows, recorded["cells"], strict=True):
        assert row["of unthrottled"] == (f"{cell['of_unthrottled']:.2f}" if "of_unthrottled" in cell else "-")
        assert row["binding"] == (cell["floor"]["binds"] if "floor" in cell else "-")


def test_two_recorded_networks_give_no_ratio_that_nobody_measured() -> None:
    names = ["lab_gpt2-xl-4gpu-nic.json", "lab_gpt2-xl-4gpu.json"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "node.cli.main",
            "lab",
            "table",
            *(f"scripts/results/{name}" for name in names),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    blocks = done.stdout.split("\n\n")
    apart = [
        {
            words
            for row in all_tables(read_results(ROOT / "scripts" / "results" / name))[0].rows
            for words in row
        }
        for name in names
    ]
    both = [block for block in blocks if ": measured\n" in block]
    assert [block.partition(":")[0] for block in both] == [f"scripts/results/{name}" for name in names]
    for block, cells in zip(both, apart, strict=True):
        assert all(words in block for words in cells)
    # The second file has no fp32: there is nothing that its rates are a multiple of.
    assert "8.40" not in both[1]


def test_the_goal_is_shown_for_cells_where_a_link_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cell(share: float, binds: str, shape: str) -> dict[str, Any]:
        key = {"forward_codec": "tah", "backward_codec": "fixed-6", "microbatch": 2, "shape": shape}
        return {"key": key, "floor": {"share": share, "binds": binds}}

    cells = [
        cell(0.95, "link 0 to 1", "100"),
        cell(0.883, "download of stage 2", "500"),
        cell(0.5, "compute of stage 1", "1000"),
        {"key": {}},
    ]
    (tmp_path / "lab_some.json").write_text("{}")
    monkeypatch.setattr(network, "RESULTS", tmp_path)
    monkeypatch.setattr(network, "read_results", lambda path: {"cells": cells})
    *_, row = network.lab_floor().splitlines()
    assert row == (
        "| lab_some.json | 1 of 2 | 0.88 (tah/fixed-6 at 500, microbatch 2) "
        "| 0.50 (tah/fixed-6 at 1000, microbatch 2) |"
    )


def test_the_default_output_folder_is_no_part_of_the_repository() -> None:
    def ignored(path: str) -> bool:
        command = ["git", "check-ignore", "--quiet", "--no-index", path]
        done = subprocess.run(command, cwd=ROOT, timeout=20, check=False)
        return done.returncode == 0

    if not (ROOT / ".git").exists():
        pytest.skip("no repository here")
    assert ignored("lab/smoke/results.json")
    assert not ignored("node/lab/table.py") and not ignored("deploy/lab/smoke.toml")
