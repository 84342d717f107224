"""Loss of small models by codec pair: the same text and seeds, one run per pair.

    python -m scripts.experiments.codec_loss --data TEXT

Each run is a real one: a coordinator and four nodes on loopback, 300 steps. Reported are the mean loss of the
last 20 steps and the held-out loss of the final weights, without codecs. Each run is written to `--out` when
it ends; runs that are already there with the same settings are skipped.
"""

import argparse
import itertools
import json
import platform
import shutil
import sys
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import numpy as np
import torch

from node.config.schema import DataSection
from node.data.data import Corpus
from node.lab.results import commit, hardware
from node.processes.demo import demo_file, run_demo
from node.run_file.loader import load_config
from node.telemetry.events import Event, RunFinished, RunSummary, StepDone
from scripts.report import RESULTS
from tests.support.reference_trainer import ReferenceTrainer
from wire.version import VERSION

OUT = RESULTS / "codec_loss.json"

PAIRS = (
    "fp32/fp32",
    "bf16/bf16",
    "fp16/fp16",
    "tah/fixed-8",
    "fixed-4/fixed-8",
    "tah/fixed-6",
    "trellis-4.41/fixed-8",
)
BASELINE = ("fp32", "fp32")
LAST_STEPS = 20
HELD_OUT_WINDOWS = 256

SETTINGS: dict[str, Any] = {
    "model.family": "llama",
    "model.layers": 4,
    "model.vocab": 256,
    "model.sequence": 256,
    "training.global_batch": 16,
    "training.microbatch": 4,
    "training.lr": 3e-3,
    "training.warmup_steps": 20,
    "pipeline.stages": 4,
    "pipeline.window": 1,
}
WIDTHS: dict[int, dict[str, Any]] = {
    128: {"model.hidden": 128, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 352},
    256: {"model.hidden": 256, "model.heads": 8, "model.kv_heads": 4, "model.ffn": 688},
}
"""Quantization noise costs more in narrow models, so more than one width is measured."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what codecs cost in loss.")
    parser.add_argument("--data", type=Path, required=True, help="text to train on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="forward codec/backward codec")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()

    report = _open_report(arguments.out, arguments.data, arguments.steps)
    made = {_key(run) for run in report["runs"]}
    for width, seed, pair in itertools.product(arguments.widths, arguments.seeds, arguments.pairs):
        forward, backward = pair.split("/")
        key = (width, forward, backward, seed)
        if key in made:
            continue
        # Write after each run: one takes minutes.
        report["runs"].append(_run(report["settings"], arguments.data, *key))
        _write(arguments.out, report)
    _print(report)
    return 0


def _key(run: dict[str, Any]) -> tuple[int, str, str, int]:
    return run["width"], run["forward_codec"], run["backward_codec"], run["seed"]


def _open_report(path: Path, data: Path, steps: int) -> dict[str, Any]:
    """The report in `path` if it has the same settings, to add runs to; else a new one."""
    settings = {**SETTINGS, "run.steps": steps, "run.snapshot_every": steps}
    report: dict[str, Any] = {
        "experiment": "codec_loss",
        "commit": commit(),
        "hardware": hardware(),
        "versions": {
            "thinwire": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "grpcio": grpc.__version__,
            "crc32c": google_crc32c.implementation,
        },
        "data": {"name": data.name, "sha256": sha256(data.read_bytes()).hexdigest()},
        "last_steps": LAST_STEPS,
        "held_out_windows": HELD_OUT_WINDOWS,
        "settings": settings,
        "widths": {str(width): values for width, values in WIDTHS.items()},
        "runs": [],
    }
    if path.exists():
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {**before, "runs": []} == report:
            return before
    return report


def _run(
    settings: dict[str, Any], data: Path, width: int, forward: str, backward: str, seed: int
) -> dict[str, Any]:
    """One run, in a directory that is removed afterwards."""
    overrides = [
        *(f"{key}={value}" for key, value in {**settings, **WIDTHS[width]}.items()),
        f"run.seed={seed}",
        f"data.path={data.absolute()}",
        f"pipeline.forward_codec={forward}",
        f"pipeline.backward_codec={backward}",
    ]
    steps: list[StepDone] = []
    ends: list[RunFinished] = []
    name, total = f"{width} wide, {forward}/{backward}, seed {seed}", settings["run.steps"]

    def emit(event: Event) -> None:
        if isinstance(event, StepDone):
            steps.append(event)
            print(f"\r{name}: {event.step}/{total} {event.loss:.4f}", end="", flush=True)
        elif isinstance(event, RunFinished):
            ends.append(event)

    directory = Path(tempfile.mkdtemp(prefix="codec-loss-"))
    try:
        code = run_demo(run_dir=directory, emit=emit, overrides=overrides)
        summary = ends[0].summary if ends else None
        if code != 0 or summary is None or [step.step for step in steps] != list(range(1, total + 1)):
            raise SystemExit(f"the run ended with exit code {code} after {len(steps)} steps")
        held_out = _held_out_loss(overrides, Path(summary.snapshot_path))
    finally:
        shutil.rmtree(directory)
    print(f"\r{name}: held out {held_out:.4f}, {summary.seconds:.0f} s")
    made = {"width": width, "forward_codec": forward, "backward_codec": backward, "seed": seed}
    return {**made, **_outcome([step.loss for step in steps], held_out, summary)}


def _outcome(losses: list[float], held_out: float, summary: RunSummary) -> dict[str, Any]:
    return {
        "loss_last": sum(losses[-LAST_STEPS:]) / LAST_STEPS,
        "loss_held_out": held_out,
        "bits_forward": summary.bits_forward,
        "bits_backward": summary.bits_backward,
        "link_bytes": summary.link_bytes,
        "link_bytes_fp32": summary.link_bytes_fp32,
        "tokens": summary.tokens,
        "tokens_per_second": summary.tokens_per_second,
        "weights_sha256": summary.weights_sha256,
        "losses": losses,
    }


def _held_out_loss(overrides: list[str], snapshot: Path) -> float:
    """Loss of a snapshot's weights in the unsplit model, over evenly spaced windows of the held-out text."""
    config = load_config(demo_file(), overrides)
    corpus = _corpus(config.data, config.model.sequence, config.training.global_batch)
    trainer = ReferenceTrainer(config, corpus)
    trainer.restore(snapshot)
    windows = corpus.validation_windows()
    chosen = np.linspace(0, len(windows) - 1, min(HELD_OUT_WINDOWS, len(windows))).astype(int)
    return trainer.validation_loss(windows[chosen])


@cache
def _corpus(data: DataSection, sequence: int, global_batch: int) -> Corpus:
    """The text, read once; the held-out part does not depend on the seed."""
    return Corpus.load(data, sequence=sequence, global_batch=global_batch, seed=0)


def _print(report: dict[str, Any]) -> None:
    """Print each run's loss and its distance from the uncompressed run of the same width and seed."""
    losses = {_key(run): run["loss_last"] for run in report["runs"]}
    for (width, forward, backward, seed), loss in losses.items():
        base = losses.get((width, *BASELINE, seed))
        gap = f"  {100 * (loss / base - 1):+.2f} %" if base is not None else ""
        print(f"{width} wide, {forward}/{backward}, seed {seed}  {loss:.4f}{gap}")
    print("scripts/docs/tables.py puts these into the documents")


def _write(path: Path, report: dict[str, Any]) -> None:
    """Write the report with each run's losses on one line, so that people can read the file."""
    losses = [run["losses"] for run in report["runs"]]
    marked = {
        **report,
        "runs": [{**run, "losses": f"losses of run {index}"} for index, run in enumerate(report["runs"])],
    }
    text = json.dumps(marked, indent=1)
    for index, values in enumerate(losses):
        text = text.replace(json.dumps(f"losses of run {index}"), json.dumps(values))
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
