"""What a snapshot weighs, and where its layers go: to the coordinator, the nodes' disks, or an object store.

Torch-free."""

from collections.abc import Sequence
from statistics import median

from node.config.schema import RunConfig
from node.model.optimizers import state_bytes
from node.model.units import unit_names
from node.schedule.placement import stage_units
from node.state.unit_state import WEIGHTS

COORDINATOR = "coordinator"
AUTO = "auto"
NODES = "nodes"
KEEPS = (AUTO, COORDINATOR, NODES)
"""Values of `snapshots.keep`, beside URLs."""
MOST_SECONDS = 60.0
"""With `auto` the coordinator has a snapshot within this time, or the nodes keep it."""


def snapshot_bytes(config: RunConfig) -> int:
    """Bytes of weights and optimizer state of the whole model: a snapshot, but for its files' headers."""
    return sum(stage_state_bytes(config, 1))


def last_snapshot_bytes(config: RunConfig) -> int:
    """The same of the snapshot of the last step, which `snapshots.last` may make smaller."""
    alone = config.snapshots.last == WEIGHTS
    return sum(state_bytes(config, unit, weights_alone=alone) for unit in unit_names(config.model))


def stage_state_bytes(config: RunConfig, stages: int) -> list[int]:
    """Bytes of weights and optimizer state of each stage, first stage first."""
    return [sum(state_bytes(config, unit) for unit in units) for units in stage_units(config, stages)]


def is_url(place: str) -> bool:
    """Whether this is an object store's address."""
    return "://" in place


def snapshot_place(config: RunConfig, step: int, rates: Sequence[float]) -> str:
    """Where the snapshot of `step` goes: `COORDINATOR`, `NODES`, or the object store's URL.

    Args:
        rates: bytes a second between each connected node and the coordinator, measured; 0 if unknown.
    """
    keep = config.snapshots.keep
    if config.snapshots.last_here and step >= config.run.steps:
        return COORDINATOR
    if keep != AUTO:
        return keep
    known = [rate for rate in rates if rate > 0]
    if len(rates) < 2 or not known or config.training.export_every:
        return COORDINATOR
    return NODES if snapshot_bytes(config) > MOST_SECONDS * median(known) else COORDINATOR
