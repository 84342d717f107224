"""The held-out loss in views, on the terminal, in comparisons and in metrics."""

import math
from copy import copy
from dataclasses import replace

from node.coordinator.metrics import RunMetrics
from node.dashboard.feed import Feed
from node.display.compare import comparison_lines
from node.display.render import Pace, event_lines, step_line
from node.display.top import view_lines
from node.telemetry import events
from node.telemetry.history import Entry
from node.view.compare import compare, record
from node.view.run_view import RunView
from node.view.view_builder import RunViewBuilder
from tests.support.run_events import done, started


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
