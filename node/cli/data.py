"""`thinwire data`: preview the tokens that a run trains on, or train a tokenizer."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.cli.parser import add_run_file
from wire.errors import escaped

if TYPE_CHECKING:
    from node.data.preview import Preview

MOST_TOKENS = 100_000


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("data", help="look at a run's training data, or train a tokenizer on it")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    preview = actions.add_parser("preview", help="show the first step's tokens and labels, and dropped rows")
    add_run_file(preview)
    preview.add_argument("--tokens", type=int, default=200, help="tokens to show per source (default: 200)")
    preview.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    preview.set_defaults(run=run, parser=preview)
    trained = actions.add_parser("tokenizer", help="train a byte-level BPE on a text")
    trained.add_argument(
        "text", metavar="TEXT", help="text as in data.path: a file, JSONL, or a folder of them"
    )
    trained.add_argument("out", metavar="OUT", type=Path, help="the folder to create, for data.tokenizer")
    trained.add_argument(
        "--vocab", type=int, default=16384, metavar="N", help="size of the vocabulary (default: 16384)"
    )
    trained.add_argument("--field", default="", help="field of JSONL rows with the text (default: text)")
    trained.add_argument(
        "--chat", action="store_true", help="add a chat template, and read conversations if rows have no text"
    )
    trained.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    trained.set_defaults(run=run_tokenizer, parser=trained)


def run_tokenizer(args: argparse.Namespace) -> int:
    from node.cli.parser import set_up_logging
    from node.config.schema import DataSection
    from node.data.tokenizer_training import train_tokenizer

    set_up_logging()
    data = DataSection(path=args.text, **({"jsonl_field": args.field} if args.field else {}))
    tokens = train_tokenizer(data, args.vocab, args.out, chat=args.chat)
    if args.json:
        sys.stdout.write(json.dumps({"tokens": tokens, "out": str(args.out)}) + "\n")
    else:
        place = json.dumps(str(args.out))
        sys.stdout.write(
            f"{tokens} tokens are in {args.out}; set data.tokenizer = {place} and model.vocab = {tokens}\n"
        )
    return 0


def run(args: argparse.Namespace) -> int:
    from node.cli.parser import UsageError, set_up_logging
    from node.data.preview import preview
    from node.run_file.loader import load_config

    if not 1 <= args.tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens must be 1 to {MOST_TOKENS:,}, got {args.tokens}")
    config = load_config(args.run_file, args.overrides)
    set_up_logging()
    report = preview(config, args.tokens)
    sys.stdout.write((json.dumps(report.to_fields()) if args.json else _text(report)) + "\n")
    return 0


def _text(report: "Preview") -> str:
    lines = [
        f"{report.vocabulary} tokens in the vocabulary; labels are marked by [[ ]]"
        if report.masked
        else f"{report.vocabulary} tokens in the vocabulary; every token is a label"
    ]
    for source in report.sources:
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
        lines.append(escaped(source.text))
    return "\n".join(lines)
