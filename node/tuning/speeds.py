"""What is known about the speed of a run's nodes and of the lines between them, and how far it is believed.
All functions are pure.

A node reports how long a block takes when it joins, and how long its passes took while it trains. Neither is
trusted. A step's seconds are measured by the coordinator. If the reports of a row explain them, its nodes are
as fast as they report. If not, some node is slower than it reports: then nodes that were never part of an
explained step count as slow as that step implies. So a node that claims to be fast can get one stage by it
and nothing else, because blocks move only by what steps have shown (`Speeds.is_known`).

Nobody measures all pairs. An unmeasured line is estimated from the two nodes' other lines, because a node's
own Internet line is mostly the bottleneck.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from node.tuning.stage_order import Machines, StageOrder, Work, step_seconds

REMEMBERED_STEPS = 20
"""A node's speed is the median of this many steps."""
LEAST_STEPS = 10
"""The steps of a placement before its step time counts as known."""
EXPLAINED = 0.5
"""Reports explain a step if the lower bound by them is at least this share of it. Schedules waste some
time."""
USUAL_RATE = 12.5e6
"""The assumed bytes per second of an unknown line: 100 Mbit/s."""
USUAL_TRIP = 0.05
"""The assumed round trip of an unknown line, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One direction of a line between two nodes."""

    rate: float
    """Bytes per second."""
    round_trip: float
    """Seconds."""


@dataclass
class _Node:
    claimed: float = 0.0
    shown: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    is_known: bool = False
    download: float = 0.0


class Speeds:
    """The speeds of nodes: by node, the seconds of a block's forward and backward for a microbatch."""

    def __init__(self, known: Mapping[str, float] | None = None) -> None:
        """`known` are the block seconds of nodes that earlier steps of the run have shown."""
        self._nodes: dict[str, _Node] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        for node, seconds in (known or {}).items():
            entry = self._node(node)
            entry.shown.append(seconds)
            entry.is_known = True

    def _node(self, node: str) -> _Node:
        return self._nodes.setdefault(node, _Node())

    def claimed(self, node: str, seconds: float) -> None:
        """Record a node's measurement of itself, in seconds."""
        self._node(node).claimed = seconds

    def downloads(self, node: str, rate: float) -> None:
        """Record the rate at which a node received data from the coordinator, in bytes per second; 0 if
        unknown."""
        self._node(node).download = rate

    def line(self, source: str, target: str, line: Line) -> None:
        """Record the measurement of one direction. The newest measurement counts."""
        if line.rate > 0:
            self._lines[source, target] = line

    def step(
        self,
        order: Sequence[str],
        blocks: Sequence[float],
        reported: Sequence[float],
        seconds: float,
        work: Work,
    ) -> bool:
        """Record a row's part in a step. Returns whether the reports of its nodes explain it.

        Args:
            order: the row's nodes, by stage.
            blocks: the blocks of each stage, including the head's share.
            reported: the seconds that each stage's passes of a microbatch took.
            seconds: the step's seconds, at the coordinator.
        """
        # No stage computes for longer than the step.
        most = seconds / work.microbatches
        each = [min(own_seconds, most) / count for own_seconds, count in zip(reported, blocks, strict=True)]
        machines = self._of(order, each, [work.blocks] * len(order))
        split = (*map(round, blocks[:-1]), round(blocks[-1] - work.head_blocks))
        order_of_it = StageOrder(nodes=tuple(range(len(order))), split=split)
        explained = step_seconds(machines, order_of_it, work) >= EXPLAINED * seconds
        slowest = seconds / (work.microbatches + (work.stages - 1) / work.slices)
        for node, mine, count in zip(order, each, blocks, strict=True):
            known = self._node(node)
            if explained:
                if not known.is_known:
                    known.shown.clear()  # it only had the suspected times
                known.is_known = True
                known.shown.append(mine)
            elif not known.is_known:
                known.shown.append(slowest / count)
        return explained

    def is_known(self, nodes: Sequence[str]) -> bool:
        """Whether steps have shown how fast all of these nodes are."""
        return all(node in self._nodes and self._nodes[node].is_known for node in nodes)

    def block_seconds(self, node: str) -> float | None:
        """A node's seconds of a block as steps have shown, else as it reports; None if nothing is known."""
        known = self._nodes.get(node)
        if known is None:
            return None
        if known.shown:
            return max(median(known.shown), 0.0 if known.is_known else known.claimed)
        return known.claimed or None

    def shown(self) -> dict[str, float]:
        """The times that steps have shown, for the record."""
        known = {node: entry for node, entry in self._nodes.items() if entry.is_known}
        return {node: median(entry.shown) for node, entry in known.items() if entry.shown}

    def text(self, pairs: int) -> str:
        """A summary of this many measured pairs for the operator."""
        rates = [8e-6 * line.rate for line in self._lines.values()]
        claims = [1000 * node.claimed for node in self._nodes.values() if node.claimed > 0]
        lines = f"{pairs} {'line' if pairs == 1 else 'lines'} between nodes measured"
        text = f"{lines}: {min(rates):.0f} to {max(rates):.0f} Mbit/s"
        return f"{text}; a block takes them {min(claims):.3g} to {max(claims):.3g} ms" if claims else text

    def machines(self, nodes: Sequence[str], most_blocks: Sequence[int]) -> Machines:
        """These nodes as input of a plan. An unknown block time counts as the median of the known ones."""
        seconds = [self.block_seconds(node) for node in nodes]
        usual = median([known for known in seconds if known] or [1.0])
        return self._of(nodes, [known or usual for known in seconds], most_blocks)

    def _of(self, nodes: Sequence[str], seconds: Sequence[float], most_blocks: Sequence[int]) -> Machines:
        sent: dict[str, list[float]] = {}
        got: dict[str, list[float]] = {}
        for (source, target), line in self._lines.items():
            sent.setdefault(source, []).append(line.rate)
            got.setdefault(target, []).append(line.rate)
        sends = [median(sent[node]) if node in sent else self._download(node) for node in nodes]
        gets = [median(got[node]) if node in got else self._download(node) for node in nodes]
        trips = [line.round_trip for line in self._lines.values()]
        trip = median(trips) if trips else USUAL_TRIP
        rate = np.minimum(np.array(sends)[:, None], np.array(gets)[None, :])
        latency = np.full_like(rate, trip / 2)
        at = {node: k for k, node in enumerate(nodes)}
        for (source, target), line in self._lines.items():
            if source in at and target in at:
                pair = at[source], at[target]
                rate[pair], latency[pair] = line.rate, line.round_trip / 2
        return Machines(
            block_seconds=tuple(seconds), most_blocks=tuple(most_blocks), rate=rate, latency=latency
        )

    def _download(self, node: str) -> float:
        known = self._nodes.get(node)
        return known.download if known is not None and known.download > 0 else USUAL_RATE
