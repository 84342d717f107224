"""`thinwire evict RUN_DIR NODE`: remove a node from a run for good, even while the run is on."""

import argparse
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from wire.errors import UserError, nearest


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("evict", help="remove a node from a run for good")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument("node", metavar="NODE", help="the node's id or name, as `thinwire status` shows it")
    parser.add_argument(
        "--keep-token",
        action="store_true",
        help="keep the token that admitted the node open; by default it is closed, because the node could "
        "otherwise return with another key",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.cli.token import as_json
    from node.coordinator.store import Store

    directory = existing_run_directory(args.run_dir)
    with Store.open(directory) as store:
        members = {member.node_id: member for member in store.members()}
        node_id = args.node
        # Ids first, because a node may use another's id as its name.
        if node_id not in members:
            current = {node for node, member in members.items() if member.evicted is None}
            node_id = _by_name(args.node, current, directory)
        eviction = store.evict(node_id, time.time(), keep_token=args.keep_token)
        if eviction is None:
            hint = nearest(args.node, list(members)) if members else "; the run has no members"
            raise UserError(f"{args.node} is not a member of the run in {args.run_dir}{hint}")
        tokens = store.list_tokens()
    if args.json:
        by = {token.token_id for token in eviction.tokens}
        came_by = [as_json(token, eviction.at) for token in tokens if token.token_id in by]
        sys.stdout.write(json.dumps({"node": eviction.node_id, "tokens": came_by}) + "\n")
    else:
        sys.stdout.write(f"{eviction}\n")
    return 0


def _by_name(name: str, members: Collection[str], directory: Path) -> str:
    """The id of the member with this name, or `name` itself if there is none. Raises UserError if several
    have it, because owners choose names freely."""
    if not name:
        raise UserError("no node given: give its id or its name, as `thinwire status` shows them")
    from node.display.watch import HistoryWatch

    watch = HistoryWatch(directory)
    watch.view()
    called = sorted(node for node in members if watch.run.name_of(node) == name)
    if len(called) > 1:
        raise UserError(f"{len(called)} nodes are called {name!r}: give the id of one, {' or '.join(called)}")
    return called[0] if called else name
