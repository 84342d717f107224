"""The names of all metrics, with their labels and meanings, and how values become Prometheus families.

Base units, ratios from 0 to 1, counters end in `_total` (design section 7). Labels are few and bounded: a
stage, the two stages of a link, a kind of time, a kind of tensor, a codec of the run, a node of the run.
Never a step, a token or an address.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format, as it goes over HTTP."""
PREFIX = "thinwire_"
STEP_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Seconds."""


class MetricKind(StrEnum):
    """As Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Definition:
    """One metric."""

    name: str
    """Without the prefix."""
    kind: MetricKind
    labels: tuple[str, ...]
    meaning: str


def _counter(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, MetricKind.COUNTER, labels, meaning)


def _gauge(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, MetricKind.GAUGE, labels, meaning)


LINK = ("source", "target")
FLOW = ("source", "target", "direction", "codec")

RUN_METRICS: tuple[Definition, ...] = (
    _gauge("build_info", "1; the version is in the labels.", "version", "protocol"),
    _gauge("run_info", "1; run id and codecs are in the labels.", "run", "forward_codec", "backward_codec"),
    _gauge("run_state", "1 for the state that the run is in, 0 for the others.", "state"),
    _gauge("steps_wanted", "Steps of the whole run."),
    _gauge("steps_done", "Steps done; goes back with a rollback."),
    _counter("steps_total", "Steps done by this coordinator, replayed ones too."),
    _counter("steps_replayed_total", "Steps that were done before and ran again after a rollback."),
    _counter("steps_aborted_total", "Steps that were aborted and ran again."),
    _counter("non_finite_total", "Steps that were not committed because a value was not finite."),
    _counter("tokens_total", "Tokens of the steps done by this coordinator."),
    _counter("recoveries_total", "Interruptions that the run got over."),
    _counter("recovery_seconds_total", "Time from interruptions to the restored state."),
    _counter("nodes_joined_total", "Nodes that joined, again or for the first time."),
    _counter("nodes_left_total", "Nodes that left, died or were put out."),
    Definition("step_seconds", MetricKind.HISTOGRAM, (), "Wall time of steps at the coordinator."),
    _gauge("last_step_timestamp_seconds", "Unix time at which a step was done last; 0 before the first."),
    _gauge("loss", "Of the newest step, nats a token."),
    _gauge("gradient_norm", "Of the newest step, before clipping."),
    _gauge("learning_rate", "Of the newest step."),
    _gauge("tokens_per_second", "Over the recent steps."),
    _gauge("eta_seconds", "To the end of the run at the recent speed."),
    _gauge("epoch", "Number of the newest placement."),
    _gauge("stages_wanted", "Stages that the run file asks for."),
    _gauge("stages_placed", "Stages of the newest placement."),
    _gauge("stages_present", "Stages of the newest placement whose node is connected."),
    _gauge("members", "Connected nodes."),
    _gauge("spares", "Connected nodes without a stage while every stage has its node."),
    _gauge("snapshot_timestamp_seconds", "Unix time of the newest snapshot; 0 before the first."),
    _gauge("snapshot_steps", "Steps done in the newest snapshot."),
    _gauge("snapshot_bytes", "Size of the newest snapshot."),
    _gauge("stage_info", "1; the stage's node and its device are in the labels.", "stage", "node", "device"),
    _gauge("stage_present", "1 if the stage's node is connected.", "stage"),
    _counter("stage_seconds_total", "Wall time of the stage's compute thread, by kind.", "stage", "kind"),
    _gauge("stage_memory_bytes", "Resident set of the stage's node.", "stage"),
    _gauge("stage_peak_memory_bytes", "The largest so far of that process.", "stage"),
    _gauge("stage_gpu_memory_bytes", "What torch holds on the stage's GPU; 0 without one.", "stage"),
    _gauge("stage_gpu_peak_memory_bytes", "The largest so far of that process.", "stage"),
    _counter("link_bytes_total", "Everything written to the link's sockets.", *LINK),
    _counter("link_tensor_bytes_total", "Frames that carried tensors.", *FLOW),
    _counter("link_elements_total", "Elements that those frames carried.", *FLOW),
    _counter("link_busy_seconds_total", "Time with something to send or to be acknowledged.", *LINK),
    _counter("link_retransmits_total", "Frames sent again.", *LINK),
    _counter("link_rejects_total", "Damaged frames, asked for again.", *LINK),
    _gauge("link_capacity_bytes_per_second", "Measured; absent while not known.", *LINK),
    _gauge("link_round_trip_seconds", "Smoothed; absent while not known.", *LINK),
    _gauge("link_queued_bytes", "Waiting to be sent or acknowledged.", *LINK),
    _gauge("node_clock_skew_seconds", "The node's wall clock minus the coordinator's.", "node"),
    _gauge("node_clock_error_seconds", "How wrong that may be.", "node"),
)
"""At the coordinator, for the whole run. A link's labels are the stages that send and receive."""

PEER = ("peer",)
PEER_FLOW = ("peer", "direction", "codec")

NODE_METRICS: tuple[Definition, ...] = (
    _gauge("build_info", "1; the version is in the labels.", "version", "protocol"),
    _gauge("node_info", "1; node, run and device are in the labels.", "node", "run", "device"),
    _gauge("node_stage", "The stage that the node hosts; -1 for none."),
    _gauge("node_epoch", "Number of the placement; 0 before the first."),
    _counter("node_seconds_total", "Wall time of the compute thread, by kind.", "kind"),
    _counter("node_link_bytes_total", "Everything written to the sockets of a neighbour's link.", *PEER),
    _counter("node_link_tensor_bytes_total", "Frames that carried tensors.", *PEER_FLOW),
    _counter("node_link_elements_total", "Elements that those frames carried.", *PEER_FLOW),
    _counter("node_link_busy_seconds_total", "Time with something to send or to be acknowledged.", *PEER),
    _counter("node_link_retransmits_total", "Frames sent again.", *PEER),
    _counter("node_link_rejects_total", "Damaged frames received.", *PEER),
    _gauge("node_link_capacity_bytes_per_second", "Measured; absent while not known.", *PEER),
    _gauge("node_link_round_trip_seconds", "Smoothed; absent while not known.", *PEER),
    _gauge("node_link_queued_bytes", "Waiting to be sent or acknowledged.", *PEER),
    _gauge("node_memory_bytes", "Resident set of the process."),
    _gauge("node_peak_memory_bytes", "The largest so far."),
    _gauge("node_gpu_memory_bytes", "What torch holds on the GPU; 0 without one."),
    _gauge("node_gpu_peak_memory_bytes", "The largest so far."),
    _gauge("local_clock_skew_seconds", "This machine's wall clock minus the coordinator's."),
    _gauge("local_clock_error_seconds", "How wrong that may be."),
)
"""At each node that was started with `--metrics`. Other names than the coordinator's, so that nobody adds
the same seconds and bytes up twice. `peer` is the neighbour's stage."""


class Histogram:
    """Counts of seconds in `STEP_BUCKETS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        bucket = next((i for i, bound in enumerate(STEP_BUCKETS) if seconds <= bound), len(STEP_BUCKETS))
        self._counts[bucket] += 1
        self._sum += seconds

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        bounds = [*(str(bound) for bound in STEP_BUCKETS), "+Inf"]
        return [(bound, float(sum(self._counts[: i + 1]))) for i, bound in enumerate(bounds)], self._sum


class Families:
    """Values for the metrics of `definitions`, in their order. A name that is not there is a KeyError."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        self._definitions = {definition.name: definition for definition in definitions}
        self._values: dict[str, list[tuple[Sequence[str], float]]] = {name: [] for name in self._definitions}
        self._histograms: dict[str, Histogram] = {}

    def set(self, name: str, value: float | None, *labels: object) -> None:
        """One sample; None leaves it out. Labels come in the order of the definition."""
        if len(labels) != len(self._definitions[name].labels):
            raise ValueError(f"{name} has the labels {self._definitions[name].labels}, not {labels}")
        if value is not None:
            self._values[name].append(([str(label) for label in labels], float(value)))

    def observed(self, name: str, histogram: Histogram) -> None:
        self._histograms[self._definitions[name].name] = histogram

    def __iter__(self) -> Iterator[Metric]:
        for name, definition in self._definitions.items():
            full, meaning, labels = PREFIX + name, definition.meaning, definition.labels
            family: CounterMetricFamily | GaugeMetricFamily
            match definition.kind:
                case MetricKind.HISTOGRAM:
                    histogram = HistogramMetricFamily(full, meaning, labels=labels)
                    if name in self._histograms:
                        buckets, total = self._histograms[name].buckets()
                        histogram.add_metric((), buckets, total)
                    yield histogram
                    continue
                case MetricKind.COUNTER:
                    family = CounterMetricFamily(full, meaning, labels=labels)
                case _:
                    family = GaugeMetricFamily(full, meaning, labels=labels)
            for values, value in self._values[name]:
                family.add_metric(values, value)
            yield family
