"""What steps cost: figures made of `StepCosts`, and sums of several. Pure."""

from dataclasses import replace

from node.telemetry.clock import WAITS
from node.telemetry.events import FlowCost, LinkCost, StageCost, StepCosts


def idle_by_stage(costs: StepCosts) -> tuple[float, ...]:
    """The share of its time that each stage waited, 0 to 1."""
    return tuple(
        min(1.0, sum(stage.seconds.get(kind.value, 0.0) for kind in WAITS) / stage.wall_seconds)
        if stage.wall_seconds > 0
        else 0.0
        for stage in costs.stages
    )


def mbit_by_stage(costs: StepCosts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mbit/s that each stage sent, and that each received."""
    up, down = [0] * len(costs.stages), [0] * len(costs.stages)
    for link in costs.links:
        up[link.source] += link.bytes
        down[link.target] += link.bytes
    scale = 8e-6 / costs.seconds if costs.seconds > 0 else 0.0
    return tuple(scale * size for size in up), tuple(scale * size for size in down)


def bits_per_element(costs: StepCosts, direction: str) -> float:
    """Bits an element of this kind of tensor took, frames and headers included; 0 if there were none."""
    flows = [flow for link in costs.links for flow in link.flows if flow.direction == direction]
    elements = sum(flow.elements for flow in flows)
    return 8 * sum(flow.bytes for flow in flows) / elements if elements else 0.0


def add_costs(earlier: StepCosts, later: StepCosts) -> StepCosts | None:
    """Both together, as the later step's; None when they are of different placements or outcomes."""
    same = (
        not earlier.aborted
        and not later.aborted
        and [(c.stage, c.node_id) for c in earlier.stages] == [(c.stage, c.node_id) for c in later.stages]
        and [(c.source, c.target) for c in earlier.links] == [(c.source, c.target) for c in later.links]
    )
    if not same:
        return None
    return replace(
        later,
        seconds=earlier.seconds + later.seconds,
        stages=tuple(map(_add_stages, earlier.stages, later.stages)),
        links=tuple(map(_add_links, earlier.links, later.links)),
    )


def _add_stages(earlier: StageCost, later: StageCost) -> StageCost:
    kinds = dict.fromkeys((*earlier.seconds, *later.seconds))
    return replace(
        later,
        wall_seconds=earlier.wall_seconds + later.wall_seconds,
        seconds={kind: earlier.seconds.get(kind, 0.0) + later.seconds.get(kind, 0.0) for kind in kinds},
    )


def _add_links(earlier: LinkCost, later: LinkCost) -> LinkCost:
    flows: dict[tuple[str, str], tuple[int, int]] = {}
    for flow in (*earlier.flows, *later.flows):
        size, elements = flows.get((flow.direction, flow.codec), (0, 0))
        flows[flow.direction, flow.codec] = size + flow.bytes, elements + flow.elements
    return replace(
        later,
        bytes=earlier.bytes + later.bytes,
        busy_seconds=earlier.busy_seconds + later.busy_seconds,
        retransmits=earlier.retransmits + later.retransmits,
        rejects=earlier.rejects + later.rejects,
        flows=tuple(
            FlowCost(direction=direction, codec=codec, bytes=size, elements=elements)
            for (direction, codec), (size, elements) in flows.items()
        ),
    )
