"""Shared by all tables: Markdown, reading a report, and parts of a caption."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LOSSES = ("loss_last", "loss_held_out")
"""Keys of a run's losses in a report: mean of the last steps, and final weights on held-out text."""

Tables = dict[str, Callable[[], str]]
"""Functions that make a table, by the name in a document's mark."""


def read_report(path: Path) -> dict[str, Any]:
    """A script's report. Raises OSError or ValueError if it cannot be read."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def if_recorded(path: Path, name: str, make: Callable[[], str]) -> Tables:
    """Register a table of results that may be missing: without `path` there is no table."""
    return {name: make} if path.exists() else {}


def commit(report: dict[str, Any]) -> str:
    """The measured commit, shortened, and whether files differed from it."""
    found: str = report["commit"]
    return found[:12] + (" with changes" if found.endswith("with changes") else "")


def commits(report: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Commits of the shown rows, some of which may be from an earlier report."""
    return ", ".join(sorted({commit({"commit": row.get("commit") or report["commit"]}) for row in rows}))


def notes(report: dict[str, Any]) -> str:
    """A report's remarks, to follow a caption."""
    return "".join(f" {note}" for note in report.get("notes", ()))


def spaced(hardware: str) -> str:
    """A processor's name with single spaces; some names are padded."""
    return " ".join(hardware.split())


def against(run: dict[str, Any] | None, baseline: dict[str, Any] | None, key: str) -> str:
    """A loss and its difference from the baseline's: `1.9321 (+0.42 %)`."""
    if run is None:
        return "-"
    if baseline is None or run is baseline:
        return f"{run[key]:.4f}"
    return f"{run[key]:.4f} ({100 * (run[key] / baseline[key] - 1):+.2f} %)"
