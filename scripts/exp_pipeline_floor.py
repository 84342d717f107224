"""The share of the physical floor that a pipeline reaches, by bandwidth and round trip.

    python scripts/exp_pipeline_floor.py --out scripts/results/pipeline_floor.json

Each run is the product itself: a coordinator and four nodes as processes, joined by a join line, mutual TLS
and all. What stands in is the machine around it: every link passes a relay with a rate and a delay
(scripts/shaped_relay.py), which change while the run goes on, and the blocks compute nothing but take a set
time, so that four stages fit on two cores and the floor is known. Steps just after a change are not counted.
The floor is `node.telemetry.floor`'s, from the frames' bytes, the relay's rate and the compute times: once
those that were set, and once those that the stages measured in the very same steps, which are longer where
other work on the machine kept them from a core.

`--simulate` measures nothing: it plans the windows from the same times and rates and simulates the schedule,
so it gives what the plan is worth where nothing else disturbs. Both may be merged into one report.

`--before CHECKOUT` measures another commit of the program too, right before this one, window by window.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from shaped_relay import ShapedRelay

from node.config.loader import to_toml
from node.config.schema import (
    CoordinatorSection,
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.coordinator.window_plan import StepMeasures, plan_windows
from node.lab.results import commit, hardware
from node.stage.schedule import Kind, schedule
from node.stage.schedule_simulation import simulate
from node.telemetry import events
from node.telemetry.floor import LinkRate, Network, step_floor
from wire.codecs.registry import codec
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES
from wire.spec import TensorSpec
from wire.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "scripts" / "results" / "pipeline_floor.json"
NODE = "node"
"""This script's first argument when it is to be a node."""
TIMES = "THINWIRE_STAND_IN_SECONDS"
STAGES = 4
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040
RATES_MBIT = (1000, 500, 300, 100, 30)
ROUND_TRIPS_MS = (100, 20, 0)
START_SECONDS = 120.0
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps that count, and their floors with the compute times measured in them."""

    steps: list[float]
    floors: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the share of the physical floor reached.")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT, help="Mbit/s, each way")
    parser.add_argument("--round-trips", type=float, nargs="+", default=ROUND_TRIPS_MS, help="milliseconds")
    parser.add_argument("--windows", nargs="+", default=["auto"], help="values of pipeline.window")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--codec", default="bf16")
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
    # As Ctrl-C: a time limit must not leave the processes of the run behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    shapes = list(itertools.product(arguments.round_trips, arguments.rates))
    if arguments.simulate:
        write(arguments, simulated(arguments, shapes))
        return 0
    measured: dict[tuple[str, Path], list[Measured]] = {}
    for window in arguments.windows:
        config = run_config(window, arguments, len(shapes))
        for checkout in (arguments.before, ROOT):
            if checkout is None:
                continue
            with tempfile.TemporaryDirectory() as directory:
                measured[window, checkout] = asyncio.run(
                    measure(config, Path(directory), shapes, arguments, checkout)
                )
    write(arguments, rows(arguments, shapes, measured))
    return 0


def run_config(window: str, arguments: argparse.Namespace, shapes: int) -> RunConfig:
    steps = shapes * (arguments.settle + arguments.steps) + 1
    return RunConfig(
        run=RunSection(name="floor", steps=steps, snapshot_every=steps),
        model=ModelSection(layers=STAGES, hidden=512, heads=8, kv_heads=2, ffn=128, vocab=256, sequence=1024),
        data=DataSection(path="stdlib"),
        training=TrainingSection(global_batch=arguments.microbatches, microbatch=1, warmup_steps=0),
        pipeline=PipelineSection(
            stages=STAGES,
            window="auto" if window == "auto" else int(window),
            forward_codec=arguments.codec,
            backward_codec=arguments.codec,
        ),
        coordinator=CoordinatorSection(listen="127.0.0.1:0", silent_seconds=60.0),
    )


async def measure(
    config: RunConfig,
    directory: Path,
    shapes: Sequence[tuple[float, float]],
    arguments: argparse.Namespace,
    checkout: Path,
) -> "list[Measured]":
    """The counted steps of a checkout's program under each (round trip, rate)."""
    run_file = directory / "run.toml"
    run_file.write_text(to_toml(config), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH")))),
        "XDG_STATE_HOME": str(directory / "state"),
        "OMP_NUM_THREADS": "1",
        TIMES: f"{FORWARD_SECONDS} {BACKWARD_SECONDS}",
    }
    children: list[asyncio.subprocess.Process] = []
    with ExitStack() as stack:
        try:
            coordinator = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "node.cli.main", "coordinator", str(run_file), "--json"),
                *("--run-dir", str(directory / "run")),
                env=environment,
                stdout=subprocess.PIPE,
                limit=1 << 20,
                cwd=checkout,
            )
            children.append(coordinator)
            async with asyncio.timeout(START_SECONDS):
                line = await _until(coordinator, events.JoinLine)
            relays = []
            for stage in range(STAGES):
                port = _free_port()
                relay = stack.enter_context(ShapedRelay(port, rate=1.25e8))
                relays.append(relay)
                children.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, str(checkout / "scripts" / Path(__file__).name), NODE),
                        *(line.line.split()[-1], f"127.0.0.1:{port}"),
                        *(f"127.0.0.1:{relay.port}", str(directory / f"node-{stage}")),
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        cwd=checkout,
                    )
                )
            results: list[Measured] = []
            for round_trip, rate in shapes:
                for relay in relays:
                    relay.shape(rate=rate * 1e6 / 8, delay=round_trip / 2e3)
                steps: list[float] = []
                floors: list[float] = []
                for _ in range(arguments.settle + arguments.steps):
                    async with asyncio.timeout(STEP_SECONDS):
                        costs = await _until(coordinator, events.StepCosts)
                        done = await _until(coordinator, events.StepDone)
                    steps.append(done.seconds)
                    floors.append(floor(arguments, round_trip, rate, costs))
                results.append(Measured(steps[arguments.settle :], floors[arguments.settle :]))
                print(
                    str(config.pipeline.window) + (", before" if checkout != ROOT else ""),
                    f"{rate:g} Mbit/s, {round_trip:g} ms:",
                    " ".join(f"{seconds:.3f}" for seconds in steps),
                    f"floor {floor(arguments, round_trip, rate):.3f}, as measured",
                    " ".join(f"{seconds:.3f}" for seconds in floors),
                    flush=True,
                )
            return results
        finally:
            for child in children:
                if child.returncode is None:
                    child.kill()
            for child in children:
                await child.wait()


async def _until(coordinator: asyncio.subprocess.Process, kind: type[Any]) -> Any:
    assert coordinator.stdout is not None
    while line := await coordinator.stdout.readline():
        event = events.from_json(line.decode())
        if isinstance(event, kind):
            return event
        if isinstance(event, events.Notice):
            print(event.text, flush=True)
    raise RuntimeError("the coordinator ended")


def tensor_bytes(name: str) -> int:
    """A packed boundary tensor of one microbatch in its frames."""
    size = codec(name).packed_bytes(TensorSpec(torch.float32, (1, 1024, 512)))
    return size + HEADER_BYTES * -(-size // PAYLOAD_BYTES)


def floor(
    arguments: argparse.Namespace,
    round_trip: float,
    rate: float,
    costs: events.StepCosts | None = None,
) -> float:
    """Seconds of a step, nothing faster being possible; with the compute times of `costs` if given."""
    forward, backward = [FORWARD_SECONDS] * STAGES, [BACKWARD_SECONDS] * STAGES
    if costs is not None:
        forward = [stage.seconds["forward"] / arguments.microbatches for stage in costs.stages]
        backward = [stage.seconds["backward"] / arguments.microbatches for stage in costs.stages]
    frames = tensor_bytes(arguments.codec)
    link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=round_trip / 2e3)
    return step_floor(
        microbatches=arguments.microbatches,
        forward=forward,
        backward=backward,
        activation_bytes=frames,
        gradient_bytes=frames,
        links=[link] * (STAGES - 1),
    ).seconds


def simulated(arguments: argparse.Namespace, shapes: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """What window 0 and the planned windows give under each (round trip, rate), if nothing else happens."""
    found = []
    for round_trip, rate in shapes:
        link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=round_trip / 2e3)
        measures = StepMeasures(
            forward=(FORWARD_SECONDS,) * STAGES,
            backward=(BACKWARD_SECONDS,) * STAGES,
            activation_bytes=tensor_bytes(arguments.codec),
            gradient_bytes=tensor_bytes(arguments.codec),
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
                FORWARD_SECONDS,
                BACKWARD_SECONDS,
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


def rows(
    arguments: argparse.Namespace,
    shapes: Sequence[tuple[float, float]],
    measured: "dict[tuple[str, Path], list[Measured]]",
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
            "forward_seconds": FORWARD_SECONDS,
            "backward_seconds": BACKWARD_SECONDS,
            "codec": arguments.codec,
        },
        "results": results,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def merge(paths: Sequence[Path], out: Path) -> None:
    """One report of several that ran with the same settings on the same machine."""
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


# ---- the stand-in for a stage's compute, in the node's process


def node(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join` with blocks that take a set time and compute nothing."""
    from node.config.join_options import JoinOptions
    from node.model import blocks
    from node.stage.main import run_node

    forward, backward = map(float, os.environ[TIMES].split())
    blocks.LlamaBlock.forward = _block_forward(forward, backward)  # type: ignore[method-assign]
    blocks.Head.forward = _head_forward  # type: ignore[method-assign]
    options = JoinOptions(
        listen=listen, advertise=advertise, state_dir=Path(directory), device="cpu", threads=1, json=True
    )
    return run_node(token, options)


class _Paced(torch.autograd.Function):
    """The identity, which takes a set time each way and gives its parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, seconds: tuple[float, float], x: torch.Tensor, *weights: torch.Tensor) -> Any:
        until = time.perf_counter() + seconds[0]
        ctx.seconds = seconds[1]
        ctx.shapes = [weight.shape for weight in weights]
        result = x.clone()
        _sleep_until(until)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        until = time.perf_counter() + ctx.seconds
        zeros = tuple(torch.zeros(shape) for shape in ctx.shapes)
        _sleep_until(until)
        return None, gradient, *zeros


def _sleep_until(moment: float) -> None:
    if (pause := moment - time.perf_counter()) > 0:
        time.sleep(pause)


def _block_forward(forward: float, backward: float) -> Any:
    def run(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Paced.apply((forward, backward), x, *block.parameters())
        return result

    return run


def _head_forward(head: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Paced.apply((0.0, 0.0), x, *head.parameters())
    return result[..., :256]


if __name__ == "__main__":
    sys.exit(node(*sys.argv[2:]) if sys.argv[1:2] == [NODE] else main())
