"""`thinwire eval RUN_DIR`: measure a snapshot's held-out loss and perplexity, or run lm-eval on it, on this
machine."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from node.cli.parser import UsageError
from node.cli.snapshot_model import add_arguments, load_model, open_snapshot
from node.cli.task_scores import score


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure the held-out loss and perplexity of a snapshot")
    add_arguments(parser)
    parser.add_argument(
        "--text", type=Path, metavar="PATH", help="measure on this text (default: the run's held-out text)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="how many samples to measure on (default: data.valid_samples, or all of --text)",
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B",
        help="run these tasks of lm-eval, which downloads their data; the run records the scores",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: at most N questions per task")
    parser.add_argument("--shots", type=int, metavar="N", help="with --tasks: examples before each question")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.tasks is not None:
        if args.text is not None or args.samples is not None:
            raise UsageError("--text and --samples are for the held-out loss: do not use them with --tasks")
        return score(args)
    if args.limit is not None or args.shots is not None:
        raise UsageError("--limit and --shots are for lm-eval: name its tasks with --tasks")
    if args.samples is not None and args.samples < 1:
        raise UsageError(f"--samples must be at least 1, got {args.samples}")
    from node.data.samples import samples_of
    from node.data.shards import load_data
    from node.telemetry.events import finite
    from node.telemetry.format import NO_LABELS

    config, _, _ = open_snapshot(args)
    path = config.data.valid if args.text is None else str(args.text.absolute())
    limit = args.samples or (config.data.valid_samples if args.text is None else None)
    corpus = None if path else load_data(config, lambda line: None)
    samples = samples_of(config, corpus, path, limit)
    if corpus is not None:
        corpus.close()
    if len(samples) > config.training.microbatch:
        samples = samples.whole_microbatches(config.training.microbatch)
    step, model = load_model(args)
    loss = model.loss(samples)
    perplexity = None if loss is None else math.exp(min(loss, 700.0))
    if args.json:
        report = {"step": step, "loss": loss, "perplexity": perplexity, "samples": samples.labelled}
        sys.stdout.write(json.dumps(finite(report)) + "\n")
    else:
        shown = NO_LABELS if loss is None else f"{loss:.4f} nats per token, perplexity {perplexity:.4g}"
        tokens = f"{samples.labelled or len(samples)} samples of {config.model.sequence} tokens"
        sys.stdout.write(f"step {step}: held-out loss {shown}, {tokens}\n")
    return 0
