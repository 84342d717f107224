"""Goodput while nodes die and come back: the run's real state machine, with nodes that take a set time.

    python -m scripts.experiments.churn                    writes scripts/results/churn.json
    python -m scripts.experiments.churn --one-row --out scripts/results/churn_one_row.json

Each case is a grid of stages and rows. A row computes a gradient group in a set time, one after another, and
its pipeline fills in a set time; sums over groups take a set time more, half of it to hand over those of a
row. Nodes die at random (exponential times), their connection closes at once, and a process of the same node
is back some seconds later. It fetches a snapshot of its state, unless its disk has that, and the gradients of
each step that is committed since, then has its seat again. Nodes keep each snapshot of their own stage. A
neighbour says so when the connection to a node has closed. Times of messages are a set round trip.

Goodput is committed steps, each once, over those of a run without deaths in the same time; a snapshot is due
every 15 steps. The same deaths are put to a machine that ends the epoch at each of them: then rows that are
whole, or that survivors make, begin the step anew.
"""

import argparse
import heapq
import math
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from node.lab.results import commit, hardware
from node.run_state.actions import (
    Aborted,
    Action,
    RecordCommit,
    RecordRestored,
    SeatFilled,
    SeatLost,
    Send,
    SnapshotAgreed,
    StepDone,
)
from node.run_state.epoch import Epoch, Phase
from node.run_state.machine import RunMachine
from node.run_state.run_plan import Past, RunPlan
from node.run_state.stage_assignment import Candidate
from node.schedule.gradient_groups import GroupTree
from node.schedule.routing import neighbours
from scripts.report import RESULTS, write
from wire.messages import (
    Abort,
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    Follow,
    Following,
    FollowStep,
    GroupDigests,
    HandedOver,
    NodeMessage,
    PeerSilent,
    Placed,
    Placement,
    Ready,
    Restore,
    Seat,
    StateHashes,
    TakeSnapshot,
    UnitHash,
    Vote,
)
from wire.telemetry import Telemetry

OUT = RESULTS / "churn.json"
PERIOD = 1.0
"""Seconds between two ticks of the machine."""
DEATHS_A_MINUTE = {
    "0.2 node-hours": 1 / 12,
    "1 node-hour": 1 / 60,
    "2.6 node-hours": 1 / 156,
    "5 % a minute": 0.05,
}
"""Of one node, by the name of the rate."""
DIGEST = bytes(16)
"""Of whatever a node computes."""
KEPT_SNAPSHOTS = 3
"""Files of so many steps stay on a node's disk."""


@dataclass(frozen=True)
class Case:
    """A grid, and how long things take, in seconds."""

    stages: int
    rows: int
    groups: int
    step: float
    """A step without deaths."""
    sync: float
    """Of it, what rows take to sum up gradients."""
    fill: float = 0.0
    """Of it, what a row without work takes until its last stage has some."""
    back: float = 10.0
    """From a death until the node is there again."""
    fetch: float = 20.0
    """To fetch a stage's state."""
    sums: float = 1.7
    """To fetch the summed gradients of a step: a byte per parameter, where the state has twelve."""
    delay: float = 0.05
    """Of a message."""
    spares: int = 0
    """Nodes beyond those that the grid has seats for."""
    snapshots: int = 15
    """Steps from one to the next."""

    @property
    def group(self) -> float:
        """Of a gradient group in a row."""
        return (self.step - self.sync - self.fill) / math.ceil(self.groups / self.rows)


@dataclass(eq=False)
class Node:
    """What a node has to do next, and what it holds."""

    name: str
    nonce: int = 0
    here: bool = True
    placement: Placement | None = None
    state: int = -1
    lineage: int = 0
    """Of the state: the epoch that it grew from."""
    stage: int = -1
    """That it holds the state of."""
    begun: Begin | None = None
    done: dict[int, float] = field(default_factory=dict)
    """By group of the step: when the node's row is done with it."""
    busy_until: float = 0.0
    voted: int = -1
    """The newest step that it has voted for."""
    vote: tuple[int, int] = (-1, -1)
    """Step and generation of the vote that is due."""
    summed: int = -1
    """The newest step for which it has all sums. It keeps them even if groups are computed again."""
    sums_at: float = 0.0
    """When it has those of the step that runs, as far as the nodes of its stage allow."""
    told: set[tuple[int, ...]] = field(default_factory=set)
    """The groups that it has said it has handed over, to the nodes that its stage has now."""
    follow: Follow | None = None
    files: dict[int, tuple[int, int]] = field(default_factory=dict)
    """On its disk: of snapshots, by step, the stage and the lineage."""

    def keeps(self, step: int, lineage: int) -> None:
        """The snapshot of a step goes to its disk; of the older files some stay."""
        self.files[step] = self.stage, lineage
        for old in sorted(self.files)[:-KEPT_SNAPSHOTS]:
            del self.files[old]


class Churn:
    """One run."""

    def __init__(self, case: Case, rate: float, seed: int) -> None:
        """`rate`: deaths of a node in a second."""
        self.case, self.now = case, 0.0
        self._chance = random.Random(seed)
        self._rate = rate
        units = [f"unit.{stage}" for stage in range(case.stages)]
        self.plan = RunPlan(
            stages=case.stages,
            groups=case.groups,
            most_rows=case.rows,
            follows=True,
            compares_newcomers=True,
            boundaries=lambda stages: 0,
            min_stages=case.stages,
            total_steps=10**9,
            snapshot_every=case.snapshots,
            silent_seconds=14.0,
            reconnect_seconds=1.0,
            regroup_seconds=10.0,
            units=lambda stages: [(unit,) for unit in units],
            unit_numbers=lambda stages: [frozenset((stage,)) for stage in range(stages)],
            neighbours=lambda stage, stages: neighbours(stage, stages, 1, False),
            stage_bytes=lambda stages, _devices: [1] * stages,
        )
        self._tree = GroupTree(case.groups)
        self.machine = RunMachine(self.plan, lambda step, norm: (1.0, 0.1), Past())
        count = case.stages * case.rows + case.spares
        self.nodes = {f"n{number}": Node(f"n{number}") for number in range(count)}
        self.committed = 0
        """Steps that are committed, and were not lost again."""
        self.deaths = self.lost = self.filled = 0
        self.aborted = self.rolled_back = 0.0
        """Seconds that steps had run which began anew, and steps that had to be done again."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self._lineages: dict[int, int] = {}
        """By step of a snapshot: the lineage of its state."""

    # ---- the clock

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (when, self._numbers, what))

    def run(self, seconds: float) -> None:
        for node in self.nodes.values():
            self._join(node)
            self._mourn(node)
        self.at(PERIOD, self._tick)
        while self._events and self._events[0][0] <= seconds:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _tick(self) -> None:
        for node in self.nodes.values():
            if node.here:
                self.machine.heard(node.name, self.now)
        self._happen(lambda: self.machine.tick(self.now))
        self.at(self.now + PERIOD, self._tick)

    # ---- deaths

    def _mourn(self, node: Node) -> None:
        if self._rate:
            self.at(self.now + self._chance.expovariate(self._rate), partial(self._die, node))

    def _die(self, node: Node) -> None:
        self.deaths += 1
        node.here = False
        self._happen(lambda: self.machine.disconnected(node.name, self.now))
        if (epoch := self.machine.epoch) is not None and epoch.has(node.name):
            stage, row = epoch.stage_of(node.name), epoch.replica_of(node.name)
            news = PeerSilent(epoch=epoch.number, stage=stage, replica=row)
            beside = {epoch.row(row)[one] for one in epoch.neighbours(node.name)}
            for near in {*beside, *epoch.column(stage)} - {""}:
                self._say(self.nodes[near], news)
        self.at(self.now + self.case.back, partial(self._return, node))

    def _return(self, node: Node) -> None:
        self.nodes[node.name] = again = Node(node.name, nonce=node.nonce + 1, files=node.files)
        self._join(again)
        self._mourn(again)

    def _join(self, node: Node) -> None:
        self._happen(
            lambda: self.machine.hello(
                Candidate(node_id=node.name, memory_bytes=0),
                address=f"{node.name}:1",
                process_nonce=node.nonce,
                epoch=0,
                now=self.now,
            )
        )

    # ---- the coordinator

    def _happen(self, event: Callable[[], list[Action]]) -> None:
        epoch = self.machine.epoch
        began = epoch.opened_at if epoch is not None and epoch.phase is Phase.STEPPING else self.now
        for action in event():
            match action:
                case Send():
                    node = self.nodes[action.node_id]
                    self.at(self.now + self.case.delay, partial(self._hear, node, action.message))
                case RecordCommit():
                    self.committed = action.step + 1
                case Aborted():
                    self.aborted += self.now - began
                case RecordRestored() if action.step < self.committed:
                    self.rolled_back += self.committed - action.step
                    self.committed = action.step
                case StepDone() if epoch := self.machine.epoch:
                    self._measure(epoch, action)
                case SeatLost():
                    self.lost += 1
                case SeatFilled():
                    self.filled += 1
                case SnapshotAgreed():
                    self.at(self.now + 1.0, partial(self._store, action.step))
                case _:
                    pass

    def _measure(self, epoch: Epoch, done: StepDone) -> None:
        """What nodes took for a group is known from steps in which their rows stayed as they were."""
        counts, happens = epoch.computed(done.step), self._happen
        if not epoch.was_uneven(done.step):
            speeds = dict.fromkeys(done.nodes, self.case.group)
            tell = partial(self.machine.row_speeds, speeds, self.case.step, self.now)
        else:
            rows = [row for row, count in enumerate(counts) if count]
            speeds = {node: self.case.group for row in rows for node in epoch.row(row) if node in done.nodes}
            tell = partial(self.machine.uneven_speeds, speeds)
        self.at(self.now, lambda: happens(tell))

    def _store(self, step: int) -> None:
        self._happen(lambda: self.machine.snapshot_stored(step, self.now))

    def _say(self, node: Node, message: NodeMessage, after: float = 0.0) -> None:
        def said() -> None:
            if node.here:
                if isinstance(message, Vote):
                    node.voted = message.step
                self._happen(lambda: self.machine.message(node.name, message, self.now))

        self.at(self.now + after + self.case.delay, said)

    # ---- a node

    def _hear(self, node: Node, message: CoordinatorMessage) -> None:
        if not node.here:
            return
        epoch = node.placement.epoch if node.placement is not None else 0
        match message:
            case Placement() if message.epoch != epoch:
                node.placement, node.begun, node.vote, node.summed = message, None, (-1, -1), -1
                if not message.enters:
                    node.follow = None
                voted = node.voted == node.state
                placed = Placed(epoch=message.epoch, held_step=node.state, voted=voted, lineage=node.lineage)
                self._say(node, placed)
            case Abort() if message.epoch == epoch:
                node.placement = None
            case Restore() if message.epoch == epoch and node.placement is not None:
                after = 3 * self.case.delay
                if message.missed is not None and (node.state, node.lineage) == (
                    message.missed.step,
                    message.lineage,
                ):
                    node.state += 1
                held = message.step, message.lineage, node.placement.stage
                if not node.placement.enters and (node.state, node.lineage, node.stage) != held:
                    after += self._fetch_seconds(node, message.step, node.placement.stage)
                    node.state, node.lineage, node.stage = held
                self._say(node, Ready(epoch=epoch, telemetry=Telemetry()), after)
            case Begin() if message.epoch == epoch:
                self._begin(node, message)
            case Commit() if message.epoch == epoch:
                if node.state == message.step:
                    node.state += 1
                if message.then is not None:
                    self._begin(node, message.then)
                else:
                    self._say(node, Applied(epoch=epoch, step=message.step, telemetry=Telemetry()))
            case TakeSnapshot() if message.epoch == epoch and node.placement is not None:
                stage = node.placement.stage
                self._lineages[message.step] = node.lineage
                node.keeps(message.step, node.lineage)
                digest = UnitHash(f"{message.step:064x}", 1.0, 1.0, 1.0)
                self._say(node, StateHashes(epoch=epoch, step=message.step, units={stage: digest}))
            case Follow() if message != node.follow:
                node.follow = message if message.sources else None
                if node.follow is not None:
                    here = (node.lineage, node.stage) == (message.lineage, message.stage)
                    has = here and node.state >= message.step
                    fetch = 0.0 if has else self._fetch_seconds(node, message.step, message.stage)
                    self.at(self.now + fetch, partial(self._fetched, node, message, has))
            case FollowStep() if node.follow is not None and message.step == node.state:
                node.state += 1
                self._say(node, Following(snapshot=message.snapshot, step=node.state))
            case _:
                pass

    def _fetch_seconds(self, node: Node, step: int, stage: int) -> float:
        """Of the state of a snapshot."""
        has = step == 0 or node.files.get(step) == (stage, self._lineages.get(step))
        return 0.0 if has else self.case.fetch

    def _fetched(self, node: Node, order: Follow, held: bool) -> None:
        """`held`: it had a newer state already."""
        if node.here and node.follow == order:
            if not held:
                node.state, node.lineage, node.stage = order.step, order.lineage, order.stage
                node.keeps(order.step, self._lineages[order.step])
            behind = max(0, self.committed - node.state)
            self.at(self.now + behind * self.case.sums, partial(self._followed, node, order))

    def _followed(self, node: Node, order: Follow) -> None:
        if node.here and node.follow == order:
            # It was told of the steps since while it fetched.
            node.state = max(node.state, self.committed)
            self._say(node, Following(snapshot=order.step, step=node.state))

    def _begin(self, node: Node, begin: Begin) -> None:
        if node.placement is None or node.vote == (begin.step, begin.generation):
            return
        if node.placement.enters:
            node.state, node.follow = begin.step, None
        before = node.begun
        if before is None or before.step != begin.step:
            before, node.done, node.busy_until, node.sums_at = None, {}, self.now, 0.0
        node.begun, node.vote = begin, (begin.step, begin.generation)
        row = node.placement.replica
        portions = begin.portions or [(at, one.groups) for at, one in enumerate(node.placement.rows)]
        portions = portions or [(0, tuple(range(self.case.groups)))]
        runs = [groups for of, groups in portions if of == row]
        own = [group for groups in runs for group in groups]
        # A row with a node that is new computes a group of another row, too, and both are compared.
        for group in (*own, *begin.audited):
            if group not in node.done:
                if node.busy_until <= self.now:
                    node.busy_until = self.now + self.case.fill
                node.busy_until += self.case.group
                node.done[group] = node.busy_until
        node.done = {group: when for group, when in node.done.items() if group in (*own, *begin.audited)}
        if begin.hands_over:
            self._hand_over(node, begin, before, runs)
        if any(of == len(node.placement.rows) for of, _ in portions):
            return  # some groups wait, and so does the vote
        self.at(max(node.done.values(), default=self.now), partial(self._computed, node, begin))

    def _hand_over(
        self, node: Node, begin: Begin, before: Begin | None, runs: Sequence[tuple[int, ...]]
    ) -> None:
        """Whole subtrees are handed over as soon as they are computed, and again after a death in the node's
        stage."""
        assert node.placement is not None
        absent, known = (
            {seat for seat in one.absent if seat.stage == node.placement.stage}
            for one in (begin, before or begin)
        )
        again = self.case.delay + self.case.sync / 2 / self.case.rows
        if before is None or absent != known:
            node.told.clear()
            node.sums_at = self.now + again  # what the dead node would have summed comes from others
        for groups in runs:
            for top in self._tree.subtrees(groups):
                of = tuple(self._tree.span(top))
                if node.done.keys() >= {*of} and of not in node.told:
                    when = max(max(node.done[group] for group in of) + self.case.sync / 2, self.now + again)
                    self.at(when, partial(self._handed, node, begin.epoch, begin.step, of))
        rows = {seat.row for seat in absent}
        kept = tuple(group for row, groups in begin.portions if row in rows for group in groups)
        if kept:
            self.at(self.now + again, partial(self._passed_on, node, begin, absent, kept))

    def _passed_on(self, node: Node, begin: Begin, absent: set[Seat], kept: tuple[int, ...]) -> None:
        """The nodes that would sum up what rows without a node had handed over have it, too."""
        newest, place = node.begun, node.placement
        if not node.here or place is None or newest is None:
            return
        known = {seat for seat in newest.absent if seat.stage == place.stage}
        if (newest.epoch, newest.step, known) == (begin.epoch, begin.step, absent):
            self._say(
                node,
                HandedOver(
                    epoch=newest.epoch, step=newest.step, generation=newest.generation, passed_on=kept
                ),
            )

    def _handed(self, node: Node, epoch: int, step: int, groups: tuple[int, ...]) -> None:
        begin = node.begun
        if not node.here or node.placement is None or begin is None:
            return
        if (begin.epoch, begin.step) != (epoch, step) or groups in node.told:
            return
        if not node.done.keys() >= {*groups}:
            return
        node.told.add(groups)
        is_last = node.placement.stage == self.case.stages - 1
        message = HandedOver(
            epoch=begin.epoch,
            step=step,
            generation=begin.generation,
            groups=groups,
            group_losses=dict.fromkeys(groups, 0.5) if is_last else {},
        )
        self._say(node, message)

    def _computed(self, node: Node, begin: Begin) -> None:
        """The node's row is done; the sums come once all rows are, as far as they are still in the step."""
        if not node.here or node.vote != (begin.step, begin.generation) or node.placement is None:
            return
        epoch = self.machine.epoch
        if epoch is None or epoch.number != begin.epoch:
            return
        if node.summed == begin.step:
            self._say(node, self._ballot(node, begin))
            return
        peers = self._peers(node, begin)
        last = max((max(other.done.values(), default=0.0) for other in peers), default=0.0)
        when = max(self.now, last + self.case.sync, node.sums_at)
        self.at(when, partial(self._summed, node, begin, peers))

    def _summed(self, node: Node, begin: Begin, peers: Sequence[Node]) -> None:
        """The node votes, unless it has left the epoch meanwhile. The sums of a node that has died are not
        complete."""
        is_on = node.placement is not None and node.vote == (begin.step, begin.generation)
        if is_on and all(peer.here for peer in peers):
            node.summed = begin.step
            self._say(node, self._ballot(node, begin))

    def _peers(self, node: Node, begin: Begin) -> list[Node]:
        epoch = self.machine.epoch
        assert epoch is not None and node.placement is not None
        return [self.nodes[name] for name in epoch.column(node.placement.stage)]

    def _ballot(self, node: Node, begin: Begin) -> Vote:
        assert node.placement is not None
        stage = node.placement.stage
        is_last, several = stage == self.case.stages - 1, self.case.groups > 1
        own = sorted(node.done.keys() - set(begin.audited))
        losses = dict.fromkeys(own, 0.5) if is_last and several else {}
        digests = {group: GroupDigests(gradient=DIGEST) for group in own if begin.digests}
        for group in begin.audited:
            digests[group] = GroupDigests(gradient=DIGEST, loss=0.5 if is_last else None)
        return Vote(
            epoch=begin.epoch,
            step=begin.step,
            norms={stage: 1.0},
            loss=None if several or not is_last else 0.5,
            group_losses=losses,
            digests=digests,
            generation=begin.generation,
        )


def goodput(case: Case, rate: float, seconds: float, seed: int, *, goes_on: bool) -> dict[str, Any]:
    """Of one run, with its counts. `goes_on`: steps go on without who dies."""
    run = Churn(case, rate, seed)
    with nullcontext() if goes_on else patch.object(Epoch, "can_lose", return_value=False):
        run.run(seconds)
    # A step's time once there were enough.
    calm = case.step + 2 * case.delay
    steps = run.committed
    return {
        "committed": steps,
        "goodput": steps * calm / seconds,
        "deaths": run.deaths,
        "deaths_a_step": run.deaths * calm / seconds,
        "seconds_a_death": max(0.0, seconds - steps * calm) / run.deaths if run.deaths else 0.0,
        "seats_lost": run.lost,
        "seats_filled": run.filled,
        "aborted_a_death": run.aborted / run.deaths if run.deaths else 0.0,
        "done_again_a_death": run.rolled_back * calm / run.deaths if run.deaths else 0.0,
    }


CASES = {
    # Groups that four rows and three share evenly.
    "8 x 4": Case(stages=8, rows=4, groups=12, step=20.0, sync=2.0),
    "8 x 4, 24 groups": Case(stages=8, rows=4, groups=24, step=20.0, sync=2.0),
    "8 x 4, 36 groups": Case(stages=8, rows=4, groups=36, step=20.0, sync=2.0),
    "8 x 4, 48 groups": Case(stages=8, rows=4, groups=48, step=20.0, sync=2.0),
    "4 x 4": Case(stages=4, rows=4, groups=12, step=20.0, sync=2.0),
    "2 x 4": Case(stages=2, rows=4, groups=12, step=20.0, sync=2.0),
    "8 x 16": Case(stages=8, rows=16, groups=64, step=24.0, sync=2.4),
    "8 x 16, 128 groups": Case(stages=8, rows=16, groups=128, step=24.0, sync=2.4),
}
ONE_ROW = "8 x 1"
"""Where no row goes on: a death ends the step, and all go back to a snapshot."""
ONE_ROW_CASE = Case(stages=8, rows=1, groups=12, step=20.0, sync=0.0, spares=2)
THOUSAND = "8 x 125, 1000 groups"
"""A thousand members at 5 % a minute for half an hour, if asked for."""
THOUSAND_CASE, THOUSAND_SECONDS = Case(stages=8, rows=125, groups=1000, step=20.0, sync=2.0), 1800.0


@dataclass(frozen=True)
class Job:
    """Some runs of a grid at a rate."""

    grid: str
    case: Case
    rate: str
    seconds: float
    seed: int
    goes_on: bool

    def run(self) -> dict[str, Any]:
        a_minute = DEATHS_A_MINUTE.get(self.rate, 0.0)
        return goodput(self.case, a_minute / 60, self.seconds, self.seed, goes_on=self.goes_on)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node-hours", type=float, default=64.0, help="simulated, of each run")
    parser.add_argument("--runs", type=int, default=3, help="of each rate and grid")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--thousand", action="store_true", help="a thousand members, too")
    parser.add_argument("--one-row", action="store_true", help="one row and two spares alone")
    parser.add_argument("--out", default=str(OUT))
    options = parser.parse_args(arguments)
    jobs = [
        Job(name, case, rate, 3600 * options.node_hours / (case.stages * case.rows), seed, goes_on)
        for name, case in ({ONE_ROW: ONE_ROW_CASE} if options.one_row else CASES).items()
        for rate in ("none", *DEATHS_A_MINUTE)
        for goes_on in ((True,) if options.one_row else (True, False))
        for seed in range(options.runs if rate != "none" else 1)
    ]
    if options.thousand:
        jobs.insert(0, Job(THOUSAND, THOUSAND_CASE, "5 % a minute", THOUSAND_SECONDS, 0, True))
    began, done = time.monotonic(), dict[Job, dict[str, Any]]()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(job.run): job for job in jobs}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            # What is measured is kept, however long the others take.
            write(Path(options.out), report(jobs, done, options.node_hours, time.monotonic() - began))


def report(
    jobs: Sequence[Job], done: Mapping[Job, dict[str, Any]], node_hours: float, took: float
) -> dict[str, Any]:
    """Of the runs that are done."""
    cases: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for job in jobs:
        if job in done:
            cases.setdefault((job.grid, job.rate, job.goes_on), []).append(done[job])
    return {
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version()},
        "node_hours": node_hours,
        "grids": {job.grid: asdict(job.case) for job in jobs},
        "cases": [
            {
                "grid": grid,
                "a_node_dies": rate,
                "goes_on": goes_on,
                "goodput": sum(run["goodput"] for run in runs) / len(runs),
                "seconds_a_death": sum(run["seconds_a_death"] for run in runs) / len(runs),
                "runs": runs,
            }
            for (grid, rate, goes_on), runs in cases.items()
        ],
        "took": took,
    }


if __name__ == "__main__":
    main()
