"""`thinwire set RUN_DIR section.key=value`: change a running run between two steps."""

import argparse
import json
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

TAKEN_SECONDS = 10.0
"""How long the coordinator may take to accept the request. It looks several times per second."""
LOOK_SECONDS = 0.1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("set", help="change a run's settings between two steps")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="+",
        help="values to change: pipeline, snapshots, run length, learning rate, held-out loss, trace",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory, owner_only
    from node.coordinator.changes import ask_for_change, check_change, is_asked_for, take_request
    from node.coordinator.store import Store
    from node.display.status import coordinator_is_gone
    from node.run_file.loader import stored_config
    from node.view.checkpoint import read_view
    from wire.errors import RunError, UserError

    directory: Path = existing_run_directory(args.run_dir)
    with Store.open(directory) as store:
        check_change(stored_config(store.run().config_json), args.overrides)
    started, words = read_view(directory)[0].started, shlex.join([str(directory), *args.overrides])
    not_running = f"the run's coordinator is not running: use `thinwire resume {words}`"
    if coordinator_is_gone(started, directory):
        raise UserError(not_running)
    with owner_only():
        ask_for_change(directory, args.overrides)

    pause, until = threading.Event(), time.monotonic() + TAKEN_SECONDS
    try:
        while is_asked_for(directory):
            gone = coordinator_is_gone(started, directory)
            # What is left here would be applied after the next resume.
            if (gone or time.monotonic() > until) and take_request(directory):
                late = f"the run's coordinator did not accept the change within {TAKEN_SECONDS:g} s"
                raise UserError(not_running) if gone else RunError(late)
            pause.wait(LOOK_SECONDS)
    except KeyboardInterrupt:
        take_request(directory)
        raise
    line = "accepted: the run applies it after this step and a snapshot; nodes stay connected"
    sys.stdout.write((json.dumps({"accepted": args.overrides}) if args.json else line) + "\n")
    return 0
