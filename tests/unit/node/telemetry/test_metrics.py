"""What Prometheus reads: every name and label as defined, counters that only grow, nothing secret."""

import errno
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.coordinator.accounting import Accounting
from node.coordinator.gateways import Gateways
from node.coordinator.metrics import COUNTED, STATES, RunMetrics
from node.run_file.addresses import why_not_bound
from node.run_state.actions import AbortKind
from node.stage.node_metrics import NodeMetrics, serve_metrics
from node.telemetry import events
from node.telemetry.metrics import (
    NODE_METRICS,
    PREFIX,
    RUN_METRICS,
    STEP_BUCKETS,
    Families,
    MetricKind,
    step_histogram,
)
from node.view.link_views import NOT_LISTENING
from node.view.run_view import RunView
from node.view.view_builder import RunViewBuilder
from tests.support.run_events import BEGAN, NODES, aborted, done, joined, opening, step
from tests.support.totals import EPOCH, totals
from wire.errors import UserError
from wire.figures import FlowFigures
from wire.spec import Direction
from wire.telemetry import relay_path

BY_VOLUNTEER = relay_path("node-cccccccccc")
LINK = (("replica", "0"), ("source", "0"), ("target", "1"), ("target_replica", "0"))


class Watched:
    """A run's metrics, fed by hand."""

    def __init__(self) -> None:
        self.builder = RunViewBuilder()
        self.metrics = RunMetrics(self.view)
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
            links = tuple(replace(link, path=BY_VOLUNTEER) for link in told.links)
            self.accounting.report(node, replace(told, links=links))

    async def view(self) -> RunView:
        return self.builder.view()

    def text(self) -> bytes:
        return self.metrics.scrape(self.builder.view()).text()

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return parsed(self.text())


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


@pytest.mark.parametrize("direction", Direction)
def test_a_codec_that_a_node_invents_keeps_nobody_from_the_view(
    watched: Watched, direction: Direction
) -> None:
    flow = FlowFigures(direction=direction, codec="invented", bytes=1000, elements=8000)
    for number in range(1, 4):
        for stage, node in enumerate(NODES[:2]):
            told = totals(number, stage=stage, epoch=EPOCH)
            links = tuple(replace(link, flows=(*link.flows, flow)) for link in told.links)
            watched.accounting.report(node, replace(told, links=links))
        watched.say(watched.accounting.step(number, seconds=1.0), done(number))
    assert watched.builder.view().links, "it has links"
    assert watched.text()


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


def test_a_link_that_is_not_direct_says_why(watched: Watched) -> None:
    def relayed(event: events.Event) -> events.Event:
        if not isinstance(event, events.StepCosts):
            return event
        return replace(event, links=tuple(replace(one, path=BY_VOLUNTEER) for one in event.links))

    watched.say(events.NodeJoined(node_id=NODES[1], device="cpu", address="", listens=False))
    watched.say(*map(relayed, step(1)))
    watched.report(1)
    found = [dict(labels) for name, labels in watched.samples() if name == "thinwire_link_path"]
    assert found
    for labels in found:
        assert labels["path"] == BY_VOLUNTEER
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
    text = watched.text().decode()
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
    histogram, families = step_histogram(), Families(RUN_METRICS)
    for seconds in (0.05, 0.1, 0.11, 3.0, 1e6):
        histogram.observe(seconds)
    families.observed("step_seconds", next(iter(histogram.collect())).samples)
    samples = parsed(families.text())
    assert samples["thinwire_step_seconds_sum", ()] == pytest.approx(1_000_003.26)
    counts = {dict(labels)["le"]: n for (name, labels), n in samples.items() if name.endswith("_bucket")}
    assert (counts["0.1"], counts["0.25"], counts["5.0"], counts["+Inf"]) == (2, 3, 4, 5)
    assert len(counts) == len(STEP_BUCKETS) + 1
    assert not any(name.endswith("_created") for name, _ in samples)


def test_wrong_names_and_labels_are_mistakes() -> None:
    families = Families(RUN_METRICS)
    with pytest.raises(KeyError):
        families.set("no_such_metric", 1.0)
    for labels in ((0,), (0, 1, 0, 0, 0)):
        with pytest.raises(ValueError):
            families.set("link_bytes_total", 1.0, *labels)


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


def test_a_scrape_is_of_one_moment_and_counts_a_relay_once(watched: Watched) -> None:
    watched.report(1.0)
    first = watched.metrics.scrape(watched.builder.view())
    watched.say(*step(1))
    watched.report(3.0)
    later, before = watched.samples(), parsed(first.text())
    assert before["thinwire_link_bytes_total", LINK] == 1000
    for name, labels in (
        ("link_bytes_total", LINK),
        ("link_elements_total", (("codec", "tah"), ("direction", "activation"), *LINK)),
        ("stage_seconds_total", (("kind", "forward"), ("replica", "0"), ("stage", "0"))),
    ):
        assert 3 * before[PREFIX + name, labels] == later[PREFIX + name, labels] > 0
    assert (before["thinwire_steps_total", ()], later["thinwire_steps_total", ()]) == (0, 1)
    assert later["thinwire_volunteer_relay_bytes_total", ()] == 2 * 5


async def test_the_text_of_a_scrape_is_written_off_the_event_loop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    text = Families.text

    def noted(families: Families) -> bytes:
        threads.append(threading.current_thread())
        return text(families)

    monkeypatch.setattr(Families, "text", noted)
    assert parsed(await watched.metrics.render()) == watched.samples()
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()
