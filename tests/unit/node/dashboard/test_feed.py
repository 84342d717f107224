"""Patches of a view: their effect, their size, and readers that miss some."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.dashboard.feed import Feed, make_patch
from node.telemetry import events
from node.view.run_view import RunView, Series
from node.view.view_builder import RunViewBuilder
from tests.support import run_events
from tests.support.page_feed import apply_patch

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
    series = Series(8)
    before: dict[str, Any] = {"curve": curve(series)}
    for step, value in added:
        series = series.plus(step, float(step), value)
        if data.draw(st.booleans()):
            after = {"curve": curve(series)}
            patch = json.loads(json.dumps(make_patch(before, after)))
            before = apply_patch(before, patch)
            assert before == after


class Clock:
    """Moves on by `step` each time that it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Slow(RunViewBuilder):
    """Takes a second for a view, and three for its fields."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.made: list[str] = []

    def view(self) -> RunView:
        self.clock.now += 1.0
        self.made.append("view")
        slow, view = self, super().view()

        class SlowView(RunView):
            def to_fields(self) -> dict[str, object]:
                slow.clock.now += 3.0
                slow.made.append("fields")
                return super().to_fields()

        return SlowView(**vars(view))


async def test_plain_values_are_made_for_their_readers_alone_and_views_take_a_twentieth_of_a_core() -> None:
    clock = Clock(step=0.0)
    builder = Slow(clock)
    feed = Feed(builder, clock)
    event = run_events.started()
    feed.apply(event, 0.0)
    assert await feed.view() is await feed.view()
    assert builder.made == ["view"]
    version, fields = await feed.newest()
    assert await feed.newest() == (version, fields) and builder.made == ["view", "fields"]
    feed.apply(event, 1.0)
    for now, made in ((79.9, 2), (80.1, 3)):  # 20 times the 4 seconds that both took
        clock.now = now
        await feed.view()
        assert len(builder.made) == made
    assert (await feed.newest())[0] > version and builder.made[2:] == ["view", "fields"]


def test_a_step_more_sends_one_point() -> None:
    series = Series()
    for step in range(1, 400):
        series = series.plus(step, float(step), 1.0)
    before = {"curve": curve(series), "steps": 500}
    series = series.plus(400, 400.0, 0.5)
    patch = make_patch(before, {"curve": curve(series), "steps": 500})
    assert patch == {"curve": {"keep": 399, "steps": [400], "times": [400.0], "values": [0.5]}}


async def test_a_feed_is_the_view_of_its_events() -> None:
    feed = Feed(RunViewBuilder())
    for at, event in run_events.history(run_events.opening(), run_events.step(1)):
        feed.apply(event, at)
    assert (await feed.view()).step == 1
    _, fields = await feed.newest()
    assert json.loads(json.dumps(fields)) == fields  # no tuples: patches compare equal
    assert fields == json.loads((await feed.view()).to_json())
    assert (await feed.newest())[1] is fields  # made once for all readers


async def test_a_reader_that_misses_versions_gets_the_newest() -> None:
    feed = Feed(RunViewBuilder(), Clock(step=0.0))
    version, seen = await feed.newest()
    waiting = asyncio.create_task(feed.newer(version))
    for at, event in run_events.history(run_events.opening(), *map(run_events.step, range(1, 20))):
        feed.apply(event, at)
    await waiting
    after = apply_patch(seen, make_patch(seen, (await feed.newest())[1]))
    assert after == (await feed.newest())[1] and after["step"] == 19


async def test_a_closed_feed_lets_its_readers_go() -> None:
    feed = Feed(RunViewBuilder())
    version, _ = await feed.newest()
    waiting = [asyncio.create_task(feed.newer(version)), asyncio.create_task(feed.pause(3600))]
    await asyncio.sleep(0)
    feed.close()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    assert feed.closed


async def test_a_view_is_of_the_moment_at_which_it_was_asked_for_and_readers_share_it() -> None:
    """It is made on a thread, while the event loop applies what comes."""
    begun, goes_on = threading.Event(), threading.Event()

    class Held(RunViewBuilder):
        def view(self) -> RunView:
            begun.set()
            assert goes_on.wait(60)
            return super().view()

    held, plain = Held(), RunViewBuilder()
    feed = Feed(held)
    for at, event in run_events.history(run_events.opening(), *map(run_events.step, range(1, 12))):
        feed.apply(event, at)
        plain.apply(event, at)
    expected = plain.view()
    readers = asyncio.gather(feed.view(), feed.view(), feed.newest())
    await asyncio.to_thread(begun.wait, 5)
    for event in (events.NodeLeft(node_id="node-bbbb", reason="left"), *run_events.step(12)):
        feed.apply(event, 2e9)
    goes_on.set()
    first, second, (_, fields) = await readers
    assert first is second and first == expected != held.view()
    assert fields == json.loads(expected.to_json())


async def test_a_view_that_fails_is_begun_anew() -> None:
    failures = [RuntimeError("broken")]

    class Failing(RunViewBuilder):
        def view(self) -> RunView:
            if failures:
                raise failures.pop()
            return super().view()

    feed = Feed(Failing())
    with pytest.raises(RuntimeError, match="broken"):
        await feed.view()
    assert await feed.view() == RunViewBuilder().view()
