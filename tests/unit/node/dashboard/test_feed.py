"""Patches of a view: their effect, their size, and readers that miss some."""

import asyncio
import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dashboard import feed as module
from node.dashboard.feed import Feed, apply_patch, json_of, make_patch
from node.telemetry import events
from node.view import link_views, view_builder
from node.view.run_view import RunView, Series
from node.view.slices import SLICE, Slices, whole
from node.view.view_builder import RunViewBuilder
from tests.support import run_events

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), PLAIN))
def test_json_is_the_same_in_slices(value: dict[str, Any]) -> None:
    assert whole(json_of(value)) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    numbers = {"of": {"many": list(range(2 * SLICE + 1)), **value}}
    assert json.loads(whole(json_of(numbers))) == numbers
    assert len(list(json_of(numbers))) == 3


def curve(series: Series) -> dict[str, Any]:
    made = series.curve()
    columns = {"steps": list(made.steps), "times": list(made.times), "values": list(made.values)}
    return {"stride": made.stride, **columns}


@given(
    st.dictionaries(st.sampled_from("abcdef"), PLAIN),
    st.dictionaries(st.sampled_from("abcdef"), PLAIN, min_size=0),
)
def test_a_patch_makes_the_later_view(before: dict[str, Any], after: dict[str, Any]) -> None:
    after = {**before, **after}  # fields never go away
    patch = make_patch(before, after)
    assert apply_patch(before, patch) == after
    assert (patch == {}) == (before == after)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(-9, 9)), max_size=60), st.data())
def test_a_curve_can_grow_roll_back_and_merge(added: list[tuple[int, float]], data: st.DataObject) -> None:
    series = Series(most_points=8)
    before: dict[str, Any] = {"curve": curve(series)}
    for step, value in added:
        series.add(step, float(step), value)
        if data.draw(st.booleans()):
            after = {"curve": curve(series)}
            patch = json.loads(json.dumps(make_patch(before, after)))
            before = apply_patch(before, patch)
            assert before == after


class Slow(RunViewBuilder):
    """Takes a second for a view, and three for its fields."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.made: list[str] = []

    def slices(self) -> Slices[RunView]:
        view = yield from super().slices()
        self.now += 1.0
        self.made.append("view")
        return view

    def fields_of(self, view: RunView) -> Slices[dict[str, Any]]:
        self.now += 3.0
        self.made.append("fields")
        yield
        return view.to_fields()


def test_plain_values_are_made_for_their_readers_alone_and_views_take_a_twentieth_of_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = Slow()
    monkeypatch.setattr(module, "_fields_of", builder.fields_of)
    feed = Feed(builder, clock=lambda: builder.now)
    event = run_events.started()
    feed.apply(event, 0.0)
    feed.view()
    feed.view()
    assert builder.made == ["view"]
    version, fields = feed.newest()
    assert feed.newest() == (version, fields) and builder.made == ["view", "fields"]
    feed.apply(event, 1.0)
    for now, made in ((79.9, 2), (80.1, 3)):  # 20 times the 4 seconds that both took
        builder.now = now
        feed.view()
        assert len(builder.made) == made
    assert feed.newest()[0] > version and builder.made[2:] == ["view", "fields"]


def test_a_step_more_sends_one_point() -> None:
    series = Series()
    for step in range(1, 400):
        series.add(step, float(step), 1.0)
    before = {"curve": curve(series), "steps": 500}
    series.add(400, 400.0, 0.5)
    patch = make_patch(before, {"curve": curve(series), "steps": 500})
    assert patch == {"curve": {"keep": 399, "steps": [400], "times": [400.0], "values": [0.5]}}


class Clock:
    """Moves on by `step` each time that it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_feed_is_the_view_of_its_events() -> None:
    feed = Feed(RunViewBuilder())
    for at, event in run_events.history(run_events.opening(), run_events.step(1)):
        feed.apply(event, at)
    assert feed.view().step == 1
    _, fields = feed.newest()
    assert json.loads(json.dumps(fields)) == fields  # no tuples: patches compare equal
    assert fields == json.loads(feed.view().to_json())
    assert feed.newest()[1] is fields  # made once for all readers


def test_views_take_a_twentieth_of_the_time() -> None:
    clock = Clock(step=0.0)
    feed = Feed(RunViewBuilder(), clock)
    clock.step = 1.0  # a view takes one second
    made: list[RunView] = []
    for number, (at, event) in enumerate(
        run_events.history(run_events.opening(), *map(run_events.step, range(1, 100)))
    ):
        feed.apply(event, at)
        clock.now = float(number)
        if (view := feed.view()) not in made[-1:]:
            made.append(view)
    assert 9 <= len(made) <= 12  # of 203 seconds
    feed.close()
    assert feed.newest()[1]["step"] == 99  # the end is never missed


async def test_a_reader_that_misses_versions_gets_the_newest() -> None:
    feed = Feed(RunViewBuilder(), Clock(step=0.0))
    version, seen = feed.newest()
    waiting = asyncio.create_task(feed.newer(version))
    for at, event in run_events.history(run_events.opening(), *map(run_events.step, range(1, 20))):
        feed.apply(event, at)
    await waiting
    after = apply_patch(seen, make_patch(seen, feed.newest()[1]))
    assert after == feed.newest()[1] and after["step"] == 19


async def test_a_closed_feed_lets_its_readers_go() -> None:
    feed = Feed(RunViewBuilder())
    waiting = [asyncio.create_task(feed.newer(feed.newest()[0])), asyncio.create_task(feed.pause(3600))]
    await asyncio.sleep(0)
    feed.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert feed.closed


MEMBERS = 3 * SLICE
"""Of one row."""


def large_run(steps: int) -> list[events.Event]:
    """So many nodes have done so many steps."""
    nodes = tuple(f"node-{number}" for number in range(MEMBERS))
    joined = [events.NodeJoined(node_id=node, device="cpu", address="192.0.2.7:4711") for node in nodes]
    placed = events.PlacementMade(epoch=1, nodes=nodes, resume_step=0, blocks=(1,) * MEMBERS)
    return [run_events.started(), *joined, placed, *map(large_step, range(1, steps + 1))]


def large_step(step: int) -> events.StepCosts:
    (template,) = [one for one in run_events.step(1) if isinstance(one, events.StepCosts)]
    stage, link = template.stages[0], template.links[0]
    stages = tuple(replace(stage, stage=number, node_id=f"node-{number}") for number in range(MEMBERS))
    links = tuple(replace(link, source=number, target=number + 1) for number in range(MEMBERS - 1))
    return replace(template, step=step, stages=stages, links=links)


def handled_by_slice(work: Slices[Any], patch: pytest.MonkeyPatch) -> list[int]:
    """Of each slice: the stages and links of a view that it made, or turned into plain values."""
    handled = [0]

    def counting(function: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            handled[-1] += 1
            return function(*arguments, **named)

        return counted

    with patch.context() as patched:
        patched.setattr(view_builder, "StageView", counting(view_builder.StageView))
        patched.setattr(link_views, "LinkView", counting(link_views.LinkView))
        patched.setattr(module, "finite", counting(module.finite))
        for _ in work:
            handled.append(0)
    return handled


def test_no_slice_of_a_view_handles_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(RunViewBuilder())
    for at, event in enumerate(large_run(steps=12)):
        feed.apply(event, float(at))
    others = len(dataclasses.fields(RunView))
    of_view = handled_by_slice(feed.views(), monkeypatch)
    # What is shown, and what advice rests on: all steps, and either half of them.
    assert sum(of_view) == 4 * (2 * MEMBERS - 1)
    assert max(of_view) <= 2 * SLICE
    of_values = handled_by_slice(feed._plain_values(), monkeypatch)
    assert sum(of_values) >= 3 * MEMBERS - 1
    assert max(of_values) <= 2 * SLICE + others


def test_a_view_in_slices_is_of_the_moment_at_which_it_began() -> None:
    builder, told = RunViewBuilder(), large_run(steps=12)
    for at, event in enumerate(told):
        builder.apply(event, float(at))
    expected, work = builder.view(), builder.slices()
    next(work)
    later = [events.NodeLeft(node_id="node-7", reason="left"), large_step(13), *run_events.step(13)]
    for at, event in enumerate(later, start=len(told)):
        builder.apply(event, float(at))
    assert whole(work) == expected != builder.view()


def test_readers_share_the_view_that_is_being_made() -> None:
    feed = Feed(RunViewBuilder())
    for at, event in enumerate(large_run(steps=2)):
        feed.apply(event, float(at))
    first, second = feed.views(), feed.views()
    next(first)
    next(second)
    assert whole(second) is whole(first) is feed.view()


async def test_other_work_has_its_turn_while_plain_values_are_made() -> None:
    feed = Feed(RunViewBuilder())
    for at, event in enumerate(large_run(steps=2)):
        feed.apply(event, float(at))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    found = await asyncio.gather(feed.newest_in_turns(), feed.newest_in_turns())
    beside.cancel()
    assert found[0] == found[1] == feed.newest() and found[0][1] is found[1][1]
    assert turns >= 3 * MEMBERS // SLICE
    assert found[0][1] == json.loads(feed.view().to_json())


def test_a_view_that_fails_is_begun_anew() -> None:
    class Failing(RunViewBuilder):
        failed = False

        def slices(self) -> Slices[RunView]:
            view = yield from super().slices()
            if not self.failed:
                self.failed = True
                raise RuntimeError("broken")
            return view

    feed = Feed(Failing())
    with pytest.raises(RuntimeError, match="broken"):
        feed.view()
    assert feed.view() == RunViewBuilder().view()
