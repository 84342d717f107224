"""`thinwire compare RUN_DIR RUN_DIR`: compare two runs side by side."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.view.compare import RunRecord


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("compare", help="compare two runs side by side")
    parser.add_argument("first", metavar="RUN_DIR", type=Path, help="the first run's directory")
    parser.add_argument("second", metavar="RUN_DIR", type=Path, help="the second run's directory")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.display.compare import comparison_lines
    from node.view.compare import compare
    from wire.errors import escaped

    first, second = args.first, args.second
    # Path.resolve raises RuntimeError where links lead back to themselves.
    names = _names(Path(os.path.realpath(first)), Path(os.path.realpath(second)))
    comparison = compare(_record(first, names[0]), _record(second, names[1]))
    text = json.dumps(comparison.to_fields()) if args.json else "\n".join(comparison_lines(comparison))
    sys.stdout.write(escaped(text) + "\n")
    return 0


def _names(first: Path, second: Path) -> tuple[str, str]:
    """The shortest suffixes of the two paths that differ."""
    shortest = min(len(first.parts), len(second.parts))
    for length in range(1, shortest):
        names = tuple(str(Path(*path.parts[-length:])) for path in (first, second))
        if names[0] != names[1]:
            return names[0], names[1]
    return first.name, second.name


def _record(directory: Path, name: str) -> "RunRecord":
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store
    from node.telemetry.history import read_history
    from node.view.compare import record

    with Store.open(existing_run_directory(directory)) as store:
        config = store.run().values()
    return record(name, config, read_history(directory))
