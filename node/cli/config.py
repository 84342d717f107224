"""`thinwire config explain RUN.toml`: resolved values, memory of stages, bytes per step on each link."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("config", help="check a run file before starting it")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    explain = actions.add_parser("explain", help="resolved values, memory and bytes per step")
    explain.add_argument("run_file", metavar="RUN.toml", type=Path, help="the run file")
    explain.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="values that override the file's",
    )
    explain.add_argument("--json", action="store_true", help="one JSON object instead of text")
    explain.set_defaults(run=run, parser=explain)


def run(args: argparse.Namespace) -> int:
    from node.analysis.explain import explain, text_plan
    from node.display.explain import explanation_json, explanation_text
    from node.run_file.loader import load_config

    config = load_config(args.run_file, args.overrides)
    explanation = explain(config, text_plan(config, _tell))
    text = explanation_json(explanation) if args.json else explanation_text(explanation)
    sys.stdout.write(text + "\n")
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
