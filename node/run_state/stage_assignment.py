"""Assigns the stages of the next epoch to nodes, and chooses what spares prefetch. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from node.config.schema import RunConfig
from node.model.shard_shapes import check_sizes
from node.run_state.grid import by_row, holders_by_stage
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import least_stage_bytes
from wire.errors import RunError

StageBytes = Callable[[int, Devices], Sequence[int]]
"""(stages, a node's devices) -> the bytes that each stage needs on every device, first stage first."""
Sharing = Callable[[Devices], str | None]
"""A node's devices -> why they cannot share the run's blocks or microbatches, or None."""
Remedies = Callable[[int, Devices, int], Sequence[str]]
"""(stages, a node's devices, bytes of each) -> settings of the run file with which they can host a stage."""
ONE = Devices()
_KINDS_REMEMBERED = 4096
"""The most needs that are remembered, by split and kind of devices: those of all nodes are asked for at every
placement, and a large model's take a tenth of a second each."""


def stage_needs(config: RunConfig, windows: int) -> StageBytes:
    """The least that a run's stages need on each kind of node. The newest few results are cached.

    Args:
        windows: the number of samples in one pass over the text.
    """

    @lru_cache(_KINDS_REMEMBERED)
    def needs(stages: int, devices: Devices) -> Sequence[int]:
        return least_stage_bytes(config, stages, devices, windows=windows)

    return needs


def sharing(config: RunConfig) -> Sharing:
    """Checks whether a node's devices can share a stage of this run."""

    def why_not(devices: Devices) -> str | None:
        try:
            check_sizes(config, devices.count, devices.tensor_parallel)
        except RunError as error:
            return str(error)
        return None

    return why_not


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A node that could host a stage. `memory_bytes` is the memory of its smallest device, 0 if unknown."""

    node_id: str
    memory_bytes: int
    devices: Devices = ONE
    kind: str = ""
    """What the bits of its results depend on, besides the number of devices."""
    flops: float = 0.0
    """Its measured operations per second in matrix products; 0 if unknown."""
    owner: str = ""
    """The name that its owner chose; "" if unknown."""


def assign(
    previous: Sequence[str | None],
    candidates: Sequence[Candidate],
    stages: int,
    stage_bytes: StageBytes,
    *,
    rows: int = 1,
    previous_rows: int = 1,
) -> tuple[str, ...] | None:
    """A grid of `rows` rows, one node for each place, or None if there is no such assignment.

    While the number of stages stays the same, nodes keep their stages, and complete rows stay together. When
    it changes, nodes keep their order along the pipeline. Newcomers fill the gaps in the order of arrival. No
    node gets a stage that does not fit in its memory. Nodes swap stages only if nothing else helps.
    """
    present = {candidate.node_id for candidate in candidates}
    needs = {devices: stage_bytes(stages, devices) for devices in {c.devices for c in candidates}}
    offers = [(c.node_id, c.memory_bytes, needs[c.devices]) for c in candidates]
    # Most stages need the same, so look once for all of them which nodes fit.
    kinds = list(needs.values())
    alike = [tuple(need[stage] for need in kinds) for stage in range(stages)]
    known = {
        kind: [node for node, memory, need in offers if memory == 0 or memory >= need[alike.index(kind)]]
        for kind in set(alike)
    }
    places = rows * stages
    fitting = [known[kind] for kind in alike] * rows
    sets = {kind: set(nodes) for kind, nodes in known.items()}
    able = [sets[kind] for kind in alike] * rows
    # A node that has a place keeps one, so nodes that were skipped once need not be checked again.
    left = {kind: iter(nodes) for kind, nodes in known.items()}
    waiting = [left[kind] for kind in alike] * rows
    taken: set[str] = set()
    wished: Sequence[str | None] = [node for node in previous if node in present]
    if len(previous) == previous_rows * stages:
        wished = by_row(holders_by_stage(previous, previous_rows, present), rows)
    hosts: list[str | None] = [None] * places
    for place, node in enumerate(wished[:places]):
        if node in able[place]:
            hosts[place] = node
            taken.add(node)
    for place in range(places):
        if hosts[place] is None:
            free = next((node for node in waiting[place] if node not in taken), None)
            if free is not None:
                hosts[place] = free
                taken.add(free)
            elif not _make_room(place, hosts, fitting, set()):
                return None
            else:
                taken = {node for node in hosts if node is not None}
    return tuple(node for node in hosts if node is not None)


def _make_room(
    place: int, hosts: list[str | None], fitting: Sequence[Sequence[str]], asked: set[str]
) -> bool:
    """Find a node for `place` by moving others (an augmenting path of bipartite matching)."""
    for node in fitting[place]:
        if node in asked:
            continue
        asked.add(node)
        held = hosts.index(node) if node in hosts else None
        if held is None or _make_room(held, hosts, fitting, asked):
            hosts[place] = node
            return True
    return False


def useless(
    candidate: Candidate,
    counts: Sequence[int],
    stage_bytes: StageBytes,
    why_not: Sharing,
    remedies: Remedies = lambda *_: (),
) -> str | None:
    """Why a node can host no stage: its devices cannot share one, or the smallest does not fit. None if it
    can host one.

    Args:
        counts: possible numbers of stages.
        why_not: as from `sharing`.
        remedies: returns what to change in the run file; without it, the advice is general.
    """
    # First, because there is no estimate if the devices cannot share evenly.
    if (line := why_not(candidate.devices)) is not None:
        return line
    if candidate.memory_bytes == 0:
        return None
    least, stages = min((need, count) for count in counts for need in stage_bytes(count, candidate.devices))
    if candidate.memory_bytes >= least:
        return None
    return (
        f"the smallest of {stages} stages needs an estimated {_mebibytes(least)}{_where(candidate.devices)}, "
        f"and this node offers {_mebibytes(candidate.memory_bytes)}: join with more memory (--max-memory, "
        "another --device, or --gpus N with --tensor-parallel T, which shares the blocks; for a GPU "
        "--max-host-memory), or let the run have "
        + (
            " or ".join(remedies(stages, candidate.devices, candidate.memory_bytes))
            or "fewer model.layers, more pipeline.stages, a smaller training.microbatch, storage.preset agoq "
            "or compact, or gradients and moments in fp8"
        )
    )


class StageAssigner:
    """Chooses the hosts of the next epoch. It remembers which node hosted which stage, and how long to wait
    for it."""

    def __init__(
        self,
        *,
        stages: int,
        min_stages: int,
        regroup_seconds: float,
        stage_bytes: StageBytes,
        sharing: Sharing = lambda _: None,
        remedies: Remedies = lambda *_: (),
        previous: Sequence[str] = (),
        most_rows: int = 1,
        previous_rows: int = 1,
        follows: bool = False,
    ) -> None:
        """
        Args:
            previous: the newest grid, row after row.
            most_rows: the most rows of the grid, if there are nodes for them.
            follows: whether nodes can follow the run and take empty seats during steps.
        """
        self.rows = previous_rows
        """The rows of the newest grid."""
        self._stages = stages
        self._min_stages = min_stages
        self.most_rows = most_rows
        self._follows = follows
        self._regroup_seconds = regroup_seconds
        self._stage_bytes = stage_bytes
        self._sharing = sharing
        self._remedies = remedies
        self._holders: list[str | None] = [node or None for node in previous]
        """The newest grid; None for a node that is gone for good."""
        self._regroup_at: float | None = None
        """When the stages of missing nodes are assigned to others, or the model is split over fewer nodes."""
        self._grows = False
        """Whether the next grid includes newcomers, because what they need is on disk."""
        self._told: str | None = None
        """The newest shortage that was reported since the last placement."""

    def vacate(self, node_id: str, now: float) -> bool:
        """The node is gone: its stage is free now, and the split stays for a while. False if it had none."""
        if node_id not in self._holders:
            return False
        self._holders = [None if node == node_id else node for node in self._holders]
        self._regroup_at = now + self._regroup_seconds
        return True

    def can_hand_over(self, node_id: str, candidates: Sequence[Candidate]) -> bool:
        """Whether `candidates` can host all stages without this node."""
        holders = self._without(node_id)
        others = [candidate for candidate in candidates if candidate.node_id != node_id]
        stages = len(holders) // self.rows
        return (
            self._kept(holders, others) is not None
            or assign(holders, others, stages, self._stage_bytes, previous_rows=self.rows) is not None
        )

    def _without(self, node_id: str) -> list[str | None]:
        return [None if node == node_id else node for node in self._holders]

    def hand_over(self, node_id: str, candidates: Sequence[Candidate], now: float) -> bool:
        """Free the stage of a connected node, if `candidates` can host all stages without it; else False."""
        if not self.can_hand_over(node_id, candidates):
            return False
        self._holders = holders = self._without(node_id)
        stages = len(holders) // self.rows
        # A split into fewer stages than required is planned again, perhaps immediately.
        self._regroup_at = now if stages < self._stages else now + self._regroup_seconds
        return True

    def take_back(self, node_id: str, stage: int, stages: int) -> None:
        """A node whose stage was free has it again, in any row where it still is."""
        if len(self._holders) % stages == 0 and None in (free := self._holders[stage::stages]):
            self._holders[stage + stages * free.index(None)] = node_id

    def can_exchange(self, first: str, other: str, candidates: Sequence[Candidate]) -> bool:
        """Whether each of two hosts fits in the other's place."""
        holders = self._exchanged(first, other)
        hosts = [candidate for candidate in candidates if candidate.node_id in holders]
        stages = len(holders) // self.rows
        grid = assign(holders, hosts, stages, self._stage_bytes, rows=self.rows, previous_rows=self.rows)
        return grid == tuple(holders)

    def exchange(self, first: str, other: str, candidates: Sequence[Candidate]) -> None:
        """Exchange two hosts' places in the next grid, if they fit there."""
        if self.can_exchange(first, other, candidates):
            self._holders = self._exchanged(first, other)

    def _exchanged(self, first: str, other: str) -> list[str | None]:
        places = {first: other, other: first}
        return [None if node is None else places.get(node, node) for node in self._holders]

    def regroup(self, now: float) -> None:
        """Let the number of stages change now, and let newcomers in."""
        self._regroup_at = now
        self._grows = True

    def excuse(self, seconds: float) -> None:
        """The coordinator received nothing for `seconds`: wait that much longer for missing nodes."""
        if self._regroup_at is not None:
            self._regroup_at += seconds

    def choose(self, candidates: Sequence[Candidate], now: float) -> tuple[str, ...] | None:
        """The hosts of the next epoch, row after row (`rows`), or None while the run must wait.

        While every stage has a node that held it in the newest grid, only such nodes are chosen: they
        continue from their state, while a newcomer would have to fetch an older state from disk. `regroup`
        lets newcomers in.

        Otherwise the grid has as many stages as the run requires, if possible; or else the same nodes as
        before; or else, once it is time to regroup, as many stages as there are nodes for. Call it again when
        a node arrives, and regularly.
        """
        present = {candidate.node_id for candidate in candidates}
        missing = [node for node in self._holders if node not in present]
        if candidates and missing and self._regroup_at is None:
            # The coordinator restarted, or a connection broke: give the hosts a moment to return.
            self._regroup_at = now + self._regroup_seconds
        due = self._regroup_at is not None and now >= self._regroup_at
        if any(node is not None for node in missing) and not due:
            return None
        if not self._grows and (kept := self._kept(self._holders, candidates)) is not None:
            return self._chosen(kept, self._stages)
        for stages in self._counts(len(candidates), due=due, whole=not missing):
            if (nodes := self._most(candidates, stages)) is not None:
                return self._chosen(nodes, stages)
        if len(candidates) >= self._stages and self._regroup_at is None:
            self._regroup_at = now + self._regroup_seconds
        return None

    def can_grow(self, stages: int, candidates: Sequence[Candidate], rows: int = 1) -> bool:
        """Whether these nodes could host more than `stages` stages, or more than `rows` rows of them."""
        most = min(self._stages, len(candidates))
        return any(
            assign((), candidates, more, self._stage_bytes) is not None
            for more in range(stages + 1, most + 1)
        ) or any(
            assign((), candidates, stages, self._stage_bytes, rows=more) is not None
            for more in range(rows + 1, self._row_limit(candidates, stages) + 1)
        )

    def holds(self, grid: Sequence[str]) -> bool:
        """Whether the next grid is to keep the hosts of this one, where "" is an empty seat."""
        return [node or "" for node in self._holders] == [*grid]

    def fillable_rows(self, candidates: Sequence[Candidate]) -> int:
        """How many rows the next grid could have if these nodes fill all seats but those of its hosts."""
        stages = len(self._holders) // self.rows
        spares = [candidate for candidate in candidates if candidate.node_id not in self._holders]
        empty = [place % stages for place, node in enumerate(self._holders) if node is None]
        for rows in range(self._row_limit(candidates, stages), self.rows, -1):
            if self._can_fill(empty + [*range(stages)] * (rows - self.rows), spares, stages):
                return rows
        return self.rows

    def _can_fill(self, empty: Sequence[int], spares: Sequence[Candidate], stages: int) -> bool:
        """Whether there is a node for each of these stages. Each gets the smallest that is left and fits."""
        left = sorted(spares, key=lambda spare: spare.memory_bytes or math.inf)
        for stage in empty:
            node = next((spare for spare in left if self.fits(spare, stage, stages)), None)
            if node is None:
                return False
            left.remove(node)
        return True

    def without_empty_rows(self) -> tuple[str, ...] | None:
        """The newest grid without its rows that have no node; None if each has one."""
        stages = len(self._holders) // self.rows
        rows = [self._holders[first : first + stages] for first in range(0, len(self._holders), stages)]
        kept = [row for row in rows if any(row)]
        return tuple(node or "" for row in kept for node in row) if len(kept) < len(rows) else None

    def fits(self, candidate: Candidate, stage: int, stages: int) -> bool:
        """Whether this stage of `stages` fits in a node's memory."""
        room = candidate.memory_bytes
        return room == 0 or room >= self._stage_bytes(stages, candidate.devices)[stage]

    def seat(self, node_id: str, place: int) -> None:
        """Put this node into an empty place of the newest grid, counted row after row."""
        self._holders[place] = node_id
        if None not in self._holders:
            self._regroup_at = None

    def take(self, grid: tuple[str, ...], stages: int) -> None:
        """Use this grid, row after row, for the next epoch."""
        self._chosen(grid, stages)

    def shortage(self, candidates: Sequence[Candidate]) -> str | None:
        """A line for the operator if there are enough nodes but not enough memory."""
        if len(candidates) < self._stages:
            return None
        if assign((), candidates, self._stages, self._stage_bytes) is not None:
            return None
        parts: list[str] = []
        for devices in dict.fromkeys(candidate.devices for candidate in candidates):
            wanted = ", ".join(map(_mebibytes, self._stage_bytes(self._stages, devices)))
            rooms = [f"{c.node_id} {_mebibytes(c.memory_bytes)}" for c in candidates if c.devices == devices]
            parts.append(
                f"the stages need {wanted}{_where(devices)} and the connected nodes have {', '.join(rooms)}"
            )
        return f"waiting for a node with more memory: {'; '.join(parts)}"

    def news(self, candidates: Sequence[Candidate]) -> str | None:
        """Like `shortage`, but each line only once."""
        line = self.shortage(candidates)
        if line is None or line == self._told:
            return None
        self._told = line
        return line

    def useless(self, candidate: Candidate) -> str | None:
        """Like the function `useless`, for this run's possible splits."""
        counts = range(self._min_stages, self._stages + 1)
        return useless(candidate, counts, self._stage_bytes, self._sharing, self._remedies)

    def _kept(self, holders: Sequence[str | None], candidates: Sequence[Candidate]) -> tuple[str, ...] | None:
        """The grid of nodes that held their stages in the newest one; None if a stage has none.

        Only where there may be several rows: a single row continues as `choose` describes.
        """
        if self.most_rows == 1 or len(holders) != self.rows * self._stages:
            return None
        by_stage = holders_by_stage(holders, self.rows, {c.node_id for c in candidates})
        rows = min(self.most_rows, *map(len, by_stage))
        if rows and self._follows:
            # Incomplete rows stay: their nodes hold the state, and seats are filled during steps.
            all_rows = min(self.most_rows, max(map(len, by_stage)))
            return tuple(node or "" for node in by_row(by_stage, all_rows))
        kept = set(by_row(by_stage, rows))
        stay = [candidate for candidate in candidates if candidate.node_id in kept]
        if rows == 0:
            return None
        return assign(holders, stay, self._stages, self._stage_bytes, rows=rows, previous_rows=self.rows)

    def _most(self, candidates: Sequence[Candidate], stages: int) -> tuple[str, ...] | None:
        """The grid with as many rows as these nodes can host."""
        for rows in range(self._row_limit(candidates, stages), 0, -1):
            grid = assign(
                self._holders,
                candidates,
                stages,
                self._stage_bytes,
                rows=rows,
                previous_rows=self.rows,
            )
            if grid is not None:
                return grid
        return None

    def _row_limit(self, candidates: Sequence[Candidate], stages: int) -> int:
        return max(1, min(self.most_rows, len(candidates) // stages))

    def _chosen(self, nodes: tuple[str, ...], stages: int) -> tuple[str, ...]:
        self._holders, self.rows = [node or None for node in nodes], len(nodes) // stages
        self._regroup_at = self._told = None
        self._grows = False
        return nodes

    def _counts(self, nodes: int, *, due: bool, whole: bool) -> Sequence[int]:
        """The numbers of stages to try, the best first."""
        counts = [self._stages] if nodes >= self._stages else []
        if due:
            counts += range(min(nodes, self._stages - 1), self._min_stages - 1, -1)
        elif whole and self._min_stages <= len(self._holders) // self.rows < self._stages:
            counts.append(len(self._holders) // self.rows)
        return counts


def prefetch_order(stage: int, units_by_stage: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Layer units in the order in which the spare of a stage should fetch them.

    Any stage may be the next to lose its node, so the other stages follow in the order of the ring.
    """
    stages = len(units_by_stage)
    return tuple(unit for offset in range(stages) for unit in units_by_stage[(stage + offset) % stages])


def _where(devices: Devices) -> str:
    """The devices that a need applies to, in words; empty for a single device."""
    if devices.count == 1:
        return ""
    return f" on each of {devices.count} devices (tensor parallel {devices.tensor_parallel})"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
