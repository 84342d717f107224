"""Run a coordinator and its nodes as processes in their network namespaces.

The processes are `thinwire` itself. Nodes join with the run's join line, over mutual TLS. The coordinator's
events arrive as JSON lines. The run's directories are in the namespace's memory file system and disappear
with it.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

from node import program
from node.config.schema import RunConfig
from node.display.terminal import last_words
from node.lab.tools import prefix
from node.lab.topology import COORDINATOR, COORDINATOR_ADDRESS, node_address, node_name
from node.run_file.loader import to_toml
from node.telemetry.events import (
    Event,
    JoinLine,
    NodeJoined,
    PlacementMade,
    RunFinished,
    StepAborted,
    StepCosts,
    StepDone,
    WindowsPlanned,
    from_json,
)
from wire.errors import RunError

E = TypeVar("E", bound=Event)

START_SECONDS = 180.0
"""Time limit for the coordinator's join line, and for each node to join."""
RESTORE_SECONDS = 600.0
"""Time limit from the last join to the placement. The initial weights of a large model take a while."""
PORT = 7700
"""The coordinator's first port. It also uses the next ones."""
GRACE_SECONDS = 5.0
MAX_EVENT_BYTES = 1 << 22
PROXIES = ("https_proxy", "no_proxy")
"""Environment variables that no process of the lab inherits."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A committed step, and when its event arrived."""

    done: StepDone
    costs: StepCosts
    at: float
    """The arrival, as `time.monotonic()`."""


class LabProcesses:
    """A run's processes in their network namespaces, and the reports of its coordinator.

    It is an async context manager. All processes have ended when it exits.
    """

    def __init__(self, directory: Path, logs: Path, threads: int) -> None:
        """
        Args:
            directory: existing directory for the run's and the nodes' state.
            logs: existing directory for the processes' output.
            threads: CPU threads of each node; 0 is torch's own choice.
        """
        self._directory = directory
        self.run_directory = directory / "run"
        """The coordinator's run directory."""
        self._logs = logs
        self._threads = threads
        self._children: dict[str, Process] = {}
        self._events: AsyncIterator[Event] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._kill()

    async def _kill(self) -> None:
        for child in self._children.values():
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGKILL)
        for child in self._children.values():
            await child.wait()

    async def _start_coordinator(self, config: RunConfig) -> None:
        run_file = self._directory / "run.toml"
        run_file.write_text(to_toml(config), encoding="utf-8")
        command = ["coordinator", str(run_file), "--run-dir", str(self.run_directory), "--json"]
        await self._spawn(COORDINATOR, [*program("cli.main"), *command], stdout=PIPE)
        self._events = self._read_events()

    async def _spawn(
        self,
        namespace: str,
        command: list[str],
        *,
        name: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        stdin: int = DEVNULL,
        stdout: int | None = None,
    ) -> Process:
        """Start `command` in a namespace. `name` is its name here, by default that of the namespace."""
        kept = {key: value for key, value in os.environ.items() if key.lower() not in PROXIES}
        if self._threads:
            kept["OMP_NUM_THREADS"] = str(self._threads)
        with (self._logs / f"{namespace}.log").open("ab") as log:
            child = self._children[name or namespace] = await asyncio.create_subprocess_exec(
                *prefix(namespace),
                *command,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                limit=MAX_EVENT_BYTES,
                env={**kept, **environment},
                start_new_session=True,
            )
        return child

    def _send_join(self, name: str, token: str, number: int, *options: str) -> None:
        """Let the node `name`, the run's `number`-th, join."""
        arguments = ["join", token, "--state-dir", str(self._directory / f"state{number}"), "--wait", "0"]
        arguments += ["--threads", str(self._threads), *options]
        stdin = self._children[name].stdin
        assert stdin is not None
        stdin.write(json.dumps(arguments).encode() + b"\n")
        stdin.close()

    # ---- events

    async def _next(self, kind: type[E], seconds: float, what: str) -> E:
        """The next event of `kind`; skips others. Ends early when a process has ended."""
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                watchers = [group.create_task(self._watch(*pair)) for pair in self._children.items()]
                event = await self._first(kind)
                for watcher in watchers:
                    watcher.cancel()
                return event
        except TimeoutError:
            raise RunError(f"the lab's coordinator did not report {what}; logs are in {self._logs}") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _first(self, kind: type[E]) -> E:
        assert self._events is not None
        async for event in self._events:
            if isinstance(event, RunFinished):
                raise RunError(f"the run in the lab ended: {event.reason}")
            if isinstance(event, kind):
                return event
        # The error of `_watch` says more about the coordinator's end.
        await asyncio.sleep(GRACE_SECONDS)
        raise RunError(f"the lab's coordinator closed its output; see {self._logs / 'coordinator.log'}")

    async def _watch(self, name: str, child: Process) -> None:
        """Raise RunError when a process ends before it is killed."""
        code = await child.wait()
        # If the coordinator reports an error, that one should be raised first.
        await asyncio.sleep(GRACE_SECONDS / 5)
        path = self._logs / f"{name}.log"
        words = last_words(path) or "it wrote no output"
        raise RunError(f"{words} ({name} in the lab ended with exit code {code}; its output is in {path})")

    async def _read_events(self) -> AsyncIterator[Event]:
        stdout = self._children[COORDINATOR].stdout
        assert stdout is not None
        while line := await stdout.readline():
            yield from_json(line.decode())


class RunProcesses(LabProcesses):
    """A run over shaped links.

    Args:
        device: `cpu`, or `cuda`, where stage i uses GPU i modulo `gpus`.
        gpus: The number of GPUs. 0 means one per stage.
    """

    def __init__(
        self, config: RunConfig, *, directory: Path, logs: Path, device: str, gpus: int = 0, threads: int
    ) -> None:
        super().__init__(directory, logs, threads)
        listen = f"{COORDINATOR_ADDRESS}:{PORT}"
        self._config = replace(config, coordinator=replace(config.coordinator, listen=listen, advertise=()))
        self._device = device
        self._gpus = gpus or config.pipeline.stages
        self._stages = config.pipeline.stages
        self._costs: StepCosts | None = None
        self.plans: list[WindowsPlanned] = []
        """All plans of windows so far."""

    async def _start(self) -> None:
        """Start all processes; nodes wait before they join."""
        for stage in range(self._stages):
            command = [*program("cli.lab_node"), self._device_of(stage)]
            await self._spawn(node_name(stage), command, stdin=PIPE)
        await self._start_coordinator(self._config)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
            await self._join_all()
        except BaseException:
            await self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self._end_coordinator()
        await self._kill()

    async def _end_coordinator(self) -> None:
        """End the coordinator so that it flushes history and trace. Two signals make it skip the snapshot."""
        child = self._children[COORDINATOR]
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)
            async with asyncio.timeout(GRACE_SECONDS):
                await child.wait()

    async def next_step(self, seconds: float) -> Step:
        """The next committed step. Raises RunError if it takes longer than `seconds`, or if anything
        fails."""
        deadline = time.monotonic() + seconds
        while True:
            what = f"the next step, within {seconds:g} s"
            event = await self._next(Event, max(0.0, deadline - time.monotonic()), what)
            match event:
                case StepCosts():
                    self._costs = event
                case WindowsPlanned():
                    self.plans.append(event)
                case StepAborted():
                    raise RunError(
                        f"a step was aborted in the lab, so nothing can be measured: {event.reason}"
                    )
                case StepDone():
                    costs, self._costs = self._costs, None
                    if costs is None or costs.step != event.step:
                        raise RunError(
                            "the coordinator reports no costs of its steps: lab and program do not match"
                        )
                    return Step(done=event, costs=costs, at=time.monotonic())

    # ---- start and end

    async def _join_all(self) -> None:
        join_line = await self._next(JoinLine, START_SECONDS, "the join line")
        token = join_line.line.split()[-1]
        nodes = [await self._join(stage, token) for stage in range(self._stages)]
        placed = await self._next(PlacementMade, RESTORE_SECONDS, "a placement")
        if list(placed.nodes) != nodes:
            raise RunError("the coordinator seated the nodes in another order than they joined in")

    async def _join(self, stage: int, token: str) -> str:
        """Let node `stage` join; return its id once the coordinator has admitted it."""
        listen = f"{node_address(stage)}:0"
        self._send_join(
            node_name(stage), token, stage, "--listen", listen, "--device", self._device_of(stage)
        )
        joined = await self._next(NodeJoined, START_SECONDS, f"node {stage}")
        if joined.address.rpartition(":")[0] != node_address(stage):
            raise RunError(f"node {stage} came from {joined.address}: the lab's routes are wrong")
        return joined.node_id

    def _device_of(self, stage: int) -> str:
        return f"cuda:{stage % self._gpus}" if self._device == "cuda" else "cpu"
