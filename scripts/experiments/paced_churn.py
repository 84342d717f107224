"""Goodput while nodes are killed and come back: `python -m scripts.experiments.paced_churn [--minutes 2]`.

The coordinator, the nodes and the links between them are the program's own processes on one machine. Blocks
compute a small model and then wait, so that each takes a set time (`paced_pipeline`), and a few cores play
many machines. Nodes die by SIGKILL at random (exponential times), and a new process of the same node starts
some seconds later, with its disk. `scripts.experiments.churn` simulates the same.

A step stands for one of `REAL_STEP_SECONDS`: deaths a step are those of a node with such steps, and a node is
back after as large a part of a step. Limits of time that the program has in seconds stay as they are.

Each cell is a run from the same seed: some steps without deaths, then so many minutes with them. Goodput is
the steps that are committed, each once, times the seconds of a calm step, over the seconds. Losses, gradient
norms and the hashes of snapshots are compared with those of a calm run of one row.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
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
from node.telemetry import events
from node.telemetry.history import EVICTED
from node.tuning.snapshot_place import snapshot_bytes
from scripts.experiments.churn import DEATHS_A_MINUTE
from scripts.experiments.paced_pipeline import NODE, TIMES, Child, Launch, join, paced_run, sleep_until
from scripts.experiments.paced_rows import Running
from scripts.report import RESULTS, one_line, write
from tests.support.fault_prefork import Forked, Prefork
from wire.identity.credentials import NodeIdentity

OUT = RESULTS / "paced_churn.json"
REAL_STEP_SECONDS, REAL_BACK_SECONDS = 20.0, 10.0
"""Of a step, and from a death until the node is there again."""
START_SECONDS, STEP_SECONDS = 300.0, 90.0
LAST_SECONDS = 30.0
"""For the step that is under way at the end of a cell."""
SETTLE_STEPS = 2
"""The first steps of a run: they are not counted as calm."""
RATES = ("5 % a minute", "2.6 node-hours", "1 node-hour", "0.2 node-hours")
LEAST_SECONDS = 60.0
"""Of a cell that is begun."""
TOLD = (
    events.Notice,
    events.SeatLost,
    events.SeatFilled,
    events.NodeJoined,
    events.NodeLeft,
    events.StepAborted,
    events.PlacementMade,
)
CALM_BLOCK_SECONDS = 0.02
"""Of a block of the calm run: so it leaves cores to the others."""
KEPT = 1000
"""Snapshots of the calm run."""


def run_config(stages: int, rows: int, arguments: argparse.Namespace) -> RunConfig:
    """The same bits whatever the rows."""
    return RunConfig(
        run=RunSection(name="churn", steps=10**6, snapshot_every=arguments.every),
        model=ModelSection(layers=stages, hidden=64, heads=2, kv_heads=2, ffn=128, vocab=256, sequence=32),
        data=DataSection(path=str(Path(json.__file__).parent)),
        training=TrainingSection(
            global_batch=arguments.microbatches, microbatch=1, warmup_steps=0, schedule="constant"
        ),
        pipeline=PipelineSection(stages=stages, groups=arguments.groups, replicas=rows),
        snapshots=SnapshotsSection(keep="nodes"),
        coordinator=CoordinatorSection(listen="127.0.0.1:0"),
    )


# ---- processes


class ForkedChild:
    """A process of the template, as `paced_run` wants it."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked
        self.pid = forked.pid

    @property
    def returncode(self) -> int | None:
        return self._forked.poll()

    def kill(self) -> None:
        self._forked.kill()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._forked.wait)


def forking(prefork: Prefork, nice: int) -> Launch:
    """Each node is a process of its own, forked from one that has imported everything."""

    async def launch(words: Sequence[str], environment: dict[str, str], folder: Path) -> Child:
        with (Path(words[-1]).parent / f"{Path(words[-1]).name}.log").open("ab") as log:
            forked = prefork.popen(words, stdout=log, stderr=log, cwd=folder, env=environment, text=True)
        os.setpriority(os.PRIO_PROCESS, forked.pid, nice)
        return ForkedChild(forked)

    return launch


def node(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join`, with blocks that take a set time."""
    from node.model.llama_block import LlamaBlock

    forward, backward = map(float, os.environ[TIMES].split())
    compute = LlamaBlock.forward

    def paced(block: LlamaBlock, x: torch.Tensor, documents: Any = None, place: Any = None) -> Any:
        until = time.perf_counter() + forward
        return _Takes.apply(until, backward, compute(block, x, documents, place))

    LlamaBlock.forward = paced  # type: ignore[method-assign]
    return join(token, listen, advertise, directory)


class _Takes(torch.autograd.Function):
    """The identity. It waits until a moment, and in backward for some seconds."""

    @staticmethod
    def forward(ctx: Any, until: float, seconds: float, x: torch.Tensor) -> Any:
        ctx.seconds = seconds
        sleep_until(until)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return None, None, gradient


@dataclass
class Grid:
    """Processes of a run, and what is known of its bits."""

    run: Running
    stages: int
    rows: int
    deaths: list[tuple[float, int]] = field(default_factory=list)
    """When, and which node."""

    @property
    def committed(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each step, by its newest commit."""
        steps = [event for _, event in self.run.told if isinstance(event, events.StepDone)]
        return {step.step: (step.loss, step.grad_norm) for step in steps}

    def snapshots(self) -> dict[int, list[str]]:
        """Hashes of the files of each snapshot that is there, by step."""
        found = {}
        for pattern in ("snapshots/*/manifest.json", "kept/step-*.json"):
            for path in (self.run.run.directory / "run").glob(pattern):
                manifest = json.loads(path.read_text())
                found[manifest["step"]] = [unit["sha256"] for unit in manifest["units"]]
        return found

    def node_id(self, number: int) -> str:
        identity = NodeIdentity.load(self.run.run.directory / f"node-{number + 1}")
        assert identity is not None
        return identity.node_id

    async def mortal(self, number: int, rate: float, back: float, chance: random.Random) -> None:
        """Kill a node again and again, `rate` times a second that it lives, and start it again."""
        while True:
            await asyncio.sleep(chance.expovariate(rate))
            self.deaths.append((time.monotonic(), number))
            await self.run.run.restart_node(number, back)


@asynccontextmanager
async def started(
    config: RunConfig, prefork: Prefork, arguments: argparse.Namespace, seconds: float, nice: int = 0
) -> AsyncIterator[Grid]:
    """A run whose nodes all have their seats. `seconds`: of a block, forward and backward."""
    stages, rows = config.pipeline.stages, config.pipeline.most_rows
    with tempfile.TemporaryDirectory() as folder:
        async with paced_run(
            config,
            Path(folder),
            forward=seconds / 3,
            backward=2 * seconds / 3,
            script="scripts.experiments.paced_churn",
            launch=forking(prefork, nice),
        ) as paced:
            run = Running(paced)
            line = await run.until(events.JoinLine, START_SECONDS)
            for _ in range(stages * rows):
                await paced.add_node(line.line.split()[-1], arguments.mbit, relayed=False)
            # Nodes that start late take the seats of a row that is added without them.
            seated: set[str] = set()
            while len(seated) < stages * rows:
                told = await run.until((events.PlacementMade, events.SeatFilled), START_SECONDS)
                if isinstance(told, events.PlacementMade):
                    seated = {node for node in told.nodes if node}
                else:
                    seated.add(told.node_id)
            try:
                yield Grid(run, stages, rows)
            except BaseException:
                print_logs(Path(folder))
                raise


def print_logs(folder: Path) -> None:
    """The ends of what the nodes said."""
    for log in sorted(folder.glob("node-*.log")):
        print(log.name, log.read_text()[-500:], file=sys.stderr)


# ---- cells


async def calm_run(stages: int, prefork: Prefork, arguments: argparse.Namespace, calm: "Bits") -> None:
    """One row that waits less, beside the others."""
    config = run_config(stages, 1, arguments)
    config = replace(
        config,
        run=replace(config.run, snapshot_every=1, keep_snapshots=KEPT),
        snapshots=SnapshotsSection(keep="coordinator"),
    )
    async with started(config, prefork, arguments, CALM_BLOCK_SECONDS, nice=19) as grid:
        while len(calm.steps) < arguments.calm_run:
            await grid.run.until(events.StepDone, STEP_SECONDS)
            calm.steps = grid.committed
        await grid.run.until(events.SnapshotStored, STEP_SECONDS)
        calm.snapshots = grid.snapshots()


def until(moment: float) -> asyncio.Timeout:
    """Until then by `time.monotonic`."""
    return asyncio.timeout(moment - time.monotonic())


async def cell(
    grid: Grid, a_minute: float, arguments: argparse.Namespace, end_at: float, seed: str
) -> dict[str, Any]:
    """Calm steps, then deaths, until `end_at` at the latest."""
    run = grid.run
    await run.steps(SETTLE_STEPS)
    calm = statistics.median(await run.steps(arguments.calm))
    scale = calm / REAL_STEP_SECONDS
    rate, back = a_minute / 60 / scale, REAL_BACK_SECONDS * scale
    begin, first = len(run.told), len(grid.committed)
    began, used = time.monotonic(), processor_seconds()
    over = min(began + 60 * arguments.minutes, end_at)
    mortals = [
        asyncio.create_task(grid.mortal(number, rate, back, random.Random(f"{seed} {number}")))
        for number in range(grid.stages * grid.rows)
    ]
    # To the end of the step that is under way then; a run that stands still counts as it is.
    with suppress(TimeoutError):
        while time.monotonic() < over:
            await run.until(events.StepDone, over + LAST_SECONDS - time.monotonic())
    seconds = time.monotonic() - began
    for mortal in mortals:
        mortal.cancel()
    for ended in await asyncio.gather(*mortals, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            raise RuntimeError("a node was not started again") from ended
    told = [event for _, event in run.told[begin:]]
    done = [event for event in told if isinstance(event, events.StepDone)]
    committed = (done[-1].step if done else first) - first
    deaths = len(grid.deaths)
    killed = {grid.node_id(number) for _, number in grid.deaths}
    left = [event for event in told if isinstance(event, events.NodeLeft)]
    return {
        "calm_step_seconds": calm,
        "scale": scale,
        "back_seconds": back,
        "seconds": seconds,
        "deaths": deaths,
        "deaths_a_step": deaths * calm / seconds,
        "deaths_a_step_meant": a_minute / 60 * REAL_STEP_SECONDS * grid.stages * grid.rows,
        "committed": committed,
        "gross_steps": len(done),
        "goodput": committed * calm / seconds,
        "seconds_a_death": max(0.0, seconds - committed * calm) / deaths if deaths else None,
        "real_seconds_a_death": max(0.0, seconds / scale - committed * REAL_STEP_SECONDS) / deaths
        if deaths
        else None,
        "step_seconds": [event.seconds for event in done],
        "seats_lost": sum(isinstance(event, events.SeatLost) for event in told),
        "seats_filled": sum(isinstance(event, events.SeatFilled) for event in told),
        "aborted": Counter(event.kind for event in told if isinstance(event, events.StepAborted)),
        "evicted": sum(event.reason.startswith((events.QUARANTINED, EVICTED)) for event in left),
        "left_alive": sum(event.node_id not in killed for event in left),
        "replaced_alive": sum(
            event.node_id not in killed for event in told if isinstance(event, events.NodeReplaced)
        ),
        "timeline": timeline(grid, begin, began),
        "cores_used": (processor_seconds() - used) / seconds,
    }


def timeline(grid: Grid, begin: int, began: float) -> list[str]:
    """Deaths, and what the coordinator said, with the seconds since the first could come."""
    told = [
        (
            at,
            event.text
            if isinstance(event, events.Notice | events.SeatLost | events.SeatFilled)
            else str(event),
        )
        for at, event in grid.run.told[begin:]
        if isinstance(event, TOLD)
    ]
    told += [(at, f"{grid.node_id(number)} is killed") for at, number in grid.deaths]
    told += [
        (at, f"step {event.step}")
        for at, event in grid.run.told[begin:]
        if isinstance(event, events.StepDone)
    ]
    return [f"{at - began:.2f} {text}" for at, text in sorted(told)]


def processor_seconds() -> float:
    """Of the machine."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = map(int, words[:3])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


@dataclass
class Bits:
    """What a run has committed."""

    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Loss and gradient norm."""
    snapshots: dict[int, list[str]] = field(default_factory=dict)
    """Hashes of files."""

    def against(self, calm: "Bits") -> dict[str, Any]:
        """As far as the calm run went."""
        steps, stored = self.steps.keys() & calm.steps.keys(), self.snapshots.keys() & calm.snapshots.keys()
        other = sorted(step for step in steps if self.steps[step] != calm.steps[step])
        return {
            "steps_compared": len(steps),
            "steps_not_compared": len(self.steps) - len(steps),
            "steps_that_differ": other,
            "snapshots_compared": sorted(stored),
            "snapshots_that_differ": sorted(
                step for step in stored if self.snapshots[step] != calm.snapshots[step]
            ),
        }


@dataclass
class Lane:
    """The cells of a grid, one after the other."""

    stages: int
    rows: int
    prefork: Prefork
    arguments: argparse.Namespace
    end_at: float
    cells: list[dict[str, Any]] = field(default_factory=list)
    bits: list[Bits] = field(default_factory=list)
    """Of each cell."""
    calm: Bits = field(default_factory=Bits)
    """Of the run without deaths."""

    async def measure(self, record: Callable[[], None]) -> None:
        """Calls `record` after each cell."""
        calm = asyncio.create_task(calm_run(self.stages, self.prefork, self.arguments, self.calm))
        try:
            for rate in self.arguments.rates:
                if time.monotonic() + LEAST_SECONDS > self.end_at:
                    break
                await self._cell(rate)
                record()
            async with until(self.end_at):
                await calm
        except TimeoutError:
            print("the calm run is not done", flush=True)
        finally:
            calm.cancel()
            await asyncio.gather(calm, return_exceptions=True)
            record()

    async def _cell(self, rate: str) -> None:
        arguments = self.arguments
        config = run_config(self.stages, self.rows, arguments)
        slots = config.microbatches / self.rows + self.stages - 1
        name = f"{self.stages} x {self.rows}"
        found: dict[str, Any] = {"grid": name, "a_node_dies": rate}
        bits = Bits()
        seed = f"{arguments.seed} {name} {rate}"
        began = time.monotonic()
        try:
            async with (
                until(self.end_at + LAST_SECONDS),
                started(config, self.prefork, arguments, arguments.step / slots) as grid,
            ):
                found["start_seconds"] = time.monotonic() - began
                found |= await cell(grid, DEATHS_A_MINUTE[rate], arguments, self.end_at, seed)
                bits = Bits(grid.committed, grid.snapshots())
        except (TimeoutError, RuntimeError, OSError) as error:
            found["error"] = one_line(error)
        print(json.dumps(found), flush=True)
        self.cells.append(found)
        self.bits.append(bits)

    def report(self) -> list[dict[str, Any]]:
        """Each cell, compared with the calm run as far as that is by now."""
        return [found | bits.against(self.calm) for found, bits in zip(self.cells, self.bits, strict=True)]


async def measured(arguments: argparse.Namespace, prefork: Prefork, about: dict[str, Any]) -> None:
    end_at = time.monotonic() + arguments.seconds
    grids = [tuple(map(int, grid.split("x"))) for grid in arguments.grids]
    lanes = [Lane(stages, rows, prefork, arguments, end_at) for stages, rows in grids]

    def record() -> None:
        cells = [found for lane in lanes for found in lane.report()]
        write(arguments.out, {**about, "load_after": os.getloadavg()[0], "cells": cells})

    for lane in lanes:
        await lane.measure(record)


def state_bytes(arguments: argparse.Namespace) -> dict[str, int]:
    """Of a stage, by grid."""
    grids = [tuple(map(int, grid.split("x"))) for grid in arguments.grids]
    return {
        f"{stages} x {rows}": snapshot_bytes(run_config(stages, rows, arguments)) // stages
        for stages, rows in grids
    }


def main() -> int:
    if sys.argv[1:2] == [NODE]:
        return node(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--grids", nargs="+", default=["8x4"], metavar="STAGESxROWS")
    parser.add_argument("--rates", nargs="+", default=RATES, choices=RATES)
    parser.add_argument("--minutes", type=float, default=2.0, help="with deaths, of each cell")
    parser.add_argument("--seconds", type=float, default=1e6, help="that all of it may take")
    parser.add_argument("--step", type=float, default=2.8, help="seconds of a step's passes")
    parser.add_argument("--calm", type=int, default=4, help="steps before the first death that are timed")
    parser.add_argument("--calm-run", type=int, default=50, help="steps of the run without deaths")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=72)
    parser.add_argument("--every", type=int, default=15, help="steps between snapshots")
    parser.add_argument("--mbit", type=float, default=3.0, help="that a node sends at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    about = {
        "experiment": "paced churn",
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": arguments.seed,
        "real_step_seconds": REAL_STEP_SECONDS,
        "real_back_seconds": REAL_BACK_SECONDS,
        "groups": arguments.groups,
        "microbatches": arguments.microbatches,
        "snapshot_every": arguments.every,
        "mbit": arguments.mbit,
        "minutes": arguments.minutes,
        "state_bytes": state_bytes(arguments),
        "silent_seconds": CoordinatorSection().silent_seconds,
        "not_scaled": "limits of time that the program has in seconds, and the start of a process",
    }
    with Prefork() as prefork:
        asyncio.run(measured(arguments, prefork, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
