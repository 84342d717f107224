"""Windows are planned in the background, from the newest step, for the epoch in which it was measured."""

import asyncio
import contextlib
import itertools
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import PipelineSection, RunConfig, SyncSection, TrainingSection
from node.coordinator import planners
from node.coordinator.planners import TELLS_SECONDS, LinkPlanner, where_shown
from node.run_state.epoch import Assignment, Epoch, OnRecord, StepRules
from node.run_state.grid import ONE_ROW, Groups
from node.run_state.stage_assignment import Candidate
from node.run_state.votes import VoteHistory
from node.schedule.floor import LinkRate
from node.telemetry.events import Event, StageCost, StepCosts, WindowsPlanned, from_json
from node.tuning.codec_plan import Lines
from node.tuning.decisions import WATCHED
from node.tuning.window_plan import SOON, StepMeasures, Windows
from tests.support.machine_driver import step_plan
from wire.figures import LinkFigures
from wire.telemetry import CodecTime, CodecTimes

SECONDS = 20.0
CONFIG = RunConfig(pipeline=PipelineSection(stages=2))
FOUR = RunConfig(pipeline=PipelineSection(stages=4), training=TrainingSection(global_batch=16, microbatch=1))
NODES = [Candidate(node_id=node, memory_bytes=2**40) for node in "ab"]
Plan = tuple[int, Windows]


def epoch(number: int, groups: Groups = ONE_ROW, hosts: str = "ab") -> Epoch:
    rules = StepRules(
        plan=step_plan,
        neighbours=lambda stage, _stages: {1 - stage},
        history=VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})]),
    )
    addresses = tuple(f"{host}:1" for host in hosts)
    assignment = Assignment(hosts=tuple(hosts), addresses=addresses, groups=groups)
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


def quiet_planner(config: RunConfig, use: Callable[[Windows], None]) -> LinkPlanner:
    """One that plans when it is told to."""
    return LinkPlanner(
        config,
        samples=9,
        line=lambda _: LinkRate(),
        use_windows=lambda _, windows: use(windows),
        use_lines=lambda *_: None,
        emit=lambda _: None,
        pause=0.0,
    )


async def test_windows_that_change_are_an_event_with_what_they_were_planned_from() -> None:
    found: list[Event] = []
    async with planning(emit=found.append) as (planner, plans):
        planner.step_done(epoch(7), NODES, costs(1))
        _, windows = await plans.get()
        await asyncio.sleep(0)
        assert len(found) == 1, "the event comes with the plan"
    (event,) = found
    assert isinstance(event, WindowsPlanned)
    assert (event.epoch, event.step, event.replica, event.windows) == (7, 1, 0, windows)
    assert event.round_trips == (6.0,)
    assert event.rates_up == event.rates_down == (0.0,) and event.lines_down == (0.0, 0.0), "nothing is known"
    assert min(event.forward + event.backward) > 0
    assert from_json(event.to_json()) == event


def noisy_steps() -> Iterator[StepCosts]:
    """Of a real run on a steady line, over and over; microbatches as many as `FOUR` has."""
    recorded = json.loads(Path(__file__).with_name("noisy_steps.json").read_text(encoding="utf-8"))
    kinds = ("forward", "backward", "encode", "decode")
    ways = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    more = FOUR.microbatches / 4
    for number, (seconds, stages, links) in enumerate(itertools.cycle(recorded["steps"]), 1):
        yield StepCosts(
            step=number,
            seconds=more * seconds,
            aborted=False,
            stages=tuple(
                StageCost(
                    stage=stage,
                    node_id="abcd"[stage],
                    wall_seconds=more * seconds,
                    seconds={kind: more * spent for kind, spent in zip(kinds, times, strict=True)},
                )
                for stage, times in enumerate(stages)
            ),
            links=tuple(
                LinkFigures(
                    source=source,
                    target=target,
                    bytes=int(more * 4e5),
                    capacity=1e3 * capacity,
                    least_round_trip_seconds=round_trip,
                )
                for (source, target), (capacity, round_trip) in zip(ways, links, strict=True)
            ),
        )


def slower(costs: StepCosts) -> StepCosts:
    """The same, had every link become one of a long round trip, and steps twice as long."""
    links = tuple(replace(link, least_round_trip_seconds=40.0) for link in costs.links)
    return replace(costs, seconds=2 * costs.seconds, links=links)


async def test_windows_settle_on_a_steady_line_and_change_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By noisy steps: one plan by the first, one by those after it, and then none until the line is another
    for good."""
    monkeypatch.setattr(planners, "PAUSE_TIMES", 0.0)
    steps, line = noisy_steps(), epoch(7, hosts="abcd")
    nodes = [Candidate(node_id=node, memory_bytes=2**40) for node in "abcd"]
    planned: list[Windows] = []
    planner = quiet_planner(FOUR, planned.append)

    async def take(count: int, change: Callable[[StepCosts], StepCosts] = lambda costs: costs) -> None:
        for _ in range(count):
            planner.step_done(line, nodes, change(next(steps)))
            await planner.plan()
            line.planned_windows = planned[-1]

    await take(1 + SOON)
    assert 1 <= len(planned) <= 2
    settled = line.planned_windows
    await take(42)
    assert line.planned_windows == settled, "nothing has changed"
    await take(2, slower)
    await take(42)
    assert line.planned_windows == settled, "two slow steps are noise"
    before = len(planned)
    await take(2 * WATCHED, slower)
    assert planned[before] != settled, "a line that stays slow has other windows"
    await take(42, slower)
    assert len(planned) <= before + 2


async def test_a_round_has_the_windows_of_one_local_step() -> None:
    """Two microbatches, which two stages have in flight without a window."""
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, groups=2), sync=SyncSection(every=2, warmup=1))
    planned: list[Windows] = []
    for step in (2, 1):
        assert not planned
        planner = quiet_planner(config, planned.append)
        planner.step_done(epoch(7, ((0, 1),)), NODES, costs(step))
        await planner.plan()
    assert planned[0][0] >= 3


async def test_memory_bounds_a_plan() -> None:
    small = [Candidate(node_id=node, memory_bytes=1) for node in "ab"]
    planned: list[Windows] = []
    for nodes in (small, NODES):
        assert not planned
        planner = quiet_planner(CONFIG, planned.append)
        planner.step_done(epoch(7), nodes, costs(1))
        await planner.plan()
    assert planned


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
