"""Efficiency of a pipeline (lower bound on step time / measured), by bandwidth and round trip.

    python -m scripts.experiments.pipeline_floor --out scripts/results/pipeline_floor.json

Each run is a real one: a coordinator and four node processes, with a join line and mutual TLS. Links and
compute are simulated: every link passes a relay (shaped_relay.py) whose rate and delay change during the run,
and blocks wait for a set time instead of computing, so that four stages fit on two cores and the lower bound
is known. Steps just after a change are not counted.
`node.schedule.floor` gives the lower bound from the frames' bytes, the relay's rate and the compute times.
It is computed with the set times and with those measured in the same steps, which are longer if other
processes use the cores.

`--simulate` measures nothing: it plans the windows from the same times and rates and simulates the schedule,
which gives the efficiency without disturbances. `--merge` joins both into one report.

`--own-limit` measures lines that are too fast for a relay: nodes reach each other directly, over loopback,
and each keeps to the rate as its own bandwidth limit, which its links share. Blocks and tensors that fit such
lines are set by `--seconds` and `--sequence`.

`--before CHECKOUT` also measures another commit, alternating with this one window by window.
"""

import argparse
import asyncio
import itertools
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from node.lab.results import commit, hardware
from node.schedule.floor import LinkRate, Network
from node.schedule.schedule import Kind, schedule
from node.schedule.simulation import simulate
from node.tuning.window_plan import StepMeasures, plan_windows
from scripts.experiments.paced_pipeline import (
    BACKWARD_SECONDS,
    FORWARD_SECONDS,
    NODE,
    STAGES,
    Measured,
    floor,
    measure,
    node,
    run_config,
    tensor_bytes,
)
from scripts.report import RESULTS, ROOT
from wire.version import VERSION

OUT = RESULTS / "pipeline_floor.json"
RATES_MBIT = (1000, 500, 300, 100, 30)
ROUND_TRIPS_MS = (100, 20, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the share of the physical floor reached.")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT, help="Mbit/s, each way")
    parser.add_argument("--round-trips", type=float, nargs="+", default=ROUND_TRIPS_MS, help="milliseconds")
    parser.add_argument("--windows", nargs="+", default=["auto"], help="values of pipeline.window")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a microbatch; 512 wide")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs=2,
        default=(FORWARD_SECONDS, BACKWARD_SECONDS),
        help="of a block, forward and backward",
    )
    parser.add_argument("--threads", type=int, default=1, help="of a node, for packing and unpacking")
    parser.add_argument("--own-limit", action="store_true", help="nodes limit themselves; see above")
    parser.add_argument("--settle", type=int, default=3, help="steps after a change that do not count")
    parser.add_argument("--steps", type=int, default=2, help="steps that count")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="measure this one too, for comparison"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--simulate", action="store_true", help="simulate instead of measuring")
    parser.add_argument("--merge", type=Path, nargs="+", help="put reports together instead of measuring")
    arguments = parser.parse_args()
    if arguments.before is not None:
        arguments.before = arguments.before.resolve()
    if arguments.merge:
        merge(arguments.merge, arguments.out)
        return 0
    # Handle SIGTERM as Ctrl-C, so that a time limit ends the run's processes too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shapes = list(itertools.product(arguments.round_trips, arguments.rates))
    if arguments.simulate:
        write(arguments, simulated(arguments, shapes))
        return 0
    measured: dict[tuple[str, Path], list[Measured]] = {}
    for window in arguments.windows:
        # A node's own limit is for a whole run.
        runs = [[shape] for shape in shapes] if arguments.own_limit else [shapes]
        for checkout, run in itertools.product((arguments.before, ROOT), runs):
            if checkout is None:
                continue
            config = run_config(window, arguments, len(run))
            with tempfile.TemporaryDirectory() as directory:
                found = asyncio.run(measure(config, Path(directory), run, arguments, checkout))
            measured.setdefault((window, checkout), []).extend(found)
    write(arguments, rows(arguments, shapes, measured))
    return 0


def rows(
    arguments: argparse.Namespace,
    shapes: Sequence[tuple[float, float]],
    measured: dict[tuple[str, Path], list[Measured]],
) -> list[dict[str, Any]]:
    return [
        {
            "simulated": False,
            "round_trip_ms": round_trip,
            "rate_mbit": rate,
            "window": window,
            "before": "" if checkout == ROOT else head(checkout),
            "floor_seconds": floor(arguments, round_trip, rate),
            "settle_steps": arguments.settle,
            "step_seconds": counted.steps,
            "measured_floor_seconds": counted.floors,
            "share": floor(arguments, round_trip, rate) / statistics.median(counted.steps),
            "share_of_measured": statistics.median(
                least / seconds for least, seconds in zip(counted.floors, counted.steps, strict=True)
            ),
        }
        for (window, checkout), results in measured.items()
        for counted, (round_trip, rate) in zip(results, shapes, strict=True)
    ]


def write(arguments: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    """The report of one machine."""
    document = {
        "commit": commit(),
        "hardware": hardware(),
        "versions": {
            "thinwire": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "grpc": grpc.__version__,
        },
        "date": time.strftime("%Y-%m-%d"),
        "settings": {
            "stages": STAGES,
            "microbatches": arguments.microbatches,
            "forward_seconds": arguments.seconds[0],
            "backward_seconds": arguments.seconds[1],
            "codec": arguments.codec,
            "sequence": arguments.sequence,
            "threads": arguments.threads,
            "own_limit": arguments.own_limit,
        },
        "results": results,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def merge(paths: Sequence[Path], out: Path) -> None:
    """Join reports that have the same settings and machine."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    heads = [{key: value for key, value in document.items() if key != "results"} for document in documents]
    if any(head != heads[0] for head in heads):
        raise SystemExit("these reports are of different machines, versions or settings")
    results = [result for document in documents for result in document["results"]]
    out.write_text(json.dumps({**heads[0], "results": results}, indent=1) + "\n", encoding="utf-8")


def head(checkout: Path) -> str:
    """The commit of a checkout."""
    words = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def simulated(arguments: Namespace, shapes: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Simulated efficiency of window 0 and of the planned windows at each (round trip, rate)."""
    found = []
    for round_trip, rate in shapes:
        link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=round_trip / 2e3)
        measures = StepMeasures(
            forward=(arguments.seconds[0],) * STAGES,
            backward=(arguments.seconds[1],) * STAGES,
            activation_bytes=tensor_bytes(arguments),
            gradient_bytes=tensor_bytes(arguments),
            links=(link,) * (STAGES - 1),
        )
        planned = plan_windows(
            measures,
            chunks=1,
            microbatches=arguments.microbatches,
            most_held=(arguments.microbatches,) * STAGES,
            current=(),
        )
        for name, windows in (("0", (0,) * (STAGES - 1)), ("auto", planned)):
            seconds = simulate(
                schedule(STAGES, 1, arguments.microbatches, windows),
                *arguments.seconds,
                network=Network(STAGES, measures.links),
                sizes={Kind.FORWARD: measures.activation_bytes, Kind.BACKWARD: measures.gradient_bytes},
                swap=True,
            ).total
            least = floor(arguments, round_trip, rate)
            found.append(
                {
                    "simulated": True,
                    "round_trip_ms": round_trip,
                    "rate_mbit": rate,
                    "window": name,
                    "windows": list(windows),
                    "floor_seconds": least,
                    "step_seconds": [seconds],
                    "share": least / seconds,
                }
            )
    return found


if __name__ == "__main__":
    sys.exit(node(*sys.argv[2:]) if sys.argv[1:2] == [NODE] else main())
