"""Plans which node hosts which stage, and how many blocks each gets, from measured speeds and lines. All
functions are pure.

A pipeline's pace is the time of its slowest part for a microbatch: a stage's compute, or a tensor on its
line. So nodes that share a slow line should not be neighbours, and a slow node should get few blocks. Of
orders with the same pace, the best is the one whose lines add least to a step's fill and drain.

The search starts from greedy chains, one from each node, and improves the best few by the whole step's lower
bound. An exact program over subsets of nodes makes steps only 0.3 % shorter on average, so there is none
(`scripts/results/order_planners.json`). `rows_of` plans several rows of many nodes.

A plan believes the measurements. Before a stage moves, `pays` requires that a step becomes a tenth shorter
and that this pays for the move.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from node.schedule.floor import LinkRate, PipelineStep
from wire.errors import ConfigError

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The measurements of n nodes, in one order."""

    block_seconds: tuple[float, ...]
    """The seconds of a block's forward and backward for a microbatch, for each node."""
    most_blocks: tuple[int, ...]
    """The most blocks that fit in each node's memory."""
    rate: Matrix
    """[n, n] bytes per second from one node to another. The diagonal is not used."""
    latency: Matrix
    """[n, n] seconds in one direction."""

    @property
    def count(self) -> int:
        return len(self.block_seconds)

    def only(self, chosen: Sequence[int]) -> "Machines":
        square = np.ix_(chosen, chosen)
        return Machines(
            block_seconds=tuple(self.block_seconds[machine] for machine in chosen),
            most_blocks=tuple(self.most_blocks[machine] for machine in chosen),
            rate=self.rate[square],
            latency=self.latency[square],
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a pipeline computes and sends for a microbatch."""

    stages: int
    blocks: int
    activation_bytes: float
    gradient_bytes: float
    microbatches: int
    head_blocks: float = 0.0
    """The blocks that the head adds to the last stage."""
    slices: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= self.blocks:
            raise ConfigError(f"{self.blocks} blocks cannot be split over {self.stages} stages")


@dataclass(frozen=True, kw_only=True)
class StageOrder:
    """A row: which node hosts each stage, by its index in `Machines`, and each stage's number of blocks."""

    nodes: tuple[int, ...]
    split: tuple[int, ...]


class _Lines:
    """The lines of all pairs: how long a tensor takes in the slower direction of a link, and what the link
    adds to fill and drain."""

    def __init__(self, machines: Machines, work: Work) -> None:
        with np.errstate(divide="ignore"):
            there = work.activation_bytes / machines.rate
            back = work.gradient_bytes / machines.rate.T
        self.busy: Matrix = np.maximum(there, back)
        self.fill: Matrix = (there + back) / work.slices + machines.latency + machines.latency.T
        for matrix in (self.busy, self.fill):
            np.fill_diagonal(matrix, np.inf)


def split_by_speed(machines: Machines, nodes: Sequence[int], work: Work) -> tuple[int, ...] | None:
    """The blocks of each stage that make the slowest stage as fast as possible; None if they do not fit.

    Each block goes to the stage that would finish first with it, which minimizes the maximum.
    """
    counts = [1] * len(nodes)
    extra = [0.0] * (len(nodes) - 1) + [work.head_blocks]
    if any(machines.most_blocks[node] < 1 for node in nodes):
        return None
    for _ in range(work.blocks - len(nodes)):
        able = [k for k, node in enumerate(nodes) if counts[k] < machines.most_blocks[node]]
        if not able:
            return None
        stage = min(able, key=lambda k: (machines.block_seconds[nodes[k]] * (counts[k] + 1 + extra[k]), k))
        counts[stage] += 1
    return tuple(counts)


def step_seconds(machines: Machines, order: StageOrder, work: Work) -> float:
    """The lower bound of a step in seconds (`node.schedule.floor`). A block's backward is assumed to take
    twice its forward."""
    blocks = [count + (0.0, work.head_blocks)[k == work.stages - 1] for k, count in enumerate(order.split)]
    seconds = [machines.block_seconds[node] * count for node, count in zip(order.nodes, blocks, strict=True)]
    return (
        PipelineStep(
            microbatches=work.microbatches,
            slices=work.slices,
            forward=tuple(whole / 3 for whole in seconds),
            backward=tuple(2 * whole / 3 for whole in seconds),
            activation_bytes=work.activation_bytes,
            gradient_bytes=work.gradient_bytes,
            links=tuple(
                LinkRate(
                    up=float(machines.rate[a, b]),
                    down=float(machines.rate[b, a]),
                    latency=float(machines.latency[a, b] + machines.latency[b, a]) / 2,
                )
                for a, b in pairwise(order.nodes)
            ),
        )
        .floor()
        .seconds
    )


def plan_order(machines: Machines, work: Work) -> StageOrder | None:
    """A row of `work.stages` of these nodes with a short step; None if no fitting row was found."""
    if machines.count < work.stages:
        return None
    search = _Search(machines, work)
    return search.best_of(search.greedy(first) for first in range(machines.count))


def rows_of(machines: Machines, work: Work, rows: int) -> list[StageOrder]:
    """Up to `rows` rows of different nodes.

    Each row takes the best of the nodes that are left. Then rows exchange nodes while that makes the slowest
    row faster.
    """
    left = list(range(machines.count))
    planned: list[StageOrder] = []
    while len(planned) < rows:
        order = plan_order(machines.only(left), work)
        if order is None:
            break
        nodes = tuple(left[place] for place in order.nodes)
        planned.append(StageOrder(nodes=nodes, split=order.split))
        left = [node for node in left if node not in nodes]
    return _evened(machines, work, planned)


def _evened(machines: Machines, work: Work, rows: list[StageOrder]) -> list[StageOrder]:
    """The rows after exchanges. An exchange must make the slowest row faster, and the other must stay faster
    than it was."""
    if len(rows) < 2:
        return rows
    seconds = [step_seconds(machines, row, work) for row in rows]
    for _ in range(4 * len(rows)):
        worst = max(range(len(rows)), key=lambda row: seconds[row])
        if (better := _exchange(machines, work, rows, seconds, worst)) is None:
            break
        other, changed = better
        for row, order in zip((worst, other), changed, strict=True):
            rows[row], seconds[row] = order, step_seconds(machines, order, work)
    return rows


def _exchange(
    machines: Machines, work: Work, rows: list[StageOrder], seconds: list[float], worst: int
) -> tuple[int, tuple[StageOrder, StageOrder]] | None:
    """Another row's number, and the slowest row and that one after an exchange that leaves both at least
    0.1 % faster than the slowest was; None if there is none."""
    limit = seconds[worst] * (1 - 1e-3)
    for other in sorted(range(len(rows)), key=lambda row: seconds[row]):
        if other == worst:
            continue
        for mine in rows[worst].nodes:
            for other_node in rows[other].nodes:
                # They take each other's places. To order both rows anew for every pair would take minutes.
                sets = [
                    tuple(other_node if node == mine else node for node in rows[worst].nodes),
                    tuple(mine if node == other_node else node for node in rows[other].nodes),
                ]
                changed = []
                for nodes in sets:
                    split = split_by_speed(machines, nodes, work)
                    if split is None:
                        break
                    row = StageOrder(nodes=nodes, split=split)
                    if step_seconds(machines, row, work) > limit:
                        break
                    changed.append(row)
                if len(changed) == len(sets):
                    return other, (changed[0], changed[1])
    return None


class _Search:
    """Improves some chains by the whole step's lower bound. It depends on where the slowest stage is, because
    all stages before it are fill and drain of its work."""

    STARTS = 4
    """The number of chains that are improved."""
    TRIES = 1000
    """The most orders that are tried from each start."""
    FEW = 16
    """With at most this many stages any two may change places; with more, only those around the
    bottleneck."""

    def __init__(self, machines: Machines, work: Work) -> None:
        self._machines = machines
        self._work = work
        self._lines = _Lines(machines, work)

    def best_of(self, starts: Iterable[tuple[int, ...]]) -> StageOrder | None:
        """The best of these rows after improvement; None if none of them fits."""
        known = [order for nodes in starts if (order := self._with_split(nodes)) is not None]
        best = sorted(known, key=self._value)[: self.STARTS]
        return min(map(self._improved, best), key=self._value, default=None)

    def _with_split(self, nodes: Sequence[int]) -> StageOrder | None:
        split = split_by_speed(self._machines, nodes, self._work)
        return None if split is None else StageOrder(nodes=tuple(nodes), split=split)

    def _value(self, order: StageOrder) -> float:
        return step_seconds(self._machines, order, self._work)

    def greedy(self, first: int) -> tuple[int, ...]:
        """A chain from a node that always continues with the nearest fast node."""
        work, lines, machines = self._work, self._lines, self._machines
        even = work.blocks / work.stages
        speed = np.array(machines.block_seconds) * even
        chain, left = [first], set(range(machines.count)) - {first}
        while len(chain) < work.stages:
            last = chain[-1]
            busy = np.maximum(lines.busy[last], speed)
            node = min(left, key=lambda candidate: (busy[candidate], lines.fill[last, candidate], candidate))
            chain.append(node)
            left.remove(node)
        return tuple(chain)

    def _improved(self, order: StageOrder) -> StageOrder:
        """Reverse, move and replace around the bottleneck while that helps."""
        value, tries = self._value(order), 0
        better = True
        while better and tries < self.TRIES:
            better = False
            for nodes in self._neighbours(order.nodes):
                tries += 1
                other = self._with_split(nodes)
                if other is not None and (other_value := self._value(other)) < value * (1 - 1e-9):
                    order, value, better = other, other_value, True
                    break
        return order

    def _neighbours(self, nodes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Orders that differ near this one's slowest line or stage, and reversals of its parts."""
        lines, work = self._lines, self._work
        n = len(nodes)
        links = [float(lines.busy[a, b]) for a, b in pairwise(nodes)]
        weak = max(range(n - 1), key=lambda k: links[k]) if n > 1 else 0
        slow = max(range(n), key=lambda k: self._machines.block_seconds[nodes[k]])
        spares = [node for node in range(self._machines.count) if node not in nodes]
        spares.sort(key=lambda spare: self._machines.block_seconds[spare])
        orders = []
        around = range(n) if n <= self.FEW else dict.fromkeys((weak, min(weak + 1, n - 1), slow))
        for place in around:
            orders += [(*nodes[:place], spare, *nodes[place + 1 :]) for spare in spares]
            for other in range(n):
                swapped = list(nodes)
                swapped[place], swapped[other] = swapped[other], swapped[place]
                orders.append(tuple(swapped))
                rest = [*nodes[:place], *nodes[place + 1 :]]
                orders.append((*rest[:other], nodes[place], *rest[other:]))
        for a in range(n):
            orders += [(*nodes[:a], *reversed(nodes[a:b]), *nodes[b:]) for b in range(a + 2, n + 1)]
        assert work.stages == n, "a row has all stages"
        return [order for order in orders if order != nodes]
