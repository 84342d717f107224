"""What the sum over gradient groups costs in loss: by sync codec, and by the length of rounds.

    python -m scripts.experiments.sync_loss --data TEXT

The unsplit trainer, whose bits are those of rows of nodes, with nothing lost between stages:

- `exact`: a sum at every optimizer step, packed with each sync codec, from initial weights on.
- `local`: rounds of H local steps, packed with `--local-codec`, from the weights and moments of the exact
  fp32 run after `--warm` steps. Every run has the same samples in the same order, so a round has those of H
  exact steps, each group a share of each.

A run of local steps begins without outer momentum, as a run with `sync.warmup` does. The held-out loss is of
the final weights. Each run is written to `--out` when it ends; those there with the same settings are kept.
The defaults take minutes on a CPU. 124 million parameters, 59 million tokens, on a GPU, with the token ids
that `convergence` reads:

    python -m scripts.experiments.sync_loss --tokens DIR --tokenizer gpt2-bpe --device cuda \\
        --layers 12 --hidden 768 --heads 12 --kv-heads 12 --ffn 2048 --vocab 50304 --sequence 1024 \\
        --batch 64 --microbatch 8 --steps 900 --warm 300 --lr-warmup 30 --lr 6e-4 --precision bfloat16 \\
        --tied --out scripts/results/sync_loss_124m.json
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SyncSection,
    TrainingSection,
)
from node.lab.results import commit, hardware
from node.model.units import parameter_specs, unit_names
from node.run_file.validate import validate
from node.stage.machine_info import fix_order
from node.training.data import Corpus
from node.training.reference import ReferenceTrainer
from scripts.experiments.convergence import StageTrainer, Windows, windows
from scripts.report import RESULTS, write
from wire.version import VERSION

OUT = RESULTS / "sync_loss.json"
CODECS = ("fp32", "bf16", "fixed-8", "trellis-4.41")
EVERY = (2, 4, 8, 16)
HELD_OUT_WINDOWS = 256
TOKENS = "books-train.npy"
LAST_STEPS = 16
"""Exact steps whose mean loss is reported; as many as the longest round has."""

States = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the groups of a run are summed."""

    every: int
    """Local steps in a round; 1 is exact."""
    codec: str
    seed: int


class Experiment:
    """One model and one text, trained in several ways."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._on_gpu = arguments.device != "cpu" and arguments.tokens is not None
        self.config = self._config(Way(every=1, codec="fp32", seed=0))

    def _config(self, way: Way) -> RunConfig:
        """The run of a way. SystemExit if steps are no multiples of a round; ConfigError for what `validate`
        refuses."""
        asked, every = self._arguments, way.every
        for name in ("steps", "warm", "lr_warmup"):
            if getattr(asked, name) % every:
                raise SystemExit(f"--{name.replace('_', '-')} must be a multiple of {every}, a round's steps")
        sync_codec = way.codec if every == 1 else "fp32"
        config = RunConfig(
            run=RunSection(seed=way.seed, steps=asked.steps // every),
            model=ModelSection(
                layers=asked.layers,
                hidden=asked.hidden,
                heads=asked.heads,
                kv_heads=asked.kv_heads,
                ffn=asked.ffn,
                vocab=asked.vocab,
                sequence=asked.sequence,
                tied=asked.tied,
            ),
            data=DataSection(path=str(asked.data or asked.tokens / TOKENS), tokenizer=asked.tokenizer),
            training=TrainingSection(
                global_batch=asked.batch * every,
                microbatch=asked.microbatch,
                lr=asked.lr,
                warmup_steps=asked.lr_warmup // every,
                precision=asked.precision,
            ),
            pipeline=PipelineSection(stages=1, window=0, groups=asked.groups, sync_codec=sync_codec),
        )
        if every > 1:
            sync = SyncSection(every=every, warmup=asked.warm // every, codec=way.codec)
            config = replace(config, sync=sync)
        validate(config, "this experiment")
        return config

    def ways(self) -> Iterator[Way]:
        asked = self._arguments
        for seed in asked.seeds:
            for codec in asked.codecs:
                yield Way(every=1, codec=codec, seed=seed)
            for every in asked.every:
                yield Way(every=every, codec=asked.local_codec, seed=seed)

    def run(self, way: Way) -> dict[str, Any]:
        """Train, and measure the loss."""
        asked, began = self._arguments, time.monotonic()
        if self._on_gpu and way.every == 1:
            trainer, losses = self._stage_trainer(way), []
        else:
            trainer, losses = self._trainer(way), []
            if way.every > 1 or (way.codec == "fp32" and asked.every):
                states, before = self._warm(way.seed)
                losses.extend(before)
                for unit, state in states.items():
                    trainer.optimizer.load_unit_state(unit, state)
                trainer.step = asked.warm // way.every
        while trainer.step < trainer.config.run.steps:
            losses.append(trainer.train_step().loss)
            if not np.isfinite(losses[-1]):
                raise SystemExit(f"{way}: the loss of step {trainer.step} is not finite")
        held_out = trainer.validation_loss(self._held_out(trainer))
        found = {
            **asdict(way),
            "commit": commit(),
            "loss_last": float(np.mean(losses[-(LAST_STEPS // way.every) or -1 :])),
            "loss_held_out": held_out,
            "weights_sha256": None if isinstance(trainer, StageTrainer) else trainer.weights_sha256(),
            "seconds": time.monotonic() - began,
            "losses": [round(loss, 5) for loss in losses],
        }
        print(f"{way}: held out {held_out:.4f}, {found['seconds']:.0f} s", flush=True)
        return found

    @cache  # noqa: B019  # lives as long as the experiment
    def _warm(self, seed: int) -> tuple[States, list[float]]:
        """The state of every unit after the exact steps that come first, and the losses of these."""
        trainer = self._trainer(Way(every=1, codec="fp32", seed=seed))
        losses = [step.loss for step in trainer.train(self._arguments.warm)]
        return {unit: trainer.optimizer.unit_state(unit) for unit in trainer.optimizer.units}, losses

    def _stage_trainer(self, way: Way) -> StageTrainer:
        """Takes exact steps on a GPU as a node does, with passes as CUDA graphs."""
        config, device = self._config(way), torch.device(self._arguments.device, 0)
        fix_order(device)
        tokens = np.load(self._arguments.tokens / TOKENS, mmap_mode="r")
        return StageTrainer(config, Windows(tokens, seed=way.seed), device)

    def _trainer(self, way: Way) -> ReferenceTrainer:
        config, tokens = self._config(way), self._arguments.tokens
        sizes = {"global_batch": config.training.global_batch, "seed": way.seed}
        corpus: Any
        if tokens is None:
            corpus = _corpus(config.data, sequence=config.model.sequence, **sizes)
        else:
            corpus = Windows(np.load(tokens / TOKENS, mmap_mode="r"), **sizes)
        return ReferenceTrainer(config, corpus, device=torch.device(self._arguments.device))

    def _held_out(self, trainer: Any) -> np.ndarray:
        """Windows that no step sees: evenly spaced ones of the text's end, or the first of `books-valid`."""
        if self._arguments.tokens is None:
            ends = trainer.corpus.validation_windows()
            return ends[np.linspace(0, len(ends) - 1, min(HELD_OUT_WINDOWS, len(ends))).astype(int)]
        valid = np.load(self._arguments.tokens / "books-valid.npy", mmap_mode="r")
        return windows(valid, np.arange(HELD_OUT_WINDOWS))


@cache
def _corpus(data: DataSection, *, sequence: int, global_batch: int, seed: int) -> Corpus:
    return Corpus.load(data, sequence=sequence, global_batch=global_batch, seed=seed)


def main() -> int:
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    experiment = Experiment(arguments)
    report = _open_report(arguments, experiment.config)
    made = {(run["every"], run["codec"], run["seed"]) for run in report["runs"]}
    for way in experiment.ways():
        if (way.every, way.codec, way.seed) not in made:
            report["runs"].append(experiment.run(way))
            write(arguments.out, report)
    print("scripts/docs/tables.py puts these into the documents")
    return 0


def _open_report(arguments: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """The report in `--out` if it has the same settings, to add runs to; else a new one."""
    cuda = arguments.device != "cpu"
    text: Path = arguments.data or arguments.tokens / TOKENS
    sync, units = SyncSection(), unit_names(config.model)
    report: dict[str, Any] = {
        "experiment": "sync_loss",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if cuda else hardware(),
        "versions": {
            "thinwire": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "data": {"name": text.name, "sha256": sha256(text.read_bytes()).hexdigest()},
        "model": asdict(config.model),
        "parameters": sum(one.elements for unit in units for one in parameter_specs(config.model, unit)),
        "training": asdict(config.training),
        "tokenizer": Path(arguments.tokenizer).name,
        "groups": arguments.groups,
        "steps": arguments.steps,
        "warm": arguments.warm,
        "outer_lr": sync.outer_lr,
        "outer_momentum": sync.outer_momentum,
        "last_steps": LAST_STEPS,
        "held_out_windows": HELD_OUT_WINDOWS,
        "runs": [],
    }
    if arguments.out.exists():
        before: dict[str, Any] = json.loads(arguments.out.read_text(encoding="utf-8"))
        # Runs say of which commit they are.
        if {**before, "commit": report["commit"], "runs": []} == json.loads(json.dumps(report)):
            return before
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what packed sums and local steps cost in loss.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="text to train on")
    source.add_argument(
        "--tokens", type=Path, help="folder of token ids, as for `convergence`; windows of its length"
    )
    parser.add_argument("--tokenizer", default="bytes", help="as `data.tokenizer` of a run file")
    for name, number in (
        ("layers", 4),
        ("hidden", 64),
        ("heads", 4),
        ("kv-heads", 2),
        ("ffn", 176),
        ("vocab", 256),
        ("sequence", 128),
        ("groups", 4),
        ("batch", 16),
        ("microbatch", 4),
        ("steps", 256),
        ("warm", 96),
        ("lr-warmup", 32),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=number, help=f"default {number}")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--codecs", nargs="*", default=CODECS)
    parser.add_argument("--every", type=int, nargs="*", default=EVERY)
    parser.add_argument("--local-codec", default=SyncSection().codec)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
