"""Who sits where: which nodes host the stages of the next epoch, and what spares keep at hand. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from node.config.schema import RunConfig
from node.model.shard_shapes import check_sizes
from node.pipeline.device_memory import Devices
from node.pipeline.memory import stage_bytes
from wire.errors import RunError

StageBytes = Callable[[int, Devices], Sequence[int]]
"""Number of stages, a node's devices -> bytes that each stage needs on every device, first stage first."""
Sharing = Callable[[Devices], str | None]
"""A node's devices -> a line, if they cannot share the run's blocks or microbatches."""
ONE = Devices()
_KINDS_REMEMBERED = 64


def stage_needs(config: RunConfig, windows: int) -> StageBytes:
    """A run's estimates; those of the newest few kinds of node are remembered.

    Args:
        windows: samples of one pass over the text.
    """

    @lru_cache(_KINDS_REMEMBERED)
    def needs(stages: int, devices: Devices) -> Sequence[int]:
        return stage_bytes(config, stages, devices, windows=windows)

    return needs


def sharing(config: RunConfig) -> Sharing:
    """Whether devices can share what a stage of this run computes, whichever stage it is."""

    def why_not(devices: Devices) -> str | None:
        try:
            check_sizes(config, devices.count, devices.tensor_parallel)
        except RunError as error:
            return str(error)
        return None

    return why_not


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A node that could host a stage. `memory_bytes`, of its smallest device, is 0 when it is not known."""

    node_id: str
    memory_bytes: int
    devices: Devices = ONE


def seat(
    previous: Sequence[str | None], candidates: Sequence[Candidate], stages: int, stage_bytes: StageBytes
) -> tuple[str, ...] | None:
    """One node for each of the stages, or None if that cannot be.

    Nodes keep the seat they had when the number of stages stays, and their order along the pipeline when it
    changes; newcomers fill the gaps in the order in which they came. Nobody gets a stage that does not fit:
    where only that helps, nodes change seats.
    """
    here = {candidate.node_id for candidate in candidates}
    needs = {devices: stage_bytes(stages, devices) for devices in {c.devices for c in candidates}}
    fitting: list[list[str]] = [
        [c.node_id for c in candidates if c.memory_bytes == 0 or c.memory_bytes >= needs[c.devices][stage]]
        for stage in range(stages)
    ]
    wished = previous if len(previous) == stages else [node for node in previous if node in here]
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


def useless(
    candidate: Candidate, counts: Sequence[int], stage_bytes: StageBytes, why_not: Sharing
) -> str | None:
    """A line for a node whose devices cannot share a stage, or that cannot hold the smallest of any split.

    None for one that can.

    Args:
        counts: the numbers of stages that the run may come to.
        why_not: as `sharing` gives.
    """
    # First: what is not divided evenly has no estimate.
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
        "another --device, or --gpus N with --tensor-parallel T, which shares the blocks)"
    )


class StageAssigner:
    """Remembers who held which stage, for how long to wait for them, and picks the next epoch's nodes."""

    def __init__(
        self,
        *,
        stages: int,
        min_stages: int,
        regroup_seconds: float,
        stage_bytes: StageBytes,
        sharing: Sharing = lambda _: None,
        previous: Sequence[str] = (),
    ) -> None:
        self._stages = stages
        self._min_stages = min_stages
        self._regroup_seconds = regroup_seconds
        self._stage_bytes = stage_bytes
        self._sharing = sharing
        self._holders: list[str | None] = list(previous)
        """By stage of the newest placement; None for a node that is gone for good."""
        self._regroup_at: float | None = None
        """When the stages of those who are missing change hands, or fewer nodes share the model."""
        self._told: str | None = None
        """The newest shortage since the last placement that the operator knows of."""

    def vacate(self, node_id: str, now: float) -> bool:
        """The node is gone: its seat is free at once, the split stays for a while. False if it had none."""
        if node_id not in self._holders:
            return False
        self._holders = [None if node == node_id else node for node in self._holders]
        self._regroup_at = now + self._regroup_seconds
        return True

    def hand_over(self, node_id: str, candidates: Sequence[Candidate], now: float) -> bool:
        """Free the seat of a node that is here, if `candidates` can fill all seats without it; else False."""
        holders = [None if node == node_id else node for node in self._holders]
        others = [candidate for candidate in candidates if candidate.node_id != node_id]
        if seat(holders, others, len(holders), self._stage_bytes) is None:
            return False
        self._holders = holders
        # A split of fewer stages than asked for has no seat to fill: it is made anew, which may be at once.
        self._regroup_at = now if len(holders) < self._stages else now + self._regroup_seconds
        return True

    def regroup(self, now: float) -> None:
        """The number of stages may change at once."""
        self._regroup_at = now

    def excuse(self, seconds: float) -> None:
        """For so long nobody could come: whoever is waited for may take as much longer."""
        if self._regroup_at is not None:
            self._regroup_at += seconds

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
            if (nodes := seat(self._holders, candidates, stages, self._stage_bytes)) is not None:
                self._holders = list(nodes)
                self._regroup_at = self._told = None
                return nodes
        if len(candidates) >= self._stages and self._regroup_at is None:
            self._regroup_at = now + self._regroup_seconds
        return None

    def can_grow(self, stages: int, candidates: Sequence[Candidate]) -> bool:
        """Whether these nodes could share the model on more than `stages` stages."""
        most = min(self._stages, len(candidates))
        return any(
            seat((), candidates, more, self._stage_bytes) is not None for more in range(stages + 1, most + 1)
        )

    def shortage(self, candidates: Sequence[Candidate]) -> str | None:
        """A line for the operator when there are nodes enough, but not memory enough."""
        if len(candidates) < self._stages:
            return None
        if seat((), candidates, self._stages, self._stage_bytes) is not None:
            return None
        parts: list[str] = []
        for devices in dict.fromkeys(candidate.devices for candidate in candidates):
            wanted = ", ".join(map(_mebibytes, self._stage_bytes(self._stages, devices)))
            rooms = [f"{c.node_id} {_mebibytes(c.memory_bytes)}" for c in candidates if c.devices == devices]
            parts.append(
                f"the stages need {wanted}{_where(devices)} and the nodes that are here have "
                f"{', '.join(rooms)}"
            )
        return f"waiting for a node with more memory: {'; '.join(parts)}"

    def news(self, candidates: Sequence[Candidate]) -> str | None:
        """As `shortage`, but each line once."""
        line = self.shortage(candidates)
        if line is None or line == self._told:
            return None
        self._told = line
        return line

    def useless(self, candidate: Candidate) -> str | None:
        """As the function `useless`, for the splits that this run may come to."""
        counts = range(self._min_stages, self._stages + 1)
        return useless(candidate, counts, self._stage_bytes, self._sharing)

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


def _where(devices: Devices) -> str:
    """What a need is of; nothing for a single device."""
    if devices.count == 1:
        return ""
    return f" on each of {devices.count} devices (tensor parallel {devices.tensor_parallel})"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
