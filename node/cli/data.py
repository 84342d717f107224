"""`thinwire data preview RUN.toml`: what a run trains on, token by token."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from node.cli.parser import add_run_file

if TYPE_CHECKING:
    from node.data.preview import Preview

MOST_TOKENS = 100_000


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("data", help="look at a run's training data")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    preview = actions.add_parser("preview", help="show the first step's tokens, labels and what is dropped")
    add_run_file(preview)
    preview.add_argument("--tokens", type=int, default=200, help="tokens of each source (default: 200)")
    preview.add_argument("--json", action="store_true", help="one JSON object instead of text")
    preview.set_defaults(run=run, parser=preview)


def run(args: argparse.Namespace) -> int:
    from node.cli.parser import UsageError, set_up_logging
    from node.data.preview import preview
    from node.run_file.loader import load_config

    if not 1 <= args.tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens must be 1 to {MOST_TOKENS:,}, got {args.tokens}")
    config = load_config(args.run_file, args.overrides)
    set_up_logging()
    found = preview(config, args.tokens)
    sys.stdout.write((json.dumps(found.to_fields()) if args.json else _text(found)) + "\n")
    return 0


def _text(found: "Preview") -> str:
    lines = [
        f"{found.vocabulary} tokens in the vocabulary; labels are marked by [[ ]]"
        if found.masked
        else f"{found.vocabulary} tokens in the vocabulary; every token is a label"
    ]
    for source in found.sources:
        lines.append("")
        lines.append(
            f"{source.path}: {source.files} files, {source.bytes:,} bytes, {source.shards} shards; "
            f"{source.weight:.0%} of samples"
            if source.files
            else f"{source.path}: read as a whole"
        )
        lines.append(
            f"the first shards: {source.documents:,} documents, {source.tokens:,} tokens, "
            f"{source.labels:,} labels"
            if source.files
            else f"{source.tokens:,} tokens to train on"
        )
        lines += [f"dropped {count:,}: {reason}" for reason, count in source.dropped.items()]
        lines.append(source.text)
    return "\n".join(lines)
