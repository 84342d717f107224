"""`thinwire eval RUN_DIR --tasks A,B`: run lm-eval on a snapshot, and record its scores in the run.

lm-eval is EleutherAI's evaluation harness, a separate package. It gets only the exported model.
"""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.cli.parser import UsageError
from node.cli.serve import exported
from wire.errors import RunError

if TYPE_CHECKING:
    from node.telemetry.events import TaskScores

PACKAGE = "lm_eval"
INSTALL = "pip install 'lm_eval[hf]'"
MOST_RESULTS = 64 << 20
"""The most bytes to read of lm-eval's results."""
MOST_METRICS = 1000
"""The most metrics to record. A group of tasks may have hundreds."""


def score(args: argparse.Namespace) -> int:
    """Run lm-eval on the snapshot that the arguments of `eval` name. Raises UserError and RunError."""
    tasks = [task.strip() for task in args.tasks.split(",")]
    if not all(tasks) or any(task.startswith("-") for task in tasks):
        raise UsageError("--tasks takes names of lm-eval's tasks separated by commas, as in arc_easy,piqa")
    for name, value, least in (("limit", args.limit, 1), ("shots", args.shots, 0)):
        if value is not None and value < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
    if importlib.util.find_spec(PACKAGE) is None:
        raise UsageError(f"--tasks needs the lm-eval package, which is not installed here: {INSTALL}")
    from node.cli.run_directory import existing_run_directory
    from node.cli.snapshot_model import chosen_snapshot

    directory = existing_run_directory(args.run_dir)
    step = chosen_snapshot(directory, args.step)[1]
    args.step = str(step)  # a running run may take another snapshot meanwhile
    folder = exported(args)
    with tempfile.TemporaryDirectory(prefix="thinwire-eval-") as out:
        command = [sys.executable, "-m", PACKAGE, "--model", "hf", "--device", args.device]
        command += ["--model_args", f"pretrained={folder.name}{_prefix(folder)}", "--tasks", ",".join(tasks)]
        command += ["--output_path", out]
        command += [] if args.limit is None else ["--limit", str(args.limit)]
        command += [] if args.shots is None else ["--num_fewshot", str(args.shots)]
        # Its output is for people; with `--json` stdout has only the result.
        code = subprocess.run(command, cwd=folder.parent, stdout=sys.stderr if args.json else None).returncode
        if code:
            raise RunError(f"lm-eval failed with exit code {code}; its output is above")
        scores = read_results(Path(out), step, args.limit or 0)
    record(directory, scores)
    if args.json:
        sys.stdout.write(json.dumps({"step": step, "limit": scores.limit, "scores": scores.scores}) + "\n")
    else:
        sys.stdout.write(scores.line + "\n")
    return 0


def _prefix(folder: Path) -> str:
    """The argument of lm-eval's model that sets the token before a text without context: a line break if the
    tokenizer has neither a beginning- nor an end-of-text token, without which lm-eval fails."""
    from node.data.tokenizer import special_tokens

    tables = folder / "tokenizer.json"
    if not tables.is_file() or special_tokens(folder).keys() & {"bos_token", "eos_token"}:
        return ""
    from tokenizers import Tokenizer

    breaks = Tokenizer.from_file(str(tables)).encode("\n", add_special_tokens=False).ids
    return f",prefix_token_id={breaks[0]}" if breaks else ""


def read_results(out: Path, step: int, limit: int) -> "TaskScores":
    """Read the scores that lm-eval wrote below `out`. Raises RunError if they cannot be used."""
    from node.telemetry.events import TaskScores

    files = sorted(out.rglob("results_*.json"))
    if not files:
        raise RunError("lm-eval wrote no results, so nothing is recorded; its output is above")
    try:
        with files[-1].open("rb") as file:
            results: Any = json.loads(file.read(MOST_RESULTS))["results"]
        scores = {
            str(task): {
                name.removesuffix(",none"): float(value)
                for name, value in metrics.items()
                if isinstance(value, int | float) and math.isfinite(value) and name != "sample_len"
            }
            for task, metrics in results.items()
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise RunError(f"{files[-1].name} of lm-eval cannot be read ({error}): nothing is recorded") from None
    if sum(map(len, scores.values())) > MOST_METRICS:
        raise RunError(f"lm-eval reported more than {MOST_METRICS} metrics: name fewer tasks")
    return TaskScores(step=step, limit=limit, scores=scores)


def record(directory: Path, scores: "TaskScores") -> None:
    """Add the scores to the run's history, through its coordinator if it is running."""
    from node.coordinator.changes import leave_scores
    from node.display.status import coordinator_alive
    from node.telemetry.history import append_event
    from node.view.checkpoint import read_view

    run = read_view(directory)[0]
    if run.started is not None and not run.over and coordinator_alive(run.started, directory):
        leave_scores(directory, scores)
    else:
        append_event(directory, scores)
