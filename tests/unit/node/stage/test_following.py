"""A node that follows the run from a snapshot holds the run's state after every step, to the bit."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.stage.executor import StageExecutor
from node.stage.following import Follower
from node.stage.stage_model import StageModel
from node.stage.sums_kept import SumsKept
from node.state.serialization import serialize_unit
from node.telemetry.clock import StageClock
from node.training.schedule import clip_coefficient, global_norm, learning_rate
from tests.support import memory_pipeline
from tests.support.memory_pipeline import CPU, MemoryPipeline
from tests.support.services import FakeServices
from wire.errors import LinkError
from wire.messages import Follow, Following, FollowStep, PlacedStage, Vote

Result = TypeVar("Result")
CONFIG = RunConfig(
    run=RunSection(steps=8, seed=7),
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=8, microbatch=2, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=2, forward_codec="fp32", backward_codec="fp32", groups=2),
)
ROWS = [(0,), (1,)]
SECONDS = 20.0


changed = partial(memory_pipeline.changed, CONFIG)


VARIANTS = {
    "fixed-8": changed(pipeline={"sync_codec": "fixed-8"}),
    "tied, head first": changed(model={"tied": True}, pipeline={"head": "first"}),
    "interleaved": changed(model={"layers": 4}, pipeline={"chunks": 2}),
    "bf16 weights, fp8 gradients and moments": changed(
        training={"precision": "bfloat16", "weights": "bfloat16", "moments": "fp8", "gradients": "fp8"}
    ),
    "adapters": replace(CONFIG, lora=LoraSection(rank=4, dropout=0.1)),
}


def new_executor(config: RunConfig) -> StageExecutor:
    return StageExecutor(config, CPU, StageClock(), StageModel(config, CPU))


def whole(executor: StageExecutor) -> dict[str, dict[str, Tensor]]:
    """All that a snapshot of its state has."""
    copy = executor.copy_state()
    return {unit: copy.whole(unit) for unit in copy.units}


def same(one: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]) -> bool:
    assert one.keys() == other.keys()
    return all(
        torch.equal(value.view(torch.uint8), other[unit][name].view(torch.uint8))
        if value.dim()
        else value == other[unit][name]
        for unit, tensors in one.items()
        for name, value in tensors.items()
    )


def commit_of(config: RunConfig, step: int, outcomes: list[Vote]) -> tuple[float, float]:
    """Learning rate and clip coefficient."""
    norms = {unit: norm for outcome in outcomes for unit, norm in outcome.norms.items()}
    clip = clip_coefficient(global_norm(norms[unit] for unit in sorted(norms)), config.training.clip)
    return learning_rate(step, config.training, config.run.steps), clip


@pytest.mark.parametrize("name", VARIANTS)
def test_summed_gradients_alone_lead_from_a_state_to_the_next(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    kept = [SumsKept(tmp_path / str(stage), 2**30) for stage in range(2)]
    with MemoryPipeline(config, rows=ROWS) as run:
        run.train(1)
        followers = [new_executor(config) for _ in range(2)]
        for stage, follower in enumerate(followers):
            held = run.executors[stage].copy_state()
            follower.place(stage, 2)
            follower.restore(1, held.whole)
            # In the second row: what it keeps is not its own alone.
            run.executors[2 + stage].keep_sums = kept[stage].keep
        for step in (1, 2):
            outcomes = run.outcomes()
            lr, clip = commit_of(config, step, outcomes[:2])
            for stage, follower in enumerate(followers):
                sums = {unit: kept[stage].read(step, unit) or b"" for unit in follower.units}
                assert {unit: len(data) for unit, data in sums.items()} == {
                    unit: follower.sum_bytes(unit) for unit in follower.units
                }
                assert follower.put_sums(sums) == outcomes[stage].norms
                follower.apply(lr, clip)
            run.commit(outcomes)
            for stage, follower in enumerate(followers):
                assert same(whole(follower), whole(run.executors[stage]))
    for one in kept:
        one.close()


# ---- the follower's part of the conversation


class Node(FakeServices):
    """A newcomer to stage 1."""

    def __init__(self, snapshot: Mapping[str, Mapping[str, Tensor]], sums: SumsKept) -> None:
        super().__init__(
            new_executor(CONFIG), {unit: serialize_unit(state) for unit, state in snapshot.items()}
        )
        self.asked: list[str] = []
        self.damaged: set[str] = set()
        """Sources whose gradients are those of another step."""
        self.gone = False
        self._sums = sums
        self.kept: dict[tuple[int, str], bytes] = {}
        """What it keeps for others, by step and unit."""

    def follower(self, group: asyncio.TaskGroup) -> Follower:
        def keep(step: int, unit: str, data: bytes) -> None:
            self.kept[step, unit] = data

        return Follower(self, self.fetch_sums, group, self.said.put_nowait, print, keep)

    async def fetch_sums(self, holders: tuple[PlacedStage, ...], step: int, unit: str, size: int) -> bytes:
        self.asked.append(holders[0].node_id)
        if self.gone:
            raise LinkError("no node keeps it")
        step -= holders[0].node_id in self.damaged
        data = await asyncio.to_thread(self._sums.read, step, unit)
        assert data is not None and len(data) == size
        return data

    async def hear(self) -> Following:
        async with asyncio.timeout(SECONDS):
            message = await self.said.get()
        assert isinstance(message, Following)
        return message


class Told:
    """A run of two rows up to step 4, the snapshot of step 1, and what a follower of stage 1 is told."""

    def __init__(self, directory: Path) -> None:
        self.sums = SumsKept(directory, 2**30)
        self.steps: list[FollowStep] = []
        with MemoryPipeline(CONFIG, rows=ROWS) as run:
            run.executors[1].keep_sums = self.sums.keep
            run.train(1)
            self.snapshot = whole(run.executors[1])
            for step in (1, 2, 3):
                outcomes = run.outcomes()
                lr, clip = commit_of(CONFIG, step, outcomes[:2])
                vote = outcomes[1]
                self.steps.append(
                    FollowStep(
                        snapshot=1,
                        step=step,
                        clip_coefficient=clip,
                        lr=lr,
                        norms=vote.norms,
                        sums=vote.sums,
                    )
                )
                run.commit(outcomes)
            self.state = whole(run.executors[1])
        sources = tuple(PlacedStage(node_id=name, address=f"{name}:1") for name in "ab")
        self.order = Follow(step=1, stage=1, stages=2, lineage=3, sources=sources)
        self.node = Node(self.snapshot, self.sums)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path / "sums")


async def test_a_follower_settles_with_the_state_of_all_steps_that_it_was_told_of(told: Told) -> None:
    node = told.node
    async with asyncio.TaskGroup() as group:
        follower = node.follower(group)
        follower.follow(told.order)
        assert await node.hear() == Following(snapshot=1, step=1)
        follower.committed(told.steps[0])
        assert await node.hear() == Following(snapshot=1, step=2)
        follower.follow(told.order)  # the same one: its connection broke
        for step in told.steps:
            follower.committed(step)
        await follower.settle()
    assert (node.executor.state_step, node.executor.lineage) == (4, 3)
    assert same(whole(node.executor), told.state)
    assert set(node.asked) == {"a", "b"}, "all replicas send"
    wanted = {(step, unit): told.sums.read(step, unit) for step in (1, 2, 3) for unit in node.executor.units}
    assert node.kept == wanted, "who comes later follows with them, also when all replicas are gone"


async def test_wrong_gradients_are_fetched_again_from_others(told: Told) -> None:
    node = told.node
    async with asyncio.TaskGroup() as group:
        follower = node.follower(group)
        follower.follow(told.order)
        await node.hear()
        follower.committed(told.steps[0])
        await node.hear()
        node.damaged = {"a"}
        follower.committed(told.steps[1])
        assert await node.hear() == Following(snapshot=1, step=3), "one liar keeps nobody out"
        node.damaged = {"a", "b"}
        follower.committed(told.steps[2])
        heard = await node.hear()
        assert "right gradient of step" in heard.failed
        await follower.settle()
    assert {step for step, _ in node.kept} == {1, 2}
    assert node.executor.state_step == -1, "and it holds no state that is not the run's"


@pytest.mark.parametrize(
    ("case", "said"),
    [("other sums", "voted for"), ("no source", "no node keeps it"), ("a step later", "step 1 is missing")],
)
async def test_what_is_not_the_runs_is_not_applied_and_said(told: Told, case: str, said: str) -> None:
    """Whoever applied gradients that have the right norms alone was turned away as a newcomer with another
    state, and the second time shut out."""
    node, step = told.node, told.steps[case == "a step later"]
    node.gone = case == "no source"
    if case == "other sums":
        assert step.sums.keys() == step.norms.keys()
        step = replace(step, sums={unit: b"0" * 16 for unit in step.sums})
    async with asyncio.TaskGroup() as group:
        follower = node.follower(group)
        follower.follow(told.order)
        await node.hear()
        follower.committed(step)
        assert said in (await node.hear()).failed


async def test_without_sources_it_follows_no_longer(told: Told) -> None:
    node = told.node
    async with asyncio.TaskGroup() as group:
        follower = node.follower(group)
        follower.follow(told.order)
        await node.hear()
        follower.follow(Follow(step=1))
        follower.committed(told.steps[0])
    assert node.said.empty() and node.executor.state_step == 1


# ---- the gradients on disk


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    sums = SumsKept(tmp_path / "sums", 250)
    for step in range(4):
        sums.keep(
            step, "head", [torch.full((60,), step, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)]
        )
    assert sums.read(3, "head") == bytes([3] * 60 + [0] * 40)
    assert [sums.read(step, "head") is None for step in range(4)] == [True, True, False, False]
    sums.close()
    assert not (tmp_path / "sums").exists()


def test_a_disk_that_fails_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "sums").write_text("no directory")
    sums = SumsKept(tmp_path / "sums", 250)
    sums.keep(1, "head", [torch.zeros(10, dtype=torch.uint8)])
    assert sums.read(1, "head") is None
    sums.close()


def test_what_a_earlier_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "sums" / "3").mkdir(parents=True)
    SumsKept(tmp_path / "sums", 250).close()
    assert not (tmp_path / "sums").exists()
