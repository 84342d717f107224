"""The run's Prometheus metrics. The coordinator exports them for all nodes, which cannot be scraped behind
NAT.

Counters belong to this process: they start at 0 with it, as Prometheus expects, and outlive nodes and epochs.
"""

from collections.abc import Callable, Mapping

from node.analysis.run_view import RunView
from node.coordinator.accounting import Accounting
from node.coordinator.gateways import Gateways
from node.run_state.actions import AbortKind
from node.telemetry import events
from node.telemetry.metrics import RUN_METRICS, Families, Histogram
from wire.relay import Relay, RelayTotals
from wire.telemetry import Telemetry, is_relayed
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
STATES = ("starting", "waiting for nodes", "restoring", "training", "stopped", "finished", "failed")


class RunMetrics:
    """Called with each event of the run. `render` gives what `GET /metrics` answers.

    `view` gives the newest view of the run; `accounting` may come later, with the coordinator.
    """

    def __init__(self, view: Callable[[], RunView]) -> None:
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

    def apply(self, event: events.Event, at: float) -> None:
        """Count an event that happened at the Unix time `at`."""
        counts = self._counts
        match event:
            case events.StepDone():
                counts["steps_total"] += 1
                counts["tokens_total"] += event.tokens_per_second * event.seconds
                self._step_seconds.add(event.seconds)
                self._last_step = at
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
        view, families = self._view(), Families(RUN_METRICS)
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
        for stage in view.stages:
            families.set("stage_info", 1, stage.stage, stage.replica, stage.node_id, stage.device)
            families.set("stage_present", stage.present, stage.stage, stage.replica)
        if self.accounting is not None:
            _stages(families, self.accounting)
            _links(families, self.accounting, view)
            for node, report in self.accounting.newest.items():
                if report.clock_error_seconds > 0:
                    families.set("node_clock_skew_seconds", report.clock_skew_seconds, node)
                    families.set("node_clock_error_seconds", report.clock_error_seconds, node)
        totals = self.relay.totals if self.relay is not None else RelayTotals()
        newest = self.accounting.newest if self.accounting is not None else {}
        self._volunteers.count(newest)
        families.set("volunteer_relay_bytes_total", self._volunteers.bytes)
        families.set("volunteer_relay_refused_total", self._volunteers.refused)
        families.set("volunteer_relay_pairs", sum(report.relay_pairs for report in newest.values()))
        families.set("relay_bytes_total", totals.bytes)
        families.set("relay_refused_total", totals.refused)
        families.set("relay_pairs", self.relay.pairs if self.relay is not None else 0)
        for number, sessions in enumerate(self.gateways.sessions if self.gateways is not None else ()):
            families.set("gateway_sessions", sessions, number)
        families.set("gateway_restarts_total", self.gateways.restarts if self.gateways is not None else 0)
        return families.text()

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


def _stages(families: Families, accounting: Accounting) -> None:
    for place, sums in accounting.run.stages.items():
        for kind, seconds in sums.seconds.items():
            families.set("stage_seconds_total", seconds, place.stage, place.replica, kind)
    for place, node in accounting.places().items():
        if (report := accounting.newest.get(node)) is not None:
            labels = place.stage, place.replica
            families.set("stage_memory_bytes", report.memory_bytes, *labels)
            families.set("stage_peak_memory_bytes", report.peak_memory_bytes, *labels)
            families.set("stage_gpu_memory_bytes", report.gpu_memory_bytes, *labels)
            families.set("stage_gpu_peak_memory_bytes", report.gpu_peak_memory_bytes, *labels)


def _links(families: Families, accounting: Accounting, view: RunView) -> None:
    why = {
        (link.source, link.target, link.source_replica, link.target_replica): "; ".join(
            filter(None, (link.why_not_direct, link.why_not_together))
        )
        for link in view.links
    }
    for (sender, receiver), sums in accounting.run.links.items():
        link = sender.stage, receiver.stage, sender.replica, receiver.replica
        families.set("link_bytes_total", sums.bytes, *link)
        families.set("link_busy_seconds_total", sums.busy, *link)
        families.set("link_retransmits_total", sums.retransmits, *link)
        families.set("link_rejects_total", sums.rejects, *link)
        for (direction, codec), size in sums.flow_bytes.items():
            labels = *link, direction.name.lower(), codec
            families.set("link_tensor_bytes_total", size, *labels)
            families.set("link_elements_total", sums.flow_elements[direction, codec], *labels)
        if (report := accounting.link_report(sender, receiver)) is not None:
            families.set("link_capacity_bytes_per_second", report.capacity or None, *link)
            families.set("link_round_trip_seconds", report.rtt_seconds or None, *link)
            families.set("link_queued_bytes", report.queued_bytes, *link)
            families.set("link_relayed", is_relayed(report.path), *link)
            if report.path:
                families.set("link_path", 1, *link, report.path, why.get(link, ""))
