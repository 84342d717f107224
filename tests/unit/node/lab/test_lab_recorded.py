"""The laboratory's recorded results: each can be measured again by a known command, and reads as it is.

A file holds its command; scripts/results/network.md has those from before it was recorded.
"""

import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from node.lab.plan import CellKey, plan_runs
from node.lab.profile import load_profile
from node.lab.results import Results, read_results
from node.lab.table import provenance

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
