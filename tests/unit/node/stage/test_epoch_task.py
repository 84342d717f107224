"""A node's side of an epoch, command by command, with a stage whose arithmetic is counting."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest
import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig
from node.model.labels import BatchPart
from node.run_state.epoch import Phase
from node.schedule.gradient_groups import RowShare, StepWork
from node.schedule.routing import Peer
from node.stage.epoch_task import EpochTask
from node.stage.executor import StageExecutor
from node.stage.inbox import LinksIO, NeighbourStuckError, StepChange, StepInterrupted
from node.stage.state_copy import StateCopy
from node.stage.tensor_transfer import BadTensorError
from node.telemetry.clock import StageClock
from tests.support.machine_driver import Driver, restore_of, sent
from tests.support.services import FakeServices
from wire.errors import (
    CacheMismatchError,
    DeviceLostError,
    LinkClosedError,
    LinkError,
    LinkLostError,
    NonFiniteError,
    PackedMismatchError,
    ProtocolViolationError,
    RunError,
    ThinwireError,
)
from wire.link import Link
from wire.messages import (
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    NodeMessage,
    PeerSilent,
    Placed,
    PlacedRow,
    PlacedStage,
    Placement,
    Portion,
    Ready,
    Restore,
    Seat,
    StepFailed,
    TakeSnapshot,
    Validate,
    Vote,
)
from wire.spec import Direction, TensorKey
from wire.telemetry import Telemetry

Result = TypeVar("Result")
SECONDS = 20.0
STAGES = tuple(PlacedStage(node_id=node, address=f"{node}:1") for node in "abc")
PLACEMENT = Placement(epoch=4, stage=1, stages=STAGES)
BESIDE = (Peer(0, 0), Peer(0, 2))


class Stage:
    """Stands in for `StageExecutor`; `log` is what it was made to do."""

    def __init__(self) -> None:
        self.config = RunConfig(model=ModelSection(layers=3), pipeline=PipelineSection(stages=3))
        self.clock = StageClock()
        self.log: list[object] = []
        self.stage = 1
        self.state_step = -1
        self.voted = False
        self.lineage = 0
        self.uncompressed = False
        self.units = self.sources = ("block.0001",)
        self.needs: tuple[BatchPart, ...] = ()
        self.trouble: Exception | None = None
        self.microbatch_numbers = [0, 1]
        self.model = self
        self.relieves = False
        self.adapted = 0
        """How often it could have planned its memory anew."""

    def relieve(self) -> bool:
        self.log.append("relieve")
        return self.relieves

    def adapt(self) -> None:
        self.adapted += 1

    def use_storages(self, names: tuple[str, ...]) -> None:
        assert not names, "the run file's"

    def place(self, stage: int, stages: int, share: RowShare | None = None) -> int:
        self.log.append(("place", stage, stages))
        return self.state_step

    def begin_restore(self, *, is_drawn: bool) -> None:
        self.state_step = -1

    def restore_unit(self, unit: str, state: Mapping[str, torch.Tensor]) -> None:
        assert unit in self.units and not state

    def end_restore(self, step: int) -> None:
        self.log.append(("restore", step))
        self.state_step, self.voted = step, False

    def forget(self) -> None:
        self.log.append("forget")
        self.state_step = -1

    def use_windows(
        self, link_windows: tuple[int, ...], audited: tuple[int, ...], groups: tuple[int, ...]
    ) -> None:
        self.windows = link_windows

    def use_codecs(self, activations: tuple[str, ...], gradients: tuple[str, ...]) -> None:
        assert not activations and not gradients, "the run file's"

    def run_step(
        self,
        epoch: int,
        step: int,
        io: LinksIO,
        samples: Mapping[BatchPart, object],
        loss_scale: float = 0.0,
        change: StepChange | None = None,
    ) -> Vote:
        self.io = io
        if self.trouble is not None:
            raise self.trouble
        self.log.append(("step", step))
        self.voted = True
        return Vote(epoch=epoch, step=step, norms={1: 2.0}, loss=None)

    def apply(self, lr: float, clip_coefficient: float) -> None:
        self.log.append(("apply", lr, clip_coefficient))
        self.state_step += 1
        self.voted = False

    wants_digests = False
    keep_sums = None
    copies_within_step = True

    def copy_state(self) -> StateCopy:
        self.log.append("copy")
        return StateCopy([])

    def expected_bytes(self, key: TensorKey) -> int | None:
        return 64

    def comes(self, row: int, key: TensorKey, work: StepWork) -> bool:
        return True


class Node(FakeServices):
    """With the stage whose arithmetic is counting."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(cast(StageExecutor, stage))
        self.stage = stage


class Talk:
    """A running epoch and the coordinator's side of the conversation."""

    def __init__(self, node: Node, task: EpochTask) -> None:
        self.node, self.task = node, task

    async def hear(self) -> NodeMessage:
        async with asyncio.timeout(SECONDS):
            return await self.node.said.get()

    async def ask(self, command: CoordinatorMessage) -> NodeMessage:
        self.task.submit(command)
        return await self.hear()

    async def begun(self, step: int = 0) -> None:
        """Placed, restored and in the middle of nothing."""
        await self.hear()
        assert await self.ask(Restore(epoch=4, step=step)) == Ready(epoch=4, telemetry=Telemetry())


@contextlib.asynccontextmanager
async def epoch(stage: Stage | None = None, *, placement: Placement = PLACEMENT) -> AsyncIterator[Talk]:
    node = Node(stage or Stage())
    task = EpochTask(placement, node)
    running = asyncio.create_task(task.run())
    try:
        yield Talk(node, task)
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=SECONDS)
    assert running.cancelled(), "only the end of the epoch ends the task"


def failure(kind: FailureKind, message: str, step: int = 0, peer: int = -1) -> StepFailed:
    return StepFailed(epoch=4, step=step, kind=kind, message=message, peer_stage=peer)


async def test_commands_are_obeyed_in_order() -> None:
    async with epoch() as talk:
        assert await talk.hear() == Placed(epoch=4, held_step=-1, voted=False)
        assert await talk.ask(Restore(epoch=4, step=0)) == Ready(epoch=4, telemetry=Telemetry())
        for step in range(2):
            vote = await talk.ask(Begin(epoch=4, step=step))
            assert vote == Vote(epoch=4, step=step, norms={1: 2.0}, loss=None)
            commit = Commit(epoch=4, step=step, clip_coefficient=0.5, lr=0.25, waited_seconds=2.0)
            assert await talk.ask(commit) == Applied(epoch=4, step=step, telemetry=Telemetry())
        assert talk.node.waited == [0.0, 2.0, 0.0, 2.0], "before each begin, and before each commit"
        assert talk.node.linked == [BESIDE]
        assert talk.node.stage.log == [
            ("place", 1, 3),
            ("restore", 0),
            ("step", 0),
            ("apply", 0.25, 0.5),
            ("step", 1),
            ("apply", 0.25, 0.5),
        ]
    assert talk.node.linked == [BESIDE, ()], "links end with the epoch"


async def test_a_command_that_comes_again_is_answered_again_and_not_done_again() -> None:
    async with epoch() as talk:
        placed = await talk.hear()
        assert await talk.ask(PLACEMENT) == placed
        commit = Commit(epoch=4, step=0, clip_coefficient=0.5, lr=0.25)
        for command in (Restore(epoch=4, step=0), Begin(epoch=4, step=0), commit):
            first = await talk.ask(command)
            done = list(talk.node.stage.log)
            assert await talk.ask(command) == first
            assert talk.node.stage.log == done
        take = TakeSnapshot(epoch=4, step=1)
        talk.task.submit(take)
        talk.task.submit(take)
        await talk.ask(Begin(epoch=4, step=1))
        assert talk.node.uploads == [(4, 1)]


async def test_a_node_whose_answer_to_its_placement_was_lost_answers_again() -> None:
    """Its control connection breaks, and the coordinator repeats the placement on the next one."""
    run = Driver(stages=3)
    (placement,) = sent(run.join("abc"), "b")
    assert isinstance(placement, Placement)
    async with epoch(placement=placement) as talk:
        lost = await talk.hear()
        run.machine.disconnected("b", run.time)
        for other in "ac":
            run.placed(other)
        (again,) = sent(run.hello("b", epoch=placement.epoch), "b")
        assert isinstance(again, Placement) and run.epoch.phase is Phase.PLACING
        talk.task.update(again)
        answer = await talk.hear()
        assert answer == lost
        assert restore_of(run.machine.message("b", answer, run.time)).step == 0
    assert talk.node.stage.log == [("place", 1, 3)], "it was placed once"


async def test_a_begin_that_comes_again_while_its_step_runs_changes_no_work() -> None:
    """As after a control connection broke."""
    go_on = threading.Event()
    async with epoch() as talk:
        await talk.begun()
        stage, inbox = talk.node.stage, talk.node.inbox
        run_step, begun, loop = stage.run_step, asyncio.Event(), asyncio.get_running_loop()

        def held(*arguments: Any) -> Vote:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(SECONDS)
            inbox.check()
            assert inbox.take_change() is None
            return run_step(*arguments)

        stage.run_step = held  # type: ignore[method-assign]
        begin = Begin(epoch=4, step=0)
        talk.task.submit(begin)
        await begun.wait()
        talk.task.submit(begin)
        await asyncio.sleep(0)
        go_on.set()
        assert isinstance(await talk.hear(), Vote)


async def test_a_row_that_loses_its_node_while_samples_are_fetched_is_still_in_the_steps_work() -> None:
    """The work that comes next leaves it out. Until then tensors for it go to its closed link."""
    stage = Stage()
    stage.config = RunConfig(model=ModelSection(layers=3), pipeline=PipelineSection(stages=3, groups=2))
    stage.needs = (BatchPart.INPUTS,)
    rows = tuple(PlacedRow(node=STAGES[1], groups=(group,)) for group in (0, 1))
    async with epoch(stage, placement=replace(PLACEMENT, rows=rows)) as talk:
        gone, line = Seat(1, 1), cast(Link, ClosedLink(LinkClosedError("closed")))
        talk.node.links = links = {Peer(*gone): line}

        class Samples:
            async def get(self, step: int, part: BatchPart, groups: tuple[int, ...], audited: object) -> str:
                portions = (Portion(0, (0, 1)),)
                talk.task.submit(Begin(epoch=4, step=0, generation=1, portions=portions, absent=(gone,)))
                assert talk.node.renewed == [(None, (Peer(*gone),))]
                links.clear()
                return "its own"

            async def more(self, step: int, part: BatchPart, groups: tuple[int, ...]) -> dict[int, str]:
                return {}

        talk.node.batches = cast(Any, Samples())
        stage.vote = lambda change: Vote(  # type: ignore[attr-defined]
            epoch=4, step=0, norms={1: 3.0}, loss=None, generation=change.generation
        )
        await talk.begun()
        assert isinstance(await talk.ask(Begin(epoch=4, step=0)), Vote)
        assert stage.io.link_to_row(1) is line


async def test_work_that_comes_when_the_vote_is_computed_has_its_samples() -> None:
    """They are asked for once, when the coordinator first gives the row a group of another."""
    go_on, begun, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    stage, asked, is_asked = Stage(), [], asyncio.Event()
    stage.config = RunConfig(model=ModelSection(layers=3), pipeline=PipelineSection(stages=3, groups=2))
    stage.needs = (BatchPart.INPUTS,)

    class Samples:
        async def get(self, step: int, part: BatchPart, groups: tuple[int, ...], audited: object) -> str:
            return "its own"

        async def more(self, step: int, part: BatchPart, groups: tuple[int, ...]) -> dict[int, str]:
            asked.append(groups)
            is_asked.set()
            return dict.fromkeys(groups, "another row's")

    def too_soon(*arguments: Any) -> Vote:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(SECONDS)
        return Vote(epoch=4, step=0, norms={1: 2.0}, loss=None)

    def vote(change: StepChange) -> Vote:
        stage.log.append(change.samples)
        return Vote(epoch=4, step=0, norms={1: 3.0}, loss=None, generation=change.generation)

    stage.run_step, stage.vote = too_soon, vote  # type: ignore[method-assign, attr-defined]
    rows = tuple(PlacedRow(node=STAGES[1], groups=(group,)) for group in (0, 1))
    async with epoch(stage, placement=replace(PLACEMENT, rows=rows)) as talk:
        talk.node.batches = cast(Any, Samples())
        await talk.begun()
        talk.task.submit(Begin(epoch=4, step=0))
        await begun.wait()
        talk.task.submit(Begin(epoch=4, step=0, generation=1, portions=(Portion(0, (0, 1)),)))
        await is_asked.wait()
        go_on.set()
        vote = await talk.hear()
        assert isinstance(vote, Vote) and vote.generation == 1
        assert stage.log[-1] == {BatchPart.INPUTS: {1: "another row's"}} and asked == [(1,)]


async def test_a_node_that_enters_takes_tensors_while_it_applies_the_steps_before() -> None:
    key = TensorKey(epoch=4, step=3, microbatch=0, boundary=0, direction=Direction.ACTIVATION)
    stage, applies = Stage(), asyncio.Event()
    stage.state_step = 2

    async def settle() -> None:
        await applies.wait()
        stage.state_step = 3

    async with epoch(stage, placement=replace(PLACEMENT, enters=True)) as talk:
        talk.node.settle = settle  # type: ignore[method-assign]
        await talk.begun(2)
        talk.task.submit(Begin(epoch=4, step=3))
        for _ in range(9):
            await asyncio.sleep(0)
            assert talk.task.expect(Peer(0, 0), key) == 64
        applies.set()
        assert isinstance(await talk.hear(), Vote)


async def test_work_that_comes_while_a_node_applies_the_steps_before_is_its_first_step() -> None:
    """Otherwise it computes the groups it was given first, and waits for the sums of a row that is gone."""
    stage, began, applies = Stage(), asyncio.Event(), asyncio.Event()
    stage.config = RunConfig(model=ModelSection(layers=3), pipeline=PipelineSection(stages=3, groups=2))
    stage.state_step = 3

    async def settle() -> None:
        began.set()
        await applies.wait()

    def run_step(*arguments: Any) -> Vote:
        change = arguments[-1]
        stage.log.append(change.work.groups)
        return Vote(epoch=4, step=3, norms={1: 2.0}, loss=None, generation=change.generation)

    stage.run_step = run_step  # type: ignore[method-assign]
    rows = tuple(PlacedRow(node=STAGES[1], groups=(group,)) for group in (0, 1))
    async with epoch(stage, placement=replace(PLACEMENT, rows=rows, enters=True)) as talk:
        talk.node.settle = settle  # type: ignore[method-assign]
        await talk.begun(3)
        talk.task.submit(Begin(epoch=4, step=3))
        await began.wait()
        talk.task.submit(Begin(epoch=4, step=3, generation=1, portions=(Portion(0, (0, 1)),)))
        applies.set()
        vote = await talk.hear()
        assert isinstance(vote, Vote) and vote.generation == 1
        assert stage.log[-1] == (0, 1) and (0,) not in stage.log


async def test_a_commit_that_carries_the_next_step_is_answered_by_its_vote() -> None:
    async with epoch() as talk:
        await talk.begun()
        await talk.ask(Begin(epoch=4, step=0))
        told = Telemetry(wall_seconds=3.0)
        talk.node.telemetry = lambda: told  # type: ignore[method-assign]
        commit = Commit(
            epoch=4, step=0, clip_coefficient=0.5, lr=0.25, waited_seconds=2.0, then=Begin(epoch=4, step=1)
        )
        vote = Vote(epoch=4, step=1, norms={1: 2.0}, loss=None, telemetry=told)
        assert await talk.ask(commit) == vote
        done = list(talk.node.stage.log)
        assert done[-3:] == [("step", 0), ("apply", 0.25, 0.5), ("step", 1)]
        told = Telemetry(wall_seconds=4.0)
        assert await talk.ask(commit) == replace(vote, telemetry=told), "the newest report"
        assert talk.node.stage.log == done


async def test_a_snapshot_that_did_not_arrive_is_sent_when_it_is_asked_for_again() -> None:
    """That it failed may have been said into a connection that broke."""
    async with epoch() as talk:
        await talk.begun(1)
        take = TakeSnapshot(epoch=4, step=1)
        for arrives, uploads in ((False, 1), (False, 2), (True, 3), (True, 3)):
            talk.task.submit(take)
            await talk.ask(Begin(epoch=4, step=1))
            assert len(talk.node.uploads) == uploads
            talk.node.arrives = arrives


@pytest.mark.parametrize("within", [True, False], ids=["in place", "rounds change weights"])
async def test_a_snapshot_that_is_asked_for_within_a_step_is_of_the_state_before_it(within: bool) -> None:
    """For a newcomer, who need not wait for the step's end."""
    go_on, begun, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    stage, taken = Stage(), list[TakeSnapshot]()
    stage.copies_within_step = within
    run_step = stage.run_step

    def slow(*arguments: Any) -> Vote:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(SECONDS)
        return run_step(*arguments)

    stage.run_step = slow  # type: ignore[method-assign]
    async with epoch(stage) as talk:
        are_taken = asyncio.Event()

        def take(epoch: int, asked: TakeSnapshot, state: StateCopy) -> None:
            taken.append(asked)
            if len(taken) == 2:
                are_taken.set()

        talk.node.take = take  # type: ignore[method-assign]
        await talk.begun()
        talk.task.submit(Begin(epoch=4, step=0))
        await begun.wait()
        # To say what the state is, and to keep a copy for another node.
        asked = [TakeSnapshot(epoch=4, step=0, attempt=at, only_hashes=at == 0) for at in range(2)]
        for one in asked:
            talk.task.submit(one)
        if within:
            await are_taken.wait()
        go_on.set()
        assert isinstance(await talk.hear(), Vote)
        await talk.ask(Commit(epoch=4, step=0, clip_coefficient=0.5, lr=0.25))
        order = ["copy", "copy", ("step", 0)] if within else [("step", 0), "copy", "copy"]
        assert stage.log[-4:] == [*order, ("apply", 0.25, 0.5)] and taken == asked


async def test_a_snapshot_that_is_taken_again_is_handed_in_again() -> None:
    """What came of the attempt before counts no more, whatever this node did for it."""
    async with epoch() as talk:
        await talk.begun(1)
        talk.node.arrives = True
        for only_hashes in (False, True):
            for attempt, uploads in ((0, 1), (0, 1), (1, 2), (1, 2)):
                attempt += 2 * only_hashes
                take = TakeSnapshot(epoch=4, step=1, only_hashes=only_hashes, attempt=attempt)
                talk.task.submit(take)
                await talk.ask(Begin(epoch=4, step=1))
                assert len(talk.node.uploads) == uploads + 2 * only_hashes


async def test_links_that_are_opened_to_a_new_neighbour_are_not_opened_again() -> None:
    """The neighbour would refuse the second as one of another process."""
    news = replace(PLACEMENT, renewed=(Seat(0, 0),))
    async with epoch() as talk:
        await talk.hear()
        talk.task.update(news)
        await talk.ask(Restore(epoch=4, step=0))
        assert talk.node.linked[0] == BESIDE and talk.node.renewed == []
        talk.task.update(news)
        assert talk.node.renewed == [(news, (Peer(0, 0),))]


async def test_the_link_to_a_dead_neighbour_is_closed_once_and_one_to_a_node_that_enters_stays() -> None:
    seat, peer = Seat(0, 2), Peer(0, 2)
    async with epoch() as talk:
        renewed = talk.node.renewed
        await talk.begun(3)
        await talk.ask(Begin(epoch=4, step=3))
        for generation in (1, 2):
            talk.task.submit(Begin(epoch=4, step=3, generation=generation, absent=(seat,)))
            assert renewed == [(None, (peer,))]
        enters = replace(PLACEMENT, renewed=(seat,))
        talk.task.update(enters)
        assert renewed.pop() == (enters, (peer,))
        talk.task.submit(Begin(epoch=4, step=3, generation=3, absent=(seat,)))
        talk.task.submit(Begin(epoch=4, step=3, generation=4))
        assert len(renewed) == 1, "it has opened its link, and then has its seat"
        talk.task.submit(Begin(epoch=4, step=3, generation=5, absent=(seat,)))
        assert renewed == 2 * [(None, (peer,))]


@pytest.mark.parametrize("is_told_by_begin", [True, False])
async def test_a_row_that_loses_a_node_ends_its_pass_over_held_out_samples(is_told_by_begin: bool) -> None:
    """Another row measures, and this node is to vote in the next step."""
    seat, waits = Seat(0, 2), threading.Event()
    stage = Stage()
    async with epoch(stage) as talk:
        await talk.begun(3)

        def validate(*_: object) -> None:
            waits.set()
            talk.node.inbox.take(TensorKey(4, 3, 9, 0, Direction.ACTIVATION))

        stage.validate = validate  # type: ignore[attr-defined]
        talk.task.submit(Validate(epoch=4, step=3, number=0, microbatches=1))
        assert await asyncio.to_thread(waits.wait, SECONDS)
        begin = Begin(epoch=4, step=3, absent=(seat,))
        if not is_told_by_begin:
            gone = PlacedStage(node_id="", address="")
            talk.task.update(replace(PLACEMENT, stages=(*STAGES[:2], gone), renewed=(seat,)))
        talk.task.submit(Validate(epoch=4, step=3, number=1, microbatches=1))
        vote = await talk.ask(begin)
        assert isinstance(vote, Vote) and vote.step == 3
        assert talk.node.inbox.take_change() is None


async def test_a_node_that_enters_keeps_its_link_to_another_that_does() -> None:
    stage = Stage()
    stage.state_step = 3
    async with epoch(stage, placement=replace(PLACEMENT, enters=True)) as talk:
        await talk.begun(3)
        assert isinstance(await talk.ask(Begin(epoch=4, step=3, absent=(Seat(0, 2),))), Vote)
        assert talk.node.renewed == []


async def test_a_stage_hands_in_what_it_holds_before_it_is_restored() -> None:
    """As a run ends whose links do not come up."""
    stage = Stage()
    stage.state_step = 3
    async with epoch(stage) as talk:
        placed = await talk.hear()
        talk.task.submit(TakeSnapshot(epoch=4, step=3))
        assert await talk.ask(PLACEMENT) == placed
        assert talk.node.uploads == [(4, 3)] and talk.node.linked == []


@pytest.mark.parametrize("step", [0, 2])
async def test_only_the_state_of_the_step_is_uploaded(step: int) -> None:
    async with epoch() as talk:
        await talk.begun(1)
        talk.task.submit(TakeSnapshot(epoch=4, step=step))
        await talk.ask(Begin(epoch=4, step=1))
        assert talk.node.uploads == []


@pytest.mark.parametrize(
    ("held", "voted", "expected"),
    [
        (5, True, [("apply", 0.25, 0.5)]),
        (5, False, [("restore", 6)]),
        (6, False, []),
        (4, True, [("restore", 6)]),
        (-1, False, [("restore", 6)]),
    ],
)
async def test_a_missed_commit_is_applied_by_one_who_voted_for_it(
    held: int, voted: bool, expected: list[object]
) -> None:
    stage = Stage()
    stage.state_step, stage.voted = held, voted
    missed = Commit(epoch=4, step=5, clip_coefficient=0.5, lr=0.25)
    async with epoch(stage) as talk:
        await talk.hear()
        await talk.ask(Restore(epoch=4, step=6, missed=missed))
        assert stage.log[1:] == expected
        assert stage.state_step == 6
        assert talk.node.fetched == ([(6, "block.0001")] if expected == [("restore", 6)] else [])


@pytest.mark.parametrize("missed", [None, Commit(epoch=4, step=5, clip_coefficient=0.5, lr=0.25)])
async def test_a_state_of_another_lineage_is_loaded_though_its_step_is_held(missed: Commit | None) -> None:
    step = 5 if missed is None else 6
    stage = Stage()
    stage.state_step, stage.voted, stage.lineage = 5, True, 2
    async with epoch(stage) as talk:
        assert await talk.hear() == Placed(epoch=4, held_step=5, voted=True, lineage=2)
        await talk.ask(Restore(epoch=4, step=step, missed=missed, lineage=4))
        assert stage.log[1:] == ["forget", ("restore", step)]
        assert (stage.state_step, stage.lineage) == (step, 4)
        assert talk.node.fetched == [(step, "block.0001")]


async def test_stages_learn_of_an_uncompressed_epoch() -> None:
    async with epoch() as talk:
        await talk.hear()
        await talk.ask(Restore(epoch=4, step=0, uncompressed=True))
        assert talk.node.stage.uncompressed
    async with epoch(talk.node.stage) as next_one:
        await next_one.begun()
        assert not next_one.node.stage.uncompressed


TROUBLE = [
    (NonFiniteError("boundary 1"), FailureKind.NON_FINITE),
    (LinkLostError("gone"), FailureKind.LINK),
    (RunError("torn"), FailureKind.INTERNAL),
    (CacheMismatchError("since step 7"), FailureKind.INTERNAL),
]


@pytest.mark.parametrize(("error", "kind"), TROUBLE)
async def test_a_failure_is_repeated_to_every_caller(error: ThinwireError, kind: FailureKind) -> None:
    """The first word may be lost with the connection; silence would hold up the run for ever."""
    async with epoch() as talk:
        await talk.begun(3)
        talk.node.stage.trouble = error
        expected = failure(kind, str(error), step=3)
        assert await talk.ask(Begin(epoch=4, step=3)) == expected
        # Its sample cache is part of its state: it must fetch a snapshot.
        forgets = isinstance(error, CacheMismatchError)
        assert (talk.node.stage.log[-1] == "forget") is (talk.node.stage.state_step == -1) is forgets
        for command in (Begin(epoch=4, step=3), PLACEMENT, TakeSnapshot(epoch=4, step=3)):
            assert await talk.ask(command) == expected
        assert talk.node.linked == [BESIDE, ()], "its neighbours learn of it too"


@pytest.mark.parametrize("error", [DeviceLostError("rank 1 is gone"), torch.OutOfMemoryError("CUDA: full")])
async def test_a_lost_device_or_full_memory_is_not_reported_but_ends_the_node(error: Exception) -> None:
    """Another epoch would fail on it in the same way, until the run has no tries left."""
    node = Node(Stage())
    task = EpochTask(PLACEMENT, node)
    talk = Talk(node, task)
    running = asyncio.create_task(task.run())
    await talk.begun(3)
    node.stage.trouble = error
    task.submit(Begin(epoch=4, step=3))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(type(error), match=str(error)):
            await running
    assert node.said.empty()


async def test_a_step_that_ran_short_of_memory_runs_again_if_the_node_can_plan_with_less() -> None:
    async with epoch() as talk:
        await talk.begun(3)
        stage = talk.node.stage
        stage.trouble, stage.relieves = torch.OutOfMemoryError("CUDA out of memory."), True
        what = "it ran out of memory, and continues with a plan for less"
        assert await talk.ask(Begin(epoch=4, step=3)) == failure(FailureKind.INTERNAL, what, step=3)
        assert stage.log[-1] == "relieve" and stage.state_step == 3, "it holds its state still"


async def test_a_state_that_cannot_be_fetched_is_a_failure_once_links_are_up() -> None:
    """Fetching may take longer than neighbours wait for a link."""
    async with epoch() as talk:
        await talk.hear()
        talk.node.missing = RunError("no complete snapshot")
        assert await talk.ask(Restore(epoch=4, step=6)) == failure(
            FailureKind.INTERNAL, "no complete snapshot"
        )
        assert talk.node.linked[0] == BESIDE


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LinkLostError("stage 2 is gone"), FailureKind.LINK),
        (ProtocolViolationError("a frame of 9 GB"), FailureKind.PEER),
    ],
)
async def test_a_lost_link_fails_the_step_and_names_the_stage_at_its_other_end(
    error: ThinwireError, kind: FailureKind
) -> None:
    async with epoch() as talk:
        await talk.begun(3)
        talk.task.link_lost(Peer(0, 2), error)
        with pytest.raises(Exception, match=str(error)) as interruption:
            talk.node.inbox.check()
        talk.node.stage.trouble = interruption.value
        assert await talk.ask(Begin(epoch=4, step=3)) == failure(kind, str(error), step=3, peer=2)


@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize("peer", [Peer(0, 2), Peer(2, PLACEMENT.stage)])
async def test_a_neighbour_that_is_stuck_is_named(peer: Peer, is_interrupted: bool) -> None:
    async with epoch() as talk:
        await talk.begun(3)
        where = {"row": peer.replica} if peer.replica else {"stage": peer.stage}
        stuck = NeighbourStuckError("it is stuck", **where)
        talk.node.stage.trouble = StepInterrupted(str(stuck), stuck) if is_interrupted else stuck
        failed = failure(FailureKind.LINK, str(stuck), step=3, peer=peer.stage)
        assert await talk.ask(Begin(epoch=4, step=3)) == replace(failed, peer_replica=peer.replica)


async def test_a_silent_neighbour_is_told_of_unless_its_seat_is_known_to_be_empty() -> None:
    async with epoch() as talk:
        await talk.begun(3)
        talk.task.silent(Peer(0, 2))
        assert await talk.hear() == PeerSilent(epoch=4, stage=2, replica=0)
        talk.task.submit(Begin(epoch=4, step=3, generation=1, absent=(Seat(0, 2),)))
        talk.task.silent(Peer(0, 2))
        talk.task.silent(Peer(0, 0))
        assert await talk.hear() == PeerSilent(epoch=4, stage=0, replica=0)


@pytest.mark.parametrize(
    ("boundary", "direction", "peer"), [(0, Direction.ACTIVATION, 0), (1, Direction.GRADIENT, 2)]
)
async def test_a_bad_tensor_in_sound_frames_is_held_against_its_sender(
    boundary: int, direction: Direction, peer: int
) -> None:
    key = TensorKey(epoch=4, step=3, microbatch=5, boundary=boundary, direction=direction)
    async with epoch() as talk:
        await talk.begun(3)
        talk.node.stage.trouble = BadTensorError(key, PackedMismatchError("a scale of zero"))
        what = f"the {direction.name.lower()} received over boundary {boundary}, microbatch 5"
        expected = failure(FailureKind.PEER, f"{what} (a scale of zero)", step=3, peer=peer)
        assert await talk.ask(Begin(epoch=4, step=3)) == expected


class ClosedLink:
    def __init__(self, error: LinkError) -> None:
        self.error = error

    def send(self, key: TensorKey, payload: memoryview, elements: int = 0) -> None:
        raise self.error

    def after_delivery(self, call: Callable[[], None]) -> None:
        pass

    def want(self, key: TensorKey | None) -> None:
        pass

    def release(self, key: TensorKey) -> None:
        pass


async def test_late_sends_of_an_epoch_do_not_disturb_the_next() -> None:
    """A tensor is handed over to the event loop, which may come to that later than to the epoch's end."""

    async def send() -> None:
        key = TensorKey(epoch=4, step=0, microbatch=0, boundary=1, direction=Direction.ACTIVATION)
        talk.node.stage.io.send(key, torch.zeros(64, dtype=torch.uint8), 64)
        await asyncio.sleep(0)

    async with epoch() as talk:
        link = ClosedLink(LinkClosedError("closed here"))
        talk.node.links = dict.fromkeys(BESIDE, link)
        await talk.begun()
        await talk.ask(Begin(epoch=4, step=0))
        # Another node has the seat at the other end, which is not this node's trouble.
        await send()
        talk.node.inbox.check()
        link.error = LinkLostError("it did not come back")
        await send()
        with pytest.raises(StepInterrupted, match="it did not come back"):
            talk.node.inbox.check()
    talk.node.inbox.reset()  # as the next epoch begins
    await send()
    talk.node.inbox.check()


async def test_nothing_is_expected_before_the_state_is_there() -> None:
    """Links are up meanwhile, and what a stage expects rests on its state."""
    key = TensorKey(epoch=4, step=0, microbatch=0, boundary=0, direction=Direction.ACTIVATION)
    async with epoch() as talk:
        await talk.hear()
        assert talk.task.expect(Peer(0, 0), key) is None
        await talk.ask(Restore(epoch=4, step=0))
        assert talk.task.expect(Peer(0, 0), key) == 64


async def test_tensors_are_expected_of_this_epochs_neighbours_for_this_step_and_the_next() -> None:
    async with epoch() as talk:
        await talk.begun(3)

        def asked(peer: int, **change: Any) -> int | None:
            fields = {
                "epoch": 4,
                "step": 3,
                "microbatch": 0,
                "boundary": 0,
                "direction": Direction.ACTIVATION,
            }
            return talk.task.expect(Peer(0, peer), TensorKey(**{**fields, **change}))

        assert asked(0) == 64
        assert asked(0, step=4) == 64
        assert asked(2, boundary=1, direction=Direction.GRADIENT) == 64
        for peer, change in (
            (0, {"epoch": 3}),
            (0, {"epoch": 5}),
            (0, {"step": 2}),
            (0, {"step": 5}),
            (2, {}),
            (0, {"boundary": 1, "direction": Direction.GRADIENT}),
        ):
            assert asked(peer, **change) is None
