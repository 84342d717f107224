"""Turn the totals that nodes report into the cost of each step and of the run. Pure.

Reports hold totals, so only a node's newest report counts, and only when it is needed: receiving a heartbeat
costs no more than storing it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from node.coordinator.reports import NO_REPORT, is_continued
from node.schedule.floor import LinkRate
from node.telemetry.costs import Ledger
from node.telemetry.events import StageCost, StepCosts
from wire.figures import LinkFigures, LinkKey, Place, StageFigures
from wire.frozen import frozen
from wire.messages import CoordinatorMessage, Waiting
from wire.spec import Direction
from wire.telemetry import Telemetry

CLOCK_RATIO = 1.01
"""A node's clock may run faster than ours by at most this factor."""
FASTEST = 1e11
"""A rate in bytes per second above that of any node's links: 800 Gbit/s."""
SLACK_SECONDS = 1.0
"""The head start in seconds of nodes, which may send before the coordinator sees their epoch begin."""


class Accounting:
    """Takes node reports and computes step costs. `codecs` are the codec names that reports may use."""

    def __init__(self, codecs: Collection[str]) -> None:
        self.hosts: tuple[str, ...] = ()
        """Node ids of the running epoch, row after row, with "" for an empty seat; none between epochs."""
        self.rows = 1
        self.newest: dict[str, Telemetry] = {}
        """Each node's newest report."""
        self._codecs = frozenset(codecs)
        self._run = Ledger(self._codecs)
        self._waiting: dict[str, tuple[Telemetry, float]] = {}
        """Each node's newest report of the epoch that is not yet counted, and when it came."""
        self._epoch = 0
        self._step = Ledger(self._codecs)
        self._counted: dict[str, Telemetry] = {}
        self._counted_wall: dict[str, float] = {}
        """The part of the reported wall time that was believed."""
        self._ready_wall: dict[str, float] = {}
        self._epoch_bytes: dict[str, int] = {}
        self._hosts: dict[Place, str] = {}
        """The node that last hosted each place, over the whole run."""
        self._places: dict[Place, str] = {}
        self._links: dict[LinkKey, None] = {}
        """The links of the newest step, sorted."""
        self._place_of: dict[str, Place] = {}

    def report(self, node_id: str, report: Telemetry, elapsed: float = math.inf) -> None:
        """Store a node's newest totals.

        Args:
            elapsed: seconds since `begin_epoch`. Reports of more time, or of more bytes than a link can carry
                in that time, are capped.
        """
        waiting = self._waiting.get(node_id)
        begins_again = waiting is not None and not is_continued(waiting[0], report)
        if begins_again:
            self._count(node_id)
        self.newest[node_id] = report
        if node_id in self._place_of and report.epoch == self._epoch:
            self._waiting[node_id] = report, elapsed
            if begins_again:
                self._count(node_id)  # or the next report could hide that totals restarted

    @property
    def run(self) -> Ledger:
        """Totals since this process started, including aborted steps."""
        self._count_all()
        return self._run

    def _count_all(self) -> None:
        for node_id in list(self._waiting):
            self._count(node_id)

    def _count(self, node_id: str) -> None:
        telemetry, elapsed = self._waiting.pop(node_id)
        place = self._place_of[node_id]
        before = self._counted.get(node_id, NO_REPORT)
        most = self._ready_wall.get(node_id, 0.0) + CLOCK_RATIO * elapsed
        wall, counted = min(telemetry.wall_seconds, most), self._counted_wall.get(node_id, 0.0)
        self._counted[node_id], self._counted_wall[node_id] = telemetry, wall
        sent = self._epoch_bytes.get(node_id, 0)
        room = FASTEST * (elapsed + SLACK_SECONDS) - sent
        stages = len(self.hosts) // self.rows
        passed = max(0.0, wall - counted)
        growth = self._step.growth(place, stages, before, telemetry, room, self.rows, passed=passed)
        for ledger in (self._run, self._step):
            ledger.count(growth)
        self._epoch_bytes[node_id] = sent + growth.counted

    def forget(self, node_id: str) -> None:
        """The node is gone: drop its newest report."""
        self.newest.pop(node_id, None)

    def begin_epoch(self, epoch: int, hosts: Sequence[str], rows: int = 1) -> None:
        """Count from each stage's report at `Ready`. Earlier totals belong to no step."""
        self._count_all()
        self._epoch = epoch
        self._place(hosts, rows)
        ready = {node: self.newest[node] for node in hosts if node in self.newest}
        self._counted = {node: report for node, report in ready.items() if report.epoch == epoch}
        self._ready_wall = {node: report.wall_seconds for node, report in self._counted.items()}
        self._counted_wall = dict(self._ready_wall)
        self._epoch_bytes = {}
        self._hosts.update(self._places)
        self._step = Ledger(self._codecs)

    def seat(self, node_id: str, place: Place) -> None:
        """The node has the place in the current epoch from now on. What it reported before is not counted."""
        for changed in (before := self._places.get(place, ""), node_id):
            if changed in self._waiting:
                self._count(changed)
        self._place_of.pop(before, None)
        self._places[place] = self._hosts[place] = node_id
        self._place_of[node_id] = place
        self.hosts = tuple(self._places.values())
        if (newest := self.newest.get(node_id)) is not None and newest.epoch == self._epoch:
            self._counted[node_id] = newest
            self._ready_wall[node_id] = self._counted_wall[node_id] = newest.wall_seconds

    def step(self, step: int, seconds: float, *, aborted: bool = False) -> StepCosts:
        """The cost of the step that has just ended. `seconds`: its wall time at the coordinator.

        An aborted step ends its epoch.
        """
        self._count_all()
        ledger, self._step = self._step, Ledger(self._codecs)
        if ledger.links.keys() != self._links.keys():
            self._links = dict.fromkeys(sorted(ledger.links))
        costs = StepCosts(
            step=step,
            seconds=seconds,
            aborted=aborted,
            stages=tuple(
                _stage_cost(place, node, ledger.stages.get(place, _NO_TIME))
                for place, node in self._places.items()
            ),
            links=tuple(_without_held_out(ledger.links[ends]) for ends in self._links),
        )
        if aborted:
            self._place((), self.rows)
        return costs

    def places(self) -> Mapping[Place, str]:
        """The hosts of the current epoch by place, row after row."""
        return self._places

    def stage_times(self) -> tuple[StageCost, ...]:
        """Each stage's time by kind, over the whole run."""
        return tuple(
            _stage_cost(place, self._hosts.get(place, ""), sums)
            for place, sums in sorted(self.run.stages.items())
        )

    def reports(self) -> dict[str, Telemetry]:
        """Each node's newest report; for a stage's node the newest one that is counted."""
        counted = {node: self._counted[node] for node in self._place_of if node in self._counted}
        return {node: counted.get(node) or self.newest[node] for node in self.newest}

    def line(self, place: Place) -> LinkRate:
        """The most that the machine at this place was seen to send and receive, as it reports."""
        newest = self.newest.get(self._places.get(place, ""), Telemetry())
        return LinkRate(up=newest.line_up or math.inf, down=newest.line_down or math.inf)

    # ---- inside

    def _place(self, hosts: Sequence[str], rows: int) -> None:
        self.hosts, self.rows = tuple(hosts), rows
        stages = len(hosts) // rows
        self._places = {Place(*divmod(index, stages)): node for index, node in enumerate(hosts)}
        self._place_of = {node: place for place, node in self._places.items() if node}


_NO_TIME = StageFigures()


def _stage_cost(place: Place, node_id: str, sums: StageFigures) -> StageCost:
    return frozen(
        StageCost, {**vars(sums), "stage": place.stage, "node_id": node_id, "replica": place.replica}
    )


def _without_held_out(link: LinkFigures) -> LinkFigures:
    """A link's figures for steps. They may include a part of what held-out samples sent."""
    flows = tuple(flow for flow in link.flows if flow.direction is not Direction.HELD_OUT)
    return replace(link, bytes=max(0, link.bytes - link.held_out_bytes), flows=flows)


class Answers:
    """When nodes last answered, to tell which node waited for which. Seconds on any monotonic clock."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._newest = 0.0

    def came(self, node_id: str, now: float) -> None:
        """A node has voted, or has finished what all were asked to do."""
        self._at[node_id] = self._newest = now

    def waited(self, node_id: str, message: CoordinatorMessage) -> float | None:
        """The seconds for which this node waited for others, if the message is sent after their answers."""
        if not isinstance(message, Waiting):
            return None
        return self._newest - self._at.get(node_id, self._newest)
