"""What is known of a run's nodes and of the lines between them, and how far it is believed. Pure.

A node says at join how long a block takes it, and while it trains how long its passes took. Neither is taken
on trust. A step's seconds are the coordinator's own: where the reports of a row explain them, its nodes are
as fast as they say. Where they do not, somebody is slower than it says: nodes that were never part of a step
that was explained are then believed to be as slow as that step. So a node that claims to be fast can get one
stage by it and nothing else: blocks move by what steps have shown (`Speeds.is_known`).

Nobody measures all pairs. What is not known of a line follows from the two nodes' other lines: what a
volunteer's own line carries is mostly what binds.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from node.tuning.stage_order import Machines, StageOrder, Work, step_seconds

REMEMBERED_STEPS = 20
"""A node is as fast as in the median of so many steps."""
LEAST_STEPS = 10
"""Steps of a placement before what they took is known."""
EXPLAINED = 0.5
"""Reports explain a step if its floor by them is at least this share of it: schedules waste some."""
USUAL_RATE = 12.5e6
"""Bytes a second of a line of which nothing is known: 100 Mbit/s."""
USUAL_TRIP = 0.05
"""Its round trip in seconds."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One direction between two nodes."""

    rate: float
    """Bytes a second."""
    round_trip: float
    """Seconds."""


@dataclass
class _Node:
    claimed: float = 0.0
    shown: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    is_known: bool = False
    download: float = 0.0


class Speeds:
    """By node: seconds of a block forward and backward, a microbatch."""

    def __init__(self, known: Mapping[str, float] | None = None) -> None:
        """`known`: of nodes that earlier steps of the run have shown."""
        self._nodes: dict[str, _Node] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        for node, seconds in (known or {}).items():
            one = self._node(node)
            one.shown.append(seconds)
            one.is_known = True

    def _node(self, node: str) -> _Node:
        return self._nodes.setdefault(node, _Node())

    def claimed(self, node: str, seconds: float) -> None:
        """A node has measured itself."""
        self._node(node).claimed = seconds

    def downloads(self, node: str, rate: float) -> None:
        """Bytes a second that came to a node from the coordinator; 0: not known."""
        self._node(node).download = rate

    def line(self, source: str, target: str, line: Line) -> None:
        """One direction was measured; the newest measurement counts."""
        if line.rate > 0:
            self._lines[source, target] = line

    def step(
        self, order: Sequence[str], blocks: Sequence[float], said: Sequence[float], seconds: float, work: Work
    ) -> bool:
        """A row's part in a step; whether what its nodes say explains it.

        Args:
            order: the row's nodes, by stage.
            blocks: of each stage, the head's share included.
            said: seconds that each stage's passes of a microbatch took.
            seconds: of the step, at the coordinator.
        """
        # No stage computes for longer than the step.
        most = seconds / work.microbatches
        each = [min(one, most) / count for one, count in zip(said, blocks, strict=True)]
        machines = self._of(order, each, [work.blocks] * len(order))
        split = (*map(round, blocks[:-1]), round(blocks[-1] - work.head_blocks))
        order_of_it = StageOrder(nodes=tuple(range(len(order))), split=split)
        explained = step_seconds(machines, order_of_it, work) >= EXPLAINED * seconds
        slowest = seconds / (work.microbatches + (work.stages - 1) / work.slices)
        for node, mine, count in zip(order, each, blocks, strict=True):
            known = self._node(node)
            if explained:
                if not known.is_known:
                    known.shown.clear()  # what it was suspected of
                known.is_known = True
                known.shown.append(mine)
            elif not known.is_known:
                known.shown.append(slowest / count)
        return explained

    def is_known(self, nodes: Sequence[str]) -> bool:
        """Whether steps have shown how fast all of these are."""
        return all(node in self._nodes and self._nodes[node].is_known for node in nodes)

    def block_seconds(self, node: str) -> float | None:
        """As steps have shown, else as the node says; None if nothing is known."""
        known = self._nodes.get(node)
        if known is None:
            return None
        if known.shown:
            return max(median(known.shown), 0.0 if known.is_known else known.claimed)
        return known.claimed or None

    def shown(self) -> dict[str, float]:
        """What steps have shown, for the record."""
        return {node: median(one.shown) for node, one in self._nodes.items() if one.is_known and one.shown}

    def text(self, pairs: int) -> str:
        """What so many measured pairs are, for the operator."""
        rates = [8e-6 * line.rate for line in self._lines.values()]
        claims = [1000 * node.claimed for node in self._nodes.values() if node.claimed > 0]
        lines = f"{pairs} {'line' if pairs == 1 else 'lines'} between nodes measured"
        text = f"{lines}: {min(rates):.0f} to {max(rates):.0f} Mbit/s"
        return f"{text}; a block takes them {min(claims):.3g} to {max(claims):.3g} ms" if claims else text

    def machines(self, nodes: Sequence[str], most_blocks: Sequence[int]) -> Machines:
        """These nodes, of which `block_seconds` is known, as a plan takes them."""
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
