"""Measure a profile: build the network, calibrate it, run the runs and their phases, write results.

Runs inside the private namespaces of `node.lab.namespaces`.
"""

import asyncio
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from node.config.schema import RunConfig
from node.coordinator.store import DATABASE_FILE
from node.data.documents import read_text
from node.data.text import SEPARATOR
from node.lab import namespaces
from node.lab.calibration import Calibration, calibrate
from node.lab.figures import (
    PhaseSteps,
    cell_figures,
    cell_floor,
    compute_times,
    floor_figures,
    plan_figures,
    plans_of,
    transfer_seconds,
)
from node.lab.network import QDISC, Network, describe_shapers
from node.lab.phase import Phases
from node.lab.plan import Cell, PlannedRun, all_shapes, plan_runs
from node.lab.processes import RunProcesses
from node.lab.profile import Profile
from node.lab.results import RESULTS_FILE, Results, describe_machine
from node.lab.support import congestion_control, delay_method
from node.lab.topology import lay_out
from node.schedule.placement import head_share, slices_of
from node.schedule.routing import link_ends
from node.telemetry.history import history_files
from node.telemetry.trace_files import TRACE_DIRECTORY, segments

Tell = Callable[[str], None]
Result = TypeVar("Result")

SECRETS = ("token_bindings", "tokens")
"""Database tables whose rows are not copied."""


async def until_stdin_ends(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, and end this program when stdin ends: then the process that started the lab wants it to
    stop, or has ended."""
    async with asyncio.TaskGroup() as group:
        lifeline = group.create_task(_end_with_stdin())
        result = await work
        lifeline.cancel()
    return result


async def _end_with_stdin() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin.fileno())
            ended.set()

    loop.add_reader(sys.stdin.fileno(), readable)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    os.kill(os.getpid(), signal.SIGINT)


def _with_text(config: RunConfig, size: int, directory: Path) -> RunConfig:
    """The config with a text of `size` bytes in the run's new directory. 0 changes nothing."""
    directory.mkdir(parents=True)
    if size == 0:
        return config
    text = directory / "text.txt"
    # It is one text even if the data has several. A character that the cut splits is dropped.
    start = read_text(config.data)[:size].replace(SEPARATOR, b"\n")
    text.write_text(start.decode(errors="ignore"), encoding="utf-8", newline="")
    return replace(config, data=replace(config.data, path=str(text)))


def keep_run(run: Path, place: Path) -> bool:
    """Copy history, trace and database of the run directory `run` to `place`, without secrets.

    The copy is enough for `thinwire trace` and `thinwire compare`. It has no snapshots, no CA and no
    operator's key. The coordinator must have ended. Replaces `place`. Returns False if there is no run.
    """
    if not (run / DATABASE_FILE).exists():
        return False
    if place.exists():
        shutil.rmtree(place)
    (place / TRACE_DIRECTORY).mkdir(parents=True)
    # A plain copy would lack what is still in the write-ahead log.
    with closing(sqlite3.connect(run / DATABASE_FILE)) as database:
        database.execute("VACUUM INTO ?", (str(place / DATABASE_FILE),))
    with closing(sqlite3.connect(place / DATABASE_FILE)) as copy:
        for table in SECRETS:
            copy.execute(f"DELETE FROM {table}")
        copy.commit()
        copy.execute("VACUUM")
    for file in history_files(run):
        shutil.copyfile(file, place / file.name)
    for segment in segments(run / TRACE_DIRECTORY):
        shutil.copyfile(segment, place / TRACE_DIRECTORY / segment.name)
    return True


class Laboratory:
    """Measures every cell of a profile that `out` does not hold yet, and writes results after each.

    Runs inside private namespaces.

    Args:
        time_limit: Seconds; a cell that would not end in time is skipped. 0 means no limit.
        only: The cells to measure, as for `node.lab.plan.plan_runs`.
    """

    def __init__(
        self, profile: Profile, out: Path, *, time_limit: float, tell: Tell, only: Sequence[str] = ()
    ) -> None:
        self._profile = profile
        self._only = only
        self._out = out
        self._tell = tell
        self._began = time.monotonic()
        self._limit = time_limit
        self._ends = link_ends(profile.config)
        self._calibrations: dict[str, Calibration] = {}
        self._start_seconds = 0.0
        """Seconds from the last run's start to its first cell; 0 before the first run."""

    async def run(self) -> bool:
        """Whether all cells asked for are measured.

        Raises RunError for a link that is off and for a run that fails. Earlier results are kept.
        """
        path = self._out / RESULTS_FILE
        profile = self._profile
        method = (
            delay_method(profile.network.delay) if any(r.needs_delay for r in plan_runs(profile)) else "none"
        )
        machine = describe_machine()
        if path.exists():
            results = Results.go_on(path, profile, machine, self._only)
        else:
            results = self._new_results(path, machine, method)
        runs = plan_runs(profile, results.done, self._only)
        if not runs:
            self._tell("every cell asked for has been measured")
            return True
        # Without delays there is only the wire between two nodes.
        for delayed, group in groupby(runs, key=lambda run: run.needs_delay):
            await self._measure(tuple(group), method if delayed else "none", results)
        results.values["finished"] = not plan_runs(profile, results.done)
        results.write()
        if left := plan_runs(profile, results.done, self._only):
            cells = sum(len(run.cells) for run in left)
            self._tell(
                f"no other cell would end within {self._limit:g} s: {cells} cells left; the same command "
                "goes on"
            )
        return not left

    async def _measure(self, runs: tuple[PlannedRun, ...], method: str, results: Results) -> None:
        profile = self._profile
        topology = lay_out(
            profile.config.pipeline.stages,
            self._ends,
            topology=profile.network.topology,
            relay=method == "relay",
            congestion_control=profile.network.congestion_control,
        )
        buffer = int(profile.network.socket_buffer_mb * 1e6)
        network = Network(
            topology,
            method=method,
            socket_buffer=buffer,
            slow_start_after_idle=profile.network.slow_start_after_idle,
        )
        await asyncio.to_thread(network.__enter__)
        try:
            await self._calibrate(network, runs, results)
            for run in runs:
                if self.over(self._start_seconds):
                    return
                await _Run(self, network, run, results, len(results.values["runs"])).measure()
        finally:
            await asyncio.to_thread(network.__exit__)

    def _new_results(self, path: Path, machine: Mapping[str, Any], method: str) -> Results:
        section = self._profile.network
        network: dict[str, Any] = {
            **asdict(section),
            "qdisc": QDISC,
            "delay_method": method,
            "congestion_control": congestion_control(section.congestion_control),
            "control": "the coordinator's wires are not shaped",
        }
        return Results.new(path, self._profile, machine, network, self._only)

    async def _calibrate(self, network: Network, runs: tuple[PlannedRun, ...], results: Results) -> None:
        """Calibrate all shapes before the first run, while the wires are idle."""
        self._calibrations.clear()
        for shape in all_shapes(runs):
            if self.over():
                return
            await asyncio.to_thread(network.shape, shape)
            calibration = await asyncio.to_thread(calibrate, network, shape, self._ends)
            self._calibrations[shape.label] = calibration
            relayed = await asyncio.to_thread(network.relayed)
            results.values["calibrations"].append(
                {
                    **calibration.as_json(),
                    "shaper": describe_shapers(shape),
                    "delay_method": network.method,
                    "relay": relayed,
                }
            )
            off = max(calibration.links, key=lambda link: abs(link.share - 1))
            self._tell(
                f"calibrated {shape.label} Mbit/s: at most {100 * abs(off.share - 1):.2f} % off, round trip "
                f"{max(link.rtt_ms for link in calibration.links):.2f} ms"
            )
        results.write()

    def over(self, seconds: float = 0.0) -> bool:
        """Whether work that takes `seconds` would end after the time limit."""
        return self._limit > 0 and time.monotonic() - self._began + seconds > self._limit

    def started(self, seconds: float) -> None:
        """Note that a run reached its first cell after `seconds`."""
        self._start_seconds = seconds


class _Run:
    def __init__(
        self, lab: Laboratory, network: Network, run: PlannedRun, results: Results, number: int
    ) -> None:
        self._lab = lab
        self._network = network
        self._run = run
        self._results = results
        self._number = number
        self.name = f"{number:02}-{run.name}"
        config = run.config
        self._tokens = config.training.global_batch * config.model.sequence

    async def measure(self) -> None:
        """Run from the start to the last cell. The run's history and trace are kept however it ends."""
        section = self._lab._profile.lab
        logs, scratch = self._lab._out / "logs" / self.name, namespaces.SCRATCH / str(self._number)
        logs.mkdir(parents=True, exist_ok=True)
        config = await asyncio.to_thread(_with_text, self._run.config, section.text_bytes, scratch)
        processes = RunProcesses(
            config,
            directory=scratch,
            logs=logs,
            device=section.device,
            gpus=section.gpus,
            threads=section.threads,
        )
        try:
            await self._measure(processes)
        finally:
            self._keep(processes.run_directory)

    def _keep(self, run_directory: Path) -> None:
        """Archive the run; the figures do not need it."""
        try:
            keep_run(run_directory, self._lab._out / "runs" / self.name)
        except (OSError, sqlite3.Error) as error:
            self._lab._tell(f"{self.name}: its history and trace could not be kept ({error})")

    async def _measure(self, processes: RunProcesses) -> None:
        lab, run, section = self._lab, self._run, self._lab._profile.lab
        raw = lab._out / "raw" / f"{self.name}.jsonl"
        raw.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        await asyncio.to_thread(self._network.shape, None)
        lab._tell(f"{self.name}: starting")
        with raw.open("w", encoding="utf-8") as log:
            async with processes:
                record: dict[str, Any] = {"name": self.name, "start_seconds": time.monotonic() - began}
                self._results.values["runs"].append(record)
                lab._tell(f"{self.name}: joined and placed in {record['start_seconds']:.1f} s")
                phases = Phases(
                    self._network,
                    processes,
                    warmup_steps=section.warmup_steps,
                    warmup_round_trips=section.warmup_round_trips,
                    spare_steps=run.spare_steps,
                    step_seconds=section.step_seconds,
                    log=log,
                )
                phase = None
                if section.unthrottled_steps:
                    phase, _ = await phases.measure(None, section.unthrottled_steps)
                    record["unthrottled"] = {
                        "step_seconds": phase.step_seconds,
                        "tokens_per_second": self._tokens / phase.step_seconds,
                        "compute": asdict(compute_times([phase], run.config.microbatches)),
                    }
                lab.started(time.monotonic() - began)
                for cell in run.cells:
                    if not lab.over(self._expected_seconds(cell, phase)):
                        await self._cell(phases, cell, phase, record, processes)

    def _expected_seconds(self, cell: Cell, unthrottled: PhaseSteps | None) -> float:
        """About how long the cell takes, in seconds; 0 if nothing has been measured yet."""
        if unthrottled is None:
            return 0.0
        step = max(
            unthrottled.step_seconds,
            transfer_seconds(unthrottled, cell.shape, self._network.topology.wires),
        )
        section = self._lab._profile.lab
        settling = section.warmup_round_trips * cell.shape.rtt_ms / 1e3
        return max(settling, step * section.warmup_steps) + step * cell.steps

    async def _cell(
        self,
        phases: Phases,
        cell: Cell,
        unthrottled: PhaseSteps | None,
        record: dict[str, Any],
        processes: RunProcesses,
    ) -> None:
        lab = self._lab
        phase, steps = await phases.measure(cell.shape, cell.steps)
        relayed = await asyncio.to_thread(self._network.relayed)
        wires = self._network.topology.wires
        measured = steps[-len(phase.costs) :]
        values: dict[str, Any] = {
            "key": asdict(cell.key),
            "run": record["name"],
            "mbit": cell.shape.busiest_mbit,
            "rtt_ms": cell.shape.rtt_ms,
            **cell_figures(
                phase,
                cell.shape,
                wires,
                tokens_per_step=self._tokens,
                losses=[step.done.loss for step in measured],
            ),
            "curve": [[step.done.step, step.done.seconds, step.done.loss] for step in steps],
            "delay_method": self._network.method,
            "relay": relayed,
        }
        if plans := plans_of(processes.plans, steps[0].done.step, measured[-1].done.step):
            values["plans"] = [plan_figures(plan) for plan in plans]
        share = ""
        if unthrottled is not None:
            config = self._run.config
            compute = compute_times([unthrottled, phase], config.microbatches)
            floor = cell_floor(
                phase,
                compute,
                cell.shape,
                wires,
                lab._calibrations[cell.shape.label],
                microbatches=config.microbatches,
                chunks=config.pipeline.chunks,
                head_share=head_share(config, config.pipeline.stages),
                slices=slices_of(config),
            )
            values["floor"] = floor_figures(floor, phase, compute)
            values["of_unthrottled"] = record["unthrottled"]["step_seconds"] / phase.step_seconds
            share = f", {floor.share(phase.step_seconds):.2f} of the floor ({floor.binds})"
        if missed := relayed.get("missed", 0):
            share += f"; the relay was too slow for {missed} packets, which no link lost"
        self._results.values["cells"].append(values)
        self._results.write()
        use = max(wire["use"] for wire in values["wires"])
        lab._tell(
            f"{record['name']} at {cell.shape.label}: {values['tokens_per_second']['median']:.0f} tokens/s, "
            f"{phase.step_seconds:.2f} s a step, busiest link {100 * use:.0f} % full{share}"
        )
