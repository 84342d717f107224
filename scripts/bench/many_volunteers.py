"""The run's state machine with many volunteers: what it takes of the coordinator's loop, without a network.

    python -m scripts.bench.many_volunteers [--volunteers 1000 10000] [--stages 250] [--groups 4]

Volunteers arrive one after the other; all rows that there are nodes for are placed; steps are voted for and
applied; the clock ticks; one host in twenty dies and a spare takes its stage. Times are of the machine's
methods alone, on one core: the longest is how long the coordinator's event loop stands still.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.lab.results import commit, hardware
from node.run_state.actions import Action, RecordCommit, RecordPlacement, Send
from node.run_state.machine import RunMachine
from node.run_state.run_plan import Past, RunPlan
from node.run_state.stage_assignment import Candidate
from node.schedule.routing import neighbours
from scripts.report import RESULTS, write
from wire.messages import Applied, Placed, Ready, Restore, Telemetry, Vote

OUT = RESULTS / "many_volunteers.json"
STEPS = 5
TICKS = 20


class Volunteers:
    """A run whose volunteers answer at once; every call of the machine is timed."""

    def __init__(self, stages: int, groups: int) -> None:
        units = ["embed", *(f"block.{k}" for k in range(stages)), "head"]
        split = [(units[0], units[1]), *((unit,) for unit in units[2:-2]), (units[-2], units[-1])]
        numbers = [frozenset(map(units.index, own)) for own in split]
        plan = RunPlan(
            stages=stages,
            groups=groups,
            most_rows=groups,
            min_stages=stages,
            total_steps=10_000,
            snapshot_every=10_000,
            silent_seconds=30.0,
            reconnect_seconds=1.0,
            regroup_seconds=5.0,
            units=lambda count: split,
            unit_numbers=lambda count: numbers,
            neighbours=lambda stage, count: neighbours(stage, count, 1, False),
            stage_bytes=lambda count, devices: [1] * count,
        )
        self.machine = RunMachine(plan, lambda step, norm: (1.0, 1e-3), Past())
        self.numbers = numbers
        self.groups = groups
        self.now = 100.0
        self.spent: dict[str, list[float]] = {}

    def timed(self, what: str, call: Callable[[], list[Action]]) -> list[Action]:
        began = time.perf_counter()
        actions = call()
        self.spent.setdefault(what, []).append(time.perf_counter() - began)
        return actions

    def arrive(self, count: int) -> None:
        for number in range(count):
            self.timed(
                "hello",
                lambda number=number: self.machine.hello(
                    Candidate(node_id=f"node-{number}", memory_bytes=1 << 30),
                    address=f"10.0.0.1:{number}",
                    process_nonce=1,
                    epoch=0,
                    now=self.now,
                ),
            )

    def answer(self, what: str, node: str, message: Placed | Ready | Vote | Applied) -> list[Action]:
        return self.timed(what, lambda: self.machine.message(node, message, self.now))

    def restore(self) -> None:
        """Take the newest placement, from whatever the volunteers held before."""
        epoch = self.machine.epoch
        assert epoch is not None, "there are nodes for every stage"
        lineage, step = 0, 0
        for node in epoch.hosts:
            held = Placed(epoch=epoch.number, held_step=-1, voted=False, lineage=0)
            for action in self.answer("placed", node, held):
                if isinstance(action, Send) and isinstance(action.message, Restore):
                    lineage, step = action.message.lineage, action.message.step
        assert lineage and step == epoch.step
        for node in epoch.hosts:
            self.answer("ready", node, Ready(epoch=epoch.number, telemetry=Telemetry()))

    def step(self) -> float:
        """One step; the seconds that the machine took in all."""
        epoch = self.machine.epoch
        assert epoch is not None
        number, began, committed = epoch.step, time.perf_counter(), 0
        for node in epoch.hosts:
            stage, row = epoch.stage_of(node), epoch.replica_of(node)
            losses = dict.fromkeys(epoch.groups[row], 1.0) if stage == epoch.stages - 1 else {}
            norms = dict.fromkeys(self.numbers[stage], 1.0)
            loss = next(iter(losses.values())) if losses and self.groups == 1 else None
            vote = Vote(
                epoch=epoch.number,
                step=number,
                norms=norms,
                loss=loss,
                group_losses=losses if self.groups > 1 else {},
            )
            committed += sum(isinstance(one, RecordCommit) for one in self.answer("vote", node, vote))
        assert committed == 1, "all have voted"
        for node in epoch.hosts if epoch.step == number else ():
            self.answer("applied", node, Applied(epoch=epoch.number, step=number, telemetry=Telemetry()))
        assert epoch.step == number + 1
        return time.perf_counter() - began


def measured(volunteers: int, stages: int, groups: int) -> dict[str, Any]:
    run = Volunteers(stages, groups)
    began = time.perf_counter()
    run.arrive(volunteers)
    arrived = time.perf_counter() - began
    run.restore()
    steps = [run.step() for _ in range(STEPS)]
    for _ in range(TICKS):
        run.now += 0.25
        for node in run.machine.members:
            run.machine.heard(node, run.now)
        run.timed("tick", lambda: run.machine.tick(run.now))
    epoch = run.machine.epoch
    assert epoch is not None
    hosts, placed = len(epoch.hosts), 0
    for node in epoch.hosts[:: max(1, len(epoch.hosts) // 20)]:
        lost = run.timed("lost", lambda node=node: run.machine.lost(node, "gone", run.now))
        placed += sum(isinstance(one, RecordPlacement) for one in lost)
    run.now += 6.0
    for node in run.machine.members:
        run.machine.heard(node, run.now)
    again = run.timed("regroup", lambda: run.machine.tick(run.now))
    placed += sum(isinstance(one, RecordPlacement) for one in again)
    return {
        "volunteers": volunteers,
        "stages": stages,
        "hosts": hosts,
        "arrival_seconds_all": round(arrived, 3),
        "step_seconds_median": round(sorted(steps)[len(steps) // 2], 4),
        "placements_after_losses": placed,
        "milliseconds": {
            what: {
                "calls": len(spent),
                "median": round(1e3 * sorted(spent)[len(spent) // 2], 4),
                "p99": round(1e3 * sorted(spent)[int(0.99 * (len(spent) - 1))], 3),
                "longest": round(1e3 * max(spent), 2),
            }
            for what, spent in run.spent.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the run's state machine with many volunteers.")
    parser.add_argument("--volunteers", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--stages", type=int, default=250)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "bench": "many_volunteers",
        "commit": commit(),
        "hardware": hardware(),
        "runs": [],
    }
    for count in arguments.volunteers:
        report["runs"].append(measured(count, arguments.stages, arguments.groups))
        print(json.dumps(report["runs"][-1]), flush=True)
        write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
