"""Decide from measurements who hosts which stage, and how many blocks each gets. Pure.

What is planned is a whole grid: rows of nodes, and one split for all rows, whose stages must hold the same
blocks. Until steps have shown how fast a node is it gets no more blocks than an even share, and a grid with
such nodes has the present split. A plan is worth a move only if the step gets shorter by a tenth of what the
coordinator measured, and pays back what the move takes (`node.tuning.decisions.pays`).

A node could say that the line to its neighbour is slow, to have another neighbour. Steps that are far shorter
than such a line allows show that it is not so: then the lines in use count as no bottleneck.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from node.tuning.decisions import pays
from node.tuning.speeds import Speeds
from node.tuning.stage_order import (
    Machines,
    StageOrder,
    Work,
    plan_order,
    rows_of,
    split_by_speed,
    step_seconds,
)
from wire.errors import ConfigError

MOST_GROWTH = 2
"""A stage gets at most so many times the blocks that it has, in one move."""
RESTART_SECONDS = 20.0
"""What a move takes beside the state: a snapshot, and all nodes come back."""
CONTRADICTED = 1.5
"""The lower bound from reports is this many times as long as the step was: some report makes a node or a line
slower than it is."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """`hosts` row after row; `split` holds the blocks of each stage."""

    hosts: tuple[str, ...]
    split: tuple[int, ...]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        stages = len(self.split)
        return [self.hosts[first : first + stages] for first in range(0, len(self.hosts), stages)]


@dataclass(frozen=True, kw_only=True)
class PlacePlan:
    """A decision, as it goes on record."""

    grid: Grid
    now_seconds: float
    """Measured seconds of a step before the move."""
    then_seconds: float
    """Planned seconds of a step after the move."""
    shown: dict[str, float] = field(default_factory=dict)
    """Seconds of a block on each node that steps have shown."""

    def to_json(self) -> str:
        """One line, for the run's database."""
        return json.dumps(
            {
                "hosts": self.grid.hosts,
                "split": self.grid.split,
                "now_seconds": self.now_seconds,
                "then_seconds": self.then_seconds,
                "shown": self.shown,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "PlacePlan":
        """Raises ConfigError for what is no plan."""
        try:
            found = json.loads(text)
            return cls(
                grid=Grid(
                    hosts=tuple(map(str, found["hosts"])),
                    split=tuple(int(count) for count in found["split"]),
                ),
                now_seconds=float(found["now_seconds"]),
                then_seconds=float(found["then_seconds"]),
                shown={str(node): float(seconds) for node, seconds in found["shown"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the plan of places is damaged ({error})") from None

    def text(self, before: Grid) -> str:
        """What changes, for the operator."""
        what = []
        if self.grid.hosts != before.hosts:
            moved = sum(a != b for a, b in zip(self.grid.hosts, before.hosts, strict=False))
            what.append(f"{moved} of {len(self.grid.hosts)} places change hands")
        if self.grid.split != before.split:
            now, then = (",".join(map(str, grid.split)) for grid in (before, self.grid))
            what.append(f"blocks by stage are {then} instead of {now}")
        return (
            f"{' and '.join(what)}: by what was measured a step takes {self.then_seconds:.2f} s instead of "
            f"{self.now_seconds:.2f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Volunteer:
    """A node that could host a stage."""

    node_id: str
    most_blocks: int
    """That its memory holds."""


def plan_places(
    speeds: Speeds,
    here: Sequence[Volunteer],
    work: Work,
    now: Grid,
    *,
    measured: float,
    move_seconds: float,
    steps_left: int,
    fits: Callable[[Grid], bool] = lambda grid: True,
) -> PlacePlan | None:
    """A better grid of as many rows and stages, if there is one that pays.

    Args:
        here: all that could host, the present hosts among them.
        work: of a row.
        measured: seconds of a step now; 0 before one was done, when the plans' own seconds count.
        move_seconds: what a move takes.
        fits: whether a grid's stages fit in its nodes' memory.
    """
    nodes = [node.node_id for node in here]
    if not set(now.hosts) <= set(nodes):
        return None  # somebody is gone: the next placement comes anyway
    shares = dict(zip(now.hosts, now.split * len(now.rows), strict=True))
    even = -(-work.blocks // work.stages)
    most = []
    for node in here:
        room = MOST_GROWTH * shares.get(node.node_id, even) if speeds.is_known([node.node_id]) else even
        most.append(max(shares.get(node.node_id, 0), min(node.most_blocks, room)))
    machines = speeds.machines(nodes, most)
    at = {node: k for k, node in enumerate(nodes)}
    rows = [StageOrder(nodes=tuple(at[node] for node in row), split=now.split) for row in now.rows]
    before = max(step_seconds(machines, row, work) for row in rows)
    if measured and before > CONTRADICTED * measured:
        machines = _free_lines(machines, rows)
        before = max(step_seconds(machines, row, work) for row in rows)
    best: tuple[float, Grid] | None = None
    known = {at[node] for node in nodes if speeds.is_known([node])}
    for planned in _plans(machines, work, rows, known):
        seconds = max(step_seconds(machines, row, work) for row in planned)
        grid = Grid(hosts=tuple(nodes[node] for row in planned for node in row.nodes), split=planned[0].split)
        if grid != now and (best is None or seconds < best[0]) and fits(grid):
            best = seconds, grid
    if best is None or before <= 0:
        return None
    seconds, grid = best
    length = measured or before
    # No step is shorter than its floor.
    then = max(seconds, length * seconds / before)
    if not pays(length - then, length, cost=move_seconds, steps_left=steps_left):
        return None
    return PlacePlan(grid=grid, now_seconds=length, then_seconds=then, shown=speeds.shown())


def _free_lines(machines: Machines, rows: Sequence[StageOrder]) -> Machines:
    """The same with lines between the rows' neighbours as fast as can be."""
    rate, latency = machines.rate.copy(), machines.latency.copy()
    for row in rows:
        for one, other in pairwise(row.nodes):
            for pair in ((one, other), (other, one)):
                rate[pair], latency[pair] = np.inf, 0.0
    return replace(machines, rate=rate, latency=latency)


def _plans(
    machines: Machines, work: Work, now: Sequence[StageOrder], known: Collection[int]
) -> list[list[StageOrder]]:
    """Grids to choose from: by lines and speeds, by lines alone, and the nodes as they are with other
    blocks. The split is the present one where not all nodes are `known`."""
    # With the present split all stages wait for the slowest node, and only lines count.
    alike = replace(machines, block_seconds=(max(machines.block_seconds),) * machines.count)
    found: list[list[StageOrder]] = [list(now)]
    for kind in (machines, alike):
        if len(now) == 1:
            order = plan_order(kind, work)
            rows = [] if order is None else [order]
        else:
            rows = rows_of(kind, work, len(now))
        if len(rows) == len(now):
            found.append(rows)
    kept = [[StageOrder(nodes=row.nodes, split=now[0].split) for row in rows] for rows in found]
    shown = [rows for rows in found if all(node in known for row in rows for node in row.nodes)]
    return kept + [evened for rows in shown if (evened := _one_split(machines, work, rows)) is not None]


def _one_split(machines: Machines, work: Work, rows: Sequence[StageOrder]) -> list[StageOrder] | None:
    """The same nodes with one split for all rows, as their slowest nodes take it; None if none fits."""
    columns = list(zip(*(row.nodes for row in rows), strict=True))
    slowest = replace(
        machines.only([column[0] for column in columns]),
        block_seconds=tuple(max(machines.block_seconds[node] for node in column) for column in columns),
        most_blocks=tuple(min(machines.most_blocks[node] for node in column) for column in columns),
    )
    split = split_by_speed(slowest, range(work.stages), work)
    if split is None:
        return None
    return [StageOrder(nodes=row.nodes, split=split) for row in rows]
