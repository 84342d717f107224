"""The costs of steps: figures of one step, sums over steps, and sums over the reports of nodes. All functions
are pure.

Nodes report totals of their epoch. The difference of two reports is added to the stage that the node hosts,
and to the links on which it sends. So sums only grow, whichever node hosts a stage, and however often epochs
and processes change.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from node.telemetry.clock import WAITS, TimeKind
from node.telemetry.events import Event, SeatLost, StepCosts
from wire.figures import FlowFigures, LinkFigures, LinkKey, Place, StageFigures, counters_of, flow_sum
from wire.frozen import frozen
from wire.spec import Direction
from wire.telemetry import NOT_TOGETHER, Telemetry, known_path

_KINDS = tuple(kind.value for kind in TimeKind)


def row_costs(costs: StepCosts, replica: int) -> StepCosts:
    """The costs of one row's stages and of the links among them."""
    return replace(
        costs,
        stages=tuple(stage for stage in costs.stages if stage.replica == replica),
        links=tuple(link for link in costs.links if link.source_replica == link.target_replica == replica),
    )


def group_seconds(costs: StepCosts, groups: Sequence[int], length: int, slices: int = 1) -> dict[str, float]:
    """How long each node's stage takes for a gradient group, including links, once its pipeline is full. If
    there are several steps, it is their mean.

    Args:
        groups: the number of groups of each row; 0 for a row that is left out.
        length: the microbatches of a group.
        slices: the slices of each microbatch.
    """
    after = (TimeKind.SYNC, TimeKind.WAIT_VOTES, TimeKind.WAIT_COORDINATOR)
    by_node = {}
    stages = Counter(stage.replica for stage in costs.stages)
    for stage in costs.stages:
        if not groups[stage.replica]:
            continue
        spent = max(0.0, stage.wall_seconds - sum(stage.seconds.get(kind, 0.0) for kind in after))
        # A row fills and drains once, however many groups it has.
        fill = (stages[stage.replica] - 1) / slices
        by_node[stage.node_id] = spent * length / (groups[stage.replica] * length + fill) / costs.steps
    return by_node


def idle_by_stage(costs: StepCosts) -> tuple[float, ...]:
    """The share of its time that each stage waited, from 0 to 1."""
    kinds = [kind.value for kind in WAITS]
    return tuple(
        min(1.0, sum([stage.seconds.get(kind, 0.0) for kind in kinds]) / stage.wall_seconds)
        if stage.wall_seconds > 0
        else 0.0
        for stage in costs.stages
    )


def mbit_by_stage(costs: StepCosts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The Mbit/s that each stage sent, and those that each received."""
    places = [(stage.replica, stage.stage) for stage in costs.stages]
    up, down = dict.fromkeys(places, 0), dict.fromkeys(places, 0)
    for link in costs.links:
        up[link.source_replica, link.source] += link.bytes
        down[link.target_replica, link.target] += link.bytes
    scale = 8e-6 / costs.seconds if costs.seconds > 0 else 0.0
    return tuple(scale * size for size in up.values()), tuple(scale * size for size in down.values())


def bits_per_element(costs: StepCosts, direction: str) -> float:
    """The bits per element of this kind of tensor, including frames and headers; 0 if none was sent."""
    return flow_sum(costs.links, direction).bits


def mean_step(costs: StepCosts) -> StepCosts:
    """The mean cost of one step of `costs`. Integers are rounded down."""
    if (count := costs.steps) == 1:
        return costs
    return replace(
        costs,
        seconds=costs.seconds / count,
        steps=1,
        stages=tuple([stage.over(count) for stage in costs.stages]),
        links=tuple([link.over(count) for link in costs.links]),
    )


def summed(before: StepCosts, costs: StepCosts) -> StepCosts | None:
    """The sum of the costs of consecutive steps, as the newest step's. None if placements differ or a step
    was aborted."""
    if (
        before.aborted
        or costs.aborted
        or [(stage.stage, stage.node_id) for stage in before.stages]
        != [(stage.stage, stage.node_id) for stage in costs.stages]
        or [link.ends for link in before.links] != [link.ends for link in costs.links]
    ):
        return None
    return replace(
        costs,
        seconds=before.seconds + costs.seconds,
        steps=before.steps + costs.steps,
        stages=tuple([old + new for old, new in zip(before.stages, costs.stages, strict=True)]),
        links=tuple([old + new for old, new in zip(before.links, costs.links, strict=True)]),
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """The time that nodes spent on steps, according to a run's events, in seconds times nodes."""

    spent: float = 0.0
    lost: float = 0.0
    """The part of it that deaths, aborts and rollbacks undid."""
    highest: int = 0
    """The newest step that was ever committed."""

    @property
    def goodput(self) -> float | None:
        """The share of the work that the steps on record needed; None before there was any work."""
        return max(0.0, 1.0 - self.lost / self.spent) if self.spent else None

    def after(self, event: Event) -> "Work":
        """The work including what `event` adds."""
        match event:
            case SeatLost():
                return replace(self, lost=self.lost + event.lost_seconds)
            case StepCosts():
                spent = event.seconds * len(event.stages)
                again = event.aborted or event.step <= self.highest
                return Work(
                    spent=self.spent + spent,
                    lost=self.lost + (spent if again else 0.0),
                    highest=self.highest if event.aborted else max(self.highest, event.step),
                )
            case _:
                return self


OTHER_CODEC = "other"
"""Replaces codec names that are not the run's, because a node could invent any number of names."""


class Growth(NamedTuple):
    """What a node did between two reports."""

    place: Place
    stage: StageFigures
    links: Sequence[LinkFigures]
    """The links on which it sends. Their `rejects` count frames that it received."""
    counted: int
    """The bytes that the links claim."""


class Ledger:
    """Sums by stage and by direction of a link. They only grow.

    Args:
        codecs: the codec names that flows may have. Others count as `OTHER_CODEC`; None accepts all.
    """

    def __init__(self, codecs: Collection[str] | None = None) -> None:
        self._codecs = codecs
        self.stages: dict[Place, StageFigures] = {}
        self.links: dict[LinkKey, LinkFigures] = {}

    @property
    def held_out_bytes(self) -> int:
        """The bytes that held-out samples sent on all links."""
        return sum(link.held_out_bytes for link in self.links.values())

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
    ) -> Growth:
        """What the node of a seat did between two reports of one epoch.

        Reports are not trusted: kinds of time sum to at most the wall time, and all links together carry at
        most `most` bytes.

        Args:
            stages, rows: how many there are.
            passed: the wall seconds in between; None takes them from the reports.
        """
        if passed is None:
            passed = max(0.0, now.wall_seconds - before.wall_seconds)
        left = passed
        seconds = {}
        total, known = now.seconds.get, before.seconds.get
        for kind in _KINDS:  # known kinds only: a node could invent any
            seconds[kind] = spent = min(max(0.0, total(kind, 0.0) - known(kind, 0.0)), left)
            left -= spent
        stage = frozen(
            StageFigures,
            {**{name: getattr(now, name) for name in _OF_STAGE}, "wall_seconds": passed, "seconds": seconds},
        )
        earlier = {(link.target_replica, link.target): link for link in before.links}
        links, counted = [], 0
        for link in now.links:
            at = link.target_replica, link.target
            if at[0] < rows and at[1] < stages and at != place:
                grown, claimed = self._believed(link, earlier.get(at, _NO_LINK), passed, most - counted)
                grown["source_replica"], grown["source"] = place
                links.append(frozen(LinkFigures, grown))
                counted += claimed
        return Growth(place, stage, links, counted)

    def count(self, growth: Growth) -> None:
        """Add the growth to the sums."""
        place, stages, links = growth.place, self.stages, self.links
        stages[place] = stages[place] + growth.stage if place in stages else growth.stage
        for link in growth.links:
            key, back = _keys(*link.ends)
            # The receiver counts damaged frames.
            sent = link if not link.rejects else replace(link, rejects=0)
            known = links.get(key)
            links[key] = sent if known is None or known is _unused(*key) else known + sent
            if back not in links:
                links[back] = _unused(*back)
            if link.rejects:
                links[back] = links[back].grown(rejects=link.rejects)

    def _believed(
        self, now: LinkFigures, before: LinkFigures, passed: float, most: float
    ) -> tuple[dict[str, Any], int]:
        """The fields of a link's growth, each counter within its bounds, and the bytes that they claim."""
        # Totals restart at zero when a link is opened again.
        earlier = vars(before if before.bytes <= now.bytes else _NO_LINK)
        # Totals of a link have one flow per direction, whose codec may have changed since.
        earlier_flows = {flow.direction: flow for flow in earlier["flows"]}
        flows, claimed = [], 0
        for flow in now.flows:
            old = earlier_flows.get(flow.direction, _NO_FLOW)
            # A frame takes at least one byte, and an element at least one bit.
            left = most - claimed
            size = _within(flow.bytes - old.bytes, left)
            elements = _within(flow.elements - old.elements, 8 * left)
            codec = flow.codec if self._codecs is None or flow.codec in self._codecs else OTHER_CODEC
            fields = {"direction": flow.direction, "codec": codec, "bytes": size, "elements": elements}
            flows.append(frozen(FlowFigures, fields))
            claimed += max(size, elements // 8)
        grown = dict(vars(now))
        for name in _LINK_NUMBERS:
            value = grown[name] - earlier[name]
            if isinstance(value, float):
                grown[name] = min(max(0.0, value), passed)
            else:
                grown[name] = value = _within(value, most)
                claimed = max(claimed, value)
        grown["flows"] = tuple(flows)
        grown["path"] = _known_path(now.path)
        grown["not_together"] = now.not_together if now.not_together in NOT_TOGETHER else ""
        return grown, claimed


_LINK_NUMBERS = counters_of(LinkFigures).numbers
_OF_STAGE = tuple(vars(StageFigures()))
_NO_LINK = LinkFigures()
_NO_FLOW = FlowFigures(direction=Direction.ACTIVATION, codec="")
_known_path = lru_cache(maxsize=1024)(known_path)


@lru_cache(maxsize=65_536)
def _keys(sender: Place, receiver: Place) -> tuple[LinkKey, LinkKey]:
    """The keys of both directions of a link. They are cached, because the same ones occur in every step."""
    return (sender, receiver), (receiver, sender)


@lru_cache(maxsize=65_536)
def _unused(sender: Place, receiver: Place) -> LinkFigures:
    """A link on which nothing was counted."""
    (source_replica, source), (target_replica, target) = sender, receiver
    return LinkFigures(
        source=source, target=target, source_replica=source_replica, target_replica=target_replica
    )


def _within(grown: int, most: float) -> int:
    """The growth of a counter, clamped to between 0 and `most`."""
    if grown <= 0:
        return 0
    return grown if grown <= most else int(max(0.0, most))
