"""Decides from measurements which node hosts which stage, and how many blocks each stage gets. All functions
are pure.

A plan covers a whole grid: rows of nodes, and one split for all rows, because the stages of all rows must
hold the same blocks. Until steps have shown how fast a node is, it gets no more blocks than an even share,
and a grid with such nodes keeps the present split. A plan is worth a move only if a step becomes shorter by a
tenth of the coordinator's measurement, and if that pays for the move (`node.tuning.decisions.pays`).

A node could report a slow line to its neighbour in order to get another neighbour. Steps that are much
shorter than such a line would allow refute the report. Then the lines in use are not considered a bottleneck.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from node.telemetry.events import read_value
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
from wire.errors import ConfigError, ProtocolViolationError

MOST_GROWTH = 2
"""The factor by which a stage's blocks may grow in one move."""
RESTART_SECONDS = 20.0
"""The seconds that a move takes besides transferring state: for a snapshot, and for all nodes to return."""
CONTRADICTED = 1.5
"""If the lower bound from reports is this many times as long as the step was, some report makes a node or a
line slower than it is."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """`hosts` are the nodes row after row; `split` has the number of blocks of each stage."""

    hosts: tuple[str, ...]
    split: tuple[int, ...]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        stages = len(self.split)
        return [self.hosts[first : first + stages] for first in range(0, len(self.hosts), stages)]


@dataclass(frozen=True, kw_only=True)
class PlacePlan:
    """A decision in the form in which it is recorded."""

    grid: Grid
    now_seconds: float
    """The measured seconds of a step before the move."""
    then_seconds: float
    """The planned seconds of a step after the move."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """The seconds of a block on each node, as steps have shown."""

    def to_json(self) -> str:
        """One line, for the run's database."""
        fields = {**vars(self), **vars(self.grid)}
        del fields["grid"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "PlacePlan":
        """The plan in a line of `to_json`.

        Raises:
            ConfigError: this is no plan.
        """
        try:
            fields = json.loads(text)
            plan: PlacePlan = read_value({**fields, "grid": fields}, cls, "plan")
        except (ValueError, TypeError, RecursionError, ProtocolViolationError) as error:
            raise ConfigError(f"the plan of places is damaged ({error})") from None
        return plan

    def text(self, before: Grid) -> str:
        """A description of the change for the operator."""
        changes = []
        if self.grid.hosts != before.hosts:
            moved = sum(a != b for a, b in zip(self.grid.hosts, before.hosts, strict=False))
            changes.append(f"{moved} of {len(self.grid.hosts)} places change hands")
        if self.grid.split != before.split:
            now, then = (",".join(map(str, grid.split)) for grid in (before, self.grid))
            changes.append(f"blocks by stage are {then} instead of {now}")
        return (
            f"{' and '.join(changes)}: by what was measured a step takes {self.then_seconds:.2f} s "
            f"instead of {self.now_seconds:.2f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Volunteer:
    """A node that could host a stage."""

    node_id: str
    most_blocks: int
    """The most blocks that fit in its memory."""


def plan_places(
    speeds: Speeds,
    candidates: Sequence[Volunteer],
    work: Work,
    now: Grid,
    *,
    measured: float,
    move_seconds: float,
    steps_left: int,
    fits: Callable[[Grid], bool] = lambda grid: True,
) -> PlacePlan | None:
    """A better grid with as many rows and stages, if there is one that pays; else None.

    Args:
        candidates: all nodes that could host a stage, including the present hosts.
        work: the work of a row.
        measured: the seconds of a step now. 0 before the first step; then the planner's own estimate is used.
        move_seconds: the seconds that a move takes.
        fits: whether a grid's stages fit in its nodes' memory.
    """
    nodes = [node.node_id for node in candidates]
    if not set(now.hosts) <= set(nodes):
        return None  # a node has left, so there will be a new placement anyway
    shares = dict(zip(now.hosts, now.split * len(now.rows), strict=True))
    even = -(-work.blocks // work.stages)
    most = []
    for node in candidates:
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
    # No step is shorter than its lower bound.
    then = max(seconds, length * seconds / before)
    if not pays(length - then, length, cost=move_seconds, steps_left=steps_left):
        return None
    return PlacePlan(grid=grid, now_seconds=length, then_seconds=then, shown=speeds.shown())


def _free_lines(machines: Machines, rows: Sequence[StageOrder]) -> Machines:
    """The same machines with infinitely fast lines between neighbours in these rows."""
    rate, latency = machines.rate.copy(), machines.latency.copy()
    for row in rows:
        for left, right in pairwise(row.nodes):
            for pair in ((left, right), (right, left)):
                rate[pair], latency[pair] = np.inf, 0.0
    return replace(machines, rate=rate, latency=latency)


def _plans(
    machines: Machines, work: Work, now: Sequence[StageOrder], known: Collection[int]
) -> list[list[StageOrder]]:
    """The grids to choose from: by lines and speeds, by lines only, and the present nodes with other blocks.
    Grids in which not all nodes are `known` keep the present split."""
    # With the present split all stages wait for the slowest node, so only lines count.
    alike = replace(machines, block_seconds=(max(machines.block_seconds),) * machines.count)
    grids: list[list[StageOrder]] = [list(now)]
    for kind in (machines, alike):
        if len(now) == 1:
            order = plan_order(kind, work)
            rows = [] if order is None else [order]
        else:
            rows = rows_of(kind, work, len(now))
        if len(rows) == len(now):
            grids.append(rows)
    kept = [[StageOrder(nodes=row.nodes, split=now[0].split) for row in rows] for rows in grids]
    shown = [rows for rows in grids if all(node in known for row in rows for node in row.nodes)]
    return kept + [evened for rows in shown if (evened := _one_split(machines, work, rows)) is not None]


def _one_split(machines: Machines, work: Work, rows: Sequence[StageOrder]) -> list[StageOrder] | None:
    """The same nodes with one split for all rows, by the slowest node of each stage; None if none fits."""
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
