"""Error of each gradient with activations in 4 bits, by model width: small trained models, the same text.

    python -m scripts.experiments.stored_gradients --data TEXT [--widths 128 256 512 1024] [--steps 150]

For each width a model is trained with exact activations; then the errors of its gradients are measured as in
`stored_activations`: one microbatch, one kind of tensor at a time (AGoQ's table 13, arXiv 2605.00539).
Each width is written when it ends; widths that are already there with the same settings are skipped.
"""

import argparse
import json
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from node.config.schema import DataSection, ModelSection, RunConfig, RunSection, TrainingSection
from node.data.data import Corpus
from node.lab.results import commit, hardware
from scripts.report import RESULTS
from tests.support.reference_trainer import ReferenceTrainer

# Find the other script whether this one is run with `-m` or by its path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from scripts.experiments.stored_activations import gone_on_with, gradient_errors

OUT = RESULTS / "stored_gradients.json"
BITS = 4
HEAD = 32
"""Channels of a head."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure errors of gradients by a model's width.")
    parser.add_argument("--data", type=Path, required=True, help="text to train on")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    report = _report(arguments)
    for width in arguments.widths:
        if any(row["width"] == width for row in report["widths"]):
            continue
        began = time.monotonic()
        report["widths"].append(measured(arguments, width))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{report['widths'][-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def measured(arguments: argparse.Namespace, width: int) -> dict[str, Any]:
    """A trained model of this width: its last losses, and the error of each gradient."""
    config = _config(width, arguments.steps)
    corpus = Corpus.load(
        DataSection(path=str(arguments.data)),
        sequence=config.model.sequence,
        global_batch=config.training.global_batch,
        seed=0,
    )
    device = torch.device(arguments.device)
    trainer = ReferenceTrainer(config, corpus, device=device)
    losses = [step.loss for step in trainer.train(arguments.steps)]
    rows = torch.from_numpy(corpus.batch(trainer.step).astype(np.int64)).to(device)
    errors = {
        row["gradient"]: row["normalised_l2"]
        for row in gradient_errors(trainer, rows[: config.training.microbatch])
        if row["bits"] == BITS
    }
    return {"width": width, "loss_last": sum(losses[-20:]) / len(losses[-20:]), "normalised_l2": errors}


def _config(width: int, steps: int) -> RunConfig:
    heads = width // HEAD
    return RunConfig(
        run=RunSection(seed=0, steps=steps),
        model=ModelSection(
            layers=2,
            hidden=width,
            heads=heads,
            kv_heads=heads,
            ffn=width * 11 // 4,
            vocab=256,
            sequence=128,
        ),
        training=TrainingSection(global_batch=16, microbatch=16, lr=1e-3, warmup_steps=20),
    )


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    data = {"name": arguments.data.name, "sha256": sha256(arguments.data.read_bytes()).hexdigest()}
    config = _config(HEAD, arguments.steps)
    on_gpu = arguments.device.startswith("cuda")
    report: dict[str, Any] = {
        "experiment": "stored_gradients",
        "data": data,
        "settings": {
            "layers": config.model.layers,
            "sequence": config.model.sequence,
            "microbatch": config.training.microbatch,
            "steps": arguments.steps,
            "bits": BITS,
        },
        "hardware": torch.cuda.get_device_name() if on_gpu else hardware(),
        "versions": {"torch": torch.__version__},
        "commit": commit(),
        "widths": [],
    }
    return gone_on_with(arguments.out, report, ("data", "settings", "hardware", "versions"))


if __name__ == "__main__":
    sys.exit(main())
