"""Measure the steps of a pipeline over real links, with blocks that wait for a set time.

Links pass relays that shape them, or, on lines that are too fast for those, each node keeps to a limit of its
own, which all its links share.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
from node.run_file.loader import to_toml
from node.schedule.floor import LinkRate, PipelineStep
from node.telemetry import events
from scripts.experiments.shaped_relay import ShapedRelay
from scripts.report import ROOT
from wire.codecs.registry import codec
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES
from wire.spec import TensorSpec

STAGES = 4
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040


def tensor_bytes(arguments: Namespace) -> int:
    """Bytes of the frames that carry one microbatch's packed boundary tensor."""
    spec = TensorSpec(torch.float32, (1, arguments.sequence, 512))
    size = codec(arguments.codec).packed_bytes(spec)
    return size + HEADER_BYTES * -(-size // PAYLOAD_BYTES)


def floor(
    arguments: Namespace,
    round_trip: float,
    rate: float,
    costs: events.StepCosts | None = None,
) -> float:
    """Lower bound on a step in seconds, with the measured compute times of `costs` if given."""
    forward, backward = ([seconds] * STAGES for seconds in arguments.seconds)
    if costs is not None:
        forward = [stage.seconds["forward"] / arguments.microbatches for stage in costs.stages]
        backward = [stage.seconds["backward"] / arguments.microbatches for stage in costs.stages]
    frames = tensor_bytes(arguments)
    link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=round_trip / 2e3)
    own = arguments.own_limit
    return (
        PipelineStep(
            microbatches=arguments.microbatches,
            forward=forward,
            backward=backward,
            activation_bytes=frames,
            gradient_bytes=frames,
            links=[] if own else [link] * (STAGES - 1),
            interfaces=[link] * STAGES if own else [],
        )
        .floor()
        .seconds
    )


SCRIPT = "scripts.experiments.pipeline_floor"
"""The module that starts a node; a checkout of another commit has it too."""
START_SECONDS = 120.0
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Measured:
    """Seconds of the counted steps, and each step's floor from the compute times measured in it."""

    steps: list[float]
    floors: list[float]


def run_config(window: str, arguments: Namespace, shapes: int) -> RunConfig:
    steps = shapes * (arguments.settle + arguments.steps) + 1
    return RunConfig(
        run=RunSection(name="floor", steps=steps, snapshot_every=steps),
        model=ModelSection(
            layers=STAGES, hidden=512, heads=8, kv_heads=2, ffn=128, vocab=256, sequence=arguments.sequence
        ),
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


class Child(Protocol):
    """A process that was started."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


Launch = Callable[[Sequence[str], dict[str, str], Path], Awaitable[Child]]
"""Starts a command with this environment, in this folder."""


async def launched(words: Sequence[str], environment: dict[str, str], folder: Path) -> Child:
    """A Python of its own."""
    return await asyncio.create_subprocess_exec(
        *words, env=environment, stdout=subprocess.DEVNULL, cwd=folder
    )


class PacedRun:
    """A coordinator of a checkout's program, and its nodes, whose blocks wait for a set time."""

    def __init__(
        self,
        coordinator: asyncio.subprocess.Process,
        environment: dict[str, str],
        directory: Path,
        checkout: Path,
        stack: ExitStack,
        script: str,
        launch: Launch,
    ) -> None:
        self.coordinator = coordinator
        self.relays: list[ShapedRelay] = []
        self.directory = directory
        """`run` in it is the run's."""
        self._environment, self._checkout = environment, checkout
        self._stack = stack
        self._script, self._launch = script, launch
        self._children: list[Child] = [coordinator]
        self._nodes: list[tuple[list[str], dict[str, str]]] = []
        """How each was started."""

    async def add_node(self, token: str, limit: float = 0.0, *, relayed: bool = True) -> None:
        """One that others reach through a relay of its own, of 1 Gbit/s until it is shaped; with a `limit`,
        in Mbit/s, one that sends no more and that others reach directly."""
        port = reached = free_port()
        if relayed and not limit:
            self.relays.append(self._stack.enter_context(ShapedRelay(port, rate=1.25e8)))
            reached = self.relays[-1].port
        number = len(self._children)
        words = [sys.executable, "-m", self._script, NODE, token, f"127.0.0.1:{port}"]
        words += [f"127.0.0.1:{reached}", str(self.directory / f"node-{number}")]
        self._nodes.append((words, self._environment | {LIMIT: str(limit)}))
        self._children.append(await self._start(number - 1))

    async def _start(self, number: int) -> Child:
        words, environment = self._nodes[number]
        return await self._launch(words, environment, self._checkout)

    async def kill_node(self, number: int) -> None:
        """End a node's process at once: the first node is 0."""
        self._children[1 + number].kill()
        await self._children[1 + number].wait()

    async def restart_node(self, number: int, after: float = 0.0) -> None:
        """End a node's process at once, and start it again."""
        await self.kill_node(number)
        await asyncio.sleep(after)
        self._children[1 + number] = await self._start(number)

    async def node_ended(self) -> int:
        """Wait until a node's process ends. Returns its number."""
        waits = [asyncio.ensure_future(child.wait()) for child in self._children[1:]]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next(number for number, wait in enumerate(waits) if wait.done())
        finally:
            for wait in waits:
                wait.cancel()

    async def kill(self) -> None:
        """End all processes."""
        for child in self._children:
            if child.returncode is None:
                child.kill()
        for child in self._children:
            await child.wait()


@asynccontextmanager
async def paced_run(
    config: RunConfig,
    directory: Path,
    *,
    forward: float,
    backward: float,
    checkout: Path = ROOT,
    threads: int = 1,
    sums_beside: bool = False,
    script: str = SCRIPT,
    launch: Launch = launched,
) -> AsyncIterator[PacedRun]:
    """A coordinator for a run of this config whose blocks take so many seconds; nodes are yet to be added.

    Args:
        threads: of a node, for packing and unpacking.
        sums_beside: rows send each other sums of gradients at once, beside the last gradients of a pipeline.
        script: a module that starts a node as this one's `node` does.
        launch: starts a node's process.
    """
    run_file = directory / "run.toml"
    run_file.write_text(to_toml(config), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH")))),
        "XDG_STATE_HOME": str(directory / "state"),
        "OMP_NUM_THREADS": str(threads),
        TIMES: f"{forward} {backward}",
        SUMS_BESIDE: "1" if sums_beside else "",
    }
    with ExitStack() as stack:
        coordinator = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "node.cli.main", "coordinator", str(run_file), "--json"),
            *("--run-dir", str(directory / "run")),
            env=environment,
            stdout=subprocess.PIPE,
            limit=1 << 20,
            cwd=checkout,
        )
        run = PacedRun(coordinator, environment, directory, checkout, stack, script, launch)
        try:
            yield run
        finally:
            await run.kill()


async def measure(
    config: RunConfig,
    directory: Path,
    shapes: Sequence[tuple[float, float]],
    arguments: Namespace,
    checkout: Path,
) -> list[Measured]:
    """The counted steps of a checkout's program under each (round trip, rate)."""
    async with paced_run(
        config,
        directory,
        forward=arguments.seconds[0],
        backward=arguments.seconds[1],
        checkout=checkout,
        threads=arguments.threads,
    ) as run:
        async with asyncio.timeout(START_SECONDS):
            line = await until(run.coordinator, events.JoinLine)
        for _ in range(STAGES):
            await run.add_node(line.line.split()[-1], shapes[0][1] if arguments.own_limit else 0.0)
        results: list[Measured] = []
        for round_trip, rate in shapes:
            for relay in run.relays:
                relay.shape(rate=rate * 1e6 / 8, delay=round_trip / 2e3)
            steps: list[float] = []
            floors: list[float] = []
            for _ in range(arguments.settle + arguments.steps):
                async with asyncio.timeout(STEP_SECONDS):
                    costs = await until(run.coordinator, events.StepCosts)
                    done = await until(run.coordinator, events.StepDone)
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


async def until(coordinator: asyncio.subprocess.Process, kind: type[Any]) -> Any:
    assert coordinator.stdout is not None
    while line := await coordinator.stdout.readline():
        event = events.from_json(line.decode())
        if isinstance(event, kind):
            return event
        if isinstance(event, events.Notice):
            print(event.text, flush=True)
    raise RuntimeError("the coordinator ended")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


NODE = "node"
"""The script's first argument when it runs as a node."""
TIMES = "THINWIRE_STAND_IN_SECONDS"
"""Environment variable with a block's seconds, forward and backward."""
LIMIT = "THINWIRE_STAND_IN_MBIT"
"""Environment variable: what a node sends at most, in Mbit/s; 0: no limit."""
SUMS_BESIDE = "THINWIRE_STAND_IN_SUMS_BESIDE"
"""Environment variable: not empty where sums wait for nothing (`paced_run`)."""


def node(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join` with blocks that wait for a set time and compute nothing."""
    from node.model import blocks
    from node.model.llama_block import LlamaBlock
    from node.stage.inbox import LinksIO

    forward, backward = map(float, os.environ[TIMES].split())
    LlamaBlock.forward = _block_forward(forward, backward)  # type: ignore[method-assign]
    blocks.Head.forward = _head_forward  # type: ignore[method-assign]
    if os.environ.get(SUMS_BESIDE):
        LinksIO._after = lambda io, links, send: send()  # type: ignore[method-assign]
    return join(token, listen, advertise, directory)


def join(token: str, listen: str, advertise: str, directory: str) -> int:
    """`thinwire join` in this process, as its environment says."""
    from node.config.join_options import JoinOptions
    from node.processes.node import run_node

    options = JoinOptions(
        listen=listen,
        advertise=advertise,
        state_dir=Path(directory),
        device="cpu",
        threads=int(os.environ["OMP_NUM_THREADS"]),
        max_bandwidth_mbit=float(os.environ.get(LIMIT, 0)),
        json=True,
    )
    return run_node(token, options)


class _Paced(torch.autograd.Function):
    """The identity, which waits in each direction and gives its parameters zero gradients."""

    @staticmethod
    def forward(ctx: Any, seconds: tuple[float, float], x: torch.Tensor, *weights: torch.Tensor) -> Any:
        until = time.perf_counter() + seconds[0]
        ctx.seconds = seconds[1]
        ctx.shapes = [weight.shape for weight in weights]
        result = x.clone()
        sleep_until(until)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        until = time.perf_counter() + ctx.seconds
        zeros = tuple(torch.zeros(shape) for shape in ctx.shapes)
        sleep_until(until)
        return None, gradient, *zeros


def sleep_until(moment: float) -> None:
    # Sleep on the compute thread, as a kernel would hold it; the node's event loop runs on another thread.
    if (pause := moment - time.perf_counter()) > 0:
        time.sleep(pause)


def _block_forward(forward: float, backward: float) -> Any:
    def run(block: torch.nn.Module, x: torch.Tensor, documents: Any = None, place: Any = None) -> Any:
        # Slices take equally long.
        slices = 1 if place is None else len(place.past.slices)
        result = _Paced.apply((forward / slices, backward / slices), x, *block.parameters())
        return result

    return run


def _head_forward(head: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Paced.apply((0.0, 0.0), x, *head.parameters())
    return result[..., :256]
