"""`thinwire trace RUN_DIR --steps a:b`: write a timeline of steps for Perfetto or chrome://tracing."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wire.errors import UserError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("trace", help="write a trace of steps for Perfetto")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument(
        "--steps", default="", metavar="A:B", help="first and last step (default: the newest complete one)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="output file, `-` for stdout (default: trace-A-B.json in RUN_DIR)",
    )
    parser.add_argument("--json", action="store_true", help="describe the output in JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.data.text import write_whole
    from node.telemetry.events import RunStarted
    from node.telemetry.format import counted, duration_text
    from node.telemetry.history import read_history
    from node.telemetry.trace import align, chrome_trace
    from node.telemetry.trace_files import TracedSteps, newest_whole_step, read_batches
    from wire.errors import ConfigError, UserError

    directory = existing_run_directory(args.run_dir)
    # The newest step in the history may have no spans on disk yet.
    text = args.steps
    if not text:
        if (newest := newest_whole_step(directory)) is None:
            raise _nothing("", directory)
        text = str(newest + 1)
    try:
        steps = TracedSteps.parse(text if ":" in text else f"{text}:{text}")
    except ConfigError:
        raise UserError(
            f"--steps {args.steps} is invalid: give one step, or the first and the last as in 3:5"
        ) from None
    assert steps.last is not None, "only `all` has no last step, and it has no colon"
    first, last = steps.first - 1, steps.last - 1
    # Neighbours may send before a stage begins the step, so read the adjacent steps too.
    aligned = align(read_batches(directory, first - 1, last + 1), first, last)
    if not aligned.spans:
        raise _nothing(f" of steps {text}", directory)
    out = args.out or directory / f"trace-{steps.first}-{steps.last}.json"
    entries = (entry.event for entry in read_history(directory))
    started = next((event for event in entries if isinstance(event, RunStarted)), None)
    trace = chrome_trace(aligned, directory.name, 1 if started is None else started.slices)
    text = json.dumps(trace, separators=(",", ":")) + "\n"
    report = sys.stdout
    if str(out) == "-":
        # stdout has only the trace.
        report = sys.stderr
        sys.stdout.write(text)
    else:
        try:
            if out.is_file() and _start(out) not in (b"", text[:_START].encode()):
                raise UserError(f"{out} is a file of another kind, which stays: name another with --out")
            write_whole(out, text)
        except OSError as error:
            reason = f"{out} cannot be written ({error.strerror})"
            raise UserError(f"{reason}: name another file with --out") from None
    stages = len({placed.stage for placed in aligned.spans})
    rows = len({placed.replica for placed in aligned.spans})
    if args.json:
        summary = {
            "file": str(out),
            "steps": [steps.first, steps.last],
            "stages": stages,
            "rows": rows,
            "spans": len(aligned.spans),
            "dropped_spans": aligned.dropped,
            "clock_error_seconds": aligned.clock_error,
        }
        report.write(json.dumps(summary) + "\n")
        return 0
    missing = f" ({aligned.dropped} more were dropped)" if aligned.dropped else ""
    grid = counted(stages, "stage") + (f" in {rows} rows" if rows > 1 else "")
    report.write(
        f"{out}: {len(aligned.spans)} spans{missing} of {grid}, clocks within "
        f"{duration_text(aligned.clock_error)}; open it in https://ui.perfetto.dev or chrome://tracing\n"
    )
    return 0


_START = 12
"""As many bytes tell a trace from other files."""


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_START)


def _nothing(which: str, directory: Path) -> "UserError":
    from node.telemetry.history import highest_step
    from wire.errors import UserError

    return UserError(
        f"there is no trace{which} in {directory}: the run has done {highest_step(directory)} steps; in the "
        "run file, telemetry.trace selects the traced steps and telemetry.trace_mb limits what is kept"
    )
