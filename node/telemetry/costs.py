"""What steps cost: figures of one step, sums over steps, and sums over the reports of nodes. Pure.

Nodes report totals of their epoch. The difference of two reports goes to the stage that the node hosts and to
the links that it sends on. So sums only grow, whoever hosts a stage, and however often epochs
and processes change.
"""

import functools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from node.telemetry.clock import WAITS, TimeKind
from node.telemetry.events import FlowCost, LinkCost, StageCost, StepCosts
from wire.spec import Direction
from wire.telemetry import LinkReport, Telemetry

_KINDS = tuple(kind.value for kind in TimeKind)


class Place(NamedTuple):
    """A place in the grid of a run."""

    replica: int
    """The row."""
    stage: int


def row_costs(costs: StepCosts, replica: int) -> StepCosts:
    """Those of one row's stages, and of the links among them."""
    return replace(
        costs,
        stages=tuple(stage for stage in costs.stages if stage.replica == replica),
        links=tuple(link for link in costs.links if link.source_replica == link.target_replica == replica),
    )


def group_seconds(costs: StepCosts, groups: Sequence[int], length: int) -> dict[str, float]:
    """What each node's stage takes for a gradient group, links included, once its pipeline is full. Of
    several steps it is the mean.

    Args:
        groups: of each row, how many.
        length: microbatches of a group.
    """
    after = (TimeKind.SYNC, TimeKind.WAIT_VOTES, TimeKind.WAIT_COORDINATOR)
    found = {}
    stages = Counter(stage.replica for stage in costs.stages)
    for stage in costs.stages:
        spent = max(0.0, stage.wall_seconds - sum(stage.seconds.get(kind, 0.0) for kind in after))
        # A row fills and drains once, however many groups it has.
        fill = stages[stage.replica] - 1
        found[stage.node_id] = spent * length / (groups[stage.replica] * length + fill) / costs.steps
    return found


def idle_by_stage(costs: StepCosts) -> tuple[float, ...]:
    """Share of its time that each stage waited, 0 to 1."""
    kinds = [kind.value for kind in WAITS]
    return tuple(
        min(1.0, sum([stage.seconds.get(kind, 0.0) for kind in kinds]) / stage.wall_seconds)
        if stage.wall_seconds > 0
        else 0.0
        for stage in costs.stages
    )


def mbit_by_stage(costs: StepCosts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mbit/s that each stage sent, and that each received."""
    places = [(stage.replica, stage.stage) for stage in costs.stages]
    up, down = dict.fromkeys(places, 0), dict.fromkeys(places, 0)
    for link in costs.links:
        up[link.source_replica, link.source] += link.bytes
        down[link.target_replica, link.target] += link.bytes
    scale = 8e-6 / costs.seconds if costs.seconds > 0 else 0.0
    return tuple(scale * size for size in up.values()), tuple(scale * size for size in down.values())


def bits_per_element(costs: StepCosts, direction: str) -> float:
    """Bits an element for this kind of tensor, frames and headers included; 0 if none was sent."""
    flows = [flow for link in costs.links for flow in link.flows if flow.direction == direction]
    elements = sum(flow.elements for flow in flows)
    return 8 * sum(flow.bytes for flow in flows) / elements if elements else 0.0


def mean_step(costs: StepCosts) -> StepCosts:
    """What one step cost, where `costs` are of several; whole numbers are rounded down."""
    if (count := costs.steps) == 1:
        return costs
    return replace(
        costs,
        seconds=costs.seconds / count,
        steps=1,
        stages=tuple(
            replace(
                stage,
                wall_seconds=stage.wall_seconds / count,
                seconds={kind: spent / count for kind, spent in stage.seconds.items()},
            )
            for stage in costs.stages
        ),
        links=tuple(
            replace(
                link,
                bytes=link.bytes // count,
                busy_seconds=link.busy_seconds / count,
                retransmits=link.retransmits // count,
                rejects=link.rejects // count,
                flows=tuple(
                    replace(flow, bytes=flow.bytes // count, elements=flow.elements // count)
                    for flow in link.flows
                ),
            )
            for link in costs.links
        ),
    )


class CostsSum:
    """The costs of several steps together."""

    def __init__(self, first: StepCosts) -> None:
        self._newest = first
        self._count = 1
        self._steps = first.steps
        self._seconds = first.seconds
        self._stages: list[_StageTotal] = []
        self._links: list[_LinkTotal] = []

    def add(self, costs: StepCosts) -> bool:
        """False, and nothing is added, if placements differ or a step was aborted."""
        before = self._newest
        same = (
            not before.aborted
            and not costs.aborted
            and [(one.stage, one.node_id) for one in before.stages]
            == [(one.stage, one.node_id) for one in costs.stages]
            and list(map(_ends, before.links)) == list(map(_ends, costs.links))
        )
        if not same:
            return False
        if self._count == 1:
            self._stages = [_StageTotal() for _ in costs.stages]
            self._links = [_LinkTotal() for _ in costs.links]
            self._add(before)
        self._add(costs)
        self._newest = costs
        self._count += 1
        self._steps += costs.steps
        self._seconds += costs.seconds
        return True

    def total(self) -> StepCosts:
        """The sum, as the newest step's."""
        if self._count == 1:
            return self._newest
        return replace(
            self._newest,
            seconds=self._seconds,
            steps=self._steps,
            stages=tuple(map(_summed_stage, self._newest.stages, self._stages)),
            links=tuple(map(_summed_link, self._newest.links, self._links)),
        )

    def _add(self, costs: StepCosts) -> None:
        for stage, sums in zip(costs.stages, self._stages, strict=True):
            sums.wall += stage.wall_seconds
            for kind, spent in stage.seconds.items():
                sums.seconds[kind] = sums.seconds.get(kind, 0.0) + spent
        for link, of_link in zip(costs.links, self._links, strict=True):
            of_link.bytes += link.bytes
            of_link.busy += link.busy_seconds
            of_link.retransmits += link.retransmits
            of_link.rejects += link.rejects
            for flow in link.flows:
                key = flow.direction, flow.codec
                size, elements = of_link.flows.get(key, (0, 0))
                of_link.flows[key] = size + flow.bytes, elements + flow.elements


def _ends(link: LinkCost) -> tuple[int, ...]:
    return link.source_replica, link.source, link.target_replica, link.target


def _summed_stage(newest: StageCost, sums: "_StageTotal") -> StageCost:
    return replace(newest, wall_seconds=sums.wall, seconds=dict(sums.seconds))


def _summed_link(newest: LinkCost, sums: "_LinkTotal") -> LinkCost:
    return replace(
        newest,
        bytes=sums.bytes,
        busy_seconds=sums.busy,
        retransmits=sums.retransmits,
        rejects=sums.rejects,
        flows=tuple(
            FlowCost(direction=direction, codec=codec, bytes=size, elements=elements)
            for (direction, codec), (size, elements) in sums.flows.items()
        ),
    )


@dataclass
class _StageTotal:
    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class _LinkTotal:
    bytes: int = 0
    busy: float = 0.0
    retransmits: int = 0
    rejects: int = 0
    flows: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Bytes and elements, by kind of tensor and codec."""


OTHER_CODEC = "other"
"""Replaces codec names that are not the run's: a node could invent any number of names."""

LinkKey = tuple[Place, Place]
"""(sender, receiver)."""


@dataclass
class StageSums:
    """One stage's time; `seconds` by kind sum to `wall`."""

    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0.0))


@dataclass
class LinkSums:
    """Traffic of one direction of a link."""

    bytes: int = 0
    """Everything written to both sockets."""
    busy: float = 0.0
    retransmits: int = 0
    rejects: int = 0
    flow_bytes: dict[tuple[Direction, str], int] = field(default_factory=dict)
    """By kind of tensor and codec."""
    flow_elements: dict[tuple[Direction, str], int] = field(default_factory=dict)

    @property
    def held_out_bytes(self) -> int:
        """Of `bytes`, those that held-out samples sent."""
        return sum(size for (kind, _), size in self.flow_bytes.items() if kind is Direction.HELD_OUT)


class LinkGrowth(NamedTuple):
    """Of one direction of a link."""

    key: LinkKey
    """From the place whose node reports to its peer."""
    back: LinkKey
    """From the peer."""
    bytes: int
    busy: float
    retransmits: int
    rejects: int
    flows: Sequence[tuple[tuple[Direction, str], int, int]]
    """Kind of tensor and codec, bytes, elements."""
    in_flows: int
    """Bytes that these claim."""


class Growth(NamedTuple):
    """What a node did between two reports."""

    place: Place
    wall: float
    seconds: Sequence[float]
    """By kind, in their order."""
    links: Sequence[LinkGrowth]
    counted: int
    """Bytes."""


class Ledger:
    """Sums by stage and by direction of link; they only grow.

    `codecs`: names that flows may carry, others count as `OTHER_CODEC`; None admits all.
    """

    def __init__(self, codecs: Collection[str] | None = None) -> None:
        self._codecs = codecs
        self.stages: dict[Place, StageSums] = {}
        self.links: dict[LinkKey, LinkSums] = {}

    @property
    def held_out_bytes(self) -> int:
        """On all links, those that held-out samples sent."""
        return sum(link.held_out_bytes for link in self.links.values())

    @property
    def link_bytes(self) -> int:
        return sum(link.bytes for link in self.links.values())

    @property
    def elements(self) -> int:
        return sum(sum(link.flow_elements.values()) for link in self.links.values())

    def bits(self, direction: Direction) -> float:
        """Bits an element for this kind of tensor, frames and headers included; 0 before the first."""
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

    def growth(
        self,
        place: Place,
        stages: int,
        before: Telemetry,
        now: Telemetry,
        most: float = math.inf,
        rows: int = 1,
        *,
        passed: float | None = None,
    ) -> "Growth":
        """What the node of a place did between two reports of one epoch.

        Reports are not trusted: kinds of time sum to at most the wall time, and all links together carry at
        most `most` bytes. `stages` and `rows`: how many there are. `passed`: seconds of wall time in between;
        None: what the reports say.
        """
        if passed is None:
            passed = max(0.0, now.wall_seconds - before.wall_seconds)
        left = passed
        seconds = []
        total, known = now.times.get, before.times.get
        for kind in _KINDS:  # known kinds only: a node could invent any
            spent = total(kind, 0.0) - known(kind, 0.0)
            if spent <= 0.0:
                spent = 0.0
            elif spent > left:
                spent = left
            left -= spent
            seconds.append(spent)
        earlier = {(link.peer_replica, link.peer_stage): link for link in before.links}
        links, counted = [], 0
        for link in now.links:
            at = link.peer_replica, link.peer_stage
            if at[0] < rows and at[1] < stages and at != place:
                of_link = self._link_growth(place, at, earlier.get(at), link, passed, most - counted)
                links.append(of_link)
                counted += max(of_link.bytes, of_link.in_flows, of_link.retransmits, of_link.rejects)
        return Growth(place, passed, seconds, links, counted)

    def count(self, growth: "Growth") -> None:
        """Add it."""
        sums = self.stages.get(growth.place)
        if sums is None:
            spent_by_kind = dict(zip(_KINDS, growth.seconds, strict=True))
            self.stages[growth.place] = StageSums(growth.wall, spent_by_kind)
        else:
            sums.wall += growth.wall
            seconds = sums.seconds
            for kind, spent in zip(_KINDS, growth.seconds, strict=True):
                if spent:
                    seconds[kind] += spent
        links = self.links
        for key, back, size, busy, retransmits, rejects, flows, _ in growth.links:
            if (link := links.get(key)) is None:
                link = links[key] = LinkSums()
            link.bytes += size
            link.busy += busy
            link.retransmits += retransmits
            # The receiver counts damaged frames.
            if (other := links.get(back)) is None:
                other = links[back] = LinkSums()
            other.rejects += rejects
            flow_bytes, flow_elements = link.flow_bytes, link.flow_elements
            for flow, size, elements in flows:
                flow_bytes[flow] = flow_bytes.get(flow, 0) + size
                flow_elements[flow] = flow_elements.get(flow, 0) + elements

    def _link_growth(
        self,
        place: Place,
        at: tuple[int, int],
        before: LinkReport | None,
        now: LinkReport,
        passed: float,
        most: float,
    ) -> "LinkGrowth":
        before = _baseline(now, before)
        # Bytes are counted by direction; the first round of an epoch gives its sums another codec's name.
        earlier = {flow.direction: flow for flow in before.flows}
        flows, in_flows = [], 0
        for flow in now.flows:
            old = earlier.get(flow.direction)
            left = most - in_flows
            # A frame takes at least one byte, an element at least one bit.
            size = _grown(old.bytes_sent if old else 0, flow.bytes_sent, left)
            elements = _grown(old.elements_sent if old else 0, flow.elements_sent, 8 * left)
            flows.append(((flow.direction, self._known(flow.codec)), size, elements))
            in_flows += max(size, elements // 8)
        busy = now.busy_seconds - before.busy_seconds
        return LinkGrowth(
            *_keys(place, at),
            _grown(before.bytes_sent, now.bytes_sent, most),
            0.0 if busy <= 0.0 else min(busy, passed),
            _grown(before.retransmits, now.retransmits, most),
            _grown(before.rejects, now.rejects, most),
            flows,
            in_flows,
        )

    def _known(self, codec: str) -> str:
        return codec if self._codecs is None or codec in self._codecs else OTHER_CODEC


@functools.lru_cache(maxsize=65_536)
def _keys(place: Place, peer: tuple[int, int]) -> tuple[LinkKey, LinkKey]:
    """Of both directions of the link between two places: the same ones come every step."""
    at, to = Place(*place), Place(*peer)
    return (at, to), (to, at)


def _grown(before: int, now: int, most: float) -> int:
    """The growth of a counter, clamped to 0 and `most`."""
    grown = now - before
    if grown <= 0:
        return 0
    return grown if grown <= most else int(max(0.0, most))


def _baseline(now: LinkReport, before: LinkReport | None) -> LinkReport:
    """The report to subtract from `now`: zeros if the link was reopened since."""
    return _NOTHING if before is None or now.bytes_sent < before.bytes_sent else before


_NOTHING = LinkReport(peer_stage=0, bytes_sent=0, bytes_received=0, retransmits=0, rejects=0, rtt_seconds=0.0)
