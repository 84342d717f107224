"""Places are planned from what nodes say, what lines were measured to carry, and what steps took."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.coordinator.placing import PlacePlanner
from node.run_state.epoch import Assignment, Committed, Epoch, OnRecord, StepRules
from node.run_state.membership import Member
from node.run_state.run_plan import Past
from node.run_state.stage_assignment import Candidate
from node.run_state.votes import VoteHistory
from node.telemetry.events import StageCost, StepCosts
from node.tuning.decisions import StepHistory
from node.tuning.places import PlacePlan
from node.tuning.speeds import LEAST_STEPS
from tests.support.machine_driver import step_plan
from wire.messages import BlockTime, CoordinatorMessage, PeerRate, ProbePeer

SECONDS = 20.0
CONFIG = RunConfig(
    run=RunSection(name="places", steps=10_000),
    model=ModelSection(layers=6, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=32),
    training=TrainingSection(global_batch=16, microbatch=1),
    pipeline=PipelineSection(stages=2, forward_codec="fp32", backward_codec="fp32", placement="measured"),
)
SPEED = {"node-a": 0.1, "node-b": 0.6}
"""Seconds of a block, forward and backward."""


def epoch(hosts: tuple[str, ...] = ("node-a", "node-b")) -> Epoch:
    rules = StepRules(
        plan=step_plan,
        neighbours=lambda stage, _stages: {1 - stage},
        history=VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})]),
    )
    return Epoch(1, Assignment(hosts=hosts, addresses=("a:1", "b:1")), OnRecord(), rules)


def costs(step: int, blocks: tuple[int, int] = (3, 3)) -> StepCosts:
    """As many steps as `step` are done; its stages take what their nodes' speeds say."""
    times = [CONFIG.microbatches * SPEED[node] * n for node, n in zip(SPEED, blocks, strict=True)]
    stages = [
        StageCost(
            stage=k, node_id=node, wall_seconds=one, seconds=dict(forward=one / 3, backward=2 * one / 3)
        )
        for k, (node, one) in enumerate(zip(SPEED, times, strict=True))
    ]
    return StepCosts(step=step, seconds=1.1 * max(times), aborted=False, stages=tuple(stages), links=())


@dataclass
class Scene:
    planner: PlacePlanner
    moves: asyncio.Queue[tuple[PlacePlan, str]]
    sent: asyncio.Queue[tuple[str, CoordinatorMessage]]
    offers: list[Candidate]
    told: list[str]

    def steps(self, first: int = 1, count: int = 2 * LEAST_STEPS) -> None:
        placed = epoch()
        for step in range(first, first + count):
            self.planner.step_done(placed, self.offers, costs(step))

    async def measure(self) -> None:
        """The one pair, as it is asked for."""
        node, message = await self.sent.get()
        assert isinstance(message, ProbePeer)
        other = message.peer.node_id
        self.planner.heard(node, PeerRate(node_id=other, round_trip=0.001, up=1e8, down=1e8))


@contextlib.asynccontextmanager
async def scene(
    past: Past | None = None, config: RunConfig = CONFIG, nodes: Sequence[str] = tuple(SPEED)
) -> AsyncIterator[Scene]:
    offers = [Candidate(node_id=node, memory_bytes=0) for node in nodes]
    members = {
        one.node_id: Member(address=f"{one.node_id}:1", offer=one, process_nonce=1, last_heard=0.0, rate=1e7)
        for one in offers
    }
    moves: asyncio.Queue[tuple[PlacePlan, str]] = asyncio.Queue()
    told: list[str] = []
    sent: asyncio.Queue[tuple[str, CoordinatorMessage]] = asyncio.Queue()

    async def move(plan: PlacePlan, what: str) -> None:
        moves.put_nowait((plan, what))

    planner = PlacePlanner(
        config,
        samples=100,
        past=past or Past(),
        members=lambda: members,
        send=lambda node, message: sent.put_nowait((node, message)),
        move=move,
        tell=told.append,
        look=0.0,
        pause=0.0,
    )
    running = asyncio.create_task(planner.run())
    try:
        async with asyncio.timeout(SECONDS):
            yield Scene(planner, moves, sent, offers, told)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_blocks_go_to_the_faster_node_once_its_steps_are_measured() -> None:
    async with scene() as here:
        for node, seconds in SPEED.items():
            here.planner.heard(node, BlockTime(seconds=seconds))
        await here.measure()
        here.steps()
        plan, what = await here.moves.get()
        blocks = dict(zip(plan.grid.hosts, plan.grid.split, strict=True))
        assert blocks == {"node-a": 5, "node-b": 1}
        assert plan.shown.keys() == SPEED.keys()
        assert "blocks by stage" in what
        line = "1 line between nodes measured: 800 to 800 Mbit/s; a block takes them 100 to 600 ms"
        assert here.told == [line]


@pytest.mark.parametrize(("left", "moves"), [(100, True), (0, False)])
async def test_no_block_moves_in_a_run_too_short_to_pay_the_move_back(left: int, moves: bool) -> None:
    config = replace(CONFIG, run=replace(CONFIG.run, steps=2 * LEAST_STEPS + left))
    async with scene(config=config) as here:
        await here.measure()
        here.steps()
        plan = here.planner._plan()
        assert plan is not None and (plan() is not None) == moves


async def test_it_moves_once_and_then_waits_for_the_next_coordinator() -> None:
    async with scene() as here:
        await here.measure()
        here.steps()
        await here.moves.get()
        here.steps(first=50)
        for _ in range(50):
            await asyncio.sleep(0)
        assert here.moves.empty()


async def test_steps_that_run_again_are_not_planned_anew() -> None:
    """They have the splits that they had, however fast nodes are now."""
    past = Past(
        committed=Committed(step=30, clip_coefficient=1.0, lr=0.1),
        splits=StepHistory(((0, (3, 3)), (25, (2, 4)))),
        hosts=tuple(SPEED),
    )
    async with scene(past) as here:
        await here.measure()
        here.steps(first=4, count=18)
        assert here.planner._plan() is None
        await here.planner.next_is(23)
        assert here.moves.empty()
        await here.planner.next_is(24)
        plan, what = here.moves.get_nowait()
        assert (plan.grid.hosts, plan.grid.split) == (tuple(SPEED), (2, 4))
        assert "as recorded" in what


async def test_after_the_steps_on_record_places_are_planned_again() -> None:
    past = Past(committed=Committed(step=30, clip_coefficient=1.0, lr=0.1), hosts=tuple(SPEED))
    async with scene(past) as here:
        await here.measure()
        here.steps(first=12)
        plan, _ = await here.moves.get()
        assert max(plan.grid.split) == 5


async def test_a_plan_that_does_not_fit_in_memory_is_none() -> None:
    async with scene() as here:
        needs = here.planner._needs((3, 3), here.offers[0].devices)
        tight = [replace(one, memory_bytes=max(needs) + 1) for one in here.offers]
        assert here.planner._fits((3, 3), 0, tight[0])
        assert not here.planner._fits((5, 1), 0, tight[0])
        assert here.planner._most_blocks(tight[0]) <= 3


async def test_after_each_move_the_next_one_waits_twice_as_long() -> None:
    past = Past(hosts=tuple(SPEED), moves=2)
    async with scene(past) as here:
        await here.measure()
        here.steps(first=12, count=4 * LEAST_STEPS - 1)
        assert here.planner._plan() is None
        here.steps(first=11 + 4 * LEAST_STEPS, count=1)
        plan, _ = await here.moves.get()
        assert max(plan.grid.split) == 5


async def test_nothing_is_planned_while_a_seat_is_empty() -> None:
    """A node of one of two rows dies after its step was measured."""
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, groups=2, replicas=2))
    hosts = (*SPEED, "node-c", "node-d")
    assignment = Assignment(hosts=hosts, addresses=hosts, groups=((0,), (1,)))
    placed = Epoch(1, assignment, OnRecord(), epoch()._rules)
    async with scene(config=config, nodes=hosts) as here:
        here.planner._newest = placed, 2 * LEAST_STEPS, [1.0] * LEAST_STEPS
        here.planner._count = 2 * LEAST_STEPS
        assert here.planner._plan() is not None
        placed.lose("node-d", 0.0)
        assert here.planner._plan() is None
