"""Who sits where: which nodes host the stages of the next epoch, and what spares keep at hand. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

StageBytes = Callable[[int], Sequence[int]]
"""Number of stages -> bytes of memory that each stage needs, first stage first."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A node that could host a stage. `memory_bytes` is 0 when it is not known."""

    node_id: str
    memory_bytes: int


def seat(
    previous: Sequence[str | None], candidates: Sequence[Candidate], needs: Sequence[int]
) -> tuple[str, ...] | None:
    """One node for each of `len(needs)` stages, or None if that cannot be.

    Nodes keep the seat they had when the number of stages stays, and their order along the pipeline when it
    changes; newcomers fill the gaps in the order in which they came. Nobody gets a stage that does not fit:
    where only that helps, nodes change seats.
    """
    memory = {candidate.node_id: candidate.memory_bytes for candidate in candidates}
    stages = len(needs)
    fitting: list[list[str]] = [
        [node for node, room in memory.items() if room == 0 or room >= need] for need in needs
    ]
    wished = previous if len(previous) == stages else [node for node in previous if node in memory]
    seats: list[str | None] = [None] * stages
    for stage, node in enumerate(wished[:stages]):
        if node in fitting[stage]:
            seats[stage] = node
    for stage in range(stages):
        if seats[stage] is None:
            free = next((node for node in fitting[stage] if node not in seats), None)
            if free is not None:
                seats[stage] = free
            elif not _make_room(stage, seats, fitting, set()):
                return None
    return tuple(node for node in seats if node is not None)


def _make_room(
    stage: int, seats: list[str | None], fitting: Sequence[Sequence[str]], asked: set[str]
) -> bool:
    """Find `stage` a node by moving others (an augmenting path of bipartite matching)."""
    for node in fitting[stage]:
        if node in asked:
            continue
        asked.add(node)
        held = seats.index(node) if node in seats else None
        if held is None or _make_room(held, seats, fitting, asked):
            seats[stage] = node
            return True
    return False


class Seating:
    """Remembers who held which stage, for how long to wait for them, and picks the next epoch's nodes."""

    def __init__(
        self,
        *,
        stages: int,
        min_stages: int,
        regroup_seconds: float,
        stage_bytes: StageBytes,
        previous: Sequence[str] = (),
    ) -> None:
        self._stages = stages
        self._min_stages = min_stages
        self._regroup_seconds = regroup_seconds
        self._stage_bytes = stage_bytes
        self._holders: list[str | None] = list(previous)
        """By stage of the newest placement; None for a node that is gone for good."""
        self._regroup_at: float | None = None
        """When the stages of those who are missing change hands, or fewer nodes share the model."""

    def vacate(self, node_id: str, now: float) -> bool:
        """The node is gone: its seat is free at once, the split stays for a while. False if it had none."""
        if node_id not in self._holders:
            return False
        self._holders = [None if node == node_id else node for node in self._holders]
        self._regroup_at = now + self._regroup_seconds
        return True

    def regroup(self, now: float) -> None:
        """The number of stages may change at once."""
        self._regroup_at = now

    def choose(self, candidates: Sequence[Candidate], now: float) -> tuple[str, ...] | None:
        """The nodes of the next epoch, by stage, or None while the run must wait.

        As many stages as the run asks for if that can be; else the same nodes as before; else, once it is
        time to regroup, as many as there are nodes for. Call it again when somebody comes, and with time.
        """
        present = {candidate.node_id for candidate in candidates}
        missing = [node for node in self._holders if node not in present]
        if candidates and missing and self._regroup_at is None:
            # A coordinator that has come back, or a connection that broke: holders get a moment to return.
            self._regroup_at = now + self._regroup_seconds
        due = self._regroup_at is not None and now >= self._regroup_at
        if any(node is not None for node in missing) and not due:
            return None
        for stages in self._counts(len(candidates), due=due, whole=not missing):
            if (nodes := seat(self._holders, candidates, self._stage_bytes(stages))) is not None:
                self._holders = list(nodes)
                self._regroup_at = None
                return nodes
        if len(candidates) >= self._stages and self._regroup_at is None:
            self._regroup_at = now + self._regroup_seconds
        return None

    def can_grow(self, stages: int, candidates: Sequence[Candidate]) -> bool:
        """Whether these nodes could share the model on more than `stages` stages."""
        most = min(self._stages, len(candidates))
        return any(
            seat((), candidates, self._stage_bytes(more)) is not None for more in range(stages + 1, most + 1)
        )

    def shortage(self, candidates: Sequence[Candidate]) -> str | None:
        """A line for the operator when there are nodes enough, but not memory enough."""
        if len(candidates) < self._stages:
            return None
        needs = self._stage_bytes(self._stages)
        if seat((), candidates, needs) is not None:
            return None
        rooms = ", ".join(f"{c.node_id} {_mebibytes(c.memory_bytes)}" for c in candidates)
        wanted = ", ".join(_mebibytes(need) for need in needs)
        return (
            f"waiting for a node with more memory: the stages need {wanted} and the nodes that are here have "
            f"{rooms}"
        )

    def _counts(self, nodes: int, *, due: bool, whole: bool) -> Sequence[int]:
        """Numbers of stages to try, the best first."""
        counts = [self._stages] if nodes >= self._stages else []
        if due:
            counts += range(min(nodes, self._stages - 1), self._min_stages - 1, -1)
        elif whole and self._min_stages <= len(self._holders) < self._stages:
            counts.append(len(self._holders))
        return counts


def prefetch_order(spare: int, units_by_stage: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Layer units in the order in which the spare number `spare` should fetch them.

    Any stage may be the next to lose its node, so spares begin at different stages and go on round the ring.
    """
    stages = len(units_by_stage)
    return tuple(unit for offset in range(stages) for unit in units_by_stage[(spare + offset) % stages])


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
