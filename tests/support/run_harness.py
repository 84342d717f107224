"""Runs for tests: a coordinator and nodes as real processes over loopback, through the real command line.

    with Run(tmp_path, CONFIG) as run:
        coordinator = run.start()
        nodes = run.add_nodes(4)
        coordinator.wait_step(5)
        nodes[2].kill()
        run.add_node()
        assert coordinator.wait_exit() == 0
        assert run.losses == undisturbed(CONFIG).losses

Nothing here sleeps: waits are for a line of a process or for its end. Each has a limit, after which the test
fails with the output of every process. Leaving the `with` block kills and reaps what still runs, including
processes that these started: all carry a mark in their environment.

On a busy machine, a run of a few steps may end before the test acts on it. Such a run stands still at a given
step until the test goes on.

    with Run(tmp_path, CONFIG, still=Still(stage=1, steps=6)) as run:
        coordinator = run.start()
        run.add_nodes(3)
        run.wait_still().kill()
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from node.config.schema import (
    CoordinatorSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.coordinator.store import Store
from node.run_file.loader import to_toml
from node.schedule.placement import chunk_units, slices_of
from node.telemetry.events import PlacementMade, SnapshotStored, StepDone
from tests.support.faults import VARIABLE, Fault, Kind, Phase, Plan
from tests.support.memory_pipeline import TEXT, MemoryPipeline, reference_run
from tests.support.paths import python_path
from tests.support.process import SECONDS, Coordinator, Launch, Listener, Process, StuckError
from wire.identity.credentials import NodeIdentity

__all__ = [
    "SECONDS",
    "SMALL",
    "TINY",
    "Coordinator",
    "Expected",
    "Launch",
    "Process",
    "Run",
    "Still",
    "StuckError",
    "packed",
    "undisturbed",
]

MARK = "THINWIRE_TEST_MARK"

SMALL = RunConfig(
    run=RunSection(name="small", seed=5, steps=12, snapshot_every=100),
    model=ModelSection(layers=5, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=32),
    training=TrainingSection(global_batch=8, microbatch=2, lr=1e-2, warmup_steps=3),
    pipeline=PipelineSection(stages=4, forward_codec="fp32", backward_codec="fp32"),
    coordinator=CoordinatorSection(listen="127.0.0.1:0", heartbeat_seconds=0.5),
)
"""A run of a few seconds beyond the start of its processes. Its data path is filled in by `Run`."""

TINY = replace(SMALL.model, layers=3, hidden=16, heads=2, kv_heads=1, ffn=24, sequence=16)
"""Steps of a few milliseconds."""


@dataclass(frozen=True)
class Expected:
    """The result of an undisturbed run."""

    losses: Mapping[int, float]
    """By step, from 1, as `StepDone` counts."""
    weights_sha256: str


@dataclass(frozen=True)
class Still:
    """Where a run stands still, once: the node of `stage` freezes as it begins the step after `steps` others.

    It is silent then: after `coordinator.silent_seconds` the coordinator gives it up.
    """

    stage: int
    steps: int

    @property
    def fault(self) -> Fault:
        return Fault(kind=Kind.STOP, phase=Phase.FORWARD, stage=self.stage, step=self.steps)


def packed(config: RunConfig) -> RunConfig:
    """The same run with all state in low precision, and bits by stage."""
    return replace(
        config,
        training=replace(
            config.training, precision="bfloat16", weights="bfloat16", gradients="fp8", moments="fp8"
        ),
        storage=StorageSection(preset="agoq", bits_by_stage=True),
        pipeline=replace(config.pipeline, window=config.pipeline.first_window),
    )


def undisturbed(config: RunConfig) -> Expected:
    """The unsplit trainer's result, computed in this process; valid for lossless codecs.

    It is the same for any pipeline, except with bits by stage, which depend on the config's pipeline. The
    unsplit trainer has whole microbatches and no adapters: with slices or adapters it is that of the same
    stages without a network.
    """
    if slices_of(config) > 1 or config.lora.rank:
        return _without_network(config)
    pipeline = config.pipeline
    training = RunConfig(
        run=replace(RunSection(), seed=config.run.seed, steps=config.run.steps),
        model=config.model,
        sync=config.sync,
        training=config.training,
        storage=config.storage,
        pipeline=replace(PipelineSection(), groups=pipeline.groups, sync_codec=pipeline.sync_codec),
    )
    if config.storage.bits_by_stage:
        training = replace(training, pipeline=config.pipeline)
    return _undisturbed(training)


def assert_near_undisturbed(coordinator: Process, config: RunConfig) -> None:
    """Check the loss of each step of a run that lost a device, each time that the step ran.

    `Run.losses` demands equal bits in a replay, but other numbers of devices add in other orders.
    """
    expected = undisturbed(config).losses
    done = [(step.step, step.loss) for step in coordinator.all(StepDone)]
    assert {step for step, _ in done} == expected.keys()
    for step, loss in done:
        assert loss == pytest.approx(expected[step], rel=1e-4), f"step {step}"


@cache
def _undisturbed(config: RunConfig) -> Expected:
    by_stage = config.storage.bits_by_stage
    groups = chunk_units(config, config.pipeline.stages) if by_stage else None
    steps, weights = reference_run(config, config.run.steps, groups)
    return Expected({number: step.loss for number, step in enumerate(steps, start=1)}, weights)


@cache
def _without_network(config: RunConfig) -> Expected:
    with MemoryPipeline(config) as stages:
        steps = stages.train(config.run.steps)
        losses = {number: step.loss for number, step in enumerate(steps, start=1)}
        return Expected(losses, stages.weights_sha256())


class Run:
    """One run in `directory`: its run file, text, coordinators (one after the other) and nodes.

    A context manager; leaving it ends every process.
    """

    def __init__(
        self,
        directory: Path,
        config: RunConfig = SMALL,
        *,
        text: bytes = TEXT,
        launch: Launch = subprocess.Popen,
        listener: Listener | None = None,
        still: Still | None = None,
    ) -> None:
        self._launch = launch
        self._listener = listener
        self._still = still
        self.directory = directory
        self.run_dir = directory / "run"
        self.run_file = directory / "run.toml"
        self.text_file = directory / "text.txt"
        self.processes: list[Process] = []
        self.coordinators: list[Coordinator] = []
        self.nodes: list[Process] = []
        self._mark = uuid.uuid4().hex
        directory.mkdir(parents=True, exist_ok=True)
        self.text_file.write_bytes(text)
        path = config.data.path if config.data.sources else str(self.text_file)
        self.config = replace(config, data=replace(config.data, path=path))
        self.run_file.write_text(to_toml(self.config), encoding="utf-8")
        self._variables: dict[str, str] = {}
        self.program: Sequence[str] = ("node.cli.main",)
        """What is run with a command's arguments."""
        if still is not None:
            markers = directory / "still"
            markers.mkdir()
            self._variables[VARIABLE] = Plan(directory=str(markers), faults=(still.fault,)).to_json()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.running:
                process.kill()
        # Processes that they started may hold the other end of their output, and may be ending too.
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.reap()
        if error is not None:
            error.add_note("\n".join(process.report() for process in self.processes))

    # ---- processes

    @property
    def environment(self) -> dict[str, str]:
        """For every process: state and crash reports stay inside `directory`."""
        return {
            **os.environ,
            **self._variables,
            MARK: self._mark,
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": python_path(),
            "XDG_STATE_HOME": str(self.directory / "state"),
            "XDG_DATA_HOME": str(self.directory / "data"),
        }

    def command(
        self,
        *arguments: str,
        name: str = "command",
        prepare: Callable[[], None] | None = None,
        wrapper: Sequence[str] = (),
        launch: Launch | None = None,
    ) -> Process:
        """Start any other `thinwire` command.

        By default what launches the others starts it, and `subprocess.Popen` if it is prepared or wrapped.
        """
        process = Process(
            f"{name}-{len(self.processes)}",
            arguments,
            directory=self.directory,
            environment=self.environment,
            program=self.program,
            prepare=prepare,
            wrapper=wrapper,
            launch=launch or (subprocess.Popen if prepare or wrapper else self._launch),
            listener=self._listener,
        )
        self.processes.append(process)
        return process

    def start(
        self, *overrides: str, prepare: Callable[[], None] | None = None, wrapper: Sequence[str] = ()
    ) -> Coordinator:
        """`thinwire coordinator`, with `section.key=value` overrides."""
        arguments = ("coordinator", str(self.run_file), "--run-dir", str(self.run_dir), "--json", *overrides)
        return self._coordinator(arguments, prepare, wrapper)

    def resume(self, *overrides: str, prepare: Callable[[], None] | None = None) -> Coordinator:
        """`thinwire resume`, on a new port, so nodes need the token of the new join line."""
        return self._coordinator(("resume", str(self.run_dir), "--json", *overrides), prepare, ())

    def add_node(
        self,
        token: str | None = None,
        *,
        state_dir: Path | None = None,
        options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ) -> Process:
        """`thinwire join`, with the newest coordinator's token unless another is given.

        With the `state_dir` of a node that has ended, that node is started again.
        """
        token = token or self.coordinators[-1].token
        number = len(self.nodes)
        state_dir = state_dir or self.state_dir(number)
        node = self.command(
            *("join", token, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1"),
            *("--state-dir", str(state_dir), "--json", "--wait", "0", *options),
            name="node",
            wrapper=wrapper,
        )
        self.nodes.append(node)
        return node

    def new_token(self) -> str:
        """A token that admits as many nodes as any test needs."""
        with Store.open(self.run_dir) as store:
            _, token = store.create_token(time.time(), timedelta(hours=1), 50)
        return token.encode()

    def add_nodes(self, count: int, token: str | None = None) -> list[Process]:
        return [self.add_node(token) for _ in range(count)]

    def state_dir(self, number: int) -> Path:
        """State directory of the `number`-th node that was added, from 0."""
        return self.directory / f"node-{number}"

    def node_at(self, stage: int, coordinator: Coordinator | None = None) -> Process:
        """The process that hosts a stage in the newest placement that the coordinator has announced."""
        placement = (coordinator or self.coordinators[-1]).all(PlacementMade)[-1]
        wanted = placement.nodes[stage]
        for number, node in enumerate(self.nodes):
            if node.running and self.node_id(number) == wanted:
                return node
        raise AssertionError(f"no running process hosts stage {stage} ({wanted})")

    def wait_still(self) -> Process:
        """Wait until the run stands still; returns the frozen process, to be killed or to `go_on`."""
        assert self._still is not None, "the run has no `still`"
        self.coordinators[-1].wait_step(self._still.steps)
        node = self.node_at(self._still.stage)
        node.wait_frozen()
        return node

    def node_id(self, number: int) -> str | None:
        """The id of the `number`-th node that was added; None before it is enrolled."""
        identity = NodeIdentity.load(self.state_dir(number))
        return identity.node_id if identity else None

    # ---- results

    @property
    def losses(self) -> dict[int, float]:
        """By step, over all coordinators; a step that ran twice must give the same bits."""
        losses: dict[int, float] = {}
        for coordinator in self.coordinators:
            for done in coordinator.all(StepDone):
                assert losses.setdefault(done.step, done.loss) == done.loss, f"step {done.step} differs"
        return losses

    @property
    def weights_sha256(self) -> str:
        """Of the newest complete snapshot on disk."""
        manifests = sorted((self.run_dir / "snapshots").glob("step-*/manifest.json"))
        assert manifests, "the run has no snapshot"
        sha256: str = json.loads(manifests[-1].read_bytes())["weights_sha256"]
        return sha256

    @property
    def snapshots(self) -> list[int]:
        """Steps of the snapshots that coordinators announced, in that order."""
        return [
            stored.step for coordinator in self.coordinators for stored in coordinator.all(SnapshotStored)
        ]

    def assert_undisturbed(self) -> None:
        """The run ends as an undisturbed one would, with no process left."""
        self.assert_quiet()
        expected = undisturbed(self.config)
        assert self.losses == expected.losses
        assert self.weights_sha256 == expected.weights_sha256
        assert self.coordinators[-1].summary.weights_sha256 == expected.weights_sha256

    def assert_quiet(self) -> None:
        """All processes end by themselves, and none crashed or printed a traceback."""
        for process in self.processes:
            process.wait_exit()
        assert self.survivors() == []
        assert self.crash_reports() == []
        for process in self.processes:
            assert "Traceback" not in process.stderr, process.report()
            assert "Fatal Python error" not in process.stderr, process.report()

    def survivors(self) -> list[int]:
        """Living processes of this run, whoever started them."""
        return [pid for pid in _processes() if _marked(pid, self._mark)]

    def crash_reports(self) -> list[str]:
        """Crash reports that the program wrote."""
        return [path.read_text(encoding="utf-8") for path in self.directory.rglob("crash-*.txt")]

    def _coordinator(
        self, arguments: Sequence[str], prepare: Callable[[], None] | None, wrapper: Sequence[str]
    ) -> Coordinator:
        coordinator = Coordinator(
            f"coordinator-{len(self.coordinators)}",
            arguments,
            directory=self.directory,
            environment=self.environment,
            program=self.program,
            prepare=prepare,
            wrapper=wrapper,
            launch=subprocess.Popen if prepare or wrapper else self._launch,
            listener=self._listener,
        )
        self.processes.append(coordinator)
        self.coordinators.append(coordinator)
        return coordinator


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _marked(pid: int, mark: str) -> bool:
    """Whether the process is alive, no zombie, and carries the mark."""
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
