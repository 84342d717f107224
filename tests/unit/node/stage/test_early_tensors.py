"""What another row sends reaches the memory only if the work of the step asks for it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig
from node.schedule.gradient_groups import ROOT, RowShare, StepWork
from node.schedule.routing import Peer
from node.stage.gradient_sync import SyncPlan
from tests.unit.node.stage.test_epoch_task import PLACEMENT, STAGES, Stage, Talk, epoch
from wire.link import Link
from wire.messages import Begin, PlacedRow, Portion, Seat
from wire.spec import Direction, TensorKey

ROWS = ((0, 1), (2, 3), (4, 5, 6, 7))
PLACED = replace(PLACEMENT, rows=tuple(PlacedRow(node=STAGES[1], groups=groups) for groups in ROWS))
BEGIN = Begin(epoch=4, step=0)
OTHER = Peer(1, 1)


class Rows(Stage):
    """The middle stage of the first row."""

    def __init__(self) -> None:
        super().__init__()
        self.config = RunConfig(
            model=ModelSection(layers=3, hidden=64, heads=2, kv_heads=2, ffn=128),
            pipeline=PipelineSection(stages=3, groups=8),
        )
        share = RowShare(self.config, 0, ROWS)
        self.plan = SyncPlan(self.config, self.units, share, uncompressed=False)
        self.tree = share.tree

    def expected_bytes(self, key: TensorKey) -> int | None:
        return self.plan.bytes_between_rows(key)

    def comes(self, row: int, key: TensorKey, work: StepWork) -> bool:
        return self.plan.comes(row, key, work)

    def keys(self, step: int = 0) -> Iterator[TensorKey]:
        """All that any row may send in any step."""
        for piece in self.plan.sizes:
            yield TensorKey(4, step, ROOT, piece, Direction.SYNC_SUM)
            for node in range(2 * 8):
                if node in self.tree:
                    yield TensorKey(4, step, node, piece, Direction.SYNC_SHARE)


class Line:
    """Stands in for a `Link`, and knows for what it holds room."""

    def __init__(self) -> None:
        self.held: set[TensorKey] = set()

    def release(self, key: TensorKey) -> None:
        if key not in self.held:
            raise ValueError(key)
        self.held.remove(key)


def arrives(talk: Talk, key: TensorKey, peer: Peer = OTHER) -> None:
    assert talk.task.expect(peer, key) is not None
    cast(Line, talk.node.links[peer]).held.add(key)
    talk.task.arrived(peer, key, bytearray(1))


def taken(talk: Talk, row: int = 1) -> set[TensorKey]:
    """What the compute thread could take of a row."""
    return {key for of, key in talk.node.inbox._buffers if of == row}


def linked(talk: Talk) -> Line:
    line = Line()
    talk.node.links = {OTHER: cast(Link, line), Peer(2, 1): cast(Link, Line())}
    return line


async def test_a_member_fills_no_memory_with_nodes_of_the_tree_that_nobody_needs() -> None:
    stage = Rows()
    async with epoch(stage, placement=PLACED) as talk:
        line = linked(talk)
        await talk.begun()
        talk.task.submit(BEGIN)
        sent = [*stage.keys()]
        for key in sent:
            arrives(talk, key)
        owners = stage.plan.owners
        (node,) = stage.tree.subtrees(ROWS[1])
        # Of the pieces of its own that row 0 would sum without it, too: it may hand them over.
        work = stage.plan.share.whole
        shares = {piece for piece, row in owners.items() if row == 0 or work.heir(1, row, piece) == 0}
        assert shares < owners.keys()
        asked = {
            *(TensorKey(4, 0, node, piece, Direction.SYNC_SHARE) for piece in shares),
            *(TensorKey(4, 0, ROOT, piece, Direction.SYNC_SUM) for piece, row in owners.items() if row == 1),
        }
        assert taken(talk) == asked and line.held == {*sent} - asked


async def test_what_another_row_sends_before_the_work_is_known_waits_for_it() -> None:
    stage = Rows()
    async with epoch(stage, placement=PLACED) as talk:
        line = linked(talk)
        await talk.begun()
        key = next(
            TensorKey(4, 0, stage.tree.leaf(group), piece, Direction.SYNC_SHARE)
            for group in (4,)
            for piece, row in stage.plan.owners.items()
            if row == 0
        )
        arrives(talk, key)
        assert not taken(talk) and line.held == {key}
        talk.task.submit(BEGIN)
        assert not taken(talk) and line.held == {key}, "the third row is to compute this group"
        portions = (*map(Portion, (0, 1), ROWS), Portion(1, (4,)), Portion(0, (5, 6, 7)))
        talk.task.submit(replace(BEGIN, generation=1, portions=portions, absent=(Seat(2, 0),)))
        assert taken(talk) == {key} and not line.held


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_tensor_that_no_work_asks_for_is_dropped_with_its_step(is_gone: bool) -> None:
    stage = Rows()
    async with epoch(stage, placement=PLACED) as talk:
        line = linked(talk)
        await talk.begun()
        talk.task.submit(BEGIN)
        await talk.hear()
        key = TensorKey(4, 0, ROOT, min(stage.plan.sizes), Direction.SYNC_SHARE)
        arrives(talk, key)
        if is_gone:  # another link has its place
            line.held.clear()
        assert not taken(talk)
        talk.task.submit(replace(BEGIN, step=1))
        await talk.hear()
        assert not taken(talk) and not line.held
