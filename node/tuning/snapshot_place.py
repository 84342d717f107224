"""The size of a snapshot, and where its layers go: to the coordinator, the nodes' disks, or an object store.
This module imports no torch."""

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
"""The values of `snapshots.keep`, besides URLs."""
MOST_SECONDS = 60.0
"""With `auto`, nodes keep a snapshot if the coordinator would not have it within this time."""


def snapshot_bytes(config: RunConfig) -> int:
    """The bytes of weights and optimizer state of the whole model: a snapshot without its files' headers."""
    return sum(stage_state_bytes(config, 1))


def last_snapshot_bytes(config: RunConfig) -> int:
    """The same for the snapshot of the last step, which `snapshots.last` may make smaller."""
    alone = config.snapshots.last == WEIGHTS
    return sum(state_bytes(config, unit, weights_alone=alone) for unit in unit_names(config.model))


def stage_state_bytes(config: RunConfig, stages: int) -> list[int]:
    """The bytes of weights and optimizer state of each stage, first stage first."""
    return [sum(state_bytes(config, unit) for unit in units) for units in stage_units(config, stages)]


def is_url(place: str) -> bool:
    """Whether this is an object store's address."""
    return "://" in place


def snapshot_place(config: RunConfig, step: int, rates: Sequence[float]) -> str:
    """Where the snapshot of `step` goes: `COORDINATOR`, `NODES`, or the object store's URL.

    Args:
        rates: the measured bytes per second between each connected node and the coordinator; 0 if unknown.
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
