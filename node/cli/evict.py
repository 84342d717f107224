"""`thinwire evict RUN_DIR NODE_ID`: remove a node from a run for good, also while the run is on."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from wire.errors import UserError, nearest


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("evict", help="remove a node from a run for good")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument("node_id", metavar="NODE_ID", help="from `thinwire status`")
    parser.add_argument(
        "--keep-token",
        action="store_true",
        help="leave the remaining uses of the token that admitted it; by default they are gone, because the "
        "node would come back under another key",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store

    with Store.open(existing_run_directory(args.run_dir)) as store:
        eviction = store.evict(args.node_id, time.time(), keep_token=args.keep_token)
        if eviction is None:
            known = [member.node_id for member in store.members()]
            hint = nearest(args.node_id, known) if known else "; it has none"
            raise UserError(f"{args.node_id} is no member of the run in {args.run_dir}{hint}")
    sys.stdout.write(f"{eviction}\n")
    return 0
