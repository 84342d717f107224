"""Windows are planned in the background, from the newest step, for the epoch in which it was measured."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from node.config.schema import PipelineSection, RunConfig, SyncSection
from node.coordinator import planners
from node.coordinator.planners import WindowPlanner
from node.pipeline.window_plan import StepMeasures, Windows
from node.run_state.epoch import Epoch
from node.run_state.grid import ONE_ROW, Groups
from node.run_state.stage_assignment import Candidate
from node.run_state.votes import VoteHistory
from node.telemetry.events import StageCost, StepCosts
from tests.support.machine_driver import step_plan
from wire.telemetry import LinkReport

SECONDS = 20.0
CONFIG = RunConfig(pipeline=PipelineSection(stages=2))
NODES = [Candidate(node_id=node, memory_bytes=2**40) for node in "ab"]
Plan = tuple[int, Windows]


def epoch(number: int, groups: Groups = ONE_ROW) -> Epoch:
    return Epoch(
        number=number,
        hosts=("a", "b"),
        addresses=("a:1", "b:1"),
        groups=groups,
        newest_snapshot=0,
        newest_state=0,
        committed=None,
        suspect_step=None,
        plan=step_plan,
        neighbours=lambda stage, _stages: {1 - stage},
        history=VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})]),
    )


def costs(step: int, *, seconds: float = 1.0) -> StepCosts:
    """Of a step whose every microbatch took `seconds` forward and as long backward, on both stages."""
    total = CONFIG.microbatches * seconds
    stages = [
        StageCost(stage=stage, node_id=node, wall_seconds=total, seconds=dict(forward=total, backward=total))
        for stage, node in enumerate("ab")
    ]
    return StepCosts(step=step, seconds=total, aborted=False, stages=tuple(stages), links=())


def far_apart(_source: int, _target: int) -> LinkReport:
    """A round trip of three microbatches."""
    return LinkReport(
        peer_stage=0,
        bytes_sent=0,
        bytes_received=0,
        retransmits=0,
        rejects=0,
        rtt_seconds=6.0,
        least_rtt_seconds=6.0,
    )


@contextlib.asynccontextmanager
async def planning(config: RunConfig = CONFIG) -> AsyncIterator[tuple[WindowPlanner, "asyncio.Queue[Plan]"]]:
    """A planner at work, and its plans."""
    plans: asyncio.Queue[Plan] = asyncio.Queue()
    planner = WindowPlanner(
        config, samples=9, link_report=far_apart, use=lambda *plan: plans.put_nowait(plan), pause=0.0
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
