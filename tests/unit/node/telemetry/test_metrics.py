"""What Prometheus reads: every name and label as defined, counters that only grow, nothing secret."""

import errno
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.analysis import slices
from node.analysis.link_views import NOT_LISTENING
from node.analysis.slices import whole
from node.analysis.view_builder import RunViewBuilder
from node.coordinator.accounting import Accounting
from node.coordinator.gateways import Gateways
from node.coordinator.metrics import COUNTED, COUNTED_SECONDS, LINK_NOW, SLICE, STATES, RunMetrics
from node.coordinator.reporter import OWN_COSTS
from node.coordinator.reports import SealedReport
from node.run_file.addresses import why_not_bound
from node.run_state.actions import AbortKind
from node.stage.node_metrics import NodeMetrics, serve_metrics
from node.telemetry import events
from node.telemetry.metrics import (
    NODE_METRICS,
    PREFIX,
    RUN_METRICS,
    STEP_BUCKETS,
    Definition,
    Families,
    Histogram,
    MetricKind,
)
from tests.support.run_events import BEGAN, NODES, aborted, done, joined, opening, step
from tests.unit.node.coordinator.test_accounting import EPOCH, totals
from wire.errors import UserError
from wire.telemetry import Telemetry, relay_path
from wire.telemetry_proto import telemetry_to_proto

LINK = (("replica", "0"), ("source", "0"), ("target", "1"), ("target_replica", "0"))
FORBIDDEN_LABELS = {"step", "token", "address", "microbatch", "peer_address", "host", "ip"}


class Watched:
    """A run's metrics, fed by hand."""

    def __init__(self) -> None:
        self.builder = RunViewBuilder()
        self.metrics = RunMetrics(self.builder.slices)
        self.metrics.accounting = self.accounting = Accounting({"tah", "fixed-8"})
        self.now = BEGAN

    def say(self, *told: events.Event) -> None:
        for event in told:
            self.builder.apply(event, self.now)
            self.metrics.apply(event, self.now)
            self.now += 1

    def report(self, steps: float, epoch: int = EPOCH) -> None:
        for stage, node in enumerate(NODES[:2]):
            told = replace(totals(steps, stage=stage, epoch=epoch), clock_error_seconds=1e-3, relayed_bytes=5)
            links = tuple(replace(link, path=relay_path(NODES[2])) for link in told.links)
            self.accounting.report(node, replace(told, links=links))

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return parsed(self.metrics.render())


def parsed(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.fixture
def watched() -> Watched:
    one = Watched()
    one.say(*opening())
    one.report(0)
    one.accounting.begin_epoch(EPOCH, NODES[:2])
    return one


@pytest.mark.parametrize("definition", [*RUN_METRICS, *NODE_METRICS], ids=lambda one: one.name)
def test_names_follow_the_rules(definition: Definition) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", definition.name)
    assert (definition.kind is MetricKind.COUNTER) == definition.name.endswith("_total")
    assert not set(definition.labels) & FORBIDDEN_LABELS
    assert definition.meaning.endswith(".")
    for unit in ("_ms", "_mbit", "_percent", "_kb", "_mb", "_milliseconds"):
        assert not definition.name.endswith(unit), "base units"


def test_a_run_gives_every_metric_that_is_defined(watched: Watched) -> None:
    watched.say(*step(1), aborted(2), events.SnapshotStored(step=1, bytes=77, path="p"))
    watched.say(events.Recovered(text="", step=1, seconds=3.0))
    measured = events.HeldOutLoss(step=1, loss=2.0, uncompressed=2.0, samples=8, best=True, seconds=1.0)
    watched.say(measured)
    watched.report(1)
    watched.metrics.gateways = cast(Gateways, SimpleNamespace(sessions=[3, 0], restarts=1))
    samples = watched.samples()
    for definition in RUN_METRICS:
        suffixes = ("_bucket", "_sum", "_count") if definition.kind is MetricKind.HISTOGRAM else ("",)
        for suffix in suffixes:
            mine = [labels for name, labels in samples if name == PREFIX + definition.name + suffix]
            assert mine, f"{definition.name} has no sample"
            extra = {"le"} if suffix == "_bucket" else set()
            assert all({key for key, _ in labels} == set(definition.labels) | extra for labels in mine)
    assert {name for name, _ in samples} <= {
        PREFIX + definition.name + suffix
        for definition in RUN_METRICS
        for suffix in ("", "_bucket", "_sum", "_count")
    }
    assert samples["thinwire_loss", ()] == pytest.approx(5.99)
    assert samples["thinwire_steps_total", ()] == 1
    assert samples["thinwire_tokens_total", ()] == pytest.approx(4096)
    assert samples["thinwire_recovery_seconds_total", ()] == 3.0
    assert samples["thinwire_snapshot_bytes", ()] == 77
    assert samples["thinwire_gateway_sessions", (("gateway", "0"),)] == 3
    assert samples["thinwire_gateway_restarts_total", ()] == 1
    forward = (("kind", "forward"), ("replica", "0"), ("stage", "0"))
    assert samples["thinwire_stage_seconds_total", forward] == 1.0
    assert samples["thinwire_link_bytes_total", LINK] == 1000
    assert samples["thinwire_link_capacity_bytes_per_second", LINK] == 5000
    flow = (("codec", "tah"), ("direction", "activation"), *LINK)
    assert 8 * samples["thinwire_link_tensor_bytes_total", flow] / samples[
        "thinwire_link_elements_total", flow
    ] == pytest.approx(4.5)


def sealed(steps: float, stage: int) -> SealedReport:
    told = replace(totals(steps, stage=stage), memory_bytes=round(5000 + steps))
    return SealedReport(EPOCH, telemetry_to_proto(told).SerializeToString())


def large_run() -> tuple[RunMetrics, Accounting, list[str]]:
    """Rows of two stages, one more stage than have costs of their own in each step."""
    rows = OWN_COSTS // 2 + 1
    nodes = [f"node-{number:03}" for number in range(2 * rows)]
    metrics = RunMetrics(RunViewBuilder().slices)
    metrics.accounting = accounting = Accounting({"tah"})
    for number, node in enumerate(nodes):
        accounting.report(node, sealed(0, number % 2))
    accounting.begin_epoch(EPOCH, nodes, rows)
    return metrics, accounting, nodes


def test_a_large_runs_reports_that_were_just_counted_are_not_read_again() -> None:
    metrics, accounting, nodes = large_run()

    def report(steps: float) -> list[SealedReport]:
        made = [sealed(steps, number % 2) for number in range(len(nodes))]
        for node, one in zip(nodes, made, strict=True):
            accounting.report(node, one, goes_on=True)
        return made

    def seen(now: float) -> tuple[float, float, float]:
        samples = parsed(whole(metrics.slices(now)))
        kind = (("kind", "forward"), ("replica", "0"), ("stage", "1"))
        memory = samples["thinwire_stage_memory_bytes", kind[1:]]
        return (
            samples["thinwire_stage_seconds_total", kind],
            samples["thinwire_link_bytes_total", LINK],
            memory,
        )

    report(1)
    metrics.apply(accounting.step(1, 2.0), BEGAN)
    newer = report(2)
    assert seen(BEGAN + COUNTED_SECONDS) == (1.0, 1000.0, 5001.0)
    assert all(one._opened is None for one in newer)
    assert seen(BEGAN + COUNTED_SECONDS + 0.1) == (2.0, 2000.0, 5002.0)
    newest = report(3)
    assert seen(BEGAN - 1.0) == (3.0, 3000.0, 5003.0), "a clock that was set back hides nothing"
    # A node without a stage is read every time: nobody counts its reports.
    accounting.report(
        "spare", SealedReport(0, telemetry_to_proto(Telemetry(relay_pairs=2)).SerializeToString())
    )
    assert parsed(whole(metrics.slices(BEGAN)))["thinwire_volunteer_relay_pairs", ()] == 2
    assert all(one._opened is not None for one in newest)


def test_the_slices_of_a_scrape_are_short_and_an_epoch_may_end_between_them() -> None:
    metrics, accounting, nodes = large_run()
    for number, node in enumerate(nodes):
        accounting.report(node, sealed(1, number % 2), goes_on=True)
    scrape = metrics.slices(BEGAN)
    next(scrape)
    assert len(accounting._waiting) == len(nodes) - SLICE
    accounting.step(1, 2.0, aborted=True)
    samples = parsed(whole(scrape))
    assert samples["thinwire_link_bytes_total", LINK] == 1000
    every = [
        value for (name, _), value in samples.items() if name == "thinwire_stage_seconds_total" and value
    ]
    assert sum(every) == pytest.approx(2.0 * len(nodes))


@pytest.mark.parametrize("value", [0, 7, 2**53 + 1, 1e18, 0.1, 1e-9, True])
def test_samples_of_several_metrics_are_written_as_single_ones(value: float) -> None:
    one, all_ = Families(RUN_METRICS), Families(RUN_METRICS)
    hostile = 'x"\\\n'
    for _ in range(2):
        one.set("stage_info", value, 1, 0, hostile, "cpu")
        all_.set_all(("stage_info",), (value,), 1, 0, hostile, "cpu")
        for name in LINK_NOW[:2]:
            one.set(name, value, 0, 1, 0, 0)
        all_.set_all(LINK_NOW, (value, value, None, None), 0, 1, 0, 0)
        for kind in ("forward", "backward"):
            one.set("stage_seconds_total", value, 1, 0, kind)
        all_.set_each("stage_seconds_total", ("forward", "backward"), (value, value), 1, 0)
    assert one.text() == all_.text()
    with pytest.raises(ValueError, match="labels"):
        all_.set_all(LINK_NOW, (value,) * 4, 0)
    with pytest.raises(ValueError, match="labels"):
        all_.set_each("stage_seconds_total", ("forward",), (value,), 1)


def test_a_link_that_is_not_direct_says_why(watched: Watched) -> None:
    def relayed(event: events.Event) -> events.Event:
        if not isinstance(event, events.StepCosts):
            return event
        return replace(event, links=tuple(replace(one, path=relay_path(NODES[2])) for one in event.links))

    watched.say(events.NodeJoined(node_id=NODES[1], device="cpu", address="", listens=False))
    watched.say(*map(relayed, step(1)))
    watched.report(1)
    found = [dict(labels) for name, labels in watched.samples() if name == "thinwire_link_path"]
    assert found
    for labels in found:
        assert labels["path"] == relay_path(NODES[2])
        assert f"the node of stage 1 {NOT_LISTENING}" in labels["why"]


def test_counters_only_grow_over_epochs_deaths_and_restarts(watched: Watched) -> None:
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    counters = {PREFIX + one.name for one in RUN_METRICS if one.kind is MetricKind.COUNTER}

    def check() -> None:
        nonlocal before
        now = {key: value for key, value in watched.samples().items() if key[0] in counters}
        assert before.keys() <= now.keys()
        assert all(now[key] >= value for key, value in before.items())
        before = now

    for epoch in range(EPOCH, EPOCH + 3):
        for steps in (0.0, 0.5, 1.0, 2.0):
            watched.report(steps, epoch)
            check()
        watched.say(done(1), aborted(2, epoch), events.NodeLeft(node_id=NODES[1], reason="killed"))
        watched.accounting.step(2, 1.0, aborted=True)
        watched.accounting.forget(NODES[1])
        check()
        watched.say(joined(NODES[1]))
        watched.report(0.0, epoch + 1)
        watched.accounting.begin_epoch(epoch + 1, NODES[:2])
        check()
    assert before["thinwire_nodes_left_total", ()] == 3
    assert before["thinwire_link_bytes_total", LINK] == 6000


def test_a_node_that_is_gone_leaves_no_gauge_behind(watched: Watched) -> None:
    watched.report(1)
    assert ("thinwire_node_clock_skew_seconds", (("node", NODES[1]),)) in watched.samples()
    watched.accounting.forget(NODES[1])
    samples = watched.samples()
    assert ("thinwire_node_clock_skew_seconds", (("node", NODES[1]),)) not in samples
    assert ("thinwire_stage_memory_bytes", (("replica", "0"), ("stage", "1"))) not in samples
    assert ("thinwire_stage_memory_bytes", (("replica", "0"), ("stage", "0"))) in samples


def test_one_state_at_a_time(watched: Watched) -> None:
    samples = watched.samples()
    states = {
        labels[0][1]: value for (name, labels), value in samples.items() if name == "thinwire_run_state"
    }
    assert set(states) == set(STATES)
    assert [state for state, value in states.items() if value] == ["training"]


def test_steps_that_are_not_finite_are_counted_apart(watched: Watched) -> None:
    watched.say(aborted(2))
    assert watched.samples()["thinwire_non_finite_total", ()] == 0
    # A node's own words count for nothing.
    watched.say(events.StepAborted(epoch=1, step=2, kind=AbortKind.FAILED, reason="the loss is not finite"))
    assert watched.samples()["thinwire_non_finite_total", ()] == 0
    watched.say(events.StepAborted(epoch=1, step=2, kind=AbortKind.NOT_FINITE, reason="the loss"))
    assert watched.samples()["thinwire_non_finite_total", ()] == 1
    watched.say(events.StepAborted(epoch=1, step=2, kind=AbortKind.PLACEMENT, reason="the placement changes"))
    assert watched.samples()["thinwire_steps_aborted_total", ()] == 3


def test_nothing_secret_and_no_address_is_shown(watched: Watched) -> None:
    watched.say(events.JoinLine(line="thinwire join tw1_S3cr3t"), aborted(2))
    text = watched.metrics.render().decode()
    assert "S3cr3t" not in text and "192.0.2" not in text and "4711" not in text


def test_labels_from_nodes_cannot_break_the_format(watched: Watched) -> None:
    hostile = 'x"} 1\nthinwire_loss 0\n'
    watched.say(events.NodeJoined(node_id=NODES[0], device=hostile, address=""))
    samples = watched.samples()
    assert (
        samples[
            "thinwire_stage_info", (("device", hostile), ("node", NODES[0]), ("replica", "0"), ("stage", "0"))
        ]
        == 1
    )


def test_a_name_means_the_same_at_the_coordinator_and_at_a_node() -> None:
    run = {one.name: one for one in RUN_METRICS}
    assert [one.name for one in NODE_METRICS if run.get(one.name, one) != one] == []


def test_every_counted_event_is_a_metric() -> None:
    assert set(COUNTED) <= {one.name for one in RUN_METRICS if one.kind is MetricKind.COUNTER}


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram()
    for seconds in (0.05, 0.1, 0.11, 3.0, 1e6):
        histogram.add(seconds)
    buckets, total = histogram.buckets()
    counts = dict(buckets)
    assert total == pytest.approx(1_000_003.26)
    assert (counts["0.1"], counts["0.25"], counts["5.0"], counts["+Inf"]) == (2, 3, 4, 5)
    assert len(counts) == len(STEP_BUCKETS) + 1


def test_wrong_names_and_labels_are_mistakes() -> None:
    families = Families(RUN_METRICS)
    with pytest.raises(KeyError):
        families.set("no_such_metric", 1.0)
    with pytest.raises(ValueError, match="labels"):
        families.set("link_bytes_total", 1.0, 0)


def test_a_node_shows_itself_across_epochs() -> None:
    metrics = NodeMetrics(node_id="node-a", run_id="run-a", device="cpu")
    metrics.report(totals(0), -1, 0)
    metrics.report(totals(1), 0, 2)
    metrics.report(totals(2), 0, 2)
    metrics.report(totals(1, stage=1, epoch=EPOCH + 1, rejects=3), 1, 2)
    samples = parsed(metrics.render())
    assert samples["thinwire_node_stage", ()] == 1
    assert samples["thinwire_node_link_bytes_total", (("peer", "1"),)] == 2000
    assert samples["thinwire_node_link_bytes_total", (("peer", "0"),)] == 1000
    assert samples["thinwire_node_link_rejects_total", (("peer", "0"),)] == 3
    assert samples["thinwire_node_seconds_total", (("kind", "forward"),)] == 3.0
    flow = (("codec", "tah"), ("direction", "gradient"), ("peer", "0"))
    assert samples["thinwire_node_link_elements_total", flow] == 1600
    assert {name for name, _ in samples} <= {PREFIX + one.name for one in NODE_METRICS}


async def test_a_node_serves_its_metrics_and_nothing_else() -> None:
    async with (
        serve_metrics("127.0.0.1:0", lambda: b"thinwire_node_stage 3\n") as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        async with session.get("/metrics") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert parsed(await answer.read()) == {("thinwire_node_stage", ()): 3.0}
        async with session.get("/") as answer:
            assert answer.status == 404
        async with session.post("/metrics") as answer:
            assert answer.status == 405
    with pytest.raises(UserError, match=r"cannot serve metrics at 192\.0\.2\.1:1 \([^(]+\): give another"):
        async with serve_metrics("192.0.2.1:1", lambda: b""):
            pass


def test_the_systems_error_is_shown_even_without_an_errno() -> None:
    taken = OSError(errno.EADDRINUSE, "error while attempting to bind on address ('127.0.0.1', 1): ...")
    assert why_not_bound(taken) == os.strerror(errno.EADDRINUSE)
    passed_over = OSError("could not bind on any address out of [('192.0.2.1', 1)]")
    assert why_not_bound(passed_over) == os.strerror(errno.EADDRNOTAVAIL)


def test_a_slice_of_a_scrape_handles_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tuple(f"node-{number}" for number in range(2 * slices.SLICE + 9))
    told = [joined(node) for node in nodes]
    placed = events.PlacementMade(epoch=EPOCH, nodes=nodes, resume_step=0, blocks=(1,) * len(nodes))
    run = Watched()
    run.accounting.begin_epoch(EPOCH, nodes)
    run.say(*told, placed)
    for stage, node in enumerate(nodes):
        run.accounting.report(node, totals(1.0, stage=stage, epoch=EPOCH))
    handled = [0]
    for name in ("set_all", "set_each"):
        write = getattr(Families, name)

        def counting(families: Families, *rest: Any, write: Any = write) -> None:
            handled[-1] += 1
            write(families, *rest)

        monkeypatch.setattr(Families, name, counting)
    made = []

    def scrape() -> slices.Slices[None]:
        made.append((yield from run.metrics.slices()))

    for _ in scrape():
        handled.append(0)
    # A stage has two samples of this kind in the view, one of its times and one of its memory; a link has at
    # most two and one for each of two kinds of tensors.
    assert sum(handled) > 4 * len(nodes) and max(handled) <= 4 * slices.SLICE
    assert made == [run.metrics.render()]


def test_two_scrapes_at_once_count_a_relay_once() -> None:
    run = Watched()
    run.accounting.begin_epoch(EPOCH, NODES[:2])
    run.say(*opening())
    run.report(1.0)
    first, second = run.metrics.slices(), run.metrics.slices()
    for _ in range(3):
        next(first)
    run.accounting.report(NODES[0], replace(totals(2.0, stage=0, epoch=EPOCH), relayed_bytes=7))
    whole(second)
    last = parsed(whole(first))
    assert last[f"{PREFIX}volunteer_relay_bytes_total", ()] <= 7 + 5
    assert run.samples()[f"{PREFIX}volunteer_relay_bytes_total", ()] == 7 + 5
