"""What a snapshot weighs, and where its layers go: to the coordinator or the nodes' disks. Torch-free."""

from collections.abc import Sequence
from statistics import median

from node.config.schema import RunConfig
from node.model.lora_shapes import trained_specs
from node.model.units import state_bytes
from node.pipeline.placement import stage_units

COORDINATOR = "coordinator"
AUTO = "auto"
NODES = "nodes"
KEEPS = (AUTO, COORDINATOR, NODES)
"""Values of `snapshots.keep`."""
MOST_SECONDS = 60.0
"""With `auto` the coordinator has a snapshot within this time, or the nodes keep it."""


def snapshot_bytes(config: RunConfig) -> int:
    """Bytes of weights and optimizer state of the whole model: a snapshot, but for its files' headers."""
    return sum(stage_state_bytes(config, 1))


def stage_state_bytes(config: RunConfig, stages: int) -> list[int]:
    """Bytes of weights and optimizer state of each stage, first stage first."""
    model, lora, moments = config.model, config.lora, config.training.moments
    return [
        sum(state_bytes(trained_specs(model, lora, unit), moments) for unit in units)
        for units in stage_units(config, stages)
    ]


def keeps_on_nodes(config: RunConfig, step: int, rates: Sequence[float]) -> bool:
    """Whether the snapshot of `step` stays on the nodes.

    Args:
        rates: bytes a second between each connected node and the coordinator, measured; 0 if unknown.
    """
    keep = config.snapshots.keep
    if config.snapshots.last_here and step >= config.run.steps:
        return False
    if keep != AUTO:
        return keep == NODES
    known = [rate for rate in rates if rate > 0]
    if len(rates) < 2 or not known or config.training.export_every:
        return False
    return snapshot_bytes(config) > MOST_SECONDS * median(known)
