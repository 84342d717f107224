"""`thinwire dashboard RUN_DIR`: serve a run's page from its history, during or after the run."""

import argparse
import sys
from pathlib import Path
from typing import Any

DEFAULT_LISTEN = "127.0.0.1:7702"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("dashboard", help="serve a run's page from its history")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"default: {DEFAULT_LISTEN}"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.parser import set_up_logging
    from node.cli.run_directory import existing_run_directory
    from node.dashboard.pages import serve_recorded
    from node.run_file.addresses import parse_listen

    host, port = parse_listen(args.listen)
    directory = existing_run_directory(args.run_dir)
    set_up_logging()
    serve_recorded(directory, host, port, say)
    return 0


def say(url: str) -> None:
    """Print the page's address."""
    sys.stdout.write(f"page at {url} (read-only; press Ctrl-C to stop)\n")
    sys.stdout.flush()
