"""Patches of a view: their effect, their size, and readers that miss some."""

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from node.analysis.run_view import RunView, Series
from node.analysis.view_builder import RunViewBuilder
from node.dashboard.feed import Feed, apply_patch, make_patch
from tests.support import run_events

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


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

    def view(self) -> RunView:
        self.now += 1.0
        self.made.append("view")
        view, fields = super().view(), RunView.to_fields

        def to_fields() -> dict[str, Any]:
            self.now += 3.0
            self.made.append("fields")
            return fields(view)

        object.__setattr__(view, "to_fields", to_fields)
        return view


def test_plain_values_are_made_for_their_readers_alone_and_views_take_a_twentieth_of_a_core() -> None:
    builder = Slow()
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
