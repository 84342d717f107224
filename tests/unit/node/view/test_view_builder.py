"""The view of a run depends on its events only, not on the reader or the time of reading."""

import json
import math
from copy import copy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.coordinator.metrics import RunMetrics
from node.dashboard.feed import Feed
from node.display.compare import comparison_lines
from node.display.render import Pace, event_lines, step_line
from node.display.top import view_lines
from node.telemetry import events
from node.telemetry.format import without_addresses
from node.telemetry.history import Entry
from node.view.compare import compare, record
from node.view.run_view import RunView, Series, SnapshotView
from node.view.view_builder import MOST_EVENTS, MOST_REPLACED, RunViewBuilder, view
from tests.support.run_events import (
    BEGAN,
    NODES,
    aborted,
    costs,
    done,
    history,
    joined,
    link_cost,
    opening,
    placed,
    started,
    step,
)


def test_a_run_without_events_is_starting() -> None:
    empty = RunViewBuilder().view()
    assert empty.state == "starting" and empty.stages == () and empty.eta_seconds is None
    assert json.loads(empty.to_json())["state"] == "starting"


def test_a_node_has_the_name_that_its_owner_gave_it_also_while_it_is_away() -> None:
    called = replace(joined(NODES[0]), name="Ana's 4090")
    builder = RunViewBuilder()
    for at, event in history(opening(), called, events.NodeLeft(node_id=NODES[0], reason="Ctrl-C")):
        builder.apply(event, at)
    seen = copy(builder).view()
    assert [stage.name for stage in seen.stages] == ["Ana's 4090", ""]
    assert f'joined: {NODES[0]} "Ana\'s 4090" (cpu)' in [event.text for event in seen.events]


def test_a_running_run() -> None:
    seen = view(history(opening(), step(1), step(2), step(3)))
    assert (seen.state, seen.step, seen.steps, seen.epoch) == ("training", 3, 100, 1)
    assert seen.started == BEGAN and seen.updated == BEGAN + 10
    assert seen.loss == pytest.approx(5.97)
    assert seen.tokens_per_second == pytest.approx(4096)
    assert seen.eta_seconds == pytest.approx(97.0)
    assert [(stage.node_id, stage.blocks, stage.present) for stage in seen.stages] == [
        (NODES[0], 4, True),
        (NODES[1], 4, True),
    ]
    first = seen.stages[0]
    assert sum(first.shares.values()) == pytest.approx(1.0)
    assert (first.busy, first.waiting) == pytest.approx((0.8, 0.2))
    assert [(member.node_id, member.stage) for member in seen.members] == [
        (NODES[0], 0),
        (NODES[1], 1),
        (NODES[2], None),
    ]
    assert seen.spares == 1
    there, back = seen.links
    assert (there.source, there.target, back.source, back.target) == (0, 1, 1, 0)
    assert there.bytes == 3_000_000
    assert there.mbit == pytest.approx(8.0) and there.capacity_mbit == pytest.approx(32.0)
    assert there.use == pytest.approx(0.25) and there.busy == pytest.approx(0.25)
    assert there.flows[0].bits_per_element == pytest.approx(6.26, rel=1e-5)
    assert back.flows[0].codec == "fixed-8" and back.flows[0].bytes == 3_000_000


@pytest.mark.parametrize(
    ("capacity", "little", "full"),
    [(0.0, False, False), (5.1e6, True, False), (4.9e6, False, False), (1.17e6, False, True)],
)
def test_the_value_of_a_capacity(capacity: float, little: bool, full: bool) -> None:
    """A million bytes a second: under a fifth of the measure it tells little, from 0.85 on it is full."""
    cost = events.StepCosts(**{**vars(costs(1)), "links": (link_cost(0, 1, capacity=capacity),)})
    seen = view(history(opening(), cost, done(1)))
    assert [(one.little_used, one.full) for one in seen.links] == [(little, full)]


def test_a_relayed_link_says_why_both_ends_could_not_dial_at_once() -> None:
    """The end that dials reports it; both directions show it."""
    links = tuple(replace(link_cost(*way), path="relay") for way in ((0, 1), (1, 0)))
    links = links[0], replace(links[1], not_together="proxy")
    shown = view(history(opening(), replace(costs(1), links=links), done(1))).links
    assert [one.why_not_together for one in shown] == 2 * [
        "a simultaneous open does not work through a proxy"
    ]
    direct = tuple(replace(link, path="direct") for link in links)
    shown = view(history(opening(), replace(costs(1), links=direct), done(1))).links
    assert [one.why_not_together for one in shown] == ["", ""]


def test_the_view_is_plain_json_without_addresses() -> None:
    text = view(history(opening(), step(1), aborted(2))).to_json()
    fields_of_view = json.loads(text)
    assert fields_of_view["events"][-1]["level"] == "warning"
    assert "192.0.2" not in text and "4711" not in text


def test_a_step_that_is_aborted_is_counted_and_not_shown_as_cost() -> None:
    seen = view(history(opening(), step(1), costs(2, aborted=True), aborted(2)))
    assert (seen.aborted, seen.state, seen.step) == (1, "restoring", 1)
    assert seen.links[0].bytes == 2_000_000, "its bytes did cross the link"
    assert seen.links[0].mbit == pytest.approx(8.0)
    again = view(
        history(opening(), step(1), aborted(2), placed(2), events.Recovered(text="", step=1, seconds=3.0))
    )
    assert (again.state, again.epoch, again.recoveries) == ("training", 2, 1)


def test_a_planned_change_of_placement_is_no_aborted_step() -> None:
    change = events.StepAborted(epoch=1, step=2, reason="the placement changes", kind="placement")
    seen = view(history(opening(), step(1), change))
    assert (seen.aborted, seen.state) == (0, "restoring")
    assert (seen.events[-1].kind, seen.events[-1].level) == ("planned", "info")
    assert seen.events[-1].text == "planned change of placement before step 2"


def test_who_lost_a_stage_stays_on_view_with_the_reason() -> None:
    """One line a node, also once it is back, after a resume, and when events have pushed the line out."""
    silent, gone = "it has been silent for more than 9 s", "its connection closed"
    shut_out = events.NodeReplaced(text=f"node {NODES[1]} is shut out: it lied", node_id=NODES[1])
    builder = RunViewBuilder()
    for event in (
        *opening(),
        events.NodeLeft(node_id=NODES[0], reason=events.LEFT),
        events.NodeLeft(node_id="node-spare", reason=gone),
    ):
        builder.apply(event, 1.0)
    assert builder.view().replaced == (), "who goes by its own wish, or has no stage"
    for event in (
        shut_out,
        events.NodeLeft(node_id=NODES[1], reason=f"{events.QUARANTINED}it lied"),
        events.NodeLeft(node_id=NODES[0], reason=gone),
        events.NodeLeft(node_id=NODES[0], reason=silent),
        *opening(),
        *(events.Notice(text="something else") for _ in range(MOST_EVENTS)),
    ):
        builder.apply(event, 2.0)
    expected = (shut_out.text, f"left: {NODES[0]}: {silent}")
    assert builder.view().replaced == copy(builder).view().replaced == expected
    for number in range(MOST_REPLACED):
        builder.apply(events.NodeReplaced(text=str(number), node_id=str(number)), 3.0)
    assert builder.view().replaced == tuple(map(str, range(MOST_REPLACED)))


def test_steps_that_run_again_replace_what_they_gave() -> None:
    back = placed(2, step=1)
    seen = view(history(opening(), step(1), step(2), step(3), aborted(4), back, step(2)))
    assert (seen.step, seen.replayed) == (2, 1)
    assert seen.loss_curve.steps == (1, 2)
    assert seen.loss_curve.times[1] > seen.started + 10


@pytest.mark.parametrize(
    ("steps", "failed", "state"),
    [(100, False, "finished"), (3, False, "stopped"), (3, True, "failed")],
)
def test_how_a_run_ended(steps: int, failed: bool, state: str) -> None:
    end = events.RunFinished(reason="enough", failed=failed)
    seen = view(history(opening(), *(step(n) for n in range(1, steps + 1)), end))
    assert (seen.state, seen.ended, seen.eta_seconds) == (state, "enough", None)
    assert seen.members == () and len(seen.stages) == 2, "the last placement stays to be looked at"


def test_a_resumed_run_goes_on() -> None:
    end = events.RunFinished(reason="stopped by the operator", failed=False)
    seen = view(history(opening(), step(1), step(2), end, started(first_step=1), joined(NODES[0])))
    assert (seen.state, seen.coordinator_starts, seen.ended) == ("waiting for nodes", 2, "")
    assert seen.step == 2 and len(seen.loss_curve.steps) == 2
    assert len(seen.members) == 1
    nodes = [joined(node) for node in NODES[1:]]
    again = view(history(opening(), step(1), step(2), end, started(first_step=1), *nodes, placed(2, step=1)))
    assert (again.step, again.loss) == (1, seen.loss), "until a step ends, the newest loss is what is known"


def stored(step: int, size: int) -> events.SnapshotStored:
    return events.SnapshotStored(step=step, bytes=size, path="x")


SAVED = [*opening(), *step(1), stored(1, 10), *step(2), stored(2, 20)]


def test_a_snapshot_that_is_set_aside_is_not_shown_as_the_newest() -> None:
    told = [*SAVED, *step(3), stored(3, 30)]
    assert view(history(told)).snapshot == SnapshotView(step=3, bytes=30, at=BEGAN + 13)
    aside = events.SnapshotSetAside(text="block 3 is damaged", step=3, whole=1)
    seen = view(history(told, aside))
    assert seen.snapshot == SnapshotView(step=1, bytes=10, at=BEGAN + 7)
    assert (seen.events[-1].level, seen.events[-1].text) == ("warning", "block 3 is damaged")
    again = view(history(told, aside, stored(2, 40)))
    assert again.snapshot == SnapshotView(step=2, bytes=40, at=BEGAN + 15)


def test_a_resumed_run_drops_snapshots_after_the_one_it_starts_from() -> None:
    assert view(history(SAVED, started(first_step=2))).snapshot == SnapshotView(
        step=2, bytes=20, at=BEGAN + 10
    )
    assert view(history(SAVED, started(first_step=1))).snapshot == SnapshotView(
        step=1, bytes=10, at=BEGAN + 7
    )
    assert view(history(SAVED, started())).snapshot is None


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200), st.sampled_from([2, 4, 8, 64]))
def test_a_curve_is_bounded_and_keeps_the_mean(values: list[float], most: int) -> None:
    series = Series(most)
    for number, value in enumerate(values, start=1):
        series = series.plus(number, float(number), value)
    curve = series.curve()
    assert len(curve.steps) == len(curve.times) == len(curve.values) <= most
    assert curve.steps[-1] == len(values)
    assert list(curve.steps) == sorted(set(curve.steps))
    counts = [last - before for before, last in zip((0, *curve.steps), curve.steps, strict=False)]
    assert all(count <= curve.stride for count in counts)
    mean = sum(count * value for count, value in zip(counts, curve.values, strict=True)) / len(values)
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-9)


@given(st.lists(st.integers(1, 60), max_size=80))
def test_a_curve_survives_rollbacks(steps: list[int]) -> None:
    series = Series(8)
    for at, number in enumerate(steps):
        series = series.plus(number, float(at), float(number))
    curve = series.curve()
    assert list(curve.steps) == sorted(set(curve.steps)) and len(curve.steps) <= 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at 192.0.2.1:7700 was not back", "at ... was not back"),
        ("at [2001:db8::1]:7700, gone", "at ..., gone"),
        ("host gpu-1.example.org:7710 is down", "host ... is down"),
        ("localhost:7700", "..."),
        ("at alices-pc:7710: Connection refused", "at ...: Connection refused"),
        ("(node-1:7710) and ALICES-PC:80, gone", "(...) and ..., gone"),
        ("my_gpu.lan:7710 is down", "... is down"),
        ("gästezimmer:7710, node.example.org.:7700", "..., ..."),
        ("http://alices-pc:7702/metrics", "http://.../metrics"),
        ("peer ipv6:%5Bfe80::1%5D:77 reset", "peer ipv6:... reset"),
        ("peer ipv4:192.0.2.1:77 reset", "peer ipv4:... reset"),
        ("[fe80::1%eth0]:7710 or fe80::1%eth0 or ::1", "... or ... or ..."),
        ("2001:db8:0:0:0:0:0:1 and ::ffff:192.0.2.1", "... and ..."),
        ("step 3: loss 5.4321 in 2.5 s (3:1)", "step 3: loss 5.4321 in 2.5 s (3:1)"),
    ],
)
def test_addresses_are_taken_out(text: str, expected: str) -> None:
    assert without_addresses(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "steps 3:46, stage 1: 404, block.0001: 12, loss:2.5",
        "at 12:30:05, 12:30, 2026-11-23T12:30:05Z or 2026-11-23T12:30",
        "cuda:0 ran out of memory; cpu:0, cuda:15",
        "split [4], [2, 2], [3:5] in 1.2.3 and trellis-4.41",
        f"weights {'12ab' * 16} or sha256:{'12ab' * 16}",
        "std::bad_alloc in torch::autograd, c10::Error :: that",
    ],
)
def test_text_that_is_not_an_address_stays(text: str) -> None:
    assert without_addresses(text) == text


def test_a_node_waiting_in_the_lobby_is_not_a_spare() -> None:
    """Else every run would seem to lose its spares when it begins."""
    lobby = [started(), *(joined(node) for node in NODES)]
    assert view(history(lobby)).spares == 0
    assert view(history(lobby, placed())).spares == 1
    gone = events.NodeLeft(node_id=NODES[0], reason="gone")
    seen = view(history(lobby, placed(), step(1), gone))
    assert (seen.state, seen.spares) == ("waiting for nodes", 0)
    assert seen.eta_seconds is None and view(history(lobby, placed(), step(1))).eta_seconds == 99.0


def test_a_run_replays_until_it_is_past_what_it_had_done() -> None:
    before = history(opening(), *(step(number) for number in range(1, 6)), aborted(6), placed(2, step=3))
    back = [event for _, event in before]
    assert view(history(back)).replays_to == 5
    assert view(history(back, step(4))).replays_to == 5
    assert view(history(back, step(4), step(5))).replays_to == 0


# ---- the held-out loss in views, on the terminal, in comparisons and in metrics


def measured(step: int, uncompressed: float, *, best: bool = False) -> events.HeldOutLoss:
    return events.HeldOutLoss(
        step=step, loss=uncompressed + 0.25, uncompressed=uncompressed, samples=64, best=best, seconds=1.0
    )


RUN = [started(), measured(2, 3.0, best=True), measured(4, 2.5, best=True), measured(6, 2.75)]


def builder_of(told: list[events.Event]) -> RunViewBuilder:
    builder = RunViewBuilder()
    for at, event in enumerate(told):
        builder.apply(event, float(at))
    return builder


def view_of(told: list[events.Event]) -> RunView:
    return builder_of(told).view()


def test_a_view_has_the_newest_and_the_best() -> None:
    view = view_of(RUN)
    found = view.held_out
    assert found is not None
    assert (found.step, found.uncompressed, found.loss) == (6, 2.75, 3.0)
    assert (found.best_step, found.best) == (4, 2.5)
    curve = view.held_out_curve
    assert (curve.steps, curve.values) == ((2, 4, 6), (3.0, 2.5, 2.75))
    assert RunView.from_json(view.to_json()) == view
    line = "held-out    2.7500 uncompressed, 3.0000 as trained, step 6; best 2.5000, step 4"
    assert line in view_lines(view, 10.0)
    assert "held-out loss at step 4: 2.5000 uncompressed, 2.7500 as trained, the best so far" in [
        event.text for event in view.events
    ]


def test_a_loss_that_is_not_a_number_is_never_the_best() -> None:
    seen = view_of([started(), measured(2, math.nan), measured(4, 5.0)])
    assert seen.held_out is not None and seen.held_out.best_step == 4
    assert seen.held_out_curve.steps == (4,)
    assert view_of([started()]).held_out is None


def test_what_has_no_labels_has_no_loss() -> None:
    """Not on the terminal, in JSON, in metrics or in a comparison."""
    nothing = replace(measured(2, math.nan), loss=None, samples=0)
    told = [started(), replace(done(1), loss=math.nan), nothing]
    view = view_of(told)
    assert nothing.line == "held-out loss at step 2: no labels"
    assert step_line(replace(done(1), loss=math.nan), Pace()).split("   ")[1] == "loss no labels"
    assert view.loss is None and view.loss_curve.values == ()
    assert view.held_out is not None and view.held_out.best is None
    assert RunView.from_json(view.to_json()) == view and '"uncompressed": null' in view.to_json()
    lines = "\n".join(view_lines(view, 10.0))
    assert "loss no labels" in lines and "held-out    no labels, step 2" in lines
    builder = builder_of(told)
    metrics = RunMetrics(Feed(builder).view).scrape(builder.view()).text().decode()
    assert "\nthinwire_loss " not in metrics and "thinwire_held_out_loss{" not in metrics
    runs = [
        record(name, {}, [Entry(at=0.0, event=event) for event in (*told, replace(done(2), loss=1.0))])
        for name in ("a", "b")
    ]
    found = compare(*runs)
    assert found.loss_at_step == ((2, 1.0, 1.0),) and found.held_out_at_step == ()
    assert {loss for _, *losses in found.loss_at_seconds for loss in losses} == {1.0}


def test_runs_are_compared_at_equal_steps() -> None:
    runs = [
        record(name, {}, [Entry(at=0.0, event=event) for event in told])
        for name, told in (("a", RUN), ("b", [started(), measured(4, 2.0), measured(8, 1.0)]))
    ]
    both = compare(*runs)
    assert both.held_out_at_step == ((4, 2.5, 2.0),)
    assert both.held_out_as_trained_at_step == ((4, 2.75, 2.25),)
    lines = comparison_lines(both)
    for title, losses in (("held-out loss, uncompressed,", "2.5000"), ("held-out loss as trained", "2.7500")):
        assert losses in lines[lines.index(f"{title} at equal steps:") + 2]


def test_metrics_have_both_ways() -> None:
    builder = builder_of(RUN)
    text = RunMetrics(Feed(builder).view).scrape(builder.view()).text().decode()
    assert 'thinwire_held_out_loss{links="as-trained"} 3.0' in text
    assert 'thinwire_held_out_loss{links="fp32"} 2.75' in text
    assert "thinwire_held_out_best_steps 4.0" in text


def test_what_is_left_out_of_the_data_is_said_with_its_reasons() -> None:
    told = [
        started(),
        events.DataDropped.of({"empty": 2}),
        events.DataDropped.of({"empty": 3, "no user": 45}),
    ]
    view = view_of(told)
    assert view.dropped == {"empty": 3, "no user": 45} == RunView.from_json(view.to_json()).dropped
    assert "left out    45 (no user), 3 (empty) of the documents read so far" in view_lines(view, 10.0)
    assert event_lines(told[2]) == [view.events[-1].text]
    assert copy(builder_of(told)).view() == view
