"""What the sum over gradient groups costs in loss: by sync codec, and by the length of rounds.

    python -m scripts.experiments.sync_loss --data TEXT

The unsplit trainer, whose bits are those of rows of nodes, with nothing lost between stages:

- `exact`: a sum at every optimizer step, packed with each sync codec, from initial weights on.
- `local`: rounds of H local steps, packed with `--local-codec`, from the weights and moments of the exact
  fp32 run after `--warm` steps. Every run has the same samples in the same order, so a round has those of H
  exact steps, each group a share of each.

A run of local steps begins without outer momentum, as a run with `sync.warmup` does. The held-out loss is of
the final weights. Runs that ended are kept in `--out`, if it is of the same settings. The defaults take
minutes on a CPU. 124 million parameters, 59 million tokens, on GPUs, with the token ids that `convergence`
reads:

    python -m scripts.experiments.sync_loss --tokens DIR --tokenizer gpt2-bpe --device cuda --gpus 0 1 2 3 \\
        --layers 12 --hidden 768 --heads 12 --kv-heads 12 --ffn 2048 --vocab 50304 --sequence 1024 \\
        --batch 64 --microbatch 8 --steps 900 --warm 300 --lr-warmup 30 --lr 6e-4 --precision bfloat16 \\
        --tied --every --codecs fp32 bf16 fixed-8 trellis-4.41 dither-3 \\
        --time-limit 560 --checkpoints DIR --out scripts/results/sync_loss_124m.json

Runs of local steps need numbers that are multiples of the longest round: the same with `--steps 448 --warm
192 --lr-warmup 32 --seeds 0 --codecs fp32 --every 2 4 8 16` and another `--out`.

With `--time-limit` a run that does not end in time leaves a checkpoint, from which the same command goes on.
`--merge` adds finished runs in `--parts`, wherever they were made, to `--out`, and does nothing else. Sums
packed with `dither-R`, which run files refuse, draw anew at every step and node of the tree.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SyncSection,
    TrainingSection,
)
from node.data.data import Corpus
from node.lab.results import commit, hardware
from node.model.units import parameter_specs, unit_names
from node.run_file.validate import validate
from node.stage.machine_info import fix_order
from node.training.optimizer import StageOptimizer
from scripts.experiments.convergence import StageTrainer, Windows, windows
from scripts.experiments.run_parts import Checkpoints, Parts, Progress, States, deal
from scripts.report import RESULTS, write
from tests.support.reference_trainer import ReferenceTrainer
from wire.version import VERSION

OUT = RESULTS / "sync_loss.json"
CODECS = ("fp32", "bf16", "fixed-8", "trellis-4.41")
EVERY = (2, 4, 8, 16)
HELD_OUT_WINDOWS = 256
TOKENS = "books-train.npy"
WAY = ("every", "codec", "seed")
SAVE_SECONDS = 25.0
"""Kept free at the end of a call: a checkpoint of 124 million parameters is 1.5 GB."""
LAST_STEPS = 16
"""Exact steps whose mean loss is reported; as many as the longest round has."""

Trainer = StageTrainer | ReferenceTrainer


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the groups of a run are summed."""

    every: int
    """Local steps in a round; 1 is exact."""
    codec: str
    seed: int

    @property
    def name(self) -> str:
        return f"every-{self.every}-{self.codec}-{self.seed}"


class Stopped(Exception):
    """There is no time left; the run's state is kept, if anything is."""


class Experiment:
    """One model and one text, trained in several ways."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._on_gpu = arguments.device != "cpu" and arguments.tokens is not None
        self._checkpoints = Checkpoints(arguments.checkpoints)
        self._until = arguments.until or time.time() + arguments.time_limit
        self.config = self._config(Way(every=1, codec="fp32", seed=0))

    def _config(self, way: Way) -> RunConfig:
        """The run of a way. SystemExit if steps are no multiples of a round; ConfigError for what `validate`
        refuses."""
        asked, every = self._arguments, way.every
        for name in ("steps", "warm", "lr_warmup"):
            if getattr(asked, name) % every:
                raise SystemExit(f"--{name.replace('_', '-')} must be a multiple of {every}, a round's steps")
        sync_codec = way.codec if every == 1 else "fp32"
        draws = sync_codec.startswith("dither-")
        if draws and not self._on_gpu:
            raise SystemExit(f"{sync_codec} needs the sums that a GPU makes: give --tokens and --device cuda")
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
                optimizer=asked.optimizer,
                warmup_steps=asked.lr_warmup // every,
                precision=asked.precision,
            ),
            pipeline=PipelineSection(
                stages=1,
                window=0,
                groups=asked.groups,
                sync_codec="fp32" if draws else sync_codec,
            ),
        )
        if every > 1:
            sync = SyncSection(
                every=every,
                warmup=asked.warm // every,
                codec=way.codec,
                outer_lr=asked.outer_lr,
                outer_momentum=asked.outer_momentum,
            )
            config = replace(config, sync=sync)
        validate(config, "this experiment")
        if draws:
            # Refused in run files, whose nodes agree on no salt for a piece.
            config = replace(config, pipeline=replace(config.pipeline, sync_codec=sync_codec))
        return config

    def ways(self) -> Iterator[Way]:
        asked = self._arguments
        for seed in asked.seeds:
            for codec in asked.codecs:
                yield Way(every=1, codec=codec, seed=seed)
            for every in asked.every:
                yield Way(every=every, codec=asked.local_codec, seed=seed)

    def run(self, way: Way) -> dict[str, Any]:
        """Train, and measure the loss. Raises Stopped."""
        asked, began = self._arguments, time.monotonic()
        trainer = self._stage_trainer(way) if self._on_gpu else self._trainer(way)
        losses: list[float] = []
        before = 0.0
        if (kept := self._checkpoints.load(way.name)) is not None:
            states, noted = kept
            _load(trainer, states)
            trainer.step, losses, before = noted["step"], noted["losses"], noted["seconds"]
        elif way.every > 1 or (way.codec == "fp32" and asked.every and not self._on_gpu):
            states, warm = self._warm(way.seed)
            losses.extend(warm)
            _load(trainer, states)
            trainer.step = asked.warm // way.every
        self._train(trainer, way, losses, trainer.config.run.steps, before - began)
        held_out = trainer.validation_loss(self._held_out(trainer))
        seconds = before + time.monotonic() - began
        found = {
            **asdict(way),
            "commit": commit(),
            "loss_last": float(np.mean(losses[-(LAST_STEPS // way.every) or -1 :])),
            "loss_held_out": held_out,
            "weights_sha256": None if isinstance(trainer, StageTrainer) else trainer.weights_sha256(),
            "seconds": seconds,
            "losses": [round(loss, 5) for loss in losses],
        }
        self._checkpoints.drop(way.name)
        print(f"{way}: held out {held_out:.4f}, {seconds:.0f} s", flush=True)
        return found

    def _train(
        self, trainer: Trainer, way: Way, losses: list[float], steps: int, spent: float, name: str = ""
    ) -> None:
        """Go on to so many steps. Raises Stopped. `spent`: seconds of earlier calls, less the clock's."""
        name = name or way.name
        tokens = trainer.config.training.global_batch * trainer.config.model.sequence
        progress, slowest = Progress(name, steps, tokens), 0.0
        while trainer.step < steps:
            began = time.monotonic()
            losses.append(trainer.train_step().loss)
            if not np.isfinite(losses[-1]):
                raise SystemExit(f"{way}: the loss of step {trainer.step} is not finite")
            progress.step(trainer.step, losses[-1])
            if way.every == 1 and trainer.step == self._arguments.warm and way.codec == "fp32":
                self._keep_warm(trainer, way.seed, losses)
            # The first compiles.
            slowest = max(slowest, time.monotonic() - began) if progress.taken > 1 else 0.0
            if trainer.step < steps and time.time() + 2 * slowest + SAVE_SECONDS > self._until:
                noted = {"step": trainer.step, "losses": losses, "seconds": spent + time.monotonic()}
                self._checkpoints.save(name, _states(trainer), noted)
                raise Stopped(f"{name}: stopped at step {trainer.step} of {steps}")

    def _keep_warm(self, trainer: Trainer, seed: int, losses: list[float]) -> None:
        """Where runs of local steps begin: the same for all, and the exact run's."""
        if self._arguments.every and not self._checkpoints.has(f"warm-{seed}"):
            self._checkpoints.save(f"warm-{seed}", _states(trainer), {"losses": losses})

    @cache  # noqa: B019  # lives as long as the experiment
    def _warm(self, seed: int) -> tuple[States, list[float]]:
        """The state of every unit after the exact steps that come first, and the losses of these. Raises
        Stopped."""
        if (kept := self._checkpoints.load(f"warm-{seed}")) is not None:
            return kept[0], kept[1]["losses"]
        way = Way(every=1, codec="fp32", seed=seed)
        trainer = self._stage_trainer(way) if self._on_gpu else self._trainer(way)
        losses: list[float] = []
        name = f"warming-{seed}"
        if (kept := self._checkpoints.load(name)) is not None:
            _load(trainer, kept[0])
            trainer.step, losses = kept[1]["step"], kept[1]["losses"]
        self._train(trainer, way, losses, self._arguments.warm, 0.0, name=name)
        self._checkpoints.drop(name)
        return _states(trainer), losses

    def _stage_trainer(self, way: Way) -> StageTrainer:
        """Takes steps on a GPU as a node does, with passes as CUDA graphs."""
        config, device = self._config(way), torch.device(self._arguments.device, 0)
        fix_order(device)
        return StageTrainer(config, self._windows(config), device)

    def _trainer(self, way: Way) -> ReferenceTrainer:
        config = self._config(way)
        corpus: Any
        if self._arguments.tokens is None:
            sizes = {"global_batch": config.training.global_batch, "seed": way.seed}
            corpus = _corpus(config.data, sequence=config.model.sequence, **sizes)
        else:
            corpus = self._windows(config)
        return ReferenceTrainer(config, corpus, device=torch.device(self._arguments.device))

    def _windows(self, config: RunConfig) -> Windows:
        tokens = np.load(self._arguments.tokens / TOKENS, mmap_mode="r")
        return Windows(tokens, global_batch=config.training.global_batch, seed=config.run.seed)

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


def _optimizer(trainer: Trainer) -> StageOptimizer:
    return trainer.stage.optimizer if isinstance(trainer, StageTrainer) else trainer.optimizer


def _states(trainer: Trainer) -> States:
    optimizer = _optimizer(trainer)
    return {unit: optimizer.unit_state(unit) for unit in optimizer.units}


def _load(trainer: Trainer, states: States) -> None:
    for unit, state in states.items():
        _optimizer(trainer).load_unit_state(unit, state)
    _optimizer(trainer).weights_changed()


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    folder = arguments.parts or arguments.out.with_suffix(".parts")
    if arguments.merge:
        _merge(arguments.out, Parts(folder, None))
        return 0
    if arguments.data is None and arguments.tokens is None:
        parser.error("give --data or --tokens")
    torch.set_num_threads(arguments.threads)
    experiment = Experiment(arguments)
    parts = Parts(folder, cache(lambda: _header(arguments, experiment.config)))
    earlier = _merge(arguments.out, parts) if arguments.worker is None else []
    ways = {way.name: way for way in experiment.ways() if asdict(way) not in earlier}
    well = True
    if arguments.worker is not None:
        _run(experiment, ways[arguments.worker], parts)
    elif arguments.gpus:
        command = [sys.executable, "-m", "scripts.experiments.sync_loss", *sys.argv[1:]]
        until = time.time() + arguments.time_limit
        well = deal(ways, parts.has, [*command, "--until", str(until)], arguments.gpus, until)
    else:
        for way in ways.values():
            if _run(experiment, way, parts):
                _merge(arguments.out, parts)
    if arguments.worker is None:
        _merge(arguments.out, parts)
        print("scripts/docs/tables.py puts these into the documents")
    return 0 if well else 1


def _run(experiment: Experiment, way: Way, parts: Parts) -> bool:
    """Whether it ended."""
    if parts.has(way.name):
        return False
    try:
        parts.put(way.name, experiment.run(way))
    except Stopped as stopped:
        print(stopped, flush=True)
        return False
    return True


def _merge(out: Path, parts: Parts) -> list[dict[str, Any]]:
    """Write the report with all finished runs; the ways of these."""
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    report = parts.merged(earlier, WAY)
    if report is None or not report["runs"]:
        return []
    report["runs"].sort(key=lambda run: (run["seed"], run["every"], run["codec"]))
    write(out, report)
    return [{name: run[name] for name in WAY} for run in report["runs"]]


def _header(arguments: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """The report without runs."""
    cuda = arguments.device != "cpu"
    text: Path = arguments.data or arguments.tokens / TOKENS
    units = unit_names(config.model)
    return {
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
        "outer_lr": arguments.outer_lr,
        "outer_momentum": arguments.outer_momentum,
        "last_steps": LAST_STEPS,
        "held_out_windows": HELD_OUT_WINDOWS,
        "runs": [],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what packed sums and local steps cost in loss.")
    source = parser.add_mutually_exclusive_group()
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
    for name, default in (("outer-lr", SyncSection.outer_lr), ("outer-momentum", SyncSection.outer_momentum)):
        parser.add_argument(f"--{name}", type=float, default=default, help=f"default {default}")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--codecs", nargs="*", default=CODECS)
    parser.add_argument("--every", type=int, nargs="*", default=EVERY)
    parser.add_argument("--local-codec", default=SyncSection().codec)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpus", type=int, nargs="+", help="their numbers: a process each, a run at a time")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds of this call")
    parser.add_argument("--checkpoints", type=Path, help="folder for runs that the time limit stops")
    parser.add_argument("--parts", type=Path, help="folder of finished runs; by default beside --out")
    parser.add_argument("--merge", action="store_true", help="only add what --parts holds to --out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=OUT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
