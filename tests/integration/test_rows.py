"""Rows of nodes in one process sync gradients over real links; a row that dies changes no bit."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pytest
import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.data.data import Corpus
from node.model.labels import BatchPart
from node.schedule.gradient_groups import microbatches_of, model_pieces, piece_bytes
from node.schedule.placement import stage_units
from node.schedule.routing import Peer
from node.stage import inbox
from node.stage.coordinator_client import Batches
from node.stage.epoch_links import EpochLinks
from node.stage.epoch_task import EpochTask
from node.stage.executor import StageExecutor
from node.stage.inbox import OWN_ROW, Inbox
from node.stage.session import IdentityHolder
from node.stage.stage_model import StageModel
from node.stage.watchdog import ComputeThread
from node.training.schedule import clip_coefficient, global_norm, learning_rate
from tests.support.links import SECONDS, quick
from tests.support.memory_pipeline import corpus, reference_run
from tests.support.pki import new_authority, new_node
from tests.support.services import FakeServices
from wire.link import Link
from wire.messages import (
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    HandedOver,
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
    SumsMissing,
    Vote,
)
from wire.spec import Direction, TensorKey

Result = TypeVar("Result")
Heard = TypeVar("Heard", bound=NodeMessage)
STAGES = 2
CONFIG = RunConfig(
    run=RunSection(steps=6, seed=7),
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=2048, sequence=16),
    training=TrainingSection(global_batch=8, microbatch=1, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=STAGES, forward_codec="fp32", backward_codec="fp32", groups=4),
)


class RowBatches:
    """Stands in for `Batches`, without a coordinator."""

    def __init__(self, data: Corpus) -> None:
        self._data = data
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def get(
        self, step: int, part: BatchPart, groups: tuple[int, ...] = (), audited: tuple[int, ...] = ()
    ) -> np.ndarray:
        assert audited == ()
        await self.go_on.wait()
        rows = self._data.batch(step).astype(np.int64)
        size, own = (
            CONFIG.training.microbatch,
            microbatches_of(CONFIG, groups or range(CONFIG.pipeline.groups)),
        )
        rows = rows[own.start * size : own.stop * size]
        return np.ascontiguousarray(rows[:, 1:] if part is BatchPart.LABELS else rows[:, :-1])

    async def more(self, step: int, part: BatchPart, groups: tuple[int, ...]) -> dict[int, np.ndarray]:
        return {group: await self.get(step, part, (group,)) for group in groups}


class Node(FakeServices):
    """With a stage of its own and real links. Every state is held, and no snapshot is taken."""

    def __init__(self, links: EpochLinks, data: Corpus) -> None:
        device = torch.device("cpu")
        self.thread = ComputeThread()
        super().__init__(
            StageExecutor(CONFIG, device, self.thread.clock, StageModel(CONFIG, device)), files={}
        )
        self.batches = cast(Batches, RowBatches(data))
        self.to_others = links
        self.address = PlacedStage(node_id="", address="")
        self.task: EpochTask | None = None
        self.running: asyncio.Task[None] | None = None

    async def compute(self, work: Callable[[], Result]) -> Result:
        return await self.thread.run(work)

    def open_links(
        self, placement: Placement, peers: tuple[Peer, ...], events: EpochTask
    ) -> contextlib.AbstractAsyncContextManager[Mapping[Peer, Link]]:
        return self.to_others.open(placement, peers, CONFIG, events)

    async def hear(self, kind: type[Heard]) -> Heard:
        # A neighbour of it is dead; or, at any time after its last group, its sums have arrived.
        while isinstance(message := await self.said.get(), PeerSilent | HandedOver | SumsMissing):
            if isinstance(message, kind):
                return message
        assert isinstance(message, kind), message
        return message

    async def vote(self, generation: int) -> Vote:
        while (vote := await self.hear(Vote)).generation != generation:
            pass
        return vote

    async def end_epoch(self) -> None:
        if self.running is not None:
            self.inbox.interrupt("the epoch is over")
            self.running.cancel()
            await asyncio.wait([self.running])
        while not self.said.empty():
            self.said.get_nowait()


Rows = Sequence[tuple[Sequence[Node], tuple[int, ...]]]
"""Each row's nodes by stage, and its groups."""


class Grid:
    """The coordinator's part of a run of rows."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self.lineage = 1
        self.losses: list[float] = []
        self.rows: Rows = ()

    @property
    def nodes(self) -> list[Node]:
        return [node for row, _ in self.rows for node in row]

    async def place(self, rows: Rows) -> None:
        for node in self.nodes:
            await node.end_epoch()
        self.rows = rows
        self.epoch += 1
        for replica, (row, _) in enumerate(rows):
            for stage, node in enumerate(row):
                placement = Placement(
                    epoch=self.epoch,
                    stage=stage,
                    stages=tuple(node.address for node in row),
                    replica=replica,
                    rows=tuple(PlacedRow(node=other[stage].address, groups=groups) for other, groups in rows),
                )
                node.task = EpochTask(placement, node)
                node.running = asyncio.create_task(node.task.run())
        for node in self.nodes:
            await node.hear(Placed)
        self.tell(Restore(epoch=self.epoch, step=self.step, lineage=self.lineage))
        for node in self.nodes:
            await node.hear(Ready)

    def tell(self, message: CoordinatorMessage) -> None:
        for node in self.nodes:
            assert node.task is not None
            node.task.submit(message)

    async def run_step(self) -> None:
        self.tell(Begin(epoch=self.epoch, step=self.step))
        await self.end_step()

    async def end_step(self, generation: int = 0, known: Mapping[int, float] = {}) -> None:
        """`known`: losses of groups whose node is gone."""
        votes = [await node.vote(generation) for node in self.nodes]
        by_stage = dict[int, Vote]()
        for node, vote in zip(self.nodes, votes, strict=True):
            first = by_stage.setdefault(node.executor.stage, vote)
            assert vote.norms == first.norms, "rows disagree"
        losses = {**known, **{group: loss for vote in votes for group, loss in vote.group_losses.items()}}
        assert sorted(losses) == list(range(CONFIG.pipeline.groups))
        total = 0.0
        for group in sorted(losses):
            total += losses[group]
        norms = {unit: norm for vote in by_stage.values() for unit, norm in vote.norms.items()}
        norm = global_norm(norms[unit] for unit in sorted(norms))
        self.tell(
            Commit(
                epoch=self.epoch,
                step=self.step,
                clip_coefficient=clip_coefficient(norm, CONFIG.training.clip),
                lr=learning_rate(self.step, CONFIG.training, CONFIG.run.steps),
            )
        )
        for node in self.nodes:
            await node.hear(Applied)
        self.losses.append(total)
        self.step += 1


@contextlib.asynccontextmanager
async def nodes(count: int, folder: Path) -> AsyncIterator[list[Node]]:
    authority, data = new_authority(), corpus(CONFIG)
    found: list[Node] = []
    try:
        async with asyncio.timeout(SECONDS):
            for _ in range(count):
                identity = new_node(authority)
                node = Node(EpochLinks(IdentityHolder(identity, folder), quick()), data)
                port = await node.to_others.start("127.0.0.1:0")
                node.address = PlacedStage(node_id=identity.node_id, address=f"127.0.0.1:{port}")
                found.append(node)
            yield found
            for node in found:
                await node.end_epoch()
    finally:
        for node in found:
            node.inbox.interrupt("the test is over")
            if node.running is not None:
                node.running.cancel()
            await node.to_others.stop()
            node.thread.shutdown(wait=True)


def same_weights(node: Node, other: Node) -> bool:
    states = [one.executor.copy_state() for one in (node, other)]
    return all(
        torch.equal(value, states[1].whole(unit)[name])
        for unit in states[0].units
        for name, value in states[0].whole(unit).items()
    )


async def test_two_rows_sync_over_links_and_one_goes_on_alone_with_the_same_bits(tmp_path: Path) -> None:
    expected, _ = reference_run(CONFIG, 4)
    async with nodes(2 * STAGES, tmp_path) as four:
        rows = four[:STAGES], four[STAGES:]
        grid = Grid()
        await grid.place([(rows[0], (0, 1)), (rows[1], (2, 3))])
        await grid.run_step()
        for stage, node in enumerate(rows[0]):
            assert same_weights(node, rows[1][stage])
            # What crossed the sockets: frames' headers included, and little of control.
            sent = {
                flow.direction: flow.bytes
                for peer, link in node.to_others.figures().items()
                if peer == Peer(1, stage)
                for flow in link.flows
            }
            units = node.executor.units
            coded = sum(piece_bytes(piece) for unit in units for piece in model_pieces(CONFIG)[unit])
            assert sent.keys() <= {*Direction} and sent[Direction.SYNC_SHARE] > 0 < sent[Direction.SYNC_SUM]
            assert sent[Direction.SYNC_SHARE] + sent[Direction.SYNC_SUM] <= 1.01 * coded

        # A node of the second row dies in mid-step: the first one's step cannot end.
        grid.tell(Begin(epoch=grid.epoch, step=grid.step))
        dead = rows[1][1]
        await dead.end_epoch()
        await dead.to_others.stop()
        await grid.nodes[0].hear(StepFailed)
        await grid.place([(rows[0], (0, 1, 2, 3))])
        await grid.run_step()
        await grid.run_step()

    assert grid.losses == [step.loss for step in expected[:3]]


@contextlib.asynccontextmanager
async def two_rows_are_done(folder: Path) -> AsyncIterator[tuple[Grid, list[dict[int, float]]]]:
    """Two of three rows have handed over what they computed. Gives the losses that the nodes have said; the
    first row waits for its samples."""
    async with nodes(3 * STAGES, folder) as six:
        grid = Grid()
        runs = [(0, 1), (2,), (3,)]
        await grid.place([(six[STAGES * row :][:STAGES], run) for row, run in enumerate(runs)])
        held = cast(RowBatches, six[0].batches)
        held.go_on.clear()
        grid.tell(Begin(epoch=grid.epoch, step=grid.step, hands_over=True))
        said = list[dict[int, float]]()
        for node, run in zip(six[STAGES:], [(2,), (2,), (3,), (3,)], strict=True):
            message = await node.hear(HandedOver)
            assert (message.groups, message.generation) == (run, 0)
            said.append({**message.group_losses})
        yield grid, said


async def dies(grid: Grid, seat: Seat) -> None:
    row, groups = grid.rows[seat.row]
    await row[seat.stage].end_epoch()
    await row[seat.stage].to_others.stop()
    left = [*grid.rows]
    left[seat.row] = [node for node in row if node is not row[seat.stage]], groups
    grid.rows = left


def go_on(grid: Grid) -> None:
    cast(RowBatches, grid.nodes[0].batches).go_on.set()


@pytest.mark.parametrize("stage", range(STAGES))
async def test_what_a_dead_node_had_handed_over_counts(stage: int, tmp_path: Path) -> None:
    """Nobody computes it again."""
    expected, _ = reference_run(CONFIG, 1)
    async with two_rows_are_done(tmp_path) as (grid, said):
        await dies(grid, Seat(1, stage))
        grid.tell(
            Begin(
                epoch=grid.epoch,
                step=grid.step,
                hands_over=True,
                generation=1,
                absent=(Seat(1, stage),),
            )
        )
        column = [node for node in grid.nodes[STAGES:] if node.executor.stage == stage]
        for node in column:
            assert (await node.hear(HandedOver)).generation == 1, "its receivers have changed"
        go_on(grid)
        await grid.end_step(1, said[stage])
        assert grid.losses == [expected[0].loss]


@pytest.mark.parametrize("arrives", [False, True], ids=["nothing", "not-a-number"])
async def test_what_a_dead_node_said_and_did_not_send_is_missed(
    arrives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows compute it, and the step goes on."""
    expected, _ = reference_run(CONFIG, 1)
    monkeypatch.setattr(inbox, "GONE_SECONDS", 0.2)
    put, units = Inbox.put, stage_units(CONFIG, STAGES)[0]
    pieces = {piece.number for unit in units for piece in model_pieces(CONFIG)[unit]}

    def loses(self: Inbox, key: TensorKey, buffer: bytearray, row: int = OWN_ROW) -> None:
        if row != 1 or key.direction is not Direction.SYNC_SHARE or key.boundary not in pieces:
            put(self, key, buffer, row)
        elif arrives:
            put(self, key, bytearray(b"\xff" * len(buffer)), row)

    monkeypatch.setattr(Inbox, "put", loses)
    async with two_rows_are_done(tmp_path) as (grid, _):
        await dies(grid, Seat(1, 0))
        begin = Begin(epoch=grid.epoch, step=grid.step, hands_over=True, generation=1, absent=(Seat(1, 0),))
        grid.tell(begin)
        mate = grid.nodes[0]
        while not mate.said.empty():
            mate.said.get_nowait()  # its connection has closed
        go_on(grid)
        while not isinstance(message := await mate.said.get(), SumsMissing):
            assert isinstance(message, HandedOver)
        assert message == SumsMissing(epoch=grid.epoch, step=grid.step, replica=1)
        portions = Portion(0, (0, 1)), Portion(0, (2,)), Portion(2, (3,))
        grid.tell(replace(begin, generation=2, portions=portions))
        await grid.end_step(2)
        assert grid.losses == [expected[0].loss]
