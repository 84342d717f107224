"""`thinwire resume RUN_DIR`: resume a stopped run from its newest snapshot.

Snapshots are stored per layer, so the number of stages, the codecs and the address may change. So may
settings that affect only future steps: a diverged run can resume with a lower learning rate, and a finished
run with more steps.
"""

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHANGEABLE = (
    *("pipeline", "snapshots", "coordinator", "dashboard", "telemetry"),
    *("data.path", "data.valid", "data.valid_every", "data.valid_samples"),
    *("data.prompts", "data.prompts_every"),
    *("run.steps", "run.tokens", "run.snapshot_every", "run.keep_snapshots", "run.keep_best"),
    *("training.lr", "training.min_lr_ratio", "training.clip"),
    *("training.schedule", "training.decay_steps", "training.decay_tokens"),
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("resume", help="resume a stopped run")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help=f"values to change; allowed are {', '.join(CHANGEABLE)}",
    )
    parser.add_argument(
        "--new-text",
        action="store_true",
        help="use the text at data.path as it is now, even if it has changed, for the steps from here on",
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.add_argument("--stay", action="store_true", help="keep serving the page after the run has ended")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.rebuild import damage

    directory: Path = args.run_dir
    broken = None
    with contextlib.suppress(OSError):
        broken = damage(directory)
    if broken is None:
        existing_run_directory(directory)
    return resume_run(directory, args.overrides, json=args.json, stays=args.stay, new_text=args.new_text)


def resume_run(
    directory: Path, overrides: Sequence[str], *, json: bool, stays: bool, new_text: bool = False
) -> int:
    """Resume the run in `directory`, with `new_text` on a changed text. Returns the exit code."""
    from node.cli.importing import importing
    from node.cli.parser import set_up_logging
    from node.cli.run_directory import owner_only
    from node.cli.run_output import emitter, serve_finished
    from node.coordinator.rebuild import damage, rebuild
    from node.coordinator.store import Store
    from node.processes.locks import run_lock
    from node.run_file.loader import change_config, stored_config
    from node.telemetry.events import Notice

    news = None
    if damage(directory):
        with owner_only(), run_lock(directory):
            # Check again, because another process may have rebuilt it.
            if problem := damage(directory):
                news = rebuild(directory, problem, time.time())
    with Store.open(directory) as store:
        config = change_config(stored_config(store.run().config_json), overrides, CHANGEABLE)
    set_up_logging()

    with importing():
        from node.processes.coordinator import run_coordinator

    with owner_only(), emitter(config, json=json) as emit:
        if news:
            emit(Notice(text=news))
        code = run_coordinator(config, run_dir=directory, emit=emit, resume=True, new_text=new_text)
        return serve_finished(directory, emit) if stays and code == 0 else code
