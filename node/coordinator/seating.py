"""Who sits where: which nodes host the stages of the next epoch, and what spares keep at hand. Pure."""

from collections.abc import Callable, Mapping, Sequence
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
    changes; newcomers fill the gaps in the order in which they came. Nobody gets a stage that does not fit.
    """
    memory = {candidate.node_id: candidate.memory_bytes for candidate in candidates}

    def fits(node: str, stage: int) -> bool:
        return memory[node] == 0 or memory[node] >= needs[stage]

    stages = len(needs)
    kept = [node for node in previous if node is not None and node in memory]
    seats: list[str | None] = [None] * stages
    if len(previous) == stages:
        for stage, node in enumerate(previous):
            if node in kept and fits(node, stage):
                seats[stage] = node
    else:
        for stage, node in enumerate(kept[:stages]):
            if fits(node, stage):
                seats[stage] = node
    waiting = [candidate.node_id for candidate in candidates if candidate.node_id not in seats]
    for stage in range(stages):
        if seats[stage] is None:
            found = next((node for node in waiting if fits(node, stage)), None)
            if found is None:
                return None
            waiting.remove(found)
            seats[stage] = found
    return tuple(node for node in seats if node is not None)


def prefetch_order(spare: int, units_by_stage: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Layer units in the order in which the spare number `spare` should fetch them.

    Any stage may be the next to lose its node, so spares begin at different stages and go on round the ring.
    """
    stages = len(units_by_stage)
    return tuple(unit for offset in range(stages) for unit in units_by_stage[(spare + offset) % stages])


def spare_nodes(seats: Sequence[str], present: Mapping[str, object]) -> tuple[str, ...]:
    """Nodes that wait in the lobby, in the order in which they came."""
    return tuple(node for node in present if node not in seats)
