"""`thinwire coordinator RUN.toml`: start a run, print its join line, and coordinate it until it ends."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from node.cli.parser import add_run_file


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("coordinator", help="start a run and print its join line")
    add_run_file(parser)
    parser.add_argument(
        "--run-dir", type=Path, help="directory to create for the run (default: runs/<name>-<n>)"
    )
    parser.add_argument("--resume", action="store_true", help="resume the run in --run-dir, if there is one")
    parser.add_argument("--stay", action="store_true", help="keep serving the page after the run has ended")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.importing import importing
    from node.cli.parser import UsageError, set_up_logging
    from node.cli.resume import resume_run
    from node.cli.run_directory import new_run_directory, owner_only, run_began
    from node.cli.run_output import emitter, serve_finished
    from node.run_file.loader import load_config, with_absolute_paths
    from wire.errors import UserError

    if args.resume:
        if args.run_dir is None:
            raise UsageError("--resume needs --run-dir: the directory that may hold the run")
        try:
            resumes = run_began(args.run_dir)
        except OSError as error:
            raise UserError(f"--run-dir {args.run_dir} cannot be read ({error.strerror})") from None
        if resumes:
            # The run has stored its config, so the run file is not read again and may be missing.
            return resume_run(args.run_dir, args.overrides, json=args.json, stays=args.stay)
    config = with_absolute_paths(load_config(args.run_file, args.overrides))
    set_up_logging()
    directory = new_run_directory(args.run_dir, config.run.name)

    with importing():
        from node.processes.coordinator import run_coordinator

    try:
        with owner_only(), emitter(config, json=args.json) as emit:
            code = run_coordinator(config, run_dir=directory, emit=emit, resume=False)
            return serve_finished(directory, emit) if args.stay and code == 0 else code
    except UserError:
        # The run has not begun: remove its empty directory.
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise
