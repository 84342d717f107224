"""`thinwire doctor [TOKEN]`: is this machine fit to take part, and can it reach the run?"""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check this machine")
    parser.add_argument(
        "token", metavar="TOKEN", nargs="?", help="also check a join token and its coordinator"
    )
    parser.add_argument("--state-dir", type=Path, help="the state directory to check (default: the user's)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.local.doctor import checks_json, checks_text, examine, healthy

    checks = examine(token=args.token, state_dir=args.state_dir)
    sys.stdout.write((checks_json(checks) if args.json else checks_text(checks)) + "\n")
    return 0 if healthy(checks) else 1
