"""The run's Prometheus metrics. The coordinator exports them for all nodes, which cannot be scraped behind
NAT.

Counters belong to this process: they start at 0 with it, as Prometheus expects, and outlive nodes and epochs.
"""

import math
import time
from collections.abc import Callable, Mapping

from node.analysis.run_view import RunView
from node.analysis.slices import Slices, ends_slice, whole
from node.coordinator.accounting import Accounting
from node.coordinator.gateways import Gateways
from node.coordinator.reporter import OWN_COSTS
from node.run_state.actions import AbortKind
from node.telemetry import events
from node.telemetry.metrics import RUN_METRICS, Families, Histogram
from wire.relay import Relay, RelayTotals
from wire.telemetry import LinkReport, Telemetry, is_relayed
from wire.version import PROTOCOL, VERSION

COUNTED = (
    "steps_total",
    "tokens_total",
    "steps_aborted_total",
    "non_finite_total",
    "recoveries_total",
    "recovery_seconds_total",
    "nodes_joined_total",
    "nodes_left_total",
)
"""Counters of events."""
MEMORY = (
    "stage_memory_bytes",
    "stage_peak_memory_bytes",
    "stage_gpu_memory_bytes",
    "stage_gpu_peak_memory_bytes",
)
LINK_TOTALS = "link_bytes_total", "link_busy_seconds_total", "link_retransmits_total", "link_rejects_total"
FLOW_TOTALS = "link_tensor_bytes_total", "link_elements_total"
LINK_NOW = "link_capacity_bytes_per_second", "link_round_trip_seconds", "link_queued_bytes", "link_relayed"
CLOCK = "node_clock_skew_seconds", "node_clock_error_seconds"
COUNTED_SECONDS = 3.0
"""Reports of a large run that were counted no longer ago are not counted again for a scrape."""
SLICE = 100
"""Reports that are counted before the event loop has its turn: a few milliseconds."""
STATES = ("starting", "waiting for nodes", "restoring", "training", "stopped", "finished", "failed")


class RunMetrics:
    """Called with each event of the run. `render` gives what `GET /metrics` answers.

    `view` gives the newest view of the run, in slices; `accounting` may come later, with the coordinator.
    """

    def __init__(self, view: Callable[[], Slices[RunView]]) -> None:
        self.accounting: Accounting | None = None
        self.relay: Relay | None = None
        """Set with the coordinator's ports, if it has one."""
        self.gateways: Gateways | None = None
        """Likewise."""
        self._volunteers = _VolunteerTotals()
        self._view = view
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._step_seconds = Histogram()
        self._last_step = 0.0
        self._costs_at = -math.inf

    def apply(self, event: events.Event, at: float) -> None:
        """Count an event that happened at the Unix time `at`."""
        counts = self._counts
        match event:
            case events.StepDone():
                counts["steps_total"] += 1
                counts["tokens_total"] += event.tokens_per_second * event.seconds
                self._step_seconds.add(event.seconds)
                self._last_step = at
            case events.StepCosts():
                self._costs_at = at
            case events.StepAborted():
                counts["steps_aborted_total"] += not event.is_planned
                counts["non_finite_total"] += event.kind == AbortKind.NOT_FINITE
            case events.Recovered():
                counts["recoveries_total"] += 1
                counts["recovery_seconds_total"] += event.seconds
            case events.NodeJoined():
                counts["nodes_joined_total"] += 1
            case events.NodeLeft():
                counts["nodes_left_total"] += 1
            case _:
                pass

    def render(self) -> bytes:
        """Everything in Prometheus' text format, version 0.0.4."""
        return whole(self.slices())

    def slices(self, now: float | None = None) -> Slices[bytes]:
        """The same in slices of milliseconds.

        Args:
            now: Unix time; None: the clock's.
        """
        accounting = self.accounting
        if accounting is not None and not self._are_counted(accounting, time.time() if now is None else now):
            yield from accounting.count_in_slices(SLICE)
        view = yield from self._view()
        families = Families(RUN_METRICS)
        families.set("build_info", 1, VERSION, PROTOCOL)
        families.set("run_info", 1, view.run_id, view.forward_codec, view.backward_codec)
        for state in STATES:
            families.set("run_state", state == view.state, state)
        for name, count in self._counts.items():
            families.set(name, count)
        families.set("steps_replayed_total", view.replayed)
        families.observed("step_seconds", self._step_seconds)
        families.set("last_step_timestamp_seconds", self._last_step)
        self._run(families, view)
        if view.held_out is not None:
            families.set("held_out_loss", view.held_out.loss, "as-trained")
            families.set("held_out_loss", view.held_out.uncompressed, "fp32")
            families.set("held_out_best_steps", view.held_out.best_step)
        for number, stage in enumerate(view.stages):
            families.set_all(("stage_info",), (1.0,), stage.stage, stage.replica, stage.node_id, stage.device)
            families.set_all(("stage_present",), (stage.present,), stage.stage, stage.replica)
            if ends_slice(number):
                yield
        yield
        reports = accounting.reports() if accounting is not None else {}
        # Before another scrape takes newer ones.
        self._volunteers.count(reports)
        if accounting is not None:
            yield
            yield from _stages(families, accounting, reports)
            yield from _links(families, accounting, reports, view)
            for node, report in reports.items():
                if report.clock_error_seconds > 0:
                    families.set_all(CLOCK, (report.clock_skew_seconds, report.clock_error_seconds), node)
        yield
        totals = self.relay.totals if self.relay is not None else RelayTotals()
        families.set("volunteer_relay_bytes_total", self._volunteers.bytes)
        families.set("volunteer_relay_refused_total", self._volunteers.refused)
        families.set("volunteer_relay_pairs", sum(report.relay_pairs for report in reports.values()))
        families.set("relay_bytes_total", totals.bytes)
        families.set("relay_refused_total", totals.refused)
        families.set("relay_pairs", self.relay.pairs if self.relay is not None else 0)
        for number, sessions in enumerate(self.gateways.sessions if self.gateways is not None else ()):
            families.set("gateway_sessions", sessions, number)
        families.set("gateway_restarts_total", self.gateways.restarts if self.gateways is not None else 0)
        return families.text()

    def _are_counted(self, accounting: Accounting, now: float) -> bool:
        """Whether the reports of a large run were counted a moment ago, when its costs were summed."""
        return len(accounting.hosts) > OWN_COSTS and 0.0 <= now - self._costs_at <= COUNTED_SECONDS

    def _run(self, families: Families, view: RunView) -> None:
        for name, value in (
            ("steps_wanted", view.steps),
            ("steps_done", view.step),
            ("loss", view.loss),
            ("gradient_norm", view.grad_norm),
            ("learning_rate", view.lr),
            ("tokens_per_second", view.tokens_per_second),
            ("eta_seconds", view.eta_seconds),
            ("epoch", view.epoch),
            ("stages_wanted", view.stages_wanted),
            ("stages_placed", len(view.stages)),
            ("stages_present", sum(stage.present for stage in view.stages)),
            ("members", len(view.members)),
            ("spares", view.spares),
            ("snapshot_timestamp_seconds", view.snapshot.at if view.snapshot else 0.0),
            ("snapshot_steps", view.snapshot.step if view.snapshot else 0),
            ("snapshot_bytes", view.snapshot.bytes if view.snapshot else 0),
        ):
            families.set(name, value)


class _VolunteerTotals:
    """What volunteers' relays have done; it never shrinks when nodes leave or restart."""

    def __init__(self) -> None:
        self.bytes = self.refused = 0
        self._counted: dict[str, tuple[int, int]] = {}
        """By node: its totals when they were counted last."""

    def count(self, newest: Mapping[str, Telemetry]) -> None:
        for node, report in newest.items():
            had_bytes, had_refused = self._counted.get(node, (0, 0))
            if report.relayed_bytes < had_bytes:
                had_bytes = had_refused = 0  # another process of that node
            self.bytes += report.relayed_bytes - had_bytes
            self.refused += max(0, report.relay_refused - had_refused)
            if report.relayed_bytes or report.relay_refused:
                self._counted[node] = report.relayed_bytes, report.relay_refused


def _stages(families: Families, accounting: Accounting, reports: Mapping[str, Telemetry]) -> Slices[None]:
    for number, (place, sums) in enumerate(list(accounting.counted.stages.items())):
        kinds = tuple(sums.seconds)
        families.set_each("stage_seconds_total", kinds, sums.seconds.values(), place.stage, place.replica)
        if ends_slice(number):
            yield
    for number, (place, node) in enumerate(accounting.places().items()):
        if (report := reports.get(node)) is not None:
            memory = report.memory_bytes, report.peak_memory_bytes
            on_gpu = report.gpu_memory_bytes, report.gpu_peak_memory_bytes
            families.set_all(MEMORY, (*memory, *on_gpu), place.stage, place.replica)
        if ends_slice(number):
            yield


def _links(
    families: Families, accounting: Accounting, reports: Mapping[str, Telemetry], view: RunView
) -> Slices[None]:
    """Each link's figures are of one moment."""
    places = accounting.places()
    why = {
        (link.source, link.target, link.source_replica, link.target_replica): "; ".join(
            filter(None, (link.why_not_direct, link.why_not_together))
        )
        for link in view.links
    }
    newest: dict[tuple[int, int, int, int], LinkReport] = {}
    for place, node in places.items():
        if (of_node := reports.get(node)) is not None:
            for one in of_node.links:
                newest.setdefault((place.stage, one.peer_stage, place.replica, one.peer_replica), one)
    yield
    for number, ((sender, receiver), sums) in enumerate(list(accounting.counted.links.items())):
        link = sender.stage, receiver.stage, sender.replica, receiver.replica
        families.set_all(LINK_TOTALS, (sums.bytes, sums.busy, sums.retransmits, sums.rejects), *link)
        for (direction, codec), size in sums.flow_bytes.items():
            elements = sums.flow_elements[direction, codec]
            families.set_all(FLOW_TOTALS, (size, elements), *link, direction.name.lower(), codec)
        if (report := newest.get(link)) is not None:
            known = report.capacity or None, report.rtt_seconds or None
            families.set_all(LINK_NOW, (*known, report.queued_bytes, is_relayed(report.path)), *link)
            if report.path:
                families.set_all(("link_path",), (1.0,), *link, report.path, why.get(link, ""))
        if ends_slice(number):
            yield
