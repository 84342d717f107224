"""A tied model against an untied one where passes take set times and compute nothing.

    python -m scripts.experiments.paced_tied [--also NAME=CHECKOUT ...]

Stages are real processes, split as deploy/lab/tied-124m.toml splits 124 million parameters. But a pass, and
packing a tensor, are a wait for a card that `paced_cards` plays: one a stage, or one for all, where processes
take turns of some milliseconds, as on a GPU that they share. So what the schedule and waiting for a card cost
is apart from what kernels, codecs and links cost. Tensors are small, and links have no limit. Times are
`SCALE` times those of a GPU while they are measured, because processors are not as much faster than these
waits; the report has them as a GPU's. For links of `SLOW_MBIT` the report has what the schedule allows.

`--also` measures other checkouts, in turns; this script and `paced_cards` must be in them. `--places`
measures some, and leaves what `--out` has of the others.
"""

import argparse
import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from node.config.schema import (
    CoordinatorSection,
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.lab.results import commit, hardware
from node.schedule.floor import LinkRate, Network, chunk_shares
from node.schedule.placement import stage_orders
from node.schedule.schedule import Kind
from node.schedule.simulation import simulate
from node.telemetry import events
from scripts.experiments.paced_cards import Card, CardTransfer, serve
from scripts.experiments.paced_pipeline import NODE, paced_run, until
from scripts.report import RESULTS, ROOT, write
from wire.codecs.formats import codec_format

OUT = RESULTS / "paced_tied.json"
THIS = "scripts.experiments.paced_tied"
CARDS = "cards"
"""The script's first argument when it plays the cards."""
SOCKET = "THINWIRE_STAND_IN_CARDS"
"""Environment variable with the path of the cards' socket."""
SCALE = 10
UNIT_SECONDS = 0.25e-3
"""Of a block's forward on a GPU."""
BLOCK = (1.0, 2.0)
"""Units of forward and backward."""
EMBED = (0.1, 1.0)
"""A gradient as large as the vocabulary is made and added."""
HEAD = (14.0, 0.8)
"""Five blocks' work. The forward makes the gradients."""
PACK_SECONDS, UNPACK_SECONDS = 0.1e-3, 0.05e-3
SLICE_SECONDS = 2e-3
SPLITS = {False: (3, 4, 4, 1), True: (0, 4, 4, 4)}
"""Blocks of each stage, by whether the model is tied."""
STAGES = 4
PLACES = ((STAGES, 0.0), (1, 0.0), (1, 0.5e-3))
"""Cards, and the seconds for which one stands still when another process's turn begins."""
MICROBATCHES = 16
WINDOW = 1
"""Enough without delays."""
SHAPE, CODECS = (4, 1024, 768), ("tah", "fixed-8")
"""Of a boundary tensor in deploy/lab/tied-124m.toml."""
SLOW_MBIT = 100.0
FRAME_SHARE = 1448 / 1514
"""Of a line's bytes, what TCP carries."""
SECONDS = 40.0
"""Limit of a start or a step."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time a tied model whose passes take set times.")
    parser.add_argument("--settle", type=int, default=3, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME=CHECKOUT", help="measure these too")
    parser.add_argument("--places", type=int, nargs="+", default=range(len(PLACES)), help="by number")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    # Handle SIGTERM as Ctrl-C, so that a time limit ends the run's processes too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    named = dict(one.split("=", 1) for one in arguments.also)
    checkouts = {**{name: Path(folder).resolve() for name, folder in named.items()}, "this": ROOT}
    places = [PLACES[number] for number in arguments.places]
    before = (
        json.loads(arguments.out.read_text(encoding="utf-8"))["results"] if arguments.out.exists() else []
    )
    results = [one for one in before if (one["cards"], one["switch_seconds"]) not in places]
    results += [
        {
            "cards": cards,
            "switch_seconds": switch,
            "program": name,
            "tied": tied,
            "bound_seconds": bound(tied=tied)
            if cards > 1
            else MICROBATCHES * sum(map(sum, passes(tied=tied))),
            **asyncio.run(measure(arguments, checkout, cards, switch, tied=tied)),
        }
        for cards, switch in places
        for name, checkout in checkouts.items()
        for tied in SPLITS
    ]
    report = {
        "experiment": "paced_tied",
        "commit": commit(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "scale": SCALE,
        "unit_seconds": UNIT_SECONDS,
        "slice_seconds": SLICE_SECONDS,
        "pack_seconds": PACK_SECONDS,
        "unpack_seconds": UNPACK_SECONDS,
        "microbatches": MICROBATCHES,
        "slow_mbit": SLOW_MBIT,
        "slow_bound_seconds": [bound(tied=tied, mbit=SLOW_MBIT) for tied in SPLITS],
        "splits": [list(SPLITS[tied]) for tied in SPLITS],
        "results": results,
    }
    write(arguments.out, report)
    return 0


def passes(*, tied: bool) -> tuple[list[float], list[float]]:
    """Seconds of a microbatch's forward and backward on each stage, as a GPU has them."""
    both: list[list[float]] = [[], []]
    for stage, blocks in enumerate(SPLITS[tied]):
        has_head = stage == (0 if tied else STAGES - 1)
        for way, found in enumerate(both):
            units = blocks * BLOCK[way] + (stage == 0) * EMBED[way] + has_head * HEAD[way]
            found.append(UNIT_SECONDS * units)
    return both[0], both[1]


def bound(*, tied: bool, mbit: float = math.inf) -> float:
    """What the schedule allows with a card for each stage; tensors have the bytes of `SHAPE` and `CODECS`."""
    forward, backward = passes(tied=tied)
    share = sum(HEAD) * UNIT_SECONDS / (forward[0] + backward[0]) if tied else None
    shares = chunk_shares(STAGES, 1, share)
    rate = mbit * 1e6 / 8 * FRAME_SHARE
    activation, gradient = (codec_format(name).packed_bytes(SHAPE) for name in CODECS)
    return simulate(
        stage_orders(run_config(0, tied=tied), STAGES, WINDOW),
        lambda chunk, _: forward[chunk % STAGES] * shares[chunk],
        lambda chunk, _: backward[chunk % STAGES] * shares[chunk],
        network=Network(STAGES, [LinkRate(up=rate, down=rate)] * (STAGES - 1 + tied)),
        sizes={Kind.FORWARD: activation, Kind.BACKWARD: gradient},
        swap=True,
    ).total


def run_config(steps: int, *, tied: bool) -> RunConfig:
    return RunConfig(
        run=RunSection(name="paced", steps=steps, snapshot_every=max(1, steps)),
        model=ModelSection(
            layers=sum(SPLITS[tied]), hidden=32, heads=4, kv_heads=4, ffn=64, sequence=16, tied=tied
        ),
        data=DataSection(path="stdlib"),
        training=TrainingSection(global_batch=MICROBATCHES, microbatch=1, warmup_steps=0),
        pipeline=PipelineSection(
            stages=STAGES,
            split=SPLITS[tied],
            head="first" if tied else "auto",
            forward_codec="bf16",
            backward_codec="bf16",
        ),
        coordinator=CoordinatorSection(listen="127.0.0.1:0", silent_seconds=60.0),
    )


async def measure(
    arguments: Namespace, checkout: Path, cards: int, switch: float, *, tied: bool
) -> dict[str, Any]:
    """Of the counted steps the seconds, and what stages did in them: medians, as a GPU's."""
    config = run_config(1 + arguments.settle + arguments.steps, tied=tied)
    with tempfile.TemporaryDirectory() as folder, playing_cards(Path(folder), cards, switch):
        async with paced_run(
            config, Path(folder), forward=0.0, backward=0.0, checkout=checkout, script=THIS
        ) as run:
            async with asyncio.timeout(SECONDS):
                line = await until(run.coordinator, events.JoinLine)
            for _ in range(STAGES):
                await run.add_node(line.line.split()[-1])
            steps: list[float] = []
            costs: list[events.StepCosts] = []
            for _ in range(arguments.settle + arguments.steps):
                async with asyncio.timeout(SECONDS):
                    costs.append(await until(run.coordinator, events.StepCosts))
                    steps.append((await until(run.coordinator, events.StepDone)).seconds / SCALE)
    counted, counted_costs = steps[arguments.settle :], costs[arguments.settle :]
    print(f"{cards} cards, {switch:g} s, {checkout}, tied {tied}:", *counted, flush=True)
    return {
        "step_seconds": statistics.median(counted),
        "steps": counted,
        "stage_seconds": [
            {
                kind: statistics.median(one.stages[stage].seconds[kind] for one in counted_costs) / SCALE
                for kind in counted_costs[0].stages[stage].seconds
            }
            for stage in range(STAGES)
        ],
    }


@contextmanager
def playing_cards(directory: Path, cards: int, switch: float) -> Iterator[None]:
    """A process that plays the cards of nodes that start meanwhile."""
    path = directory / "cards"
    times = (str(SCALE * SLICE_SECONDS), str(SCALE * switch))
    served = subprocess.Popen([sys.executable, "-m", THIS, CARDS, str(path), str(cards), *times], cwd=ROOT)
    os.environ[SOCKET] = str(path)
    try:
        yield
    finally:
        served.kill()
        served.wait()


def node(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join` with a card that computes nothing."""
    from node.config.join_options import JoinOptions
    from node.model import blocks
    from node.model.llama_block import LlamaBlock
    from node.processes.node import run_node
    from node.stage import executor

    card = Card(Path(os.environ[SOCKET]))
    device = CardTransfer(card, SCALE * PACK_SECONDS, SCALE * UNPACK_SECONDS)
    original = executor.TensorTransfer
    # As on a GPU; older programs unpack on one thread with packing.
    beside = {"unpacks_beside": True} if "unpacks_beside" in original.__init__.__annotations__ else {}
    stand_ins: dict[Any, Any] = {
        (executor, "TensorTransfer"): lambda _, record, *__, **___: original(device, record, **beside),
        (LlamaBlock, "forward"): _forward(card, BLOCK),
        (blocks.Embedding, "forward"): _forward(card, EMBED),
        (blocks.Head, "forward"): _forward(card, HEAD),
    }
    for (owner, name), stand_in in stand_ins.items():
        setattr(owner, name, stand_in)
    options = JoinOptions(
        listen=listen, advertise=advertise, state_dir=Path(directory), device="cpu", threads=1, json=True
    )
    return run_node(token, options)


def _forward(card: Card, units: tuple[float, float]) -> Callable[..., torch.Tensor]:
    forward, backward = (SCALE * UNIT_SECONDS * one for one in units)

    def run(layer: torch.nn.Module, x: torch.Tensor, documents: Any = None) -> torch.Tensor:
        made: torch.Tensor = _Waiting.apply(card, (forward, backward), layer, x, *layer.parameters())
        return made

    return run


class _Waiting(torch.autograd.Function):
    """A layer whose work the card is asked for with the next mark. Hidden states pass, for logits as often as
    they fit; gradients of parameters are 0."""

    @staticmethod
    def forward(
        ctx: Any,
        card: Card,
        seconds: tuple[float, float],
        layer: Any,
        x: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        card.waiting += seconds[0]
        ctx.card, ctx.seconds, ctx.shapes = card, seconds[1], [weight.shape for weight in weights]
        ctx.width = x.shape[-1] if x.is_floating_point() else 0
        if ctx.width == 0:
            return torch.ones(*x.shape, weights[0].shape[-1])
        wide = weights[-1].shape[0] if hasattr(layer, "output") else ctx.width
        return x.repeat(1, 1, wide // ctx.width)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.card.waiting += ctx.seconds
        of_x = gradient[..., : ctx.width] if ctx.width else None
        return None, None, None, of_x, *(torch.zeros(shape) for shape in ctx.shapes)


if __name__ == "__main__":
    if sys.argv[1:2] == [NODE]:
        sys.exit(node(*sys.argv[2:]))
    if sys.argv[1:2] == [CARDS]:
        serve(Path(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:]))
    sys.exit(main())
