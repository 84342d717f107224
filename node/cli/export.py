"""`thinwire export RUN_DIR OUT`: write a snapshot as a Hugging Face model folder."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from node.cli.snapshot_model import NEWEST, add_snapshot_arguments, chosen_snapshot, first_layers


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("export", help="write a snapshot as a Hugging Face model folder")
    add_snapshot_arguments(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="",
        help="dtype of the weights (default: as in the checkpoint that the run started from, else float32)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="for a run with adapters, write the whole model with merged adapters instead of a PEFT folder",
    )
    parser.add_argument("--json", action="store_true", help="describe the output in JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.state.export import Merge, export

    directory = existing_run_directory(args.run_dir)
    merge: Merge | None = None
    if args.merge:
        from node.state.merging import merged_parameters

        merge = partial(merged_parameters, known=first_layers(directory))
    # Without a step, `export` uses a newer snapshot if the run removes this one meanwhile.
    wanted = None if args.step in NEWEST else chosen_snapshot(directory, args.step)[1]
    step = export(directory, args.out, step=wanted, dtype=args.dtype, merge=merge)
    if args.json:
        sys.stdout.write(json.dumps({"event": "exported", "step": step, "out": str(args.out)}) + "\n")
    else:
        sys.stdout.write(f"step {step} is in {args.out}; load it with from_pretrained({str(args.out)!r})\n")
    return 0
