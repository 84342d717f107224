"""What the run's state machine starts from, as plain values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.coordinator.epoch import Committed
from node.coordinator.seating import Sharing, StageBytes


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What the run file says, as far as the state machine needs it. Times in seconds."""

    stages: int
    min_stages: int
    """With fewer nodes than this the run pauses."""
    total_steps: int
    snapshot_every: int
    silent_seconds: float
    reconnect_seconds: float
    """How long a node whose connection broke may take to come back before it counts as dead."""
    regroup_seconds: float
    """How long to wait for a missing node before its stage, or the whole split, changes hands."""
    units: Callable[[int], Sequence[Sequence[str]]]
    """Number of stages -> the layer units of each stage."""
    stage_bytes: StageBytes
    sharing: Sharing = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Past:
    """What the database knows of the run; the defaults are a new run's."""

    last_epoch: int = 0
    newest_snapshot: int = 0
    committed: Committed | None = None
    seats: tuple[str, ...] = ()
