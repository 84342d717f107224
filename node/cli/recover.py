"""`thinwire recover --from PLACE`: rebuild a run directory after its coordinator's disk is lost."""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from wire.errors import UserError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("recover", help="rebuild a run whose coordinator's disk is lost")
    parser.add_argument(
        "--from",
        dest="node_dirs",
        metavar="PLACE",
        action="append",
        required=True,
        type=lambda place: place if "://" in place else Path(place),
        help="a node's state directory, a copy of it, or URL/RUN_ID in an object store; one is enough, but "
        "several may be given",
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="the run directory to create (default: runs/NAME-N)"
    )
    parser.add_argument(
        "overrides", metavar="section.key=value", nargs="*", default=[], help="such as data.path=TEXT"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.resume import CHANGEABLE
    from node.cli.run_directory import new_run_directory, owner_only
    from node.coordinator.rebuild import newest_record, recover
    from node.processes.locks import run_lock
    from node.run_file.loader import HUB, change_config

    record = newest_record(args.node_dirs)
    config = record.config
    given = {override.partition("=")[0].strip() for override in args.overrides}
    data = config.data
    named = {
        "data.path": "" if data.sources else data.path,
        "data.sources": ",".join(data.sources),
        "data.valid": data.valid,
        "data.chat_template": data.chat_template,
        # Adapters need this model, while a snapshot contains a whole model.
        "model.from": config.model.from_ if config.lora.rank else "",
    }
    for key, value in named.items():
        if value not in ("", "stdlib") and not value.startswith(HUB) and key not in given:
            raise UserError(f"the nodes' records do not say where {value!r} is: add {key}=PATH")
    changeable = (*CHANGEABLE, "data.sources", "data.tokenizer", "data.chat_template", "model.from")
    config = change_config(config, args.overrides, changeable)
    with owner_only():
        directory = new_run_directory(args.run_dir, config.run.name)
        with run_lock(directory):
            line = recover(record, config, directory, args.node_dirs, time.time())
    if args.json:
        fields = {"run_id": record.run_id, "step": record.manifests[-1].step, "run_dir": str(directory)}
        sys.stdout.write(json.dumps(fields) + "\n")
        return 0
    sys.stdout.write(
        f"{line}\nlost: the old certificates and tokens, and the history of losses. Continue with\n\n"
        f"  thinwire resume {shlex.quote(str(directory))}\n\n"
        "and, on every machine of the run, end `thinwire join` and run the new join line with the same state "
        "directory as before\n"
    )
    return 0
