"""Shared by scripts: JSON reports, package versions, Markdown tables, recorded tensors, errors in a line."""

import hashlib
import importlib.metadata
import json
import platform
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
MOST_CHARACTERS = 300

Column = tuple[str, str]
"""A heading, and `left` or `right`."""


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON; its folder need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def drawn_from(what: str, drawn: object) -> str:
    """A line for a figure's file: what it was drawn from, with a hash. A test compares the hash with that of
    the results, so it finds a figure that is out of date."""
    return f"drawn from {what} with sha256 {hashlib.sha256(json.dumps(drawn).encode()).hexdigest()}"


def gpu_report(parser: ArgumentParser, bench: str) -> dict[str, Any]:
    """What a GPU bench's report begins with; ends the program with a message where there is no NVIDIA GPU."""
    # Here, so that scripts that need no GPU start without torch.
    import torch

    from node.lab.results import commit

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    return {
        "bench": bench,
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def version(package: str) -> str:
    """The installed version of a package, or `not installed`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def one_line(problem: BaseException, most: int = MOST_CHARACTERS) -> str:
    """An exception's class and message in one line, cut after `most` characters."""
    kind, words = type(problem).__name__, " ".join(str(problem).split())
    return f"{kind}: {words}"[:most] if words else kind


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table; `|` within a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("--:" if side == "right" else "---" for _, side in columns) + "|"
    return "\n".join([line([heading for heading, _ in columns]), rule, *(line(row) for row in rows)])
