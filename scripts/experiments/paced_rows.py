"""Rows of a grid over shaped relays: `python -m scripts.experiments.paced_rows [--waits]`.

Processes of the program on one machine, whose blocks wait for a set time and compute nothing, so that a few
cores can play many machines (`paced_pipeline`). It measures

- rows: the step of 2 x S nodes against that of 1 x S, with equal global batch and equal bits, over links of
  several rates and round trips.

and with `--waits` in place of that

- snapshots: the longest time between two steps with snapshots every few steps, against that without.
- newcomers: the time between the two steps at which a row enters, and the steps done while it fetched.
"""

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
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
    SnapshotsSection,
    TrainingSection,
)
from node.lab.results import commit, hardware
from node.schedule.gradient_groups import RowShare, sync_bytes
from node.schedule.placement import slices_of, stage_units
from node.telemetry import events
from node.tuning.snapshot_place import snapshot_bytes
from node.view.explain import framed_bytes
from scripts.experiments.paced_pipeline import PacedRun, paced_run
from scripts.experiments.step_parts import step_parts
from scripts.report import RESULTS, write
from wire.codecs.formats import codec_format

OUT, WAITS_OUT = RESULTS / "rows.json", RESULTS / "row_waits.json"
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040
"""Of a block and a microbatch; `--pace` multiplies them."""
START_SECONDS, STEP_SECONDS = 180.0, 180.0
TRACE_SECONDS = 3.0
"""After which a step's spans are on disk."""
RATES, ROUND_TRIPS = (1000.0, 300.0, 100.0), (0.0, 50.0)
"""Mbit/s, ms."""


def run_config(stages: int, rows: int, microbatches: int, steps: int, slices: int = 1) -> RunConfig:
    """The same run, whatever the rows: two gradient groups."""
    return RunConfig(
        run=RunSection(name="rows", steps=steps, snapshot_every=steps),
        model=ModelSection(layers=stages, hidden=512, heads=8, kv_heads=2, ffn=128, vocab=256, sequence=1024),
        data=DataSection(path="stdlib"),
        training=TrainingSection(global_batch=microbatches, microbatch=1, warmup_steps=0),
        pipeline=PipelineSection(stages=stages, groups=2, replicas=rows, sequence_chunks=slices),
        coordinator=CoordinatorSection(listen="127.0.0.1:0", silent_seconds=90.0),
    )


@dataclass
class Running:
    """A coordinator and its nodes. `told` is every event, with the time of its reading."""

    run: PacedRun
    token: str = ""
    told: list[tuple[float, Any]] = field(default_factory=list)

    async def until(self, kind: type[Any] | tuple[type[Any], ...], seconds: float) -> Any:
        """The next event of this kind."""
        assert self.run.coordinator.stdout is not None
        async with asyncio.timeout(seconds):
            while line := await self.run.coordinator.stdout.readline():
                event = events.from_json(line.decode())
                self.told.append((time.monotonic(), event))
                if isinstance(event, kind):
                    return event
        raise RuntimeError("the coordinator ended")

    async def add_node(self) -> None:
        """One that others reach through a relay of its own."""
        await self.run.add_node(self.token)

    async def steps(self, count: int) -> list[float]:
        """Seconds between the ends of so many steps."""
        ends = []
        for _ in range(count + 1):
            await self.until(events.StepDone, STEP_SECONDS)
            ends.append(self.told[-1][0])
        return [after - before for before, after in itertools.pairwise(ends)]


@asynccontextmanager
async def running(
    config: RunConfig, nodes: int, pace: float = 1.0, *, sums_beside: bool = False
) -> AsyncIterator[Running]:
    """A run of this config with so many nodes, whose blocks take `pace` times as long."""
    forward, backward = pace * FORWARD_SECONDS, pace * BACKWARD_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        async with paced_run(
            config, Path(folder), forward=forward, backward=backward, sums_beside=sums_beside
        ) as paced:
            run = Running(paced)
            line = await run.until(events.JoinLine, START_SECONDS)
            run.token = line.line.split()[-1]
            for _ in range(nodes):
                await run.add_node()
            yield run


async def throughput(
    config: RunConfig,
    shapes: Sequence[tuple[float, float]],
    arguments: argparse.Namespace,
    *,
    sums_beside: bool = False,
) -> list[dict[str, Any]]:
    """The steps of a grid over every kind of link, (Mbit/s, round trip in ms), one run for all."""
    stages, rows, chunks = config.pipeline.stages, config.pipeline.most_rows, config.pipeline.chunks
    pace = arguments.pace * stages / config.model.layers
    groups = range(config.pipeline.groups)
    share = RowShare(
        config, 0, [groups[row * len(groups) // rows :][: len(groups) // rows] for row in range(rows)]
    )
    sent = max(sync_bytes(config, units, share) for units in stage_units(config, stages))
    own = config.microbatches // rows
    tensor = (1, config.model.sequence, config.model.hidden)
    codecs = config.pipeline.forward_codec, config.pipeline.backward_codec
    activation, gradient = (framed_bytes(codec_format(name).packed_bytes(tensor)) for name in codecs)
    # A direction of a node's relay has one kind of boundary tensor and, with two rows, one row's sums.
    crossed = own * chunks * max(activation, gradient)
    found = []
    async with running(config, rows * stages, pace, sums_beside=sums_beside) as run:
        while True:
            placed = await run.until(events.PlacementMade, START_SECONDS)
            if len(placed.nodes) == rows * stages:
                break
        for rate, delay in shapes:
            for relay in run.run.relays:
                relay.shape(rate=rate * 1e6 / 8, delay=delay / 2e3)
            await run.steps(arguments.settle)
            begun = len(run.told)
            times = await run.steps(arguments.steps)
            told = [one for _, one in run.told[begun:]]
            kinds = seconds_by_kind([one for one in told if isinstance(one, events.StepCosts)])
            # What each row must compute, one microbatch after the other, and the pipeline's fill and drain.
            filled = own + (stages - 1) / slices_of(config)
            least = filled * arguments.pace * (FORWARD_SECONDS + BACKWARD_SECONDS)
            found.append(
                {
                    "stages": stages,
                    "rows": rows,
                    "rate_mbit": rate,
                    "round_trip_ms": delay,
                    "step": [one for one in told if isinstance(one, events.StepDone)][-1].step,
                    "step_seconds": times,
                    "compute_seconds": least,
                    "measured_compute_seconds": filled * (kinds["forward"] + kinds["backward"]) / own,
                    "seconds_by_kind": kinds,
                    "activation_bytes": activation,
                    "gradient_bytes": gradient,
                    "boundary_bytes": crossed,
                    "sync_bytes": sent,
                    "floor_seconds": max(least, (crossed + sent) / (rate * 1e6 / 8)),
                }
            )
            print(found[-1], flush=True)
        await asyncio.sleep(TRACE_SECONDS)
        for one in found:
            one["parts"] = step_parts(run.run.directory / "run", one["step"] - 1, stages)
    return found


def seconds_by_kind(costs: Sequence[events.StepCosts]) -> dict[str, float]:
    """What a stage did in a step: medians over steps of the mean over stages."""
    kinds = {kind for one in costs for stage in one.stages for kind in stage.seconds}
    return {
        kind: statistics.median(
            statistics.fmean(stage.seconds.get(kind, 0.0) for stage in one.stages) for one in costs
        )
        for kind in sorted(kinds)
    }


async def waits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Two stages and a state of some size: snapshots beside steps, then a row that enters."""
    model = ModelSection(layers=2, hidden=512, heads=8, kv_heads=2, ffn=8192, vocab=256, sequence=1024)
    config = replace(
        run_config(2, 2, arguments.microbatches, 10**5),
        model=model,
        run=RunSection(name="waits", steps=10**5, snapshot_every=arguments.every),
        snapshots=SnapshotsSection(keep=arguments.keep),
    )
    async with running(config, 2) as run:
        await run.until(events.StepDone, START_SECONDS)
        await run.steps(arguments.settle)
        gaps: list[float] = []
        numbers: list[int] = []
        before = run.told[-1][0]
        while len(gaps) < 3 * arguments.every:
            done = await run.until(events.StepDone, STEP_SECONDS)
            at = run.told[-1][0]
            gaps.append(at - before)
            numbers.append(done.step)
            before = at
        saving = [gap for gap, step in zip(gaps, numbers, strict=True) if (step - 1) % arguments.every == 0]
        others = [gap for gap, step in zip(gaps, numbers, strict=True) if (step - 1) % arguments.every]
        for _ in range(2):
            await run.add_node()
        entered = None
        while entered is None:
            await run.until(events.StepDone, STEP_SECONDS)
            grids = [(at, one) for at, one in run.told if isinstance(one, events.PlacementMade)]
            entered = next((at for at, one in grids if len(one.nodes) == 4), None)
        notices = [(at, one.text) for at, one in run.told if isinstance(one, events.Notice)]
        begun = next(at for at, text in notices if "follow the run" in text)
        ends = [at for at, one in run.told if isinstance(one, events.StepDone)]
        last = max(at for at in ends if at < entered)
        first = min(at for at in ends if at > entered)
        after = await run.steps(arguments.steps)
    return {
        "stages": 2,
        "keep": arguments.keep,
        "snapshot_bytes": snapshot_bytes(config),
        "snapshot_every": arguments.every,
        "usual_step_seconds": statistics.median(others),
        "slowest_usual_step_seconds": max(others),
        "steps_with_a_snapshot_seconds": saving,
        "longest_wait_for_a_snapshot_seconds": max(saving) - statistics.median(others),
        "newcomers": {
            "seconds_from_arrival_to_entry": entered - begun,
            "steps_meanwhile": sum(begun < at <= entered for at in ends),
            "seconds_between_the_steps_around_the_entry": first - last,
            "step_with_two_rows_seconds": statistics.median(after),
            "wait_seconds": first - last - statistics.median(after),
        },
    }


def compare(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast two rows are, by stages and links."""
    found = []
    for one in results:
        for two in results:
            same = all(one[key] == two[key] for key in ("stages", "rate_mbit", "round_trip_ms"))
            if same and (one["rows"], two["rows"]) == (1, 2):
                before, after = (statistics.median(each["step_seconds"]) for each in (one, two))
                keys = ("stages", "rate_mbit", "round_trip_ms")
                found.append({**{key: one[key] for key in keys}, "times": before / after})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Rows of a grid over shaped relays, with paced blocks.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, metavar="MBIT")
    parser.add_argument("--round-trips", type=float, nargs="*", default=ROUND_TRIPS, metavar="MS")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--slices", type=int, default=1, help="of a sample, by pipeline.sequence_chunks")
    parser.add_argument("--pace", type=float, default=1.0, help="how many times as long blocks wait")
    parser.add_argument("--settle", type=int, default=2, help="steps after each change of the links")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--every", type=int, default=5, help="steps between snapshots")
    parser.add_argument("--waits", action="store_true", help="what steps wait for snapshots and newcomers")
    parser.add_argument("--keep", default="nodes", help="with --waits: snapshots.keep of the run")
    arguments = parser.parse_args()
    report = {
        "experiment": "rows",
        "commit": commit(),
        "hardware": hardware(),
        "load": list(os.getloadavg()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "paced": f"blocks wait {arguments.pace * FORWARD_SECONDS:g} s forward and "
        f"{arguments.pace * BACKWARD_SECONDS:g} s backward",
        "microbatches": arguments.microbatches,
        "slices": arguments.slices,
        "steps": arguments.steps,
    }
    if arguments.waits:
        write(arguments.out or WAITS_OUT, {**report, **asyncio.run(waits(arguments))})
        return 0
    results = []
    shapes = [(rate, delay) for rate in arguments.rates for delay in arguments.round_trips]
    for stages in arguments.stages:
        for rows in (1, 2):
            config = run_config(stages, rows, arguments.microbatches, 10**5, arguments.slices)
            results += asyncio.run(throughput(config, shapes, arguments))
            write(arguments.out or OUT, {**report, "speedups": compare(results), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
