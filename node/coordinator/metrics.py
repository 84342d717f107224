"""The run's Prometheus metrics. The coordinator exports them for all nodes, which cannot be scraped behind
NAT.

Counters belong to this process: they start at 0 with it, as Prometheus expects, and continue when nodes and
epochs end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.coordinator.accounting import Accounting
from node.coordinator.gateways import Gateways
from node.run_state.actions import AbortKind
from node.telemetry import events
from node.telemetry.costs import Ledger, Work
from node.telemetry.metrics import RUN_METRICS, Families, step_histogram
from node.view.run_view import RunView
from wire.figures import LinkFigures, LinkKey, Place, StageFigures
from wire.relay import Relay
from wire.telemetry import Telemetry, is_relayed
from wire.version import PROTOCOL, VERSION

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

COUNTED = (
    "steps_total",
    "tokens_total",
    "steps_aborted_total",
    "non_finite_total",
    "recoveries_total",
    "recovery_seconds_total",
    "nodes_joined_total",
    "nodes_left_total",
    "nodes_lost_in_steps_total",
    "step_node_seconds_total",
    "step_node_seconds_lost_total",
)
"""Counters of events."""
STATES = ("starting", "waiting for nodes", "restoring", "training", "stopped", "finished", "failed")


class RunMetrics:
    """Call it with each event of the run. `render` returns the answer to `GET /metrics`.

    `view` returns the newest view of the run. `accounting` is set later, by the coordinator.
    """

    def __init__(self, view: Callable[[], Awaitable[RunView]]) -> None:
        self.accounting: Accounting | None = None
        self.relay: Relay | None = None
        """Set with the coordinator's ports, if it has a relay."""
        self.gateways: Gateways | None = None
        """Set with the coordinator's ports, if it has gateways."""
        self._volunteers = _VolunteerTotals()
        self._view = view
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._work = Work()
        self._step_seconds = step_histogram()
        self._last_step = 0.0

    def apply(self, event: events.Event, at: float) -> None:
        """Count an event that happened at the Unix time `at`."""
        counts = self._counts
        self._work = self._work.after(event)
        counts["step_node_seconds_total"] = self._work.spent
        counts["step_node_seconds_lost_total"] = self._work.lost
        match event:
            case events.StepDone():
                counts["steps_total"] += 1
                counts["tokens_total"] += event.tokens_per_second * event.seconds
                self._step_seconds.observe(event.seconds)
                self._last_step = at
            case events.SeatLost():
                counts["nodes_lost_in_steps_total"] += 1
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

    async def render(self) -> bytes:
        """All metrics in Prometheus' text format. It is written on a thread, because for a thousand nodes it
        takes as long as a step."""
        scrape = self.scrape(await self._view())
        return await asyncio.to_thread(scrape.text)

    def scrape(self, view: RunView) -> "Scrape":
        """All present values, including those of reports that have not been counted."""
        accounting, relay, gateways = self.accounting, self.relay, self.gateways
        run = accounting.run if accounting is not None else Ledger()
        reports = accounting.reports() if accounting is not None else {}
        self._volunteers.count(reports)
        return Scrape(
            view=view,
            counts=dict(self._counts),
            step_seconds=tuple(next(iter(self._step_seconds.collect())).samples),
            last_step=self._last_step,
            stages=dict(run.stages),
            links=dict(run.links),
            places=frozenset(place for place, node in accounting.places().items() if node in reports)
            if accounting is not None
            else (),
            reports=reports,
            single={
                "volunteer_relay_bytes_total": self._volunteers.bytes,
                "volunteer_relay_refused_total": self._volunteers.refused,
                "volunteer_relay_pairs": sum(report.relay_pairs for report in reports.values()),
                "relay_bytes_total": relay.totals.bytes if relay is not None else 0,
                "relay_refused_total": relay.totals.refused if relay is not None else 0,
                "relay_pairs": relay.pairs if relay is not None else 0,
                "gateway_restarts_total": gateways.restarts if gateways is not None else 0,
            },
            gateway_sessions=tuple(gateways.sessions) if gateways is not None else (),
        )


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """The values at one time. They do not change, so a thread may read them."""

    view: RunView
    counts: Mapping[str, float]
    """Counters of events by name."""
    step_seconds: "Sequence[Sample]"
    """The samples of the histogram of step times."""
    last_step: float
    """The Unix time of the last step; 0 before the first."""
    stages: Mapping[Place, StageFigures]
    links: Mapping[LinkKey, LinkFigures]
    """Figures since this process started, over all epochs."""
    places: Collection[Place]
    """The places of the current epoch's present nodes."""
    reports: Mapping[str, Telemetry]
    """Each node's newest report."""
    single: Mapping[str, float]
    """Other metrics without labels, by name."""
    gateway_sessions: tuple[int, ...]

    def text(self) -> bytes:
        view, families = self.view, Families(RUN_METRICS)
        families.set("build_info", 1, VERSION, PROTOCOL)
        families.set("run_info", 1, view.run_id, view.forward_codec, view.backward_codec)
        for state in STATES:
            families.set("run_state", state == view.state, state)
        for name, value in {**self.counts, **self.single}.items():
            families.set(name, value)
        for gateway, sessions in enumerate(self.gateway_sessions):
            families.set("gateway_sessions", sessions, gateway)
        families.observed("step_seconds", self.step_seconds)
        families.set("last_step_timestamp_seconds", self.last_step)
        self._run(families)
        self._stages(families)
        self._links(families)
        for node, report in self.reports.items():
            if report.clock_error_seconds > 0:
                families.set("node_clock_skew_seconds", report.clock_skew_seconds, node)
                families.set("node_clock_error_seconds", report.clock_error_seconds, node)
        return families.text()

    def _run(self, families: Families) -> None:
        view = self.view
        for name, value in (
            ("steps_wanted", view.steps),
            ("steps_done", view.step),
            ("steps_replayed_total", view.replayed),
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
        if view.held_out is not None:
            families.set("held_out_loss", view.held_out.loss, "as-trained")
            families.set("held_out_loss", view.held_out.uncompressed, "fp32")
            families.set("held_out_best_steps", view.held_out.best_step or None)

    def _stages(self, families: Families) -> None:
        for stage in self.view.stages:
            families.set("stage_info", 1, stage.stage, stage.replica, stage.node_id, stage.device)
            families.set("stage_present", stage.present, stage.stage, stage.replica)
        for place, figures in self.stages.items():
            at = place.stage, place.replica
            for kind, value in figures.seconds.items():
                families.set("stage_seconds_total", value, *at, kind)
            if place in self.places:
                families.set_state("stage_", figures, *at)

    def _links(self, families: Families) -> None:
        why = {
            link.ends: "; ".join(filter(None, (link.why_not_direct, link.why_not_together)))
            for link in self.view.links
        }
        for ends, link in self.links.items():
            labels = link.source, link.target, link.source_replica, link.target_replica
            families.set_link_totals("link_", link, *labels)
            if all(place in self.places for place in ends):
                families.set_link_now("link_", link, *labels)
                families.set("link_relayed", is_relayed(link.path), *labels)
                if link.path:
                    families.set("link_path", 1, *labels, link.path, why.get(ends, ""))


class _VolunteerTotals:
    """The totals of volunteers' relays. They do not shrink when nodes leave or restart."""

    def __init__(self) -> None:
        self.bytes = self.refused = 0
        self._counted: dict[str, tuple[int, int]] = {}
        """Each node's totals when they were last counted."""

    def count(self, newest: Mapping[str, Telemetry]) -> None:
        for node, report in newest.items():
            had_bytes, had_refused = self._counted.get(node, (0, 0))
            if report.relayed_bytes < had_bytes:
                had_bytes = had_refused = 0  # another process of this node
            self.bytes += report.relayed_bytes - had_bytes
            self.refused += max(0, report.relay_refused - had_refused)
            if report.relayed_bytes or report.relay_refused:
                self._counted[node] = report.relayed_bytes, report.relay_refused
