"""What all tables share: Markdown, reading a report, and words for a caption."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LOSSES = ("loss_last", "loss_held_out")
"""What a report says of a run: the mean of its last steps, and the final weights on text that no step saw."""

Tables = dict[str, Callable[[], str]]
"""By the name in a document's mark, what makes the table."""


def read_report(path: Path) -> dict[str, Any]:
    """What a script recorded. Raises OSError or ValueError if it cannot be read."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def if_recorded(path: Path, name: str, make: Callable[[], str]) -> Tables:
    """A table of results that need not be there yet: without `path` there is none, nor a place for it."""
    return {name: make} if path.exists() else {}


def commit(report: dict[str, Any]) -> str:
    """The commit that was measured, short, and whether files differed from it."""
    found: str = report["commit"]
    return found[:12] + (" with changes" if found.endswith("with changes") else "")


def commits(report: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Of what is shown, some of which may be of an earlier report."""
    return ", ".join(sorted({commit({"commit": row.get("commit") or report["commit"]}) for row in rows}))


def notes(report: dict[str, Any]) -> str:
    """What a report says beside its figures, to follow a caption."""
    return "".join(f" {note}" for note in report.get("notes", ()))


def spaced(hardware: str) -> str:
    """A processor's name with single spaces: some pad theirs."""
    return " ".join(hardware.split())


def against(run: dict[str, Any] | None, baseline: dict[str, Any] | None, key: str) -> str:
    """A loss, and by how much it differs from the baseline's: `1.9321 (+0.42 %)`."""
    if run is None:
        return "-"
    if baseline is None or run is baseline:
        return f"{run[key]:.4f}"
    return f"{run[key]:.4f} ({100 * (run[key] / baseline[key] - 1):+.2f} %)"
