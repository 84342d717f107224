"""Codec `auto` against fixed ones over four unlike links: `python -m scripts.experiments.four_links`.

Five stages, joined by relays of 1000, 300, 100 and 30 Mbit/s, real processes and real codecs on CPU. Blocks
wait for a set time in place of computing, so that the machine's cores pack and send. For each codec: seconds
of a step, median of the counted ones; for `auto` also the codecs that it had in them. Steps of `auto` count
once a plan was kept when it came up for change. `--codecs` measures some of them; with `--merge` their
results replace or join those of the file, if it is of the same commit and machine.

Such blocks learn nothing. So small models then train in one process, on the same bytes and seeds, with four
boundaries that have the codecs of `auto`'s last plan, those of a fixed codec that is nearly as fast as the
fastest, or none: side by side, one on each core. `--losses` trains them alone, with the codecs of `--out`.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.common.random_bits import mixed
from node.config.schema import (
    PLANNED,
    CoordinatorSection,
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.data.data import Corpus
from node.lab.results import commit, hardware
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.head_loss import head_loss
from node.model.units import unit_names
from node.telemetry import events
from node.tuning.codec_times import of_gradients
from node.tuning.decisions import WATCHED
from scripts.experiments.paced_pipeline import PacedRun, paced_run
from scripts.experiments.shaped_relay import ShapedRelay
from scripts.report import RESULTS, write
from wire.codecs import registry
from wire.spec import TensorSpec

OUT = RESULTS / "four_links.json"
RATES = (1000, 300, 100, 30)
"""Mbit/s, of the links in order of stages."""
STAGES = len(RATES) + 1
ROUND_TRIP = 0.01
FORWARD_SECONDS, BACKWARD_SECONDS = 0.05, 0.10
CODECS = (PLANNED, "fp32", "bf16", "fixed-8", "tah", "trellis-4.41")
CALM = WATCHED + 1
"""Steps without a new plan before the steps of `auto` count: plans come up for change every `WATCHED`."""
SETTLED = 3
"""Steps before those of a fixed codec count: windows are planned from the first ones."""
START_SECONDS, STEP_SECONDS = 300.0, 120.0
"""Without a word from the coordinator. The first step compiles."""
NEARLY = 0.9
"""Of the fastest fixed codec's speed: such a codec's loss counts."""
LOSS_MODEL = ModelSection(layers=STAGES, hidden=128, heads=4, kv_heads=2, ffn=352, vocab=256, sequence=256)
LOSS_BATCH, LOSS_RATE, LOSS_WARMUP = 8, 3e-3, 20
HELD_OUT = 64
"""Windows."""


def config(name: str, codec: str, microbatches: int) -> RunConfig:
    return RunConfig(
        run=RunSection(name=name, steps=1000, snapshot_every=1000),
        model=ModelSection(layers=STAGES, hidden=512, heads=8, kv_heads=2, ffn=128, vocab=256, sequence=1024),
        data=DataSection(path="stdlib"),
        training=TrainingSection(global_batch=microbatches, microbatch=1, warmup_steps=0),
        pipeline=PipelineSection(stages=STAGES, forward_codec=codec, backward_codec=of_gradients(codec)),
        coordinator=CoordinatorSection(listen="127.0.0.1:0", silent_seconds=60.0),
    )


async def measure(codec: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One codec's steps."""
    run_config = config("four-links", codec, arguments.microbatches)
    async with paced_run(run_config, directory, forward=FORWARD_SECONDS, backward=BACKWARD_SECONDS) as run:
        return await _watch(run, codec, arguments.steps, arguments.auto_seconds)


async def _watch(run: PacedRun, codec: str, steps: int, most_seconds: float) -> dict[str, Any]:
    """Follow the run's events: shape links as stages are given out, and count steps."""
    assert run.coordinator.stdout is not None
    relays: dict[str, ShapedRelay] = {}
    where: dict[str, str] = {}
    plan: list[list[str]] = []
    counted: list[float] = []
    calm, changes, began = 0, 0, time.monotonic()
    while len(counted) < steps:
        async with asyncio.timeout(START_SECONDS if calm == 0 else STEP_SECONDS):
            line = await run.coordinator.stdout.readline()
        if not line:
            raise RuntimeError("the coordinator ended")
        match events.from_json(line.decode()):
            case events.JoinLine() as told:
                for _ in range(STAGES):
                    await run.add_node(told.line.split()[-1])
                relays = {f"127.0.0.1:{relay.port}": relay for relay in run.relays}
            case events.NodeJoined() as joined:
                where[joined.node_id] = joined.address
            case events.PlacementMade() as placed:
                # The lower stage dials, so a link goes by the relay of its higher stage.
                for rate, node in zip(RATES, placed.nodes[1:], strict=True):
                    relays[where[node]].shape(rate=rate * 1e6 / 8, delay=ROUND_TRIP / 2)
                calm = 0
                counted.clear()
            case events.CodecsPlanned() as made:
                plan = [list(made.activations), list(made.gradients)]
                changes += 1
                print(f"{codec}, step {made.step}: {plan}", flush=True)
            case events.StepDone() as done:
                calm += 1
                print(f"{codec}, step {done.step}: {done.seconds:.3f} s", flush=True)
                late = time.monotonic() - began > most_seconds
                if calm > (CALM if codec == PLANNED else SETTLED) or late:
                    counted.append(done.seconds)
            case _:
                pass
    return {
        "codec": codec,
        "step_seconds": statistics.median(counted),
        "steps": [round(one, 4) for one in counted],
        "plans": changes,
        "activation_codecs": plan[0] if plan else [codec] * len(RATES),
        "gradient_codecs": plan[1] if plan else [of_gradients(codec)] * len(RATES),
    }


class Coded:
    """Gives a boundary's tensors as their receiver gets them, each with a salt of its own."""

    def __init__(self, name: str, salt: int) -> None:
        self._codec = registry.codec(name)
        self._salt = salt
        self._calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self._calls += 1
        which = self._codec.salted(mixed(self._salt + 7919 * self._calls))
        return which.decode(which.encode(x.contiguous()), TensorSpec(x.dtype, tuple(x.shape)))


class _Crossing(torch.autograd.Function):
    """A boundary: what one stage sends is not quite what the next one gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Coded, back: Coded) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return ctx.back(gradient), None, None


def loss_of(chunk: Chunk, rows: Tensor, crossings: Sequence[tuple[Coded, Coded]] | None) -> Tensor:
    """Mean cross-entropy of windows [B, S + 1], through the boundaries if there are any."""
    with compute_precision("bfloat16", rows.device):
        x = chunk.layers[0](rows[:, :-1])
        blocks = list(chunk.layers)[1:-1]
        for number, block in enumerate(blocks):
            x = block(x)
            if crossings is not None and number < len(blocks) - 1:
                x = _Crossing.apply(x, *crossings[number])
        head = chunk.layers[-1]
        return head_loss(head.norm(x).flatten(0, 1), head.output, rows[:, 1:].flatten())


def held_out_loss(result: dict[str, Any] | None, seed: int, steps: int) -> float:
    """Of a small model that has trained with a result's codecs at its boundaries; None: without any."""
    torch.manual_seed(seed)
    chunk = build_chunk(LOSS_MODEL, unit_names(LOSS_MODEL), seed, torch.device("cpu"))
    crossings = None
    if result is not None:
        names = zip(result["activation_codecs"], result["gradient_codecs"], strict=True)
        crossings = [
            (
                Coded(there, mixed(4096 * seed + 2 * number)),
                Coded(back, mixed(4096 * seed + 2 * number + 1)),
            )
            for number, (there, back) in enumerate(names)
        ]
    corpus = Corpus.load(
        DataSection(path="stdlib"), sequence=LOSS_MODEL.sequence, global_batch=LOSS_BATCH, seed=seed
    )
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=LOSS_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        cosine = 0.55 + 0.45 * np.cos(np.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = LOSS_RATE * min(1.0, (step + 1) / LOSS_WARMUP) * cosine
        loss_of(chunk, torch.from_numpy(corpus.batch(step).astype(np.int64)), crossings).backward()
        torch.nn.utils.clip_grad_norm_(chunk.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    windows = torch.from_numpy(corpus.validation_windows()[:HELD_OUT].astype(np.int64))
    with torch.no_grad():
        return statistics.fmean(float(loss_of(chunk, part, None)) for part in windows.split(LOSS_BATCH))


def losses(results: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Of `auto`, of the fixed codecs that are nearly as fast as the fastest, and without any codec."""
    best = min((one["step_seconds"] for one in results if one["codec"] != PLANNED), default=0.0)
    compared = [one for one in results if one["codec"] == PLANNED or NEARLY * one["step_seconds"] <= best]
    cases = [(one, seed) for one in (None, *compared) for seed in range(arguments.loss_seeds)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        trained = list(pool.map(held_out_loss, *zip(*cases, strict=True), repeat(arguments.loss_steps)))
    found: dict[str, list[float]] = {}
    for (one, seed), loss in zip(cases, trained, strict=True):
        name = "none" if one is None else one["codec"]
        found.setdefault(name, []).append(loss)
        print(f"{name}, seed {seed}: held-out loss {loss:.4f}", flush=True)
    return {
        "commit": commit(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "steps": arguments.loss_steps,
        "batch": LOSS_BATCH,
        "held_out": found,
    }


def report(
    results: Sequence[dict[str, Any]], microbatches: int, trained: dict[str, Any] | None
) -> dict[str, Any]:
    """The whole document."""
    by_codec = {one["codec"]: one for one in results}
    fixed = [one["step_seconds"] for name, one in by_codec.items() if name != PLANNED]
    share = min(fixed) / by_codec[PLANNED]["step_seconds"] if fixed and PLANNED in by_codec else None
    return {
        "experiment": "four_links",
        "commit": commit(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "runs": 1,
        "rates_mbit": RATES,
        "round_trip_ms": 1000 * ROUND_TRIP,
        "microbatches": microbatches,
        "elements": 1024 * 512,
        "compute_seconds": FORWARD_SECONDS + BACKWARD_SECONDS,
        "auto_over_best_fixed": None if share is None else round(share, 4),
        "results": [by_codec[name] for name in CODECS if name in by_codec],
        "losses": trained,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Codec auto against fixed ones on four unlike links.")
    parser.add_argument("--codecs", nargs="+", default=CODECS, choices=CODECS)
    parser.add_argument("--steps", type=int, default=4, help="that count (default 4)")
    parser.add_argument("--microbatches", type=int, default=24, help="of a step (default 24)")
    parser.add_argument("--auto-seconds", type=float, default=300.0, help="after which steps count anyway")
    parser.add_argument("--loss-steps", type=int, default=200, help="of the small models; 0 trains none")
    parser.add_argument("--loss-seeds", type=int, default=2)
    parser.add_argument("--losses", action="store_true", help="train with what the file has, no more")
    parser.add_argument("--merge", action="store_true", help="keep the file's results of other codecs")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.losses:
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        write(arguments.out, {**before, "losses": losses(before["results"], arguments)})
        return 0
    known: dict[str, dict[str, Any]] = {}
    if arguments.merge and arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        same = {"commit": commit(), "hardware": hardware(), "microbatches": arguments.microbatches}
        if any(before[name] != value for name, value in same.items()):
            raise SystemExit(
                f"{arguments.out} is of another commit, machine or step: measure all codecs again"
            )
        known = {one["codec"]: one for one in before["results"]}
    for codec in arguments.codecs:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(codec, arguments, Path(folder)))
        known[codec] = found
        print(json.dumps(found), flush=True)
        write(arguments.out, report(list(known.values()), arguments.microbatches, None))
    if arguments.loss_steps:
        trained = losses(list(known.values()), arguments)
        write(arguments.out, report(list(known.values()), arguments.microbatches, trained))
    return 0


if __name__ == "__main__":
    sys.exit(main())
