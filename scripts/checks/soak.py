"""Soak test: seeded random schedules of faults over real runs, compared bit for bit with undisturbed runs.

    make soak                                  until 200 processes were killed
    make soak SOAK_ARGS="--seed 17 --runs 1"   repeat one schedule; a failure prints this command

Writes scripts/results/soak.json if no run failed.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from node.config.schema import RunConfig
from node.faults import Fault, Kind, Phase
from node.telemetry.events import NodeLeft, PlacementMade, RunStarted, StepAborted, StepDone
from scripts.report import RESULTS
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small
from tests.support.run_harness import Coordinator

RECORD = RESULTS / "soak.json"
SILENT_SECONDS = 3.0
"""`coordinator.silent_seconds` of the runs: how long a frozen node delays its run."""
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
FRAMES = (Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.TRUNCATE, Kind.STALL)


@dataclass(frozen=True)
class Schedule:
    """A run and its faults: a function of the seed."""

    seed: int
    config: RunConfig
    faults: tuple[Fault, ...]
    spares: int

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
        schedule = cls(seed, config, tuple(dict.fromkeys(faults)), chance.randrange(3))
        return schedule._with_rows(random.Random(f"rows {seed}"))

    def _with_rows(self, chance: random.Random) -> "Schedule":
        """Half of the schedules with up to two rows, whose nodes die and come back in sync too."""
        if chance.random() < 0.5:
            return self
        pipeline, steps = self.config.pipeline, self.config.run.steps
        groups, codec = chance.choice((2, 4)), chance.choice(("fp32", "bf16", "fixed-8", "trellis-4.41"))
        pipeline = replace(pipeline, groups=groups, sync_codec=codec, replicas=2)
        kills = [
            Fault(
                kind=Kind.KILL,
                phase=chance.choice((Phase.SYNC, Phase.STATE_FETCH)),
                stage=chance.randrange(pipeline.stages),
                step=chance.randrange(steps),
                skip=chance.randrange(2),
            )
            for _ in range(4)
        ]
        return replace(
            self,
            config=replace(self.config, pipeline=pipeline),
            faults=tuple(dict.fromkeys((*self.faults, *kills))),
            spares=self.spares + pipeline.stages,
        )


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
    detect_death: list[float] = field(default_factory=list)
    detect_silence: list[float] = field(default_factory=list)
    recover_node: list[float] = field(default_factory=list)
    recover_coordinator: list[float] = field(default_factory=list)

    def add(self, run: FaultRun) -> None:
        self.runs += 1
        self.steps += run.config.run.steps
        self.kills += len(run.killed)
        self.kills_of_coordinators += sum(isinstance(process, Coordinator) for process in run.killed)
        for fault in run.plan.faults:
            for at in run.times(fault):
                self.faults[f"{fault.kind} in {fault.phase}"] += 1
                self._time(run, fault, at)

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
    parser.add_argument("--runs", type=int, help="how many schedules (default: until --kills)")
    parser.add_argument("--kills", type=int, default=200, help="stop after as many processes were killed")
    args = parser.parse_args(argv)
    # The undisturbed run is computed in this process; leave the other cores to the nodes.
    torch.set_num_threads(1)
    totals = Totals()
    began = time.monotonic()
    with Prefork() as prefork:
        for seed in _seeds(args, totals):
            schedule = Schedule.of(seed)
            if not _run(schedule, prefork, totals):
                print(f'failed; run it again: make soak SOAK_ARGS="--seed {seed} --runs 1"')
                return 1
            pipeline = schedule.config.pipeline
            print(
                f"seed {seed}: {pipeline.stages} stages, {pipeline.groups} groups, "
                f"{schedule.config.run.steps} steps, {schedule.spares} spares; {totals.kills} killed so far",
                flush=True,
            )
    if args.runs is None:
        RECORD.write_text(json.dumps(_report(args.seed, totals, began), indent=2) + "\n", encoding="utf-8")
        print(f"{totals.kills} processes killed in {totals.runs} runs; every loss and weight as undisturbed")
    return 0


def _seeds(args: argparse.Namespace, totals: Totals) -> Iterator[int]:
    seed = args.seed
    while totals.runs < args.runs if args.runs is not None else totals.kills < args.kills:
        yield seed
        seed += 1


def _run(schedule: Schedule, prefork: Prefork, totals: Totals) -> bool:
    """Whether the run ended like an undisturbed one; if not, print the output of all its processes."""
    with tempfile.TemporaryDirectory(prefix="thinwire-soak-") as directory:
        try:
            with FaultRun(Path(directory), schedule.config, schedule.faults, launch=prefork.popen) as run:
                run.start()
                run.add_nodes(schedule.config.pipeline.stages)
                for _ in range(schedule.spares):
                    run.add_spare()
                code = run.tend()
                assert code == 0, f"the coordinator ended with exit code {code}"
                run.assert_undisturbed()
                totals.add(run)
        except AssertionError as error:
            print(f"seed {schedule.seed}: {error}", *getattr(error, "__notes__", ()), sep="\n")
            for fault in schedule.faults:
                print(json.dumps(asdict(fault)))
            return False
    return True


def _report(first_seed: int, totals: Totals, began: float) -> dict[str, object]:
    def spread(seconds: list[float]) -> dict[str, float | int]:
        if not seconds:
            return {"measured": 0}
        return {
            "measured": len(seconds),
            "median": round(statistics.median(seconds), 2),
            "max": round(max(seconds), 2),
        }

    return {
        "kills": totals.kills,
        "kills_of_coordinators": totals.kills_of_coordinators,
        "runs": totals.runs,
        "seeds": [first_seed, first_seed + totals.runs - 1],
        "steps": totals.steps,
        "faults": dict(sorted(totals.faults.items())),
        "seconds": round(time.monotonic() - began),
        "cores": os.cpu_count(),
        "silent_seconds": SILENT_SECONDS,
        "seconds_to_detect_a_death": spread(totals.detect_death),
        "seconds_to_detect_silence": spread(totals.detect_silence),
        "seconds_to_recover_from_a_node": spread(totals.recover_node),
        "seconds_to_recover_from_a_coordinator": spread(totals.recover_coordinator),
    }


if __name__ == "__main__":
    sys.exit(main())
