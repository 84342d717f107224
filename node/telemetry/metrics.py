"""All metrics: names, labels, meanings, and their form as Prometheus' text, version 0.0.4.

Base units, ratios from 0 to 1, counters end in `_total`. Labels are bounded: a stage, the two stages of a
link, a kind of time, a kind of tensor, a codec or a node of the run; never a step, a token or an address.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""HTTP content type of Prometheus' text format."""
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


STAGE = ("stage", "replica")
LINK = ("source", "target", "replica", "target_replica")
"""`replica`: the row of the stage that sends."""
FLOW = (*LINK, "direction", "codec")

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
    Definition("step_seconds", MetricKind.HISTOGRAM, (), "Wall time of steps at the coordinator."),
    _gauge("last_step_timestamp_seconds", "Unix time of the last step done; 0 before the first."),
    _gauge("loss", "Training loss of the newest step, nats a token."),
    _gauge("held_out_loss", "Newest held-out loss, nats a token; links: as-trained or fp32.", "links"),
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
    _gauge("stage_memory_bytes", "Resident set of the stage's node process.", *STAGE),
    _gauge("stage_peak_memory_bytes", "Largest so far for that process.", *STAGE),
    _gauge("stage_gpu_memory_bytes", "Allocated by torch on the stage's GPU; 0 without one.", *STAGE),
    _gauge("stage_gpu_peak_memory_bytes", "Largest so far for that process.", *STAGE),
    _counter("link_bytes_total", "All bytes written to the link's sockets.", *LINK),
    _counter("link_tensor_bytes_total", "Bytes of frames that carried tensors.", *FLOW),
    _counter("link_elements_total", "Elements in those frames.", *FLOW),
    _counter("link_busy_seconds_total", "Time with data to send or to be acknowledged.", *LINK),
    _counter("link_retransmits_total", "Frames sent again.", *LINK),
    _counter("link_rejects_total", "Damaged frames, requested again.", *LINK),
    _gauge("link_capacity_bytes_per_second", "Measured capacity; absent while unknown.", *LINK),
    _gauge("link_round_trip_seconds", "Smoothed round trip; absent while unknown.", *LINK),
    _gauge("link_queued_bytes", "Bytes waiting to be sent or acknowledged.", *LINK),
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
"""At the coordinator, for the whole run. `source` and `target` are the stages that send and receive."""

_RUN_LABELS = {one.name: one.labels for one in RUN_METRICS}

PEER = ("peer",)
PEER_FLOW = ("peer", "direction", "codec")

NODE_METRICS: tuple[Definition, ...] = (
    _gauge("build_info", "1; the version is in the labels.", "version", "protocol"),
    _gauge("node_info", "1; node, run and device are in the labels.", "node", "run", "device"),
    _gauge("node_stage", "Stage of the node; -1 for none."),
    _gauge("node_epoch", "Epoch of the placement; 0 before the first."),
    _counter("node_seconds_total", "Wall time of the compute thread, by kind.", "kind"),
    _counter("node_link_bytes_total", "All bytes written to the link's sockets.", *PEER),
    _counter("node_link_tensor_bytes_total", "Bytes of frames that carried tensors.", *PEER_FLOW),
    _counter("node_link_elements_total", "Elements in those frames.", *PEER_FLOW),
    _counter("node_link_busy_seconds_total", "Time with data to send or to be acknowledged.", *PEER),
    _counter("node_link_retransmits_total", "Frames sent again.", *PEER),
    _counter("node_link_rejects_total", "Damaged frames received.", *PEER),
    _gauge("node_link_capacity_bytes_per_second", "Measured capacity; absent while unknown.", *PEER),
    _gauge("node_link_round_trip_seconds", "Smoothed round trip; absent while unknown.", *PEER),
    _gauge("node_link_queued_bytes", "Bytes waiting to be sent or acknowledged.", *PEER),
    _gauge("node_memory_bytes", "Resident set of the process."),
    _gauge("node_peak_memory_bytes", "Largest so far."),
    _gauge("node_gpu_memory_bytes", "Allocated by torch on the GPU; 0 without one."),
    _gauge("node_gpu_peak_memory_bytes", "Largest so far."),
    _gauge("local_clock_skew_seconds", "This machine's wall clock minus the coordinator's."),
    _gauge("local_clock_error_seconds", "Bound on the error of the skew."),
)
"""At each node started with `--metrics`. Names differ from the coordinator's, so nothing is counted twice.
`peer` is the neighbour's stage."""


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
    """Values of the metrics in `definitions`, in their order. KeyError for an unknown name."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        self._definitions = {definition.name: definition for definition in definitions}
        self._samples: dict[str, list[str]] = {name: [] for name in self._definitions}
        self._lists: dict[tuple[str, ...], list[list[str]]] = {}

    def set(self, name: str, value: float | None, *labels: object) -> None:
        """Add a sample, unless `value` is None. Labels in the order of the definition."""
        names = self._definitions[name].labels
        if len(labels) != len(names):
            raise ValueError(f"{name} has the labels {names}, not {labels}")
        if value is not None:
            self._samples[name].append(f"{_sample_name(name, names, labels)} {_number(value)}")

    def set_all(self, names: tuple[str, ...], values: Iterable[float | None], *labels: object) -> None:
        """As `set`, for several of the run's metrics with these labels; values are finite. Takes a third of
        the time."""
        lists = self._lists.get(names)
        if lists is None:
            lists = self._lists[names] = [self._samples[name] for name in names]
        for samples, start, value in zip(lists, _starts(names, labels), values, strict=True):
            if value is not None:
                samples.append(start + repr(float(value)))

    def set_each(self, name: str, last: tuple[object, ...], values: Iterable[float], *labels: object) -> None:
        """As `set`, of one of the run's metrics, for several values of the last label; values are finite."""
        starts = _starts_of_each(name, last, labels)
        self._samples[name] += [
            start + repr(float(value)) for start, value in zip(starts, values, strict=True)
        ]

    def observed(self, name: str, histogram: Histogram) -> None:
        """Add a histogram's counts."""
        samples = self._samples[self._definitions[name].name]
        buckets, total = histogram.buckets()
        for bound, count in buckets:
            samples.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {_number(count)}')
        samples += [f"{PREFIX}{name}_count {_number(buckets[-1][1])}", f"{PREFIX}{name}_sum {_number(total)}"]

    def text(self) -> bytes:
        """Everything, each metric with its meaning."""
        lines: list[str] = []
        for name, one in self._definitions.items():
            lines += [f"# HELP {PREFIX}{name} {_escaped(one.meaning)}", f"# TYPE {PREFIX}{name} {one.kind}"]
            lines += self._samples[name]
        lines.append("")
        return "\n".join(lines).encode()


@functools.lru_cache(maxsize=2**17)
def _sample_name(name: str, names: tuple[str, ...], labels: tuple[object, ...]) -> str:
    """A sample's name with its labels. A thousand nodes have thirty thousand, the same at every scrape."""
    if not names:
        return PREFIX + name
    pairs = (f'{key}="{_escaped(str(label), quotes=True)}"' for key, label in zip(names, labels, strict=True))
    return f"{PREFIX}{name}{{{','.join(pairs)}}}"


@functools.lru_cache(maxsize=2**17)
def _starts(names: tuple[str, ...], labels: tuple[object, ...]) -> tuple[str, ...]:
    """Of run metrics' samples with these labels: what stands before the value."""
    for name in names:
        if len(labels) != len(_RUN_LABELS[name]):
            raise ValueError(f"{name} has the labels {_RUN_LABELS[name]}, not {labels}")
    return tuple(f"{_sample_name(name, _RUN_LABELS[name], labels)} " for name in names)


@functools.lru_cache(maxsize=2**17)
def _starts_of_each(name: str, last: tuple[object, ...], labels: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(_starts((name,), (*labels, one))[0] for one in last)


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    """As Prometheus reads it."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
