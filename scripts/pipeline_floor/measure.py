"""The product under relays: a coordinator and four nodes as processes, links reshaped while they run."""

import asyncio
import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shaped_relay import ShapedRelay

from node.config.schema import (
    CoordinatorSection,
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.run_file.loader import to_toml
from node.telemetry import events
from pipeline_floor.floor import BACKWARD_SECONDS, FORWARD_SECONDS, STAGES, floor
from pipeline_floor.stand_in import NODE, TIMES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path("scripts", "exp_pipeline_floor.py")
"""Of a checkout: what starts a node there, in another commit too."""
START_SECONDS = 120.0
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps that count, and their floors with the compute times measured in them."""

    steps: list[float]
    floors: list[float]


def run_config(window: str, arguments: Namespace, shapes: int) -> RunConfig:
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
    arguments: Namespace,
    checkout: Path,
) -> list[Measured]:
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
                        *(sys.executable, str(checkout / SCRIPT), NODE),
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
