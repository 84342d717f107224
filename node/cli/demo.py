"""`thinwire demo`: a complete run on this machine, with four nodes and real text."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="train a small model on real text, in four stages on this machine"
    )
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="values that override the demo's settings",
    )
    parser.add_argument("--data", type=Path, help="text, JSONL or a folder (default: Python's own sources)")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--run-dir", type=Path, help="new directory for the run (default: runs/demo-<n>)")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import new_run_directory
    from node.display.render import make_renderer
    from node.processes.demo import run_demo
    from node.run_file.loader import parse_override

    overrides = []
    if args.data is not None:
        overrides.append(f"data.path={args.data.absolute()}")
    if args.steps is not None:
        # A short demo warms up for at most a tenth of its steps.
        overrides += [f"run.steps={args.steps}", f"training.warmup_steps={min(20, args.steps // 10)}"]
    overrides += args.overrides
    for override in overrides:
        parse_override(override)
    directory = new_run_directory(args.run_dir, "demo")
    with make_renderer(json=args.json) as emit:
        return run_demo(run_dir=directory, emit=emit, overrides=overrides)
