"""A real Prometheus scrapes a real run: every metric, counters over a node's death, queries of deploy/."""

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import DashboardSection
from node.telemetry.events import PageServed, PlacementMade, RunStarted
from node.telemetry.metrics import NODE_METRICS, PREFIX, RUN_METRICS, Definition, MetricKind
from tests.support.deploy import DEPLOY, compose
from tests.support.fault_prefork import Prefork
from tests.support.prometheus import BINARY, MISSING, Prometheus, queries
from tests.support.run_harness import SMALL, Run

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=100_000, snapshot_every=5),
    model=replace(SMALL.model, layers=2),
    pipeline=replace(SMALL.pipeline, stages=2, forward_codec="tah", backward_codec="fixed-8"),
    dashboard=DashboardSection(listen="127.0.0.1:0"),
    # A node that did not get the end gives up before its test does.
    coordinator=replace(SMALL.coordinator, outage_seconds=10.0, gateways=1),
)
MAY_BE_ABSENT = {"link_capacity_bytes_per_second", "node_link_capacity_bytes_per_second"}
"""A quick machine's links may never be busy for long enough to be measured."""


MAY_BE_EMPTY = {"Use of each link", "Measured capacity", "The five busiest links"}
"""The same of panels: those that divide by a capacity. Every other one shows something of a healthy run."""


def suffixes(definition: Definition) -> tuple[str, ...]:
    return ("_bucket", "_sum", "_count") if definition.kind is MetricKind.HISTOGRAM else ("",)


def offered(prometheus: Prometheus, label: str, selector: str) -> list[str]:
    """The values that Grafana offers for a variable of `label_values(selector, label)`."""
    values: list[str] = prometheus.get(f"label/{label}/values", **{"match[]": selector})
    return values


@pytest.mark.timeout(240)
def test_a_real_prometheus_scrapes_a_real_run(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start()
        token = coordinator.token
        watched = run.command(
            *("join", token, "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1"),
            *("--state-dir", str(tmp_path / "watched"), "--metrics", "127.0.0.1:0", "--json", "--wait", "0"),
            name="watched",
        )
        doomed = run.add_node()
        page = coordinator.wait_event(PageServed).url
        line = watched.wait_line(lambda line: "/metrics" in line)
        targets = {
            "coordinator": page.removeprefix("http://").rstrip("/"),
            "node": line.partition("http://")[2].partition("/metrics")[0],
        }
        with Prometheus(tmp_path / "prometheus", targets) as prometheus:
            prometheus.wait_for("thinwire_snapshot_steps > 0")
            sent = prometheus.wait_for("sum(thinwire_link_bytes_total) > 0")[0][1]
            steps = prometheus.wait_for("thinwire_steps_total > 0")[0][1]
            panels = [query for query in queries() if query.panel]
            assert {query.panel for query in panels} > MAY_BE_EMPTY
            for query in panels:
                if query.panel not in MAY_BE_EMPTY:
                    prometheus.wait_for(query.plain)  # raises when it stays empty

            doomed.kill()
            run.add_node(token, state_dir=run.state_dir(0))
            coordinator.wait_event(PlacementMade, lambda placement: placement.epoch >= 2)
            prometheus.wait_for("thinwire_recoveries_total == 1")
            prometheus.wait_for(f"thinwire_steps_total > {steps + 5}")
            prometheus.wait_for("thinwire_node_epoch == 2")

            names = prometheus.names()
            for definition in (*RUN_METRICS, *NODE_METRICS):
                for suffix in suffixes(definition):
                    full = PREFIX + definition.name + suffix
                    if full not in names and definition.name in MAY_BE_ABSENT:
                        continue
                    assert full in names, f"{full} was not scraped"
                    extra = {"le"} if suffix == "_bucket" else set()
                    assert prometheus.labels(full) == set(definition.labels) | extra
            known = {
                PREFIX + one.name + suffix
                for one in (*RUN_METRICS, *NODE_METRICS)
                for suffix in suffixes(one)
            }
            assert {name for name in names if name.startswith(PREFIX)} <= known

            # Counters survive the death of a node: Prometheus saw none of them fall.
            for definition in (*RUN_METRICS, *NODE_METRICS):
                if definition.kind is MetricKind.COUNTER:
                    assert prometheus.query(f"resets({PREFIX}{definition.name}[5m]) > 0") == []
            # A scrape that a busy machine answers too late leaves no samples until the next one.
            assert prometheus.wait_for("sum(thinwire_link_bytes_total)")[0][1] > sent

            # What the metrics say is what the run is: bits an element, kinds that sum to wall time.
            # By one query, for what is of one scrape: between two of them many steps may be done.
            sent_bytes = "sum by (codec) (thinwire_link_tensor_bytes_total)"
            elements = "sum by (codec) (thinwire_link_elements_total)"
            both = prometheus.wait_for(
                f"label_replace(8 * {sent_bytes} / {elements}, 'of', 'bits', '', '')"
                f" or label_replace({elements}, 'of', 'elements', '', '')"
            )
            per_codec, counts = (
                {labels["codec"]: value for labels, value in both if labels["of"] == of}
                for of in ("bits", "elements")
            )
            foretold = coordinator.all(RunStarted)[0].codec_bits
            assert per_codec.keys() == {"tah", "fixed-8"}
            step = CONFIG.training.global_batch * CONFIG.model.sequence * CONFIG.model.hidden
            for codec, count in counts.items():
                # A tensor's elements count when it is queued, its bytes when they leave: those of a step may
                # be on their way, and the node that died took as many with it.
                assert per_codec[codec] == pytest.approx(foretold[codec], rel=2 * step / count)
            mine = prometheus.wait_for("sum(thinwire_node_seconds_total)")[0][1]
            assert mine > 0

            every = queries()
            assert len(every) > 20, "deploy/ has dashboards and alerts"
            for query in every:
                prometheus.query(query.plain)  # raises for a mistake
                for metric in query.metrics:
                    assert metric in names | known, f"{query.where}: nothing is called {metric}"
            asked = [(query.label, query.plain) for query in every if query.label]
            assert len(asked) == 4, "dashboards have variables"
            for label, selector in asked:
                assert offered(prometheus, label, selector), f"label_values({selector}, {label})"
            assert offered(prometheus, "nowhere", "thinwire_run_info") == []
            assert offered(prometheus, "instance", "thinwire_no_such_metric") == []
        coordinator.interrupt()
        coordinator.interrupt()
        assert watched.wait_exit() in (0, 1)


READY = "Server is ready to receive web requests."


def of_compose(directory: Path) -> list[str]:
    """Compose's own command for Prometheus, with what is mounted for it put into the paths."""
    service = compose()["services"]["prometheus"]
    arguments = " ".join(service["command"])
    for mount in service["volumes"]:
        source, inside = mount.split(":")[:2]
        outside = DEPLOY / source if source.startswith(".") else directory / source
        arguments = arguments.replace(f"={inside}", f"={outside}")
    return [*arguments.split(" "), "--web.listen-address=127.0.0.1:0"]


def says(arguments: Sequence[str]) -> str:
    """What a Prometheus says until it is ready, or of why it ends before."""
    assert BINARY is not None
    said = ""
    with subprocess.Popen([BINARY, *arguments], env={}, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if READY in line:
                process.send_signal(signal.SIGTERM)
    return said


def test_prometheus_starts_as_compose_starts_it(tmp_path: Path) -> None:
    said = says(of_compose(tmp_path))
    assert READY in said, said
    assert (tmp_path / "prometheus").is_dir(), "its volume holds what it stores"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("retention.time", "retention.tyme"), ("=90d", "=90days"), ("config.file", "config.fiel")],
)
def test_prometheus_does_not_start_with_a_bad_config(right: str, wrong: str, tmp_path: Path) -> None:
    arguments = of_compose(tmp_path)
    changed = [one.replace(right, wrong) for one in arguments]
    assert changed != arguments
    said = says(changed)
    assert READY not in said and "Error parsing command" in said, said
