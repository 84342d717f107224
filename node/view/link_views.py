"""Links as a run's view shows them: totals of the run, rates over recent steps, the path taken. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from node.telemetry import events
from node.telemetry.costs import LinkKey, Place
from node.view.run_view import FlowView, LinkView
from node.view.slices import Slices, ends_slice
from node.view.step_model import LITTLE
from wire.telemetry import DIRECT, NOT_TOGETHER, is_relayed

NOT_LISTENING = "opens no port"
NOT_REACHED = "cannot be dialled from the coordinator"
NOT_ANSWERING = "does not answer its neighbour"
"""Why a link is not direct, about the node that its neighbour could have dialled."""


@dataclass(frozen=True, kw_only=True)
class FlowSums:
    """What one kind of tensor took on one direction of a link, over the whole run."""

    direction: str
    codec: str
    bytes: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class LinkSums:
    """One direction of a link over the whole run."""

    source: int
    target: int
    source_replica: int = 0
    target_replica: int = 0
    bytes: int
    retransmits: int
    rejects: int
    flows: tuple[FlowSums, ...]


def ends_of(link: events.LinkCost | LinkSums) -> LinkKey:
    return Place(link.source_replica, link.source), Place(link.target_replica, link.target)


class LinkTotals:
    """Totals of one direction of a link over the whole run. They do not change, as a view of them takes a
    while."""

    def __init__(self, state: LinkSums | None = None) -> None:
        self._bytes = state.bytes if state else 0
        self._retransmits = state.retransmits if state else 0
        self._rejects = state.rejects if state else 0
        flows = state.flows if state else ()
        self._flows = {(flow.direction, flow.codec): (flow.bytes, flow.elements) for flow in flows}

    def state(self, ends: LinkKey) -> LinkSums:
        flows = (
            FlowSums(direction=direction, codec=codec, bytes=size, elements=elements)
            for (direction, codec), (size, elements) in self._flows.items()
        )
        (source_replica, source), (target_replica, target) = ends
        return LinkSums(
            source=source,
            target=target,
            source_replica=source_replica,
            target_replica=target_replica,
            bytes=self._bytes,
            retransmits=self._retransmits,
            rejects=self._rejects,
            flows=tuple(flows),
        )

    def plus(self, cost: events.LinkCost) -> "LinkTotals":
        """These totals with a step more."""
        found = LinkTotals()
        found._bytes = self._bytes + cost.bytes
        found._retransmits = self._retransmits + cost.retransmits
        found._rejects = self._rejects + cost.rejects
        found._flows = dict(self._flows)
        for flow in cost.flows:
            size, elements = self._flows.get((flow.direction, flow.codec), (0, 0))
            found._flows[flow.direction, flow.codec] = size + flow.bytes, elements + flow.elements
        return found

    def view(self, ends: LinkKey, recent: list[events.LinkCost], seconds: float) -> LinkView:
        (source_replica, source), (target_replica, target) = ends
        newest = recent[-1]
        rate = sum(cost.bytes for cost in recent) / seconds
        use = min(1.0, rate / newest.capacity) if newest.capacity > 0 else None
        flows = []
        for direction, codec in dict.fromkeys((f.direction, f.codec) for c in recent for f in c.flows):
            mine = [f for c in recent for f in c.flows if (f.direction, f.codec) == (direction, codec)]
            elements = sum(flow.elements for flow in mine)
            sent = sum(flow.bytes for flow in mine)
            size, all_elements = self._flows[direction, codec]
            flows.append(
                FlowView(
                    direction=direction,
                    codec=codec,
                    bits_per_element=8 * sent / elements if elements else 0.0,
                    mbit=8e-6 * sent / seconds,
                    bytes=size,
                    elements=all_elements,
                )
            )
        return LinkView(
            source=source,
            target=target,
            source_replica=source_replica,
            target_replica=target_replica,
            bytes=self._bytes,
            mbit=8e-6 * rate,
            capacity_mbit=8e-6 * newest.capacity,
            use=use,
            busy=min(1.0, sum(cost.busy_seconds for cost in recent) / seconds),
            flows=tuple(flows),
            round_trip_seconds=newest.round_trip_seconds,
            retransmits=self._retransmits,
            rejects=self._rejects,
            queued_bytes=newest.queued_bytes,
            little_used=use is not None and use < LITTLE,
            path=newest.path,
        )


NO_TOTALS = LinkTotals()


def alike(steps: Sequence[events.StepCosts]) -> Slices[tuple[events.StepCosts, ...]]:
    """The last of the steps that sent the same kinds of tensors in the same codecs, oldest first."""

    def flows(costs: events.StepCosts) -> Slices[set[tuple[LinkKey, str, str]]]:
        found: set[tuple[LinkKey, str, str]] = set()
        for number, link in enumerate(costs.links):
            ends = ends_of(link)
            found.update((ends, flow.direction, flow.codec) for flow in link.flows)
            if ends_slice(number):
                yield
        return found

    first = len(steps)
    newest = (yield from flows(steps[-1])) if steps else set()
    while first and (yield from flows(steps[first - 1])) == newest:
        first -= 1
    return tuple(steps[first:])


def link_views(
    totals: "Mapping[LinkKey, LinkTotals]",
    recent: Sequence[events.StepCosts],
    placement: events.PlacementMade | None,
    undialled: Mapping[str, str],
) -> Slices[tuple[LinkView, ...]]:
    """Links of the recent steps.

    Args:
        totals: of each link over the whole run; has all links of `recent`.
        undialled: why neighbours cannot dial a node, for those that they cannot.
    """
    seconds = sum(costs.seconds for costs in recent)
    by_ends: dict[LinkKey, list[events.LinkCost]] = {}
    for costs in recent:
        for number, link in enumerate(costs.links):
            by_ends.setdefault(ends_of(link), []).append(link)
            if ends_slice(number):
                yield
    # The end that dials knows.
    together = {
        frozenset(ends): words
        for ends, links in by_ends.items()
        if (words := NOT_TOGETHER.get(links[-1].not_together, ""))
    }
    found = []
    for number, ends in enumerate(sorted(by_ends) if seconds > 0 else ()):
        link_view = totals[ends].view(ends, by_ends[ends], seconds)
        found.append(_with_reason(link_view, placement, undialled, together.get(frozenset(ends), "")))
        if ends_slice(number):
            yield
    return tuple(found)


def _with_reason(
    link: LinkView, placement: events.PlacementMade | None, undialled: Mapping[str, str], not_together: str
) -> LinkView:
    """The link with the reasons why it takes no better path, if there is one."""
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
        # The lower one dials if both can be dialled.
        del reasons[lower]
    return replace(
        link,
        why_not_direct=" and ".join(f"{where} {why}" for where, why in reasons.items()),
        why_not_together=not_together if is_relayed(link.path) else "",
    )
