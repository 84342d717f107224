"""Windows are planned in the background, from the newest step, for the epoch in which it was measured."""

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from node.config.schema import PipelineSection, RunConfig, SyncSection
from node.coordinator import planners
from node.coordinator.planners import TELLS_SECONDS, LinkPlanner, where_shown
from node.run_state.epoch import Assignment, Epoch, OnRecord, StepRules
from node.run_state.grid import ONE_ROW, Groups
from node.run_state.stage_assignment import Candidate
from node.run_state.votes import VoteHistory
from node.schedule.floor import LinkRate
from node.telemetry.events import Event, StageCost, StepCosts, WindowsPlanned, from_json
from node.tuning.codec_plan import Lines
from node.tuning.window_plan import StepMeasures, Windows
from tests.support.machine_driver import step_plan
from wire.figures import LinkFigures
from wire.telemetry import CodecTime, CodecTimes

SECONDS = 20.0
CONFIG = RunConfig(pipeline=PipelineSection(stages=2))
NODES = [Candidate(node_id=node, memory_bytes=2**40) for node in "ab"]
Plan = tuple[int, Windows]


def epoch(number: int, groups: Groups = ONE_ROW) -> Epoch:
    rules = StepRules(
        plan=step_plan,
        neighbours=lambda stage, _stages: {1 - stage},
        history=VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})]),
    )
    assignment = Assignment(hosts=("a", "b"), addresses=("a:1", "b:1"), groups=groups)
    return Epoch(number, assignment, OnRecord(), rules)


def costs(step: int, *, seconds: float = 1.0) -> StepCosts:
    """Of a step whose every microbatch took `seconds` forward and as long backward, on both stages. A round
    trip between them takes three microbatches."""
    total = CONFIG.microbatches * seconds
    stages = [
        StageCost(stage=stage, node_id=node, wall_seconds=total, seconds=dict(forward=total, backward=total))
        for stage, node in enumerate("ab")
    ]
    links = tuple(
        LinkFigures(source=stage, target=1 - stage, least_round_trip_seconds=6.0) for stage in range(2)
    )
    return StepCosts(step=step, seconds=total, aborted=False, stages=tuple(stages), links=links)


@contextlib.asynccontextmanager
async def planning(
    config: RunConfig = CONFIG,
    emit: Callable[[Event], None] = lambda _: None,
    use_lines: Callable[[int, Lines, float], None] = lambda *_: None,
) -> AsyncIterator[tuple[LinkPlanner, "asyncio.Queue[Plan]"]]:
    """A planner at work, and its plans."""
    plans: asyncio.Queue[Plan] = asyncio.Queue()
    planner = LinkPlanner(
        config,
        samples=9,
        line=lambda _: LinkRate(),
        use_windows=lambda *plan: plans.put_nowait(plan),
        use_lines=use_lines,
        emit=emit,
        pause=0.0,
    )
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        running = group.create_task(planner.run())
        yield planner, plans
        running.cancel()


async def test_a_plan_is_reported_with_its_epoch() -> None:
    async with planning() as (planner, plans):
        planner.step_done(epoch(7), NODES, costs(1))
        number, windows = await plans.get()
    assert number == 7
    assert len(windows) == 1 and windows[0] >= 3


async def test_windows_that_change_are_an_event_with_what_they_were_planned_from() -> None:
    found: list[Event] = []
    async with planning(emit=found.append) as (planner, plans):
        planner.step_done(epoch(7), NODES, costs(1))
        _, windows = await plans.get()
        assert len(found) == 1, "the event comes with the plan"
        kept = epoch(7)
        kept.plan_windows(windows)
        planner.step_done(kept, NODES, costs(2))
        assert (await plans.get())[1] == windows
    (event,) = found
    assert isinstance(event, WindowsPlanned)
    assert (event.epoch, event.step, event.replica, event.windows) == (7, 1, 0, windows)
    assert event.round_trips == (6.0,)
    assert event.rates_up == event.rates_down == (0.0,) and event.lines_down == (0.0, 0.0), "nothing is known"
    assert min(event.forward + event.backward) > 0
    assert from_json(event.to_json()) == event


async def test_one_step_that_differs_changes_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a row do, and windows that are planned again as they are stay."""

    begun: queue.Queue[None] = queue.Queue()

    def plan_windows(measures: StepMeasures, **_: object) -> Windows:
        begun.put(None)
        return (round(measures.forward[0]),)

    monkeypatch.setattr(planners, "plan_windows", plan_windows)
    found: list[Event] = []
    # The first plan of an epoch counts at once; a single 9, 1 or 3 is noise.
    plan_of_step = [(2, True), (2, True), (9, False), (2, True), (1, False), (2, True), (3, False), (4, True)]
    line = epoch(7)
    async with planning(emit=found.append) as (planner, plans):
        for step, (seconds, counts) in enumerate(plan_of_step, 1):
            planner.step_done(line, NODES, costs(step, seconds=seconds))
            await asyncio.to_thread(begun.get, timeout=SECONDS)
            if counts:
                assert await plans.get() == (7, (seconds,))
                line.plan_windows((seconds,))
    assert plans.empty()
    assert [one.windows for one in found if isinstance(one, WindowsPlanned)] == [(2,), (4,)]


async def test_a_round_has_the_windows_of_one_local_step() -> None:
    """Two microbatches, which two stages have in flight without a window."""
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, groups=2), sync=SyncSection(every=2, warmup=1))
    async with planning(config) as (planner, plans):
        planner.step_done(epoch(7, ((0, 1),)), NODES, costs(1))
        exact = await plans.get()
        planner.step_done(epoch(7, ((0, 1),)), NODES, costs(2))
        of_round = await plans.get()
    assert exact[1][0] >= 3 and of_round == (7, (0,))


async def test_memory_bounds_a_plan() -> None:
    small = [Candidate(node_id=node, memory_bytes=1) for node in "ab"]
    async with planning() as (planner, plans):
        planner.step_done(epoch(7), small, costs(1))
        assert await plans.get() == (7, (0,))


async def test_the_newest_step_that_ended_during_planning_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def plan_windows(measures: StepMeasures, **_: object) -> Windows:
        begun.set()
        assert go_on.wait(SECONDS)
        return (round(measures.forward[0]),)

    monkeypatch.setattr(planners, "plan_windows", plan_windows)
    async with planning() as (planner, plans):
        planner.step_done(epoch(7), NODES, costs(1, seconds=1))
        assert await asyncio.to_thread(begun.wait, SECONDS)
        planner.step_done(epoch(7), NODES, costs(2, seconds=2))
        planner.step_done(epoch(8), NODES, costs(3, seconds=3))
        go_on.set()
        assert [await plans.get(), await plans.get()] == [(7, (1,)), (8, (3,))]
    assert plans.empty()


async def test_a_step_that_nobody_measured_changes_nothing() -> None:
    async with planning() as (planner, plans):
        planner.step_done(epoch(7), NODES, replace(costs(1), aborted=True))
        planner.step_done(epoch(8), NODES, costs(2))
        assert (await plans.get())[0] == 8
    assert plans.empty()


def test_a_rate_counts_only_where_tensors_show_it() -> None:
    """A link that is busy for most of a step shows its rate, as does a tensor that takes long; else it counts
    as fast."""
    link = LinkRate(up=1e6, down=1e6, latency=0.01)
    told = StepMeasures(
        forward=(0.1,) * 3, backward=(0.1,) * 3, activation_bytes=0, gradient_bytes=0, links=(link, link)
    )
    microbatches = 10

    def cost(source: int, target: int, size: int, busy: float) -> LinkFigures:
        return LinkFigures(
            source=source,
            target=target,
            bytes=size * microbatches,
            flows=(),
            busy_seconds=busy,
            capacity=1e6,
            round_trip_seconds=0.02,
            retransmits=0,
            rejects=0,
            queued_bytes=0,
        )

    small, large = int(0.5e6 * TELLS_SECONDS), int(2e6 * TELLS_SECONDS)
    links = (cost(0, 1, small, 0.2), cost(1, 0, small, 1.2), cost(1, 2, large, 0.2))
    found = where_shown(told, replace(costs(1), seconds=2.0, links=links), microbatches).links
    assert [one.up for one in found] == [math.inf, 1e6]
    assert [one.down for one in found] == [1e6, math.inf], "nobody has reported the last one"
    assert [one.latency for one in found] == [0.01, 0.01]


async def test_codecs_and_windows_are_planned_by_one_measure_of_a_step() -> None:
    """Codecs at each step, and by what nodes say of their packing."""
    pipeline = replace(CONFIG.pipeline, forward_codec="auto", backward_codec="auto")
    found: asyncio.Queue[tuple[int, Lines, float]] = asyncio.Queue()
    slow = CodecTimes(times=(CodecTime(codec="fixed-8", pack=2e-9, unpack=1e-9),))
    async with planning(
        replace(CONFIG, pipeline=pipeline), use_lines=lambda *lines: found.put_nowait(lines)
    ) as (planner, plans):
        planner.heard("b", CodecTimes(times=()))
        planner.heard("b", slow)
        planner.step_done(epoch(7), NODES, costs(1))
        number, lines, seconds = await found.get()
        assert (await plans.get())[0] == number == 7
    assert seconds == pytest.approx(costs(1).seconds / CONFIG.microbatches)
    assert [one.of("fixed-6") for one in lines.packing] == [(0.0, 0.0), (2e-9, 1e-9)]
    assert [one.of("trellis-3") for one in lines.packing] == [(0.0, 0.0)] * 2
