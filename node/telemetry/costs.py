"""Adding up what steps cost. Pure."""

from dataclasses import replace

from node.telemetry.events import FlowCost, LinkCost, StageCost, StepCosts


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
