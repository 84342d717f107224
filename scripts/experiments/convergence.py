"""Loss by codec at 124 million parameters (the size of GPT-2 small), on books in GPT-2's BPE, on GPUs.

    python -m scripts.experiments.convergence --tokens DIR [--gpus 0 1 2 3] [--only NAME ...]

The unsplit reference trainer with thinwire's model, optimizer and codecs, and a codec at each boundary of a
4-stage pipeline: after blocks 3, 6 and 9, in both directions. `DIR` holds books-train.npy and
books-valid.npy, token ids as uint16. Each GPU does its runs one after the other, or several at once. Each run
is written to `--parts` when it ends; runs that are already there are skipped.

Suites (65,536 tokens a step, AdamW, bf16 autocast):

    pass      310 steps, 20.3 million tokens, less than one pass over the text
    long      900 steps, 59 million tokens, two and a half passes
    epochs    310 steps over a part of the text that is seen four times, so that AQ-SGD can send changes
    backward  310 steps with 4-bit gradients, activations in fp16
    memory    310 steps with activations, gradients, moments or weights in few bits, boundaries uncompressed
              in all runs but one; gradients accumulate over eight microbatches a step
    memory-long    the same over 900 steps
    optimizer      200 and 900 steps by AdamW and by Muon, at several learning rates and through several
                   codecs, and in 0.72 of the steps by Muon
    mixture   900 steps of a mixture of eight experts, of which a token has two
    compute        900 steps of the one stage of a run with `stages = 1`, as a node computes it: CUDA graphs,
                   matrix products in bf16 or in FP8
    small          AdamW and Muon in a model of 0.23 million parameters, for CPUs: 2,048 bytes a step in
                   float32, through codecs, with momentum in FP8, and in rounds of local steps

Without GPUs `--runs-a-gpu` processes run beside one another. The token ids of the suite `small` are the
text's bytes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.common.tiles import NON_FINITE
from node.config.schema import (
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    SyncSection,
    TrainingSection,
)
from node.data.data import document_starts
from node.lab.results import commit, hardware
from node.model.chunk import compute_precision
from node.model.rng import generator
from node.model.rng import salt as rng_salt
from node.model.units import unit_names
from node.run_file.validate import validate
from node.schedule.gradient_groups import parts_of_group
from node.schedule.placement import split_units
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from node.stage.step_passes import put_group_sums, sum_own_tie
from node.training.schedule import clip_coefficient, global_norm, learning_rate
from node.tuning.memory import stage_storages
from scripts.experiments.convergence_runs import (
    COMPUTE,
    EPOCH_WINDOWS,
    EXACT_STEPS,
    GLOBAL_BATCH,
    GROUPS,
    MEMORY,
    MIXTURE,
    MIXTURE_MODEL,
    NAIVE,
    ROUNDS_WARMUP,
    RUNS,
    SEQUENCE,
    SMALL,
    STAGES,
    VALIDATION_WINDOWS,
    Run,
)
from scripts.report import RESULTS
from tests.support.device_sums import DeviceSums
from tests.support.reference_trainer import ReferenceTrainer, Step
from wire.codecs.base import Codec
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import Direction, TensorKey, TensorSpec
from wire.version import VERSION

OUT = RESULTS / "convergence.json"
REMEMBERED = torch.bfloat16
"""Dtype of the `aqsgd-b` codec's sample cache, which `Boundaries` imitates."""
RUNS_A_GPU = "THINWIRE_RUNS_A_GPU"
"""Environment variable with how many runs share its GPU."""


class Windows:
    """Fixed windows of the text in a new order each pass; used in place of `node.data.data.Corpus`.

    A window's position in the text never changes, so AQ-SGD meets the same samples again.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        limit: int | None = None,
        seed: int,
        global_batch: int = GLOBAL_BATCH,
        sequence: int = SEQUENCE,
    ) -> None:
        """`tokens` [N] of whole numbers; the first `limit` windows of `sequence` are used, or all."""
        self._tokens = tokens
        self._global_batch, self._sequence = global_batch, sequence
        count = (len(tokens) - 1) // sequence
        self.count = count if limit is None else min(count, limit)
        self._seed = seed

    def samples(self, step: int) -> np.ndarray:
        """Window numbers of a step, [global_batch] int64."""
        places = np.arange(step * self._global_batch, (step + 1) * self._global_batch)
        return np.array(
            [self._order(number)[index] for number, index in zip(*divmod(places, self.count), strict=True)]
        )

    def batch(self, step: int) -> np.ndarray:
        """Tokens [global_batch, sequence + 1]."""
        return windows(self._tokens, self.samples(step), self._sequence)

    def labels(self, step: int) -> np.ndarray:
        """Labels of a step, [global_batch, sequence]: every token counts."""
        return self.batch(step)[:, 1:]

    def documents(self, step: int) -> np.ndarray:
        """Where documents begin, bool [global_batch, sequence]: a window is one."""
        return document_starts(self.batch(step)[:, :-1], None)

    @cache  # noqa: B019  # lives as long as its run
    def _order(self, number: int) -> np.ndarray:
        return generator(self._seed, step=number, purpose="data order").permutation(self.count)


def windows(tokens: np.ndarray, samples: np.ndarray, sequence: int) -> np.ndarray:
    """[n, sequence + 1] for n window numbers."""
    chosen: np.ndarray = tokens[samples[:, None] * sequence + np.arange(sequence + 1)]
    return chosen


class Boundaries:
    """Apply the codecs to the boundary tensors of a run and measure their relative error."""

    def __init__(self, run: Run, text: Windows) -> None:
        self._codecs = {
            Direction.ACTIVATION: _change(run.forward, run.seed),
            Direction.GRADIENT: _change(run.backward, run.seed),
        }
        self._aqsgd = run.forward.startswith("aqsgd-")
        self._text = text
        self._kept: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor] = {}
        self.error: dict[str, float] = {}
        """Relative error of a tensor late in the run, by direction and boundary."""
        self.open = False
        """Switch the codecs off."""

    def __call__(self, tensor: Tensor, key: TensorKey) -> Tensor:
        if self.open:
            return tensor
        if self._aqsgd and key.direction is Direction.ACTIVATION:
            arrived = self._through_cache(tensor, key)
        else:
            arrived = self._codecs[key.direction](tensor, key)
        if key.microbatch == 0 and key.step % 50 == 49:
            self._measure(tensor, arrived, key)
        return arrived

    def _through_cache(self, tensor: Tensor, key: TensorKey) -> Tensor:
        """AQ-SGD: bf16 the first time, then the quantized change from the cached tensor, which is bf16."""
        first = key.microbatch * len(tensor)
        samples = torch.from_numpy(self._text.samples(key.step)[first : first + len(tensor)]).to(
            tensor.device
        )
        if key.boundary not in self._kept:
            shape = (self._text.count, *tensor.shape[1:])
            self._kept[key.boundary] = torch.zeros(shape, dtype=REMEMBERED, device=tensor.device)
            self._seen[key.boundary] = torch.zeros(self._text.count, dtype=torch.bool, device=tensor.device)
        kept, seen = self._kept[key.boundary], self._seen[key.boundary]
        before = kept[samples].float()
        changed = before + self._codecs[Direction.ACTIVATION](tensor.float() - before, key)
        arrived = torch.where(seen[samples][:, None, None], changed, tensor.float()).to(REMEMBERED)
        kept[samples] = arrived
        seen[samples] = True
        return arrived.to(tensor.dtype)

    def _measure(self, sent: Tensor, arrived: Tensor, key: TensorKey) -> None:
        error = torch.linalg.vector_norm((arrived - sent).float()) / torch.linalg.vector_norm(sent.float())
        self.error[f"{key.direction.name.lower()} {key.boundary}"] = error.item()


class DevicePacking:
    """Packs a tensor on the GPU, where its packed form stays, without the checksum, which
    is made and checked on the host."""

    def pack(self, which: Codec, tensor: Tensor) -> Tensor:
        return which.pack(tensor)

    def unpack(self, which: Codec, packed: Tensor, spec: TensorSpec) -> Tensor:
        exponent = int(packed[EXPONENT].view(torch.int32).item())
        if exponent == NON_FINITE:
            raise NonFiniteError(f"a tensor for {which} is not finite")
        return which.unpack(packed, spec, replace(which._header(spec), exponent=exponent))


def _change(name: str, seed: int) -> Callable[[Tensor, TensorKey], Tensor]:
    """A function that encodes and decodes a tensor with this codec."""
    if name == NAIVE:
        return _naive
    if name.startswith("aqsgd-"):
        name = name.replace("aqsgd-", "fixed-")
    packing, chosen = DevicePacking(), codec(name)

    def change(tensor: Tensor, key: TensorKey) -> Tensor:
        spec, which = TensorSpec(tensor.dtype, tuple(tensor.shape)), chosen
        if chosen.draws:
            purpose = f"{key.direction.name} of microbatch {key.microbatch}"
            which = chosen.salted(rng_salt(seed, step=key.step, layer=str(key.boundary), purpose=purpose))
        return packing.unpack(which, packing.pack(which, tensor.contiguous()), spec)

    return change


def _naive(tensor: Tensor, _: TensorKey) -> Tensor:
    scale = tensor.abs().amax() / 7
    return (tensor / scale).round().clamp(-7, 7) * scale


def run_config(run: Run, *, stages: int) -> RunConfig:
    storage, training = MEMORY[run.memory]
    # For the run's stages; a window has not been measured here.
    split: dict[str, Any] = {"split": run.blocks} if stages == STAGES else {}
    is_small = run.suite == SMALL
    every = run.every
    if every > 1 and run.model.tied:
        split["head"] = "first"
    sync = SyncSection(every=every, warmup=EXACT_STEPS[run.suite] // every) if every > 1 else SyncSection()
    config = RunConfig(
        run=RunSection(seed=run.seed, steps=run.steps // every),
        model=run.model,
        training=TrainingSection(
            global_batch=run.global_batch * every,
            microbatch=run.microbatch,
            optimizer=run.optimizer,
            muon_iterations=run.iterations,
            lr=run.lr,
            min_lr_ratio=0.1,
            warmup_steps=ROUNDS_WARMUP // every if is_small or every > 1 else 30,
            precision="float32" if is_small else "bfloat16",
            **training,
        ),
        storage=StorageSection(**storage),
        pipeline=PipelineSection(
            stages=stages, window=0, groups=GROUPS if every > 1 else 1, sync_codec="fp32", **split
        ),
        sync=sync,
    )
    validate(config, run.name)
    return config


def make_trainer(
    run: Run, text: Windows, boundary: Boundaries | None, device: torch.device
) -> ReferenceTrainer:
    """The unsplit trainer of a run; its blocks are compiled unless they keep packed activations or have
    experts."""
    storage, _ = MEMORY[run.memory]
    config = run_config(run, stages=STAGES)
    trainer = ReferenceTrainer(
        config,
        text,  # type: ignore[arg-type]  # has all that the trainer asks of a corpus
        groups=split_units(config.model, STAGES, run.blocks),
        boundary=boundary,
        device=device,
    )
    if not storage and run.suite not in (MIXTURE, SMALL):
        for chunk in trainer.chunks:
            for layer in chunk.layers:
                layer.compile()
    return trainer


def after_exact_steps(run: Run, tokens: np.ndarray, trainer: ReferenceTrainer) -> list[float]:
    """Have a trainer of rounds go on from exact steps over the same samples; returns their losses."""
    exact = make_trainer(replace(run, every=1), _text(replace(run, every=1), tokens), None, trainer.device)
    losses = [step.loss for step in exact.train(EXACT_STEPS[run.suite])]
    for unit in trainer.optimizer.units:
        trainer.optimizer.load_unit_state(unit, exact.optimizer.unit_state(unit))
    trainer.optimizer.weights_changed()
    trainer.step = EXACT_STEPS[run.suite] // run.every
    return losses


def _text(run: Run, tokens: np.ndarray) -> Windows:
    return Windows(
        tokens,
        limit=EPOCH_WINDOWS if run.suite == "epochs" else None,
        seed=run.seed,
        global_batch=run.global_batch * run.every,
        sequence=run.model.sequence,
    )


class StageTrainer:
    """A run of one stage as a node does it, in place of the reference trainer."""

    def __init__(self, config: RunConfig, text: Windows, device: torch.device) -> None:
        self.config, self._text, self._device = config, text, device
        self.step = 0
        self._units = unit_names(config.model)
        self.stage = StageModel(config, device)
        self.stage.build(0, 1)

    def train_step(self) -> Step:
        config, stage = self.config, self.stage
        is_round, parts = config.is_round(self.step), config.parts_of(self.step)
        sums = None
        if config.pipeline.groups > 1:
            salt = rng_salt(config.run.seed, step=self.step, layer="", purpose="sync dither")
            sums = DeviceSums(config, self._units, of_round=is_round, salt=salt)
        batches = np.split(self._text.batch(self.step), config.microbatches)
        stage.begin_step()
        losses = []
        for group in range(config.pipeline.groups):
            if is_round:
                stage.local.begin_group()
            for part in parts_of_group(config, group, parts):
                for number in part:
                    losses.append(stage.forward(0, number, *self._ids(batches[number])).clone())
                    stage.backward(0, number, None)
                if is_round:
                    self._tie()
                    stage.local.step(self.step)
            if sums is not None:
                changes = stage.local.changes() if is_round else stage.take_gradients(self._units)
                sums.group_done(group, changes)
        if is_round:
            stage.local.end()
        if sums is None:
            stage.finish_step()
        else:
            for unit, values in sums.finish():
                put_group_sums(stage, unit, values, of_round=is_round)
        lr = learning_rate(self.step, config.training, config.run.steps)
        if is_round:
            stage.local.apply(self.step)
            grad_norm = 0.0
        else:
            self._tie()
            grad_norm = global_norm(stage.squared_norms().values())
            stage.apply(lr, clip_coefficient(grad_norm, config.training.clip))
        self.step += 1
        return Step(loss=float(torch.stack(losses).double().sum()), grad_norm=grad_norm, lr=lr)

    def _tie(self) -> None:
        if self.config.model.tied:
            sum_own_tie(self.stage)

    @torch.no_grad()
    def validation_loss(self, held_out: np.ndarray) -> float:
        """As `ReferenceTrainer.validation_loss`, in the run's own precision."""
        (chunk,) = self.stage._chunks
        parts = np.split(held_out, len(held_out) // self.config.training.microbatch)
        with compute_precision(self.config.training.precision, self._device):
            return float(np.mean([chunk.loss(*self._ids(part)).item() for part in parts]))

    def _ids(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        whole = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def train(run: Run, tokens: Path, out: Path) -> None:
    """Do one run and write its result to the folder `out`."""
    ids = np.load(tokens / "books-train.npy", mmap_mode="r")
    text = _text(run, ids)
    on_gpu = torch.cuda.is_available()
    boundary, device = Boundaries(run, text), torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    trainer: StageTrainer | ReferenceTrainer
    losses: list[float] = []
    if run.suite == COMPUTE:
        fix_order(device)
        trainer = StageTrainer(run_config(run, stages=1), text, device)
    else:
        trainer = make_trainer(run, text, boundary, device)
        if run.every > 1:
            losses += after_exact_steps(run, ids, trainer)
    valid = np.load(tokens / "books-valid.npy", mmap_mode="r")
    sequence = run.model.sequence
    # A small model's windows are short: evenly spaced ones are of more than one book.
    apart = len(valid) // sequence // VALIDATION_WINDOWS if run.suite == SMALL else 1
    held_out = windows(valid, np.arange(VALIDATION_WINDOWS) * apart, sequence)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began, taken = time.perf_counter(), 0
    while trainer.step < trainer.config.run.steps:
        losses.append(trainer.train_step().loss)
        taken += 1
        if taken == 10:
            _wait(on_gpu)
            steady = time.perf_counter()
        if trainer.step % 50 == 0:
            print(f"{run.name}: {trainer.step}/{trainer.config.run.steps} {losses[-1]:.4f}", flush=True)
        if not np.isfinite(losses[-1]):
            break
    _wait(on_gpu)
    seconds = time.perf_counter() - began
    per_step = (time.perf_counter() - steady) / (taken - 10) if taken > 10 else seconds
    # Codecs on CPUs take longer than the small model.
    without = run.suite == SMALL or run.forward.startswith("aqsgd-")
    through = None if without else trainer.validation_loss(held_out)
    boundary.open = True
    record = {
        **asdict(run),
        "commit": commit(),
        "loss_valid": trainer.validation_loss(held_out),
        "loss_valid_through_codecs": through,
        "loss_last": float(np.mean(losses[-20:])),
        "relative_error": boundary.error,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "seconds": seconds,
        "seconds_a_step": per_step,
        "rounds": _rounds(trainer.config, EXACT_STEPS[run.suite]) if run.every > 1 else None,
        "runs_a_gpu": int(os.environ.get(RUNS_A_GPU, "1")),
        "remembered": str(REMEMBERED) if run.forward.startswith("aqsgd-") else None,
        "stage_bits": [storage.norm_input for storage in stage_storages(trainer.config, STAGES)],
        "losses": [round(loss, 5) for loss in losses],
    }
    whole = out / f"{run.name}.tmp"
    whole.write_text(json.dumps(record), encoding="utf-8")
    whole.rename(out / f"{run.name}.json")
    print(
        f"{run.name}: held out {record['loss_valid']:.4f}, {seconds:.0f} s, {per_step:.3f} s a step",
        flush=True,
    )


def _rounds(config: RunConfig, exact_steps: int) -> dict[str, Any]:
    return {"groups": config.pipeline.groups, "exact_steps": exact_steps, "codec": config.sync.codec}


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


class Dealer:
    """Assigns runs to GPUs; each run is a process."""

    def __init__(self, runs: list[Run], command: list[str], parts: Path, until: float) -> None:
        self._left = runs
        self._command = command
        self._parts = parts
        self._until = until
        self._lock = threading.Lock()
        self._a_step = 0.0
        """Longest seconds per step of the runs so far, their start-up included."""
        self.failed = False

    def serve(self, gpu: int, beside: int) -> None:
        """Do runs on this GPU until none is left, `beside` of them at a time."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), RUNS_A_GPU: str(beside)}
        while (run := self._next()) is not None:
            began = time.monotonic()
            code = subprocess.run([*self._command, "--worker", run.name], env=environment).returncode
            with self._lock:
                self._a_step = max(self._a_step, (time.monotonic() - began) / run.steps)
                # Go on with the other runs; the report shows that this one is missing.
                self.failed |= code != 0

    def _next(self) -> Run | None:
        with self._lock:
            while self._left:
                run = self._left.pop(0)
                if (self._parts / f"{run.name}.json").exists():
                    continue
                if time.monotonic() + run.steps * self._a_step < self._until:
                    return run
                print(f"{run.name}: left out, no time", flush=True)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what codecs cost in loss at 124M parameters.")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="folder of books-train.npy, books-valid.npy"
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument("--runs-a-gpu", type=int, default=1, help="at a time; small kernels leave it waiting")
    parser.add_argument("--only", nargs="+", help="runs whose names begin so, in this order")
    parser.add_argument("--steps", type=int, help="instead of each run's own number, for a trial")
    parser.add_argument(
        "--time-limit", type=float, default=1e9, help="seconds; no run starts that may not fit"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--parts", type=Path, help="folder for single runs' results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts = arguments.parts or arguments.out.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        run = next(run for run in RUNS if run.name == arguments.worker)
        train(replace(run, steps=arguments.steps or run.steps), arguments.tokens, parts)
        return 0
    wanted = list(RUNS)
    if arguments.only:
        wanted = [run for prefix in arguments.only for run in RUNS if run.name.startswith(prefix)]
    command = [
        sys.executable,
        "-m",
        "scripts.experiments.convergence",
        "--tokens",
        str(arguments.tokens),
        "--parts",
        str(parts),
    ]
    if arguments.steps:
        command += ["--steps", str(arguments.steps)]
    dealer = Dealer(list(dict.fromkeys(wanted)), command, parts, time.monotonic() + arguments.time_limit)
    beside = arguments.runs_a_gpu
    threads = [
        threading.Thread(target=dealer.serve, args=(gpu, beside))
        for _ in range(beside)
        for gpu in arguments.gpus
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gather(parts, arguments.out)
    return int(dealer.failed)


def gather(parts: Path, out: Path) -> None:
    """One report of all finished runs, with the runs of the earlier report that were not repeated."""
    fields = set(Run.__dataclass_fields__)

    def name(record: dict[str, Any]) -> str:
        return Run(**{k: v for k, v in record.items() if k in fields}).name

    made = [json.loads(path.read_text(encoding="utf-8")) for path in parts.glob("*.json")]
    records = {name(record): record for record in made}
    if out.exists():
        earlier = json.loads(out.read_text(encoding="utf-8"))
        for record in earlier["runs"]:
            records.setdefault(name(record), {"commit": earlier["commit"], **record})
    order = {run.name: index for index, run in enumerate(RUNS)}
    kept = sorted(
        (record for key, record in records.items() if key in order), key=lambda record: order[name(record)]
    )
    first = Run(**{key: value for key, value in kept[0].items() if key in fields})
    report: dict[str, Any] = {
        "experiment": "convergence",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else hardware(),
        "versions": {
            "thinwire": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "model": asdict(first.model),
        "mixture_model": asdict(MIXTURE_MODEL),
        "tokens_a_step": first.global_batch * first.model.sequence,
        "validation_windows": VALIDATION_WINDOWS,
        "runs": kept,
    }
    # One run per line, so that people can read the file.
    text = json.dumps({**report, "runs": []}, indent=1)
    lines = ",\n  ".join(json.dumps(record) for record in kept)
    out.write_text(text.replace('"runs": []', f'"runs": [\n  {lines}\n ]') + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
