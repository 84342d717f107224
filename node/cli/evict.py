"""`thinwire evict RUN_DIR NODE`: remove a node from a run for good, also while the run is on."""

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from wire.errors import UserError, nearest


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("evict", help="remove a node from a run for good")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument("node", metavar="NODE", help="its id or its name, from `thinwire status`")
    parser.add_argument(
        "--keep-token",
        action="store_true",
        help="keep the token that admitted it open; by default it is closed, because the node could return "
        "with another key",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store

    directory = existing_run_directory(args.run_dir)
    with Store.open(directory) as store:
        members = {member.node_id: member for member in store.members()}
        node_id = args.node
        # Ids first: a node may call itself by another's id.
        if node_id not in members:
            inside = {node for node, member in members.items() if member.evicted is None}
            node_id = _by_name(args.node, inside, directory)
        eviction = store.evict(node_id, time.time(), keep_token=args.keep_token)
        if eviction is None:
            hint = nearest(args.node, list(members)) if members else "; it has none"
            raise UserError(f"{args.node} is no member of the run in {args.run_dir}{hint}")
    sys.stdout.write(f"{eviction}\n")
    return 0


def _by_name(name: str, members: Collection[str], directory: Path) -> str:
    """The id of the only one of `members` that is called `name`; `name` itself if none is. UserError for
    several: owners choose names freely, or none."""
    if not name:
        raise UserError("the node is empty: give its id or its name, as `thinwire status` shows them")
    from node.display.watch import HistoryWatch

    watch = HistoryWatch(directory)
    watch.view()
    called = sorted(node for node in members if watch.run.name_of(node) == name)
    if len(called) > 1:
        raise UserError(f"{len(called)} nodes are called {name!r}: name one by its id, {' or '.join(called)}")
    return called[0] if called else name
