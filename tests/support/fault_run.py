"""Runs with faults on purpose: faults are data, and dead processes are started again as a volunteer would.

with FaultRun(tmp_path, CONFIG, [kill], launch=prefork.popen) as run:
    run.start()
    run.add_nodes(3)
    assert run.tend() == 0
    run.assert_undisturbed()
    assert run.times(kill)
"""

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from node.config.schema import RunConfig
from node.coordinator.store import StepRecord, Store
from node.schedule.placement import chunk_units
from node.telemetry.events import Event, NodeJoined, NodeLeft, Notice, RunFinished, SnapshotStored, from_json
from tests.support.faults import VARIABLE, Fault, Kind, Phase, Plan, fired_at
from tests.support.memory_pipeline import TEXT, reference_run
from tests.support.ports import free_port
from tests.support.run_harness import (
    SMALL,
    TINY,
    Coordinator,
    Expected,
    Launch,
    Process,
    Run,
    StuckError,
    undisturbed,
)
from wire.identity.credentials import NodeIdentity

NEWS_SECONDS = 60.0
"""Limit of a wait for news from a run; after half of it frozen nodes are woken."""
KILLED = -signal.SIGKILL

E = TypeVar("E", bound=Event)


def small(
    *,
    steps: int = 6,
    snapshot_every: int = 2,
    min_stages: int = 0,
    codecs: tuple[str, str] = ("fp32", "fp32"),
    heartbeat_seconds: float = 0.25,
    silent_seconds: float = 20.0,
) -> RunConfig:
    """Three stages of a few milliseconds a step, with short timeouts, except for silence.

    A busy machine may stop a process for seconds, longer if it compiles: only tests of silence lower that.
    """
    return replace(
        SMALL,
        run=replace(SMALL.run, steps=steps, snapshot_every=snapshot_every),
        model=TINY,
        pipeline=replace(
            SMALL.pipeline,
            stages=3,
            min_stages=min_stages,
            window=1,
            forward_codec=codecs[0],
            backward_codec=codecs[1],
        ),
        coordinator=replace(
            SMALL.coordinator,
            # The coordinator takes this port and the two next ones, again after a restart.
            listen=f"127.0.0.1:{free_port(neighbours=2)}",
            heartbeat_seconds=heartbeat_seconds,
            silent_seconds=silent_seconds,
            regroup_seconds=1.0,
            outage_seconds=30.0,
        ),
    )


class FaultRun(Run):
    """A run whose processes all get the fault plan."""

    def __init__(
        self,
        directory: Path,
        config: RunConfig,
        faults: Sequence[Fault],
        *,
        gather: int = 0,
        snapshot_first: bool = False,
        text: bytes = TEXT,
        launch: Launch = subprocess.Popen,
    ) -> None:
        """
        Args:
            gather: hold the first step until so many nodes have joined, if the run is tended. Otherwise a
                node that starts slowly may come after the fault, or after the end.
            snapshot_first: hold the step after the first snapshot until that is stored, if the run is
                tended. Otherwise a snapshot may take longer than the steps that follow.
        """
        begin, hold = (
            Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=step)
            for step in (0, config.run.snapshot_every)
        )
        self._news: queue.SimpleQueue[tuple[float, Process, str | None]] = queue.SimpleQueue()
        self.heard_at: list[tuple[float, Event]] = []
        """Every event of every coordinator, with the Unix time of its reading."""
        super().__init__(directory, config, text=text, launch=launch, listener=self._listen)
        self._marker_directory = directory / "faults"
        self._marker_directory.mkdir()
        port = int(config.coordinator.listen.rpartition(":")[2])
        self.plan = Plan(
            directory=str(self._marker_directory),
            faults=(*faults, *[begin] * bool(gather), *[hold] * snapshot_first),
            control_port=port,
        )
        self._gather, self._joined = gather, set[str]()
        self._begin_gate, self._gate = contextlib.ExitStack(), contextlib.ExitStack()
        for wanted, gate, fault in ((gather, self._begin_gate, begin), (snapshot_first, self._gate, hold)):
            if wanted:
                gate.enter_context(held(self, fault))
        self.state_dirs: dict[Process, Path] = {}
        self._over = False
        self.killed: list[Process] = []
        """Processes that faults killed, in the order of discovery."""

    def __exit__(self, *error: Any) -> None:
        self._begin_gate.close()
        self._gate.close()
        super().__exit__(*error)

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, VARIABLE: self.plan.to_json()}

    def add_node(
        self,
        token: str | None = None,
        *,
        state_dir: Path | None = None,
        options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ) -> Process:
        directory = state_dir or self.state_dir(len(self.nodes))
        node = super().add_node(token, state_dir=directory, options=options, wrapper=wrapper)
        self.state_dirs[node] = directory
        return node

    def node_id(self, number: int) -> str | None:
        identity = NodeIdentity.load(self.state_dirs[self.nodes[number]])
        return identity.node_id if identity else None

    def add_spare(self) -> Process:
        """A node beyond those that the join line admits."""
        return self.add_node(self.new_token())

    @property
    def _lossless(self) -> bool:
        return {self.config.pipeline.forward_codec, self.config.pipeline.backward_codec} == {"fp32"}

    # ---- keeping a run going

    def tend(
        self,
        *,
        seconds: float = NEWS_SECONDS,
        until: Callable[[Event], bool] = lambda event: isinstance(event, RunFinished),
        restart: bool = True,
    ) -> int | None:
        """Run until an event, or until the coordinator ends by itself; returns its exit code.

        Killed nodes are started again with the same identity, a killed coordinator is resumed, and frozen
        nodes wake once they are given up. Each wait for news takes at most `seconds`.
        """
        self._over = False
        while True:
            at, process, line = self._next(seconds)
            if line is None:
                code = self._ended(process, restart=restart)
                if code is not None:
                    return code
            elif isinstance(process, Coordinator):
                event = from_json(line)
                self.heard_at.append((at, event))
                self._over = self._over or isinstance(event, RunFinished)
                if isinstance(event, SnapshotStored):
                    self._gate.close()
                if isinstance(event, NodeJoined):
                    self._joined.add(event.node_id)
                    if len(self._joined) >= self._gather:
                        self._begin_gate.close()
                if isinstance(event, NodeLeft) and "silent" in event.reason:
                    self.wake(event.node_id)
                if until(event) and not isinstance(event, RunFinished):
                    return None

    def _next(self, seconds: float) -> tuple[float, Process, str | None]:
        with contextlib.suppress(queue.Empty):
            return self._news.get(timeout=seconds / 2)
        # Nobody gives up a node that froze while no coordinator ran.
        for node in self.nodes:
            if node.running:
                node.go_on()
        try:
            return self._news.get(timeout=seconds / 2)
        except queue.Empty:
            raise StuckError(f"nothing happened for {seconds:g} s") from None

    def wake(self, node_id: str) -> None:
        """SIGCONT to the process of a node."""
        for number, node in enumerate(self.nodes):
            if node.running and self.node_id(number) == node_id:
                node.go_on()

    def _ended(self, process: Process, *, restart: bool) -> int | None:
        code = process.wait_exit()
        if code == KILLED:
            self.killed.append(process)
        if isinstance(process, Coordinator):
            if code != KILLED or not restart:
                self._turn_away_latecomers()
                return code
            self.resume()
        elif code == KILLED and restart and not self._over and process in self.state_dirs:
            self.add_node(state_dir=self.state_dirs[process])
        return None

    def _turn_away_latecomers(self) -> None:
        """Kill nodes that started too late to meet the coordinator: they would look for it."""
        for node in self.nodes:
            if node.running and not any("joined run" in line for line in node.lines):
                node.go_on()
                node.kill()

    def _listen(self, process: Process, line: str | None) -> None:
        self._news.put((time.time(), process, line))

    def wait_frozen(self) -> Process:
        """Wait until a fault has frozen one more node; returns its process, to `go_on`."""
        stopped = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None
        return next(process for process in self.processes if process.pid == stopped.si_pid)

    # ---- results

    def times(self, fault: Fault) -> list[float]:
        """Unix times at which the fault happened."""
        return [fired_at(marker) for marker in self.plan.markers(fault)]

    def assert_all_happened(self) -> None:
        missing = [fault.name for fault in self.plan.faults if len(self.times(fault)) != fault.count]
        assert not missing, f"never happened: {missing}"

    def all(self, kind: type[E]) -> list[E]:
        """The events of one kind, of all coordinators."""
        return [event for _, event in self.heard_at if isinstance(event, kind)]

    def after(self, at: float, kind: type[E]) -> tuple[float, E]:
        """The first event of a kind after a time, and the seconds between."""
        later = ((when - at, event) for when, event in self.heard_at if when >= at)
        return next((seconds, event) for seconds, event in later if isinstance(event, kind))

    @property
    def records(self) -> list[StepRecord]:
        """The run's record of its committed steps."""
        with Store.open(self.run_dir) as store:
            return store.steps()

    def assert_ends_undisturbed(self, *, restart: bool = True, codes: Sequence[int] = (0,)) -> None:
        """The run ends, every fault has happened, and the result has the bits of an undisturbed run."""
        assert self.tend(restart=restart) == 0
        self.assert_all_happened()
        self.assert_undisturbed(codes)

    def assert_undisturbed(self, codes: Sequence[int] = (0,)) -> None:
        """Every loss and the final weights have the bits of an undisturbed run."""
        expected = (undisturbed if self._lossless else _undisturbed_lossy)(self.config)
        assert {record.step + 1: record.loss for record in self.records} == expected.losses
        assert self.weights_sha256 == expected.weights_sha256
        assert not [
            event.text
            for _, event in self.heard_at
            if isinstance(event, Notice) and "with a different loss" in event.text
        ]
        assert self.crash_reports() == []
        for process in self.processes:
            # A node finds nobody there if it comes while no coordinator runs, or if its connection broke as
            # the run ended.
            lines = "nothing answers", "did not answer"
            forlorn = process.wait_exit() == 1 and any(line in process.stderr for line in lines)
            assert forlorn or process.exit_code in (*codes, KILLED), process.report()


@contextlib.contextmanager
def held(run: FaultRun, hold: Fault) -> Iterator[None]:
    """Whoever comes to this fault waits until the block ends."""
    with run.plan.gate(hold).open("a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


def until_joined(count: int) -> Callable[[Event], bool]:
    """True once so many nodes have joined since now, the same ones again included."""
    joined = []

    def seen(event: Event) -> bool:
        joined.extend([event] * isinstance(event, NodeJoined))
        return len(joined) == count

    return seen


@cache
def _undisturbed_lossy(config: RunConfig) -> Expected:
    """The unsplit trainer with the run's codecs where its links are."""
    steps, weights = reference_run(config, config.run.steps, chunk_units(config, config.pipeline.stages))
    return Expected({number: step.loss for number, step in enumerate(steps, start=1)}, weights)
