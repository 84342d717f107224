"""How much of a step a pipeline computes when samples are cut along the sequence.

    python -m scripts.experiments.sequence_chunks --out scripts/results/sequence_chunks.json

Real runs, as of `scripts.experiments.pipeline_floor`: a coordinator and four node processes over loopback
relays, whose blocks wait for a set time, shared equally among a sample's slices. The share is the work of a
stage, microbatches x (forward + backward), over the step: what is lacking to 1 is fill, drain, links and
delays. The share of measured counts as work what the busiest stage took for it, which is longer by the
program's own part. `--simulate` simulates the schedule with the same times instead.
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config.schema import RunConfig
from node.lab.results import commit, hardware
from node.schedule.floor import LinkRate, Network
from node.schedule.placement import boundary_bytes, slices_of
from node.schedule.schedule import Kind, Window, schedule
from node.schedule.simulation import simulate
from node.telemetry import events
from node.tuning.window_plan import StepMeasures, plan_windows
from scripts.experiments.paced_pipeline import STAGES, START_SECONDS, paced_run, run_config, until
from scripts.report import RESULTS, version, write

CASES: tuple[tuple[int, int, int | str, float], ...] = (
    (16, 1024, 1, 0.060),
    (16, 1024, 2, 0.060),
    (16, 1024, 4, 0.060),
    (1, 65536, "auto", 1.92),
)
"""Microbatches, tokens of a sample, `pipeline.sequence_chunks`, and a stage's seconds for a microbatch, a
third of them in forward."""


def case_config(
    microbatches: int, tokens: int, chunks: int | str, arguments: argparse.Namespace
) -> RunConfig:
    given = argparse.Namespace(**vars(arguments), microbatches=microbatches, sequence=tokens)
    base = run_config(arguments.window, given, 1)
    return replace(
        base,
        model=replace(base.model, ffn=2048),
        data=replace(base.data, order="whole"),
        pipeline=replace(base.pipeline, sequence_chunks=chunks),
    )


def simulated(config: RunConfig, seconds: float, rate: float) -> float:
    """Of a step with the windows that would be planned."""
    slices, count = slices_of(config), config.microbatches
    link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8)
    size = boundary_bytes(config, config.pipeline.forward_codec) / slices
    each = seconds / 3 / slices
    measures = StepMeasures(
        forward=(each,) * STAGES,
        backward=(2 * each,) * STAGES,
        activation_bytes=size,
        gradient_bytes=size,
        links=(link,) * (STAGES - 1),
    )
    windows: Window = config.pipeline.first_window
    if config.pipeline.window == "auto":
        most = (count * slices,) * STAGES
        windows = plan_windows(
            measures, chunks=1, microbatches=count, most_held=most, current=(), slices=slices
        )
    return simulate(
        schedule(STAGES, 1, count, windows, slices=slices),
        each,
        2 * each,
        network=Network(STAGES, measures.links),
        sizes={Kind.FORWARD: size, Kind.BACKWARD: size},
        swap=True,
    ).total


async def measured(
    config: RunConfig, seconds: float, arguments: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """The counted steps, and the seconds of each that its busiest stage computed."""
    with tempfile.TemporaryDirectory() as directory:
        async with paced_run(config, Path(directory), forward=seconds / 3, backward=2 * seconds / 3) as run:
            async with asyncio.timeout(START_SECONDS):
                line = await until(run.coordinator, events.JoinLine)
            for _ in range(STAGES):
                await run.add_node(line.line.split()[-1])
            for relay in run.relays:
                relay.shape(rate=arguments.rate * 1e6 / 8, delay=0.0)
            steps: list[float] = []
            computed: list[float] = []
            for _ in range(arguments.settle + arguments.steps):
                async with asyncio.timeout(START_SECONDS):
                    costs = await until(run.coordinator, events.StepCosts)
                    steps.append((await until(run.coordinator, events.StepDone)).seconds)
                computed.append(
                    max(stage.seconds["forward"] + stage.seconds["backward"] for stage in costs.stages)
                )
                print(f"{steps[-1]:.3f} ({computed[-1]:.3f} computed)", end=" ", flush=True)
            return steps[arguments.settle :], computed[arguments.settle :]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what slices of samples leave of fill and drain.")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--rate", type=float, default=10000.0, help="Mbit/s of a link each way")
    parser.add_argument("--window", default="2", help="value of pipeline.window")
    parser.add_argument("--pace", type=float, default=1.0, help="how many times as long blocks wait")
    parser.add_argument("--settle", type=int, default=3, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--simulate", action="store_true", help="simulate instead of measuring")
    parser.add_argument("--out", type=Path, default=RESULTS / "sequence_chunks.json")
    arguments = parser.parse_args()
    # Handle SIGTERM as Ctrl-C, so that a time limit ends the run's processes too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: list[dict[str, Any]] = []
    for microbatches, tokens, chunks, unscaled in CASES:
        config, seconds = case_config(microbatches, tokens, chunks, arguments), arguments.pace * unscaled
        if arguments.simulate:
            steps, computed = [simulated(config, seconds, arguments.rate)], []
        else:
            steps, computed = asyncio.run(measured(config, seconds, arguments))
        row: dict[str, Any] = {
            "microbatches": microbatches,
            "tokens": tokens,
            "sequence_chunks": chunks,
            "slices": slices_of(config),
            "work_seconds": microbatches * seconds,
            "step_seconds": [round(step, 4) for step in steps],
            "share": round(microbatches * seconds / statistics.median(steps), 4),
        }
        if computed:
            row["computed_seconds"] = [round(took, 4) for took in computed]
            shares = [took / step for took, step in zip(computed, steps, strict=True)]
            row["share_of_measured"] = round(statistics.median(shares), 4)
        print(row, flush=True)
        results.append(row)
        document = {
            "commit": commit(),
            "hardware": hardware(),
            "torch": version("torch"),
            "simulated": arguments.simulate,
            "stages": STAGES,
            "codec": arguments.codec,
            "rate_mbit": arguments.rate,
            "pace": arguments.pace,
            "window": arguments.window,
            "results": results,
        }
        write(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
