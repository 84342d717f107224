"""All metrics: names, labels and meanings, and their export by `prometheus_client`.

Units are base units, ratios are from 0 to 1, and counters end in `_total`. Labels are bounded: a stage, the
two stages of a link, a kind of time, a kind of tensor, a codec or a node of the run; never a step, a token or
an address.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, cast

from wire.figures import LinkFigures, StageFigures

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The HTTP content type of Prometheus' text format."""
PREFIX = "thinwire_"
STEP_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Upper bounds of step times in seconds."""


class MetricKind(StrEnum):
    """The kinds of metrics, with Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Definition:
    name: str
    """The name without the prefix."""
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str


def _counter(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, MetricKind.COUNTER, labels, meaning)


def _gauge(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, MetricKind.GAUGE, labels, meaning)


STAGE = ("stage", "replica")
LINK = ("source", "target", "replica", "target_replica")
"""`replica` is the row of the sending stage."""
PEER = ("peer",)

_LINK_COUNTERS = {
    "bytes": ("bytes_total", "All bytes written to the link's sockets."),
    "busy_seconds": ("busy_seconds_total", "Time with data to send or to be acknowledged."),
    "processor_seconds": ("processor_seconds_total", "Processor time of the thread that sends."),
    "retransmits": ("retransmits_total", "Frames sent again."),
    "rejects": ("rejects_total", "Damaged frames, requested again."),
}
_LINK_GAUGES = {
    "capacity": ("capacity_bytes_per_second", "Measured capacity; absent while unknown."),
    "round_trip_seconds": ("round_trip_seconds", "Smoothed round trip; absent while unknown."),
    "queued_bytes": ("queued_bytes", "Bytes waiting to be sent or acknowledged."),
}
_UNKNOWN_AT_ZERO = ("capacity", "round_trip_seconds")
_STATE = {
    "memory_bytes": "Resident set of the node's process.",
    "peak_memory_bytes": "Largest so far for that process.",
    "gpu_memory_bytes": "Allocated by torch on the node's GPU; 0 without one.",
    "gpu_peak_memory_bytes": "Largest so far for that process.",
    "expert_load": "Of a mixture: the busiest expert's tokens over the mean; 0 without experts.",
    "dead_experts": "Experts without tokens in this epoch.",
}
"""The metrics, by the field of `LinkFigures` or `StageFigures` that they export."""


def _link_metrics(prefix: str, *labels: str) -> tuple[Definition, ...]:
    flow = (*labels, "direction", "codec")
    return (
        *(_counter(prefix + name, meaning, *labels) for name, meaning in _LINK_COUNTERS.values()),
        _counter(f"{prefix}tensor_bytes_total", "Bytes of frames that carried tensors.", *flow),
        _counter(f"{prefix}elements_total", "Elements in those frames.", *flow),
        *(_gauge(prefix + name, meaning, *labels) for name, meaning in _LINK_GAUGES.values()),
    )


def _memory_metrics(prefix: str, *labels: str) -> tuple[Definition, ...]:
    return tuple(_gauge(prefix + name, meaning, *labels) for name, meaning in _STATE.items())


RUN_METRICS: tuple[Definition, ...] = (
    _gauge("build_info", "1; the version is in the labels.", "version", "protocol"),
    _gauge("run_info", "1; run id and codecs are in the labels.", "run", "forward_codec", "backward_codec"),
    _gauge("run_state", "1 for the run's state, 0 for the others.", "state"),
    _gauge("steps_wanted", "Steps of the whole run."),
    _gauge("steps_done", "Steps done; decreases on a rollback."),
    _counter("steps_total", "Steps done by this coordinator, replayed ones included."),
    _counter("steps_replayed_total", "Committed steps that ran again after a rollback."),
    _counter("steps_aborted_total", "Steps aborted and run again."),
    _counter("non_finite_total", "Steps not committed because a value was not finite."),
    _counter("tokens_total", "Tokens of the steps done by this coordinator."),
    _counter("recoveries_total", "Interruptions the run recovered from."),
    _counter("recovery_seconds_total", "Time from interruption to restored state."),
    _counter("nodes_joined_total", "Joins, rejoins included."),
    _counter("nodes_left_total", "Nodes that left, died or were evicted."),
    _counter("nodes_lost_in_steps_total", "Nodes that were lost while their step went on."),
    _counter("step_node_seconds_total", "Seconds of nodes in steps."),
    _counter("step_node_seconds_lost_total", "Of them: what deaths, aborts and rollbacks undid."),
    Definition("step_seconds", MetricKind.HISTOGRAM, (), "Wall time of steps at the coordinator."),
    _gauge("last_step_timestamp_seconds", "Unix time of the last step done; 0 before the first."),
    _gauge("loss", "Training loss of the newest step, nats per token."),
    _gauge("held_out_loss", "Newest held-out loss, nats per token; links: as-trained or fp32.", "links"),
    _gauge("held_out_best_steps", "Step with the least held-out loss."),
    _gauge("gradient_norm", "Gradient norm of the newest step, before clipping."),
    _gauge("learning_rate", "Learning rate of the newest step."),
    _gauge("tokens_per_second", "Mean over the last ten steps."),
    _gauge("eta_seconds", "Time to the end of the run at the recent speed."),
    _gauge("epoch", "Epoch of the newest placement."),
    _gauge("stages_wanted", "Stages that the run file asks for."),
    _gauge("stages_placed", "Stages of the newest placement."),
    _gauge("stages_present", "Stages of the newest placement whose node is connected."),
    _gauge("members", "Connected nodes."),
    _gauge("spares", "Connected nodes without a stage, once every stage has its node."),
    _gauge("snapshot_timestamp_seconds", "Unix time of the newest snapshot; 0 before the first."),
    _gauge("snapshot_steps", "Step of the newest snapshot."),
    _gauge("snapshot_bytes", "Size of the newest snapshot."),
    _gauge("stage_info", "1; the stage's node and its device are in the labels.", *STAGE, "node", "device"),
    _gauge("stage_present", "1 if the stage's node is connected.", *STAGE),
    _counter("stage_seconds_total", "Wall time of the stage's compute thread, by kind.", *STAGE, "kind"),
    *_memory_metrics("stage_", *STAGE),
    *_link_metrics("link_", *LINK),
    _gauge("link_relayed", "1 if the link goes through a relay, 0 if it is direct.", *LINK),
    _gauge("link_path", "1 for the link's path; `why`: why it takes no better one.", *LINK, "path", "why"),
    _counter("relay_bytes_total", "Bytes that the coordinator's relay carried, both ways together."),
    _counter("relay_refused_total", "Requests that the coordinator's relay refused."),
    _gauge("relay_pairs", "Pairs of connections that the coordinator's relay joins; a link has two."),
    _counter("volunteer_relay_bytes_total", "Bytes that volunteers' relays carried, both ways together."),
    _counter("volunteer_relay_refused_total", "Requests that volunteers' relays refused."),
    _gauge("volunteer_relay_pairs", "Pairs of connections that volunteers' relays join."),
    _gauge(
        "gateway_sessions",
        "Control sessions that a gateway keeps; one for each, if there are any.",
        "gateway",
    ),
    _counter("gateway_restarts_total", "Gateways that ended and were started again."),
    _gauge("node_clock_skew_seconds", "The node's wall clock minus the coordinator's.", "node"),
    _gauge("node_clock_error_seconds", "Bound on the error of the skew.", "node"),
)
"""The coordinator's metrics, for the whole run. `source` and `target` are the stages that send and
receive."""

NODE_METRICS: tuple[Definition, ...] = (
    _gauge("build_info", "1; the version is in the labels.", "version", "protocol"),
    _gauge("node_info", "1; node, run and device are in the labels.", "node", "run", "device"),
    _gauge("node_stage", "Stage of the node; -1 for none."),
    _gauge("node_epoch", "Epoch of the placement; 0 before the first."),
    _counter("node_seconds_total", "Wall time of the compute thread, by kind.", "kind"),
    *_link_metrics("node_link_", *PEER),
    *_memory_metrics("node_"),
    _gauge("local_clock_skew_seconds", "This machine's wall clock minus the coordinator's."),
    _gauge("local_clock_error_seconds", "Bound on the error of the skew."),
)
"""The metrics of each node that was started with `--metrics`. Their names differ from the coordinator's, so
nothing is counted twice. `peer` is the neighbour's stage."""


def step_histogram() -> "Histogram":
    """An empty histogram of step times."""
    from prometheus_client import Histogram

    return Histogram(f"{PREFIX}step_seconds", "", buckets=STEP_BUCKETS, registry=None)


class Families:
    """The values of the metrics in `definitions`, in their order. It is a collector for
    `prometheus_client`."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        # Imported here, because most processes are never scraped, and the import takes a twentieth of a
        # second.
        from prometheus_client.metrics_core import Metric

        self._labels: dict[str, tuple[str, ...]] = {}
        self._metrics: dict[str, Metric] = {}
        for definition in definitions:
            self._labels[definition.name] = definition.labels
            # `Metric` adds a counter's suffix itself.
            self._metrics[definition.name] = Metric(
                PREFIX + definition.name.removesuffix("_total"), definition.meaning, definition.kind
            )

    def set(self, name: str, value: float | None, *labels: object) -> None:
        """Add a sample, unless `value` is None. Labels are in the order of the definition.

        Raises:
            KeyError: the name is unknown.
            ValueError: the number of labels is wrong.
        """
        labelled = dict(zip(self._labels[name], map(str, labels), strict=True))
        if value is not None:
            self._metrics[name].add_sample(PREFIX + name, labelled, value)

    def set_link_totals(self, prefix: str, link: LinkFigures, *labels: object) -> None:
        for name, (metric, _) in _LINK_COUNTERS.items():
            self.set(prefix + metric, getattr(link, name), *labels)
        for flow in link.flows:
            self.set(f"{prefix}tensor_bytes_total", flow.bytes, *labels, flow.kind, flow.codec)
            self.set(f"{prefix}elements_total", flow.elements, *labels, flow.kind, flow.codec)

    def set_link_now(self, prefix: str, link: LinkFigures, *labels: object) -> None:
        for name, (metric, _) in _LINK_GAUGES.items():
            value = getattr(link, name)
            self.set(prefix + metric, value or None if name in _UNKNOWN_AT_ZERO else value, *labels)

    def set_state(self, prefix: str, stage: StageFigures, *labels: object) -> None:
        for name in _STATE:
            self.set(prefix + name, getattr(stage, name), *labels)

    def observed(self, name: str, samples: "Iterable[Sample]") -> None:
        """Add the samples of a histogram, without the time of its creation, which counters lack too."""
        kept = [sample for sample in samples if not sample.name.endswith("_created")]
        self._metrics[name].samples = kept

    def collect(self) -> "Iterable[Metric]":
        """All metrics, including those without samples."""
        return self._metrics.values()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format, version 0.0.4."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast("Collector", self))
        return generate_latest(registry)
