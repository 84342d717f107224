"""Links as a run's view shows them: totals of the run, rates over recent steps, the path taken. All functions
are pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from node.telemetry import events
from node.telemetry.costs import OTHER_CODEC
from node.view.run_view import FlowView, LinkView
from node.view.step_model import LITTLE
from wire.figures import LinkFigures, LinkKey, counters_of, total
from wire.telemetry import DIRECT, NOT_TOGETHER, is_relayed

NOT_LISTENING = "opens no port"
NOT_REACHED = "cannot be dialled from the coordinator"
NOT_ANSWERING = "does not answer its neighbour"
"""Why a link is not direct: what prevents its neighbour from dialling the node."""


def link_view(whole: LinkFigures, recent: Sequence[LinkFigures], seconds: float) -> LinkView:
    """The view of one direction of a link.

    Args:
        whole: its figures over the whole run.
        recent: its figures in each of the recent steps, which took `seconds` together.
    """
    newest = total(recent)
    rate = newest.bytes / seconds
    use = min(1.0, rate / newest.capacity) if newest.capacity > 0 else None
    flows = {(flow.direction, flow.codec): flow for flow in whole.flows}
    return LinkView(
        **{
            **vars(newest),
            **{name: getattr(whole, name) for names in counters_of(LinkFigures) for name in names},
            "flows": tuple(
                FlowView(
                    **vars(flows[flow.direction, flow.codec]),
                    bits_per_element=flow.bits,
                    mbit=8e-6 * flow.bytes / seconds,
                )
                for flow in newest.flows
                # No run has such a codec: a node invented one.
                if flow.codec != OTHER_CODEC
            ),
        },
        mbit=8e-6 * rate,
        capacity_mbit=8e-6 * newest.capacity,
        use=use,
        busy=min(1.0, newest.busy_seconds / seconds),
        processor=min(1.0, newest.processor_seconds / newest.busy_seconds) if newest.busy_seconds else 0.0,
        little_used=use is not None and use < LITTLE,
    )


def alike(steps: Sequence[events.StepCosts]) -> tuple[events.StepCosts, ...]:
    """The last of these steps that sent the same kinds of tensors in the same codecs, oldest first."""

    def flows(costs: events.StepCosts) -> set[tuple[LinkKey, str, str]]:
        return {(link.ends, flow.kind, flow.codec) for link in costs.links for flow in link.flows}

    newest = flows(steps[-1]) if steps else set()
    return tuple(reversed(list(takewhile(lambda costs: flows(costs) == newest, reversed(steps)))))


def link_views(
    totals: Mapping[LinkKey, LinkFigures],
    recent: Sequence[events.StepCosts],
    placement: events.PlacementMade | None,
    undialled: Mapping[str, str],
) -> tuple[LinkView, ...]:
    """The links of the recent steps.

    Args:
        totals: the figures of each link over the whole run. It contains all links of `recent`.
        undialled: for nodes that neighbours cannot dial, why not.
    """
    seconds = sum(costs.seconds for costs in recent)
    if seconds <= 0:
        return ()
    by_ends: dict[LinkKey, list[LinkFigures]] = {}
    for costs in recent:
        for link in costs.links:
            by_ends.setdefault(link.ends, []).append(link)
    # Only the end that dials knows the reason.
    together = {
        frozenset(ends): words
        for ends, links in by_ends.items()
        if (words := NOT_TOGETHER.get(links[-1].not_together, ""))
    }
    return tuple(
        _with_reason(
            link_view(totals[ends], by_ends[ends], seconds),
            placement,
            undialled,
            together.get(frozenset(ends), ""),
        )
        for ends in sorted(by_ends)
    )


def _with_reason(
    link: LinkView, placement: events.PlacementMade | None, undialled: Mapping[str, str], not_together: str
) -> LinkView:
    """The link with the reasons why it takes no better path, if there is a better one."""
    if link.path in ("", DIRECT) or placement is None:
        return link
    reasons: dict[str, str] = {}
    places = sorted(((link.source_replica, link.source), (link.target_replica, link.target)))
    for replica, stage in places:
        index = replica * placement.stages + stage
        node_id = placement.nodes[index] if index < len(placement.nodes) else ""
        where = f"the node of stage {stage}" + (f" of row {replica}" if len(placement.groups) > 1 else "")
        reasons[where] = undialled.get(node_id, NOT_ANSWERING)
    lower, upper = reasons
    if reasons[lower] == reasons[upper] == NOT_ANSWERING:
        # If both can be dialled, the lower stage dials.
        del reasons[lower]
    return replace(
        link,
        why_not_direct=" and ".join(f"{where} {why}" for where, why in reasons.items()),
        why_not_together=not_together if is_relayed(link.path) else "",
    )
