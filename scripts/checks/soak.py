"""Soak test: seeded random schedules of faults over real runs, compared bit for bit with undisturbed runs.

    make soak                                  until 200 processes were killed, then 200 schedules of rows
    make soak SOAK_ARGS=--rows                 those of rows alone
    make soak SOAK_ARGS="--seed 17 --runs 1"   repeat one schedule; a failure prints this command

Writes scripts/results/soak.json and soak_rows.json, each if no run of its kind failed.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import count, pairwise
from multiprocessing import util
from pathlib import Path

import torch

from node.config.schema import RunConfig, SyncSection
from node.lab.results import commit, hardware
from node.telemetry.events import Event, NodeLeft, PlacementMade, RunStarted, StepAborted, StepDone
from scripts.report import RESULTS
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small
from tests.support.faults import ANY, Fault, Kind, Phase
from tests.support.run_harness import Coordinator

RECORD, RECORD_OF_ROWS = RESULTS / "soak.json", RESULTS / "soak_rows.json"
SCHEDULES_OF_ROWS = 200
SILENT_SECONDS = 3.0
"""`coordinator.silent_seconds` of runs of one row: how long a frozen node delays its run."""
NODE_PHASES = (
    Phase.STATE_FETCH,
    Phase.FORWARD,
    Phase.SENDING,
    Phase.BACKWARD,
    Phase.VOTING,
    Phase.COMMIT_APPLY,
    Phase.APPLY,
    Phase.SNAPSHOT,
)
COORDINATOR_PHASES = (
    Phase.STATE_FETCH,
    Phase.FORWARD,
    Phase.VOTING,
    Phase.COMMIT_APPLY,
    Phase.APPLY,
    Phase.SNAPSHOT,
)
ROW_PHASES = (
    *(Phase.SYNC, Phase.STATE_FETCH) * 3,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.VOTING,
    Phase.COMMIT_APPLY,
    Phase.APPLY,
    Phase.SNAPSHOT,
)
"""Those of rows' nodes, the likelier ones more than once."""
FRAMES = (Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.TRUNCATE, Kind.STALL)


@dataclass(frozen=True)
class Schedule:
    """A run and its faults: a function of the seed."""

    seed: int
    config: RunConfig
    faults: tuple[Fault, ...]
    spares: int = 0
    joins: tuple[int, ...] = ()
    """Steps after which one more node joins, in order."""

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        chance = random.Random(seed)
        stages = chance.choice((2, 3, 3, 4))
        steps = chance.randrange(20, 50)
        lossless = chance.random() < 0.5
        # Fewer stages have fewer boundaries, so with a lossy codec the losses would differ.
        fewer = lossless and stages > 2 and chance.random() < 0.4
        config = small(
            steps=steps,
            snapshot_every=chance.randrange(2, 8),
            min_stages=2 if fewer else 0,
            codecs=("fp32", "fp32") if lossless else ("tah", "fixed-8"),
            silent_seconds=SILENT_SECONDS,
        )
        config = replace(
            config,
            run=replace(config.run, seed=seed, keep_snapshots=chance.choice((1, 3))),
            model=replace(config.model, layers=max(3, stages), tied=chance.random() < 0.3),
            pipeline=replace(config.pipeline, stages=stages, window=chance.randrange(3)),
        )
        faults = tuple(_fault(chance, stages, steps) for _ in range(chance.randrange(8, 16)))
        return cls(seed, config, tuple(dict.fromkeys(faults)), chance.randrange(3))

    @classmethod
    def of_rows(cls, seed: int, *, steps: int = 0) -> "Schedule":
        """Two to four rows of four gradient groups, exact or in rounds. A row is there from the begin; nodes
        of others join as steps go on, and any may die, most often in sync, a local step or as it fetches.

        `steps`: of the run; 0 draws.
        """
        chance = random.Random(f"rows {seed}")
        rows, stages = chance.choice((2, 3, 4)), chance.choice((1, 2, 2, 3))
        steps = steps or chance.randrange(12, 28)
        lossless, in_rounds = chance.random() < 0.7, chance.random() < 0.5
        config = small(
            steps=steps,
            snapshot_every=chance.randrange(3, 9),
            codecs=("fp32", "fp32") if lossless else ("tah", "fixed-8"),
        )
        config = replace(
            config,
            run=replace(config.run, seed=seed),
            training=replace(config.training, global_batch=16),
            pipeline=replace(
                config.pipeline,
                stages=stages,
                groups=4,
                replicas=rows,
                sync_codec=chance.choice(("fp32", "bf16", "fixed-8", "trellis-4.41")),
            ),
        )
        warmup = chance.randrange(steps // 2)
        if in_rounds:
            codec = chance.choice(("fp32", "fixed-4", "fixed-4"))
            config = replace(
                config,
                sync=SyncSection(every=2, warmup=warmup, codec=codec, outer_lr=0.6, outer_momentum=0.9),
            )
        phases = ROW_PHASES + (Phase.LOCAL_STEP,) * (3 if in_rounds else 0)
        faults = [_kill(chance, phases, stages, steps) for _ in range(chance.randrange(3, 7))]
        joins = sorted(chance.randrange(1 + steps // 2) for _ in range((rows - 1) * stages))
        return cls(seed, config, tuple(dict.fromkeys(faults)), joins=tuple(joins))


def _kill(chance: random.Random, phases: Sequence[Phase], stages: int, steps: int) -> Fault:
    """A death of any process of a run of rows; one in six is the coordinator's."""
    if chance.random() < 1 / 6:
        kind, phase, stage = Kind.COORDINATOR_KILL, chance.choice(COORDINATOR_PHASES), ANY
    else:
        kind, phase, stage = Kind.KILL, chance.choice(phases), chance.randrange(stages)
    # State is fetched, and saved, after some steps only.
    any_step = phase in (Phase.STATE_FETCH, Phase.SNAPSHOT)
    step = ANY if any_step else chance.randrange(steps)
    return Fault(kind=kind, phase=phase, stage=stage, step=step, skip=chance.randrange(6 if any_step else 2))


def _fault(chance: random.Random, stages: int, steps: int) -> Fault:
    kind = chance.choice(
        [Kind.KILL] * 10
        + [Kind.COORDINATOR_KILL] * 4
        + [Kind.TORN_WRITE, Kind.STOP, Kind.CUT, Kind.CUT, Kind.CUT_CONTROL, Kind.CUT_CONTROL]
        + [chance.choice(FRAMES)] * 2
    )
    phase = chance.choice(NODE_PHASES)
    if kind is Kind.COORDINATOR_KILL:
        phase = chance.choice(COORDINATOR_PHASES)
    elif kind is Kind.TORN_WRITE:
        phase = Phase.SNAPSHOT
    elif kind in FRAMES:
        phase = Phase.SENDING
    # Snapshots are taken after some steps only, so take the first one from here.
    any_step = phase in (Phase.SNAPSHOT, Phase.STATE_FETCH)
    return Fault(
        kind=kind,
        phase=phase,
        stage=-1 if kind in (Kind.COORDINATOR_KILL, Kind.TORN_WRITE) else chance.randrange(stages),
        step=-1 if any_step else chance.randrange(steps),
        skip=chance.randrange(8 if any_step else 3),
        seconds=0.5 if kind is Kind.STALL else 0.0,
    )


@dataclass
class Totals:
    """Totals of all runs. Seconds are measured while faults overlap."""

    runs: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    kills_of_coordinators: int = 0
    rows_lost: int = 0
    """Placements with fewer rows than the one before."""
    rows_entered: int = 0
    detect_death: list[float] = field(default_factory=list)
    detect_silence: list[float] = field(default_factory=list)
    recover_node: list[float] = field(default_factory=list)
    recover_coordinator: list[float] = field(default_factory=list)

    def add(self, run: FaultRun) -> None:
        self.runs += 1
        self.steps += run.config.run.steps
        self.kills += len(run.killed)
        self.kills_of_coordinators += sum(isinstance(process, Coordinator) for process in run.killed)
        grids = [len(placed.groups) or 1 for placed in run.all(PlacementMade)]
        self.rows_lost += sum(after < before for before, after in pairwise(grids))
        self.rows_entered += sum(after > before for before, after in pairwise(grids))
        for fault in run.plan.faults:
            for at in run.times(fault):
                self.faults[f"{fault.kind} in {fault.phase}"] += 1
                self._time(run, fault, at)

    def add_up(self, others: "Totals") -> None:
        """Add what another process has counted."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(others, each.name))

    def _time(self, run: FaultRun, fault: Fault, at: float) -> None:
        recovered = _recovered(run, at)
        if fault.kind in (Kind.COORDINATOR_KILL, Kind.TORN_WRITE):
            self.recover_coordinator += recovered
        elif fault.kind in (Kind.KILL, Kind.STOP):
            noticed = [
                when - at
                for when, event in run.heard_at
                if when >= at and isinstance(event, StepAborted | NodeLeft | RunStarted)
            ][:1]
            (self.detect_death if fault.kind is Kind.KILL else self.detect_silence).extend(noticed)
            self.recover_node += recovered


def _recovered(run: FaultRun, at: float) -> list[float]:
    """Seconds until a step was done in an epoch begun after the fault; empty if there was no new epoch."""
    placed = False
    for when, event in run.heard_at:
        if when < at:
            continue
        placed = placed or isinstance(event, PlacementMade)
        if placed and isinstance(event, StepDone):
            return [when - at]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill everything, many times, and compare the results.")
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule; the next has the next")
    parser.add_argument("--rows", action="store_true", help="only schedules of several rows")
    parser.add_argument("--runs", type=int, help="how many schedules; records nothing")
    parser.add_argument("--kills", type=int, default=200, help="stop after as many processes were killed")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no schedule after as many")
    parser.add_argument(
        "--jobs", type=int, default=1, help="schedules at a time; each has up to 13 processes"
    )
    parser.add_argument("--out", type=Path, help="where the record goes, instead of scripts/results")
    args = parser.parse_args(argv)
    kinds = (True,) if args.rows else (False,) if args.runs is not None else (False, True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context, initializer=_begin_worker) as workers:
        return max(_soak(args, workers, of_rows=of_rows) for of_rows in kinds)


_worker_prefork: Prefork | None = None


def _begin_worker() -> None:
    """What a process that does schedules has: a prefork that ends with it."""
    global _worker_prefork
    # The undisturbed run is computed in this process; leave the other cores to the nodes.
    torch.set_num_threads(1)
    _worker_prefork = Prefork().__enter__()
    # Handlers of `atexit` do not run in these processes.
    util.Finalize(None, _worker_prefork.__exit__, (None, None, None), exitpriority=1)


def _done_schedule(seed: int, of_rows: bool) -> "Totals":
    """Run a schedule, in a worker. Raises AssertionError as `run_schedule` does."""
    assert _worker_prefork is not None, "not in a worker"
    totals = Totals()
    run_schedule(_schedule(seed, of_rows=of_rows), _worker_prefork, totals)
    return totals


def _schedule(seed: int, *, of_rows: bool) -> Schedule:
    return Schedule.of_rows(seed) if of_rows else Schedule.of(seed)


def _soak(args: argparse.Namespace, workers: Executor, *, of_rows: bool) -> int:
    """Run schedules of one kind, `--jobs` at a time; 1 if one failed."""
    totals, began = Totals(), time.monotonic()
    seeds, running = count(args.seed), dict[Future[Totals], int]()
    while True:
        while len(running) < args.jobs and not _enough(args, totals, len(running), began, of_rows=of_rows):
            seed = next(seeds)
            running[workers.submit(_done_schedule, seed, of_rows)] = seed
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            seed = running.pop(future)
            schedule = _schedule(seed, of_rows=of_rows)
            try:
                totals.add_up(future.result())
            except AssertionError as error:
                print(f"seed {seed}: {error}", *getattr(error, "__notes__", ()), sep="\n")
                print(*(json.dumps(asdict(fault)) for fault in schedule.faults), sep="\n")
                again = f"--seed {seed} --runs 1" + " --rows" * of_rows
                print(f'failed; run it again: make soak SOAK_ARGS="{again}"')
                return 1
            pipeline = schedule.config.pipeline
            print(
                f"seed {seed}: {pipeline.stages} stages, {pipeline.most_rows} rows, "
                f"{schedule.config.run.steps} steps of {schedule.config.sync.every}, "
                f"{schedule.spares + len(schedule.joins)} more nodes; {totals.kills} killed so far",
                flush=True,
            )
    if args.runs is None:
        record = RECORD_OF_ROWS if of_rows else RECORD
        report = _report(args, totals, began, of_rows=of_rows)
        (args.out or record).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"{totals.kills} processes killed in {totals.runs} runs; every loss and weight as undisturbed")
    return 0


def _enough(args: argparse.Namespace, totals: Totals, running: int, began: float, *, of_rows: bool) -> bool:
    """No further schedule begins."""
    if time.monotonic() - began >= 60 * args.minutes:
        return True
    if args.runs is not None:
        return totals.runs + running >= args.runs
    return totals.runs + running >= SCHEDULES_OF_ROWS if of_rows else totals.kills >= args.kills


def run_schedule(schedule: Schedule, prefork: Prefork, totals: Totals) -> None:
    """Raises AssertionError, with all processes' output, unless the run ends like an undisturbed one."""
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-soak-") as directory,
        FaultRun(Path(directory), schedule.config, schedule.faults, launch=prefork.popen) as run,
    ):
        run.start()
        run.add_nodes(schedule.config.pipeline.stages)
        for _ in range(schedule.spares):
            run.add_spare()
        code = _tend(run, schedule)
        assert code == 0, f"the coordinator ended with exit code {code}"
        run.assert_undisturbed()
        totals.add(run)


def _tend(run: FaultRun, schedule: Schedule) -> int | None:
    """Keep the run going, with the nodes that join; the coordinator's exit code."""
    token = run.new_token()
    for step in schedule.joins:
        if step > 0 and (code := run.tend(until=partial(_has_done, step))) is not None:
            return code
        run.add_node(token)
    return run.tend()


def _has_done(step: int, event: Event) -> bool:
    return isinstance(event, StepDone) and event.step >= step


def _report(args: argparse.Namespace, totals: Totals, began: float, *, of_rows: bool) -> dict[str, object]:
    def spread(seconds: list[float]) -> dict[str, float | int]:
        if not seconds:
            return {"measured": 0}
        return {
            "measured": len(seconds),
            "median": round(statistics.median(seconds), 2),
            "max": round(max(seconds), 2),
        }

    return {
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "kills": totals.kills,
        "kills_of_coordinators": totals.kills_of_coordinators,
        "rows_lost": totals.rows_lost,
        "rows_entered": totals.rows_entered,
        "runs": totals.runs,
        "seeds": [args.seed, args.seed + totals.runs - 1],
        "schedules_at_a_time": args.jobs,
        "steps": totals.steps,
        "faults": dict(sorted(totals.faults.items())),
        "seconds": round(time.monotonic() - began),
        "cores": os.cpu_count(),
        "silent_seconds": small().coordinator.silent_seconds if of_rows else SILENT_SECONDS,
        "seconds_to_detect_a_death": spread(totals.detect_death),
        "seconds_to_detect_silence": spread(totals.detect_silence),
        "seconds_to_recover_from_a_node": spread(totals.recover_node),
        "seconds_to_recover_from_a_coordinator": spread(totals.recover_coordinator),
    }


if __name__ == "__main__":
    sys.exit(main())
