"""From the totals that nodes report to what a step and a run cost. Pure.

Nodes report totals of their epoch; differences between two reports go to the stage that the node hosts, and
to the links that it sends on. So sums by stage and by link only grow, whoever hosts the stage, however often
epochs and processes change.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from node.telemetry.clock import TimeKind
from node.telemetry.events import FlowCost, LinkCost, StageCost, StageTimes, StepCosts
from wire.spec import Direction
from wire.telemetry import LinkReport, Telemetry

OTHER_CODEC = "other"
"""In place of a codec's name that is none of the run's: a node could invent any number of names."""

LinkKey = tuple[int, int]
"""The stage that sends, the stage that receives."""


@dataclass
class StageSums:
    """What one stage did; `seconds` by kind sum to `wall`."""

    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {kind.value: 0.0 for kind in TimeKind})


@dataclass
class LinkSums:
    """What one direction of a link carried."""

    bytes: int = 0
    """Everything written to both sockets."""
    busy: float = 0.0
    retransmits: int = 0
    rejects: int = 0
    flow_bytes: dict[tuple[Direction, str], int] = field(default_factory=dict)
    """By kind of tensor and codec."""
    flow_elements: dict[tuple[Direction, str], int] = field(default_factory=dict)


class Ledger:
    """Sums by stage and by direction of link. They only grow."""

    def __init__(self) -> None:
        self.stages: dict[int, StageSums] = {}
        self.links: dict[LinkKey, LinkSums] = {}

    @property
    def link_bytes(self) -> int:
        return sum(link.bytes for link in self.links.values())

    @property
    def elements(self) -> int:
        return sum(sum(link.flow_elements.values()) for link in self.links.values())

    def bits(self, direction: Direction) -> float:
        """Bits an element of this kind of tensor took, frames and headers included; 0 before the first."""
        size = self._flows(direction, "flow_bytes")
        elements = self._flows(direction, "flow_elements")
        return 8 * size / elements if elements else 0.0

    def _flows(self, direction: Direction, column: str) -> int:
        return sum(
            count
            for link in self.links.values()
            for (kind, _), count in getattr(link, column).items()
            if kind is direction
        )

    def link(self, source: int, target: int) -> LinkSums:
        return self.links.setdefault((source, target), LinkSums())


class Accounting:
    """Takes the reports of a run's nodes; gives what each step cost.

    `codecs` are the names that flows may carry.
    """

    def __init__(self, codecs: Collection[str]) -> None:
        self.run = Ledger()
        """Since this coordinator began, aborted steps included."""
        self.seats: tuple[str, ...] = ()
        """Who hosts the stages of the epoch that runs; empty between epochs."""
        self.newest: dict[str, Telemetry] = {}
        """Each node's newest report."""
        self._codecs = frozenset(codecs)
        self._epoch = 0
        self._step = Ledger()
        self._counted: dict[str, Telemetry] = {}
        self._hosts: dict[int, str] = {}

    def report(self, node_id: str, telemetry: Telemetry) -> None:
        """A node's newest totals."""
        self.newest[node_id] = telemetry
        if node_id not in self.seats or telemetry.epoch != self._epoch:
            return
        before = self._counted.get(node_id, Telemetry())
        self._counted[node_id] = telemetry
        for ledger in (self.run, self._step):
            self._add(ledger, self.seats.index(node_id), before, telemetry)

    def forget(self, node_id: str) -> None:
        """The node is gone: what it said last is no news any more."""
        self.newest.pop(node_id, None)

    def begin_epoch(self, epoch: int, seats: Sequence[str]) -> None:
        """Count from what every stage reported when it was ready; what came before is nobody's step."""
        self._epoch, self.seats = epoch, tuple(seats)
        ready = {node: self.newest[node] for node in seats if node in self.newest}
        self._counted = {node: report for node, report in ready.items() if report.epoch == epoch}
        self._hosts.update(enumerate(seats))
        self._step = Ledger()

    def step(self, step: int, seconds: float, *, aborted: bool = False) -> StepCosts:
        """What the step that just ended cost; `seconds` is its wall time at the coordinator.

        A step that was aborted ended its epoch.
        """
        ledger, self._step = self._step, Ledger()
        costs = StepCosts(
            step=step,
            seconds=seconds,
            aborted=aborted,
            stages=tuple(
                self._stage_cost(stage, node, ledger.stages.get(stage, StageSums()))
                for stage, node in enumerate(self.seats)
            ),
            links=tuple(
                self._link_cost(source, target, sums)
                for (source, target), sums in sorted(ledger.links.items())
            ),
        )
        if aborted:
            self.seats = ()
        return costs

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Where each stage's time went, over the whole run."""
        return tuple(
            StageTimes(
                stage=stage,
                node_id=self._hosts.get(stage, ""),
                wall_seconds=sums.wall,
                seconds=dict(sums.seconds),
            )
            for stage, sums in sorted(self.run.stages.items())
        )

    def link_report(self, source: int, target: int) -> LinkReport | None:
        """What the sender said last of this direction of a link, if it is in use."""
        if source >= len(self.seats):
            return None
        links = self.newest.get(self.seats[source], Telemetry()).links
        return next((link for link in links if link.peer_stage == target), None)

    # ---- inside

    def _add(self, ledger: Ledger, stage: int, before: Telemetry, now: Telemetry) -> None:
        sums = ledger.stages.setdefault(stage, StageSums())
        if now.wall_seconds >= before.wall_seconds:
            sums.wall += now.wall_seconds - before.wall_seconds
            for kind in TimeKind:  # only the kinds that there are: a node could name any
                spent = now.times.get(kind.value, 0.0) - before.times.get(kind.value, 0.0)
                sums.seconds[kind.value] += max(0.0, spent)
        earlier = {link.peer_stage: link for link in before.links}
        for link in now.links:
            if link.peer_stage < len(self.seats) and link.peer_stage != stage:
                self._add_link(ledger, stage, _baseline(link, earlier.get(link.peer_stage)), link)

    def _add_link(self, ledger: Ledger, stage: int, before: LinkReport, now: LinkReport) -> None:
        sums = ledger.link(stage, now.peer_stage)
        sums.bytes += now.bytes_sent - before.bytes_sent
        sums.busy += max(0.0, now.busy_seconds - before.busy_seconds)
        sums.retransmits += max(0, now.retransmits - before.retransmits)
        # It is the receiver that counts damaged frames.
        ledger.link(now.peer_stage, stage).rejects += max(0, now.rejects - before.rejects)
        earlier = {(flow.direction, flow.codec): flow for flow in before.flows}
        for flow in now.flows:
            old = earlier.get((flow.direction, flow.codec))
            key = flow.direction, flow.codec if flow.codec in self._codecs else OTHER_CODEC
            size = flow.bytes_sent - (old.bytes_sent if old else 0)
            elements = flow.elements_sent - (old.elements_sent if old else 0)
            sums.flow_bytes[key] = sums.flow_bytes.get(key, 0) + max(0, size)
            sums.flow_elements[key] = sums.flow_elements.get(key, 0) + max(0, elements)

    def _stage_cost(self, stage: int, node_id: str, sums: StageSums) -> StageCost:
        newest = self.newest.get(node_id, Telemetry())
        return StageCost(
            stage=stage,
            node_id=node_id,
            wall_seconds=sums.wall,
            seconds=dict(sums.seconds),
            memory_bytes=newest.memory_bytes,
            peak_memory_bytes=newest.peak_memory_bytes,
            gpu_memory_bytes=newest.gpu_memory_bytes,
            gpu_peak_memory_bytes=newest.gpu_peak_memory_bytes,
        )

    def _link_cost(self, source: int, target: int, sums: LinkSums) -> LinkCost:
        newest = self.link_report(source, target)
        return LinkCost(
            source=source,
            target=target,
            bytes=sums.bytes,
            flows=tuple(
                FlowCost(
                    direction=direction.name.lower(),
                    codec=codec,
                    bytes=size,
                    elements=sums.flow_elements[direction, codec],
                )
                for (direction, codec), size in sums.flow_bytes.items()
            ),
            busy_seconds=sums.busy,
            capacity=newest.capacity if newest else 0.0,
            round_trip_seconds=newest.rtt_seconds if newest else 0.0,
            retransmits=sums.retransmits,
            rejects=sums.rejects,
            queued_bytes=newest.queued_bytes if newest else 0,
        )


def _baseline(now: LinkReport, before: LinkReport | None) -> LinkReport:
    """What `now` is to be counted from: nothing, if the link was made anew since."""
    if before is None or now.bytes_sent < before.bytes_sent:
        return LinkReport(
            peer_stage=now.peer_stage,
            bytes_sent=0,
            bytes_received=0,
            retransmits=0,
            rejects=0,
            rtt_seconds=0.0,
        )
    return before
