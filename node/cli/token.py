"""`thinwire token create|list|revoke RUN_DIR`: manage join tokens in the run's database.

These commands also work while the coordinator runs. A revoked token admits no more nodes, but nodes that it
admitted stay. Evicting a node closes its token: it admits no more nodes, but its other nodes may return.
"""

import argparse
import json
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.cli.parser import UsageError
from node.telemetry.format import parse_duration
from wire.identity.names import node_id_of
from wire.identity.token import LONGEST_TTL, MOST_USES

if TYPE_CHECKING:
    from wire.identity.token import TokenRecord

MOST_NODES = 3
"""How many nodes per token the list names; `--json` names all."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("token", help="create, list and revoke join tokens")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    create = actions.add_parser("create", help="create a token and print its join line")
    create.add_argument("--uses", type=int, default=1, help="how many nodes it may admit (default: 1)")
    create.add_argument("--ttl", default="24h", help="how long it is valid: 90m, 24h, 7d (default: 24h)")
    listing = actions.add_parser("list", help="list a run's tokens, without their secrets")
    revoke = actions.add_parser("revoke", help="revoke a token")
    for action, function in ((create, _create), (listing, _list), (revoke, _revoke)):
        action.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
        action.add_argument("--json", action="store_true", help="print JSON instead of text")
        action.set_defaults(run=function, parser=action)
    revoke.add_argument("token_id", metavar="TOKEN_ID", help="the id that `thinwire token list` shows")


def parse_ttl(text: str) -> timedelta:
    """Parse a token's lifetime, such as `30s`, `90m`, `24h` or `7d`. Raises UsageError."""
    seconds = parse_duration(text) or 0.0
    if not 0 < seconds <= LONGEST_TTL.total_seconds():
        raise UsageError(f"--ttl must be a time such as 90m, 24h or 7d, at most 366d, got {text!r}")
    return timedelta(seconds=seconds)


def _create(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store

    ttl = parse_ttl(args.ttl)
    if not 1 <= args.uses <= MOST_USES:
        raise UsageError(f"--uses must be 1 to {MOST_USES:,}, got {args.uses}")
    with Store.open(existing_run_directory(args.run_dir)) as store:
        record, token = store.create_token(time.time(), ttl, args.uses)
    text = token.encode()
    if args.json:
        sys.stdout.write(json.dumps({**as_json(record, time.time()), "token": text}) + "\n")
    else:
        sys.stdout.write(f"thinwire join {text}\n")
    return 0


def _list(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store
    from node.telemetry.format import table_lines

    with Store.open(existing_run_directory(args.run_dir)) as store:
        records = store.list_tokens()
    now = time.time()
    if args.json:
        sys.stdout.write(json.dumps([as_json(record, now) for record in records]) + "\n")
    elif records:
        rows = []
        for record in records:
            uses = f"{record.uses}/{record.uses_allowed}"
            nodes = _nodes(record)
            more = f" and {len(nodes) - MOST_NODES} more" if len(nodes) > MOST_NODES else ""
            admitted = " ".join(nodes[:MOST_NODES]) + more
            rows.append([record.token_id, record.state(now), uses, _date(record.expires), admitted])
        sys.stdout.write("\n".join(table_lines(["id", "state", "uses", "expires", "nodes"], rows)) + "\n")
    else:
        directory = shlex.quote(str(args.run_dir))
        sys.stdout.write(f"no tokens; create one with `thinwire token create {directory}`\n")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store
    from wire.errors import nearest

    with Store.open(existing_run_directory(args.run_dir)) as store:
        if not store.revoke_token(args.token_id):
            known = [record.token_id for record in store.list_tokens()]
            hint = nearest(args.token_id, known) if known else "; the run has no tokens"
            raise UsageError(f"no token {args.token_id!r} in {args.run_dir}{hint}")
    text = json.dumps({"id": args.token_id, "state": "revoked"})
    sys.stdout.write((text if args.json else f"revoked {args.token_id}; nodes that it admitted stay") + "\n")
    return 0


def as_json(record: "TokenRecord", now: float) -> dict[str, Any]:
    """What `--json` prints of a token, here and in `thinwire evict`."""
    return {
        "id": record.token_id,
        "state": record.state(now),
        "uses": record.uses,
        "uses_allowed": record.uses_allowed,
        "created": record.created,
        "expires": record.expires,
        "nodes": _nodes(record),
    }


def _nodes(record: "TokenRecord") -> list[str]:
    return sorted(map(node_id_of, record.bound))


def _date(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
