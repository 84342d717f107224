"""Ways to a shorter step of two rows of nodes: `python -m scripts.experiments.paced_row_ways`.

Runs as those of `paced_rows`: processes of the program whose blocks wait for a set time, over shaped relays.
Each way has a run with one row and one with two. Several runs go at a time; each takes one or two cores.

Beside what is measured stands what the schedule allows, simulated: computing, bytes over each link, round
trips, and no time for anything else.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch

from node.config.schema import RunConfig
from node.lab.results import commit, hardware
from node.schedule.floor import LinkRate, Network
from node.schedule.schedule import Kind, schedule
from node.schedule.simulation import simulate
from scripts.experiments.paced_rows import BACKWARD_SECONDS, FORWARD_SECONDS, compare, run_config, throughput
from scripts.experiments.step_parts import PARTS
from scripts.report import RESULTS, write

OUT = RESULTS / "row_ways.json"
STAGES, MICROBATCHES = 4, 96
CELLS = ("1000/0", "100/0", "100/50")
WINDOWS = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Way:
    """What differs from the run as it is."""

    pipeline: Mapping[str, Any] = field(default_factory=dict)
    """Values of `[pipeline]`."""
    layers: int = STAGES
    sums_beside: bool = False
    """As `paced_run` has it."""

    def config(self, rows: int, microbatches: int) -> RunConfig:
        one = run_config(STAGES, rows, microbatches, 10**5)
        return replace(
            one,
            model=replace(one.model, layers=self.layers),
            pipeline=replace(one.pipeline, **self.pipeline),
        )


WAYS = {
    "as it is": Way(),
    "sums beside the last gradients": Way(sums_beside=True),
    "4 groups": Way(pipeline={"groups": 4}),
    "a window of 8 from the first step": Way(pipeline={"window": 8}),
    "4-bit gradients and sums": Way(pipeline={"backward_codec": "tah", "sync_codec": "fixed-4"}),
    "2 chunks a stage": Way(pipeline={"chunks": 2}, layers=2 * STAGES),
}


def allowed_seconds(config: RunConfig, one: Mapping[str, Any], pace: float) -> float:
    """Seconds of a step in which only computing, bytes and round trips take time, with the best window.
    `one`: the figures measured for that step."""
    rate, way = one["rate_mbit"] * 1e6 / 8, one["round_trip_ms"] / 2e3
    chunks, own = config.pipeline.chunks, config.microbatches // one["rows"]
    links = [LinkRate(up=rate, down=rate, latency=way)] * (STAGES if chunks > 1 else STAGES - 1)
    network = Network(STAGES, links)
    pipeline = min(
        simulate(
            schedule(STAGES, chunks, own, window),
            pace * FORWARD_SECONDS / chunks,
            pace * BACKWARD_SECONDS / chunks,
            network=network,
            sizes={Kind.FORWARD: one["activation_bytes"], Kind.BACKWARD: one["gradient_bytes"]},
            swap=chunks == 1,
        ).total
        for window in WINDOWS
    )
    return pipeline + _sums_seconds(one)


def least_parts(config: RunConfig, one: Mapping[str, Any], pace: float) -> dict[str, float]:
    """The same of each part of a step with one chunk a stage."""
    rate, way, hops = one["rate_mbit"] * 1e6 / 8, one["round_trip_ms"] / 2e3, STAGES - 1
    forward, backward = pace * FORWARD_SECONDS, pace * BACKWARD_SECONDS
    least = (
        0.0,
        hops * (forward + one["activation_bytes"] / rate + way),
        config.microbatches // one["rows"] * (forward + backward),
        hops * (backward + one["gradient_bytes"] / rate + way),
        _sums_seconds(one),
    )
    return dict(zip(PARTS, least, strict=True))


def _sums_seconds(one: Mapping[str, Any]) -> float:
    """Sums cross twice: to who adds them, and back."""
    rate, way = one["rate_mbit"] * 1e6 / 8, one["round_trip_ms"] / 2e3
    return max(one["sync_bytes"] / rate + way, 2 * way) if one["sync_bytes"] else 0.0


def measured(name: str, rows: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A way's figures, by kind of link."""
    way = WAYS[name]
    config = way.config(rows, arguments.microbatches)
    shapes = [(float(rate), float(trip)) for rate, trip in (cell.split("/") for cell in arguments.cells)]
    found = asyncio.run(throughput(config, shapes, arguments, sums_beside=way.sums_beside))
    return [
        {
            "way": name,
            **one,
            "allowed_seconds": allowed_seconds(config, one, arguments.pace),
            "least_parts": least_parts(config, one, arguments.pace),
        }
        for one in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Ways to a shorter step of two rows, beside each other.")
    parser.add_argument("--out", type=type(OUT), default=OUT)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--cells", nargs="*", default=CELLS, metavar="MBIT/MS", help="rates and round trips")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--pace", type=float, default=1.0, help="how many times as long blocks wait")
    parser.add_argument("--settle", type=int, default=2, help="steps after each change of the links")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--together", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time"
    )
    parser.add_argument("--add", action="store_true", help="keep other ways that --out has, of like runs")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "experiment": "row_ways",
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "paced": f"blocks wait {arguments.pace * FORWARD_SECONDS:g} s forward and "
        f"{arguments.pace * BACKWARD_SECONDS:g} s backward",
        "microbatches": arguments.microbatches,
        "steps": arguments.steps,
        "runs_at_a_time": arguments.together,
    }
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.add else report
    if any(known[key] != value for key, value in report.items()):
        parser.error(f"{arguments.out} is of other runs: leave out --add")
    # The longest first.
    runs = [(name, rows) for rows in (1, 2) for name in arguments.ways]
    with ProcessPoolExecutor(arguments.together, get_context("spawn")) as pool:
        jobs = [pool.submit(measured, name, rows, arguments) for name, rows in runs]
        results = [one for job in jobs for one in job.result()]
    results += [one for one in known.get("results", ()) if one["way"] not in arguments.ways]
    of_ways = {name: [one for one in results if one["way"] == name] for name in WAYS}
    report["speedups"] = [{"way": name, **one} for name, found in of_ways.items() for one in compare(found)]
    report["results"] = results
    write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
