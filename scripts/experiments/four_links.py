"""Codec `auto` against fixed ones over four unlike links: `python -m scripts.experiments.four_links`.

Five stages, joined by relays of 1000, 300, 100 and 30 Mbit/s, real processes and real codecs on CPU. Blocks
wait for a set time in place of computing, so that the machine's cores pack and send. For each codec: seconds
of a step, median of the counted ones; for `auto` also the codecs that it had in them. Steps of `auto` count
once its plan has not changed for some steps. `--codecs` measures some of them; with `--merge` their results
replace or join those of the file, if it is of the same commit and machine.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
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
from node.telemetry import events
from scripts.experiments.paced_pipeline import PacedRun, paced_run
from scripts.experiments.shaped_relay import ShapedRelay
from scripts.report import RESULTS, write

OUT = RESULTS / "four_links.json"
RATES = (1000, 300, 100, 30)
"""Mbit/s, of the links in order of stages."""
STAGES = len(RATES) + 1
ROUND_TRIP = 0.01
FORWARD_SECONDS, BACKWARD_SECONDS = 0.05, 0.10
CODECS = ("auto", "fp32", "bf16", "fixed-8", "tah", "trellis-4.41")
MICROBATCHES = 24
CALM = 4
"""Steps without a new plan before the steps of `auto` count."""
START_SECONDS, STEP_SECONDS = 180.0, 120.0


def config(name: str, codec: str) -> RunConfig:
    return RunConfig(
        run=RunSection(name=name, steps=1000, snapshot_every=1000),
        model=ModelSection(layers=STAGES, hidden=512, heads=8, kv_heads=2, ffn=128, vocab=256, sequence=1024),
        data=DataSection(path="stdlib"),
        training=TrainingSection(global_batch=MICROBATCHES, microbatch=1, warmup_steps=0),
        pipeline=PipelineSection(stages=STAGES, forward_codec=codec, backward_codec=codec),
        coordinator=CoordinatorSection(listen="127.0.0.1:0", silent_seconds=60.0),
    )


async def measure(codec: str, steps: int, most_seconds: float, directory: Path) -> dict[str, Any]:
    """One codec's steps."""
    async with paced_run(
        config("four-links", codec), directory, forward=FORWARD_SECONDS, backward=BACKWARD_SECONDS
    ) as run:
        return await _watch(run, codec, steps, most_seconds)


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
                if calm > (CALM if codec == "auto" else 2) or late:
                    counted.append(done.seconds)
            case _:
                pass
    return {
        "codec": codec,
        "step_seconds": statistics.median(counted),
        "steps": [round(one, 4) for one in counted],
        "plans": changes,
        "activation_codecs": plan[0] if plan else [codec] * len(RATES),
        "gradient_codecs": plan[1] if plan else [codec] * len(RATES),
    }


def report(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole document."""
    by_codec = {one["codec"]: one for one in results}
    fixed = [one["step_seconds"] for name, one in by_codec.items() if name != "auto"]
    share = min(fixed) / by_codec["auto"]["step_seconds"] if fixed and "auto" in by_codec else None
    return {
        "experiment": "four_links",
        "commit": commit(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "runs": 1,
        "rates_mbit": RATES,
        "round_trip_ms": 1000 * ROUND_TRIP,
        "microbatches": MICROBATCHES,
        "elements": 1024 * 512,
        "compute_seconds": FORWARD_SECONDS + BACKWARD_SECONDS,
        "auto_over_best_fixed": None if share is None else round(share, 4),
        "results": [by_codec[name] for name in CODECS if name in by_codec],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Codec auto against fixed ones on four unlike links.")
    parser.add_argument("--codecs", nargs="+", default=CODECS, choices=CODECS)
    parser.add_argument("--steps", type=int, default=4, help="that count (default 4)")
    parser.add_argument("--auto-seconds", type=float, default=150.0, help="after which steps count anyway")
    parser.add_argument("--merge", action="store_true", help="keep the file's results of other codecs")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    known: dict[str, dict[str, Any]] = {}
    if arguments.merge and arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        if before["commit"] != commit() or before["hardware"] != hardware():
            raise SystemExit(f"{arguments.out} is of another commit or machine: measure all codecs again")
        known = {one["codec"]: one for one in before["results"]}
    for codec in arguments.codecs:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(codec, arguments.steps, arguments.auto_seconds, Path(folder)))
        known[codec] = found
        print(json.dumps(found), flush=True)
        write(arguments.out, report(list(known.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
