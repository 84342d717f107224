"""`thinwire eval RUN_DIR`: a snapshot's held-out loss and perplexity, or what lm-eval says of it, on this
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
    parser = commands.add_parser("eval", help="held-out loss and perplexity of a snapshot")
    add_arguments(parser)
    parser.add_argument(
        "--text", type=Path, metavar="PATH", help="measure on this text (default: the run's held-out text)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="samples to measure on (default: data.valid_samples; with --text all)",
    )
    parser.add_argument(
        "--tasks", metavar="A,B", help="tasks of lm-eval, which downloads what they need; recorded in the run"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: at most N questions of each")
    parser.add_argument("--shots", type=int, metavar="N", help="with --tasks: examples before each question")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.tasks is not None:
        if args.text is not None or args.samples is not None:
            raise UsageError("--text and --samples are for the held-out loss: leave them out with --tasks")
        return score(args)
    if args.limit is not None or args.shots is not None:
        raise UsageError("--limit and --shots are for lm-eval: name its tasks by --tasks")
    if args.samples is not None and args.samples < 1:
        raise UsageError(f"--samples must be at least 1, got {args.samples}")
    from node.data.samples import samples_of
    from node.data.shards import load_data
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
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        found = NO_LABELS if loss is None else f"{loss:.4f} nats a token, perplexity {perplexity:.4g}"
        tokens = f"{samples.labelled or len(samples)} samples of {config.model.sequence} tokens"
        sys.stdout.write(f"step {step}: held-out loss {found}, {tokens}\n")
    return 0
