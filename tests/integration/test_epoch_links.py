"""A node's links of one epoch: how many bytes they can queue, over real sockets and TLS."""

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.schedule.routing import Peer
from node.stage import epoch_links
from node.stage.epoch_links import EpochLinks, dials, outbox_bytes
from node.stage.session import IdentityHolder
from tests.support.links import EPOCH, SECONDS, quick
from tests.support.pki import new_authority, new_node
from wire.codecs.registry import codec
from wire.errors import LinkError, ThinwireError
from wire.link import DialledLink, Link, LinkSettings
from wire.messages import PlacedRow, PlacedStage, Placement
from wire.spec import Direction, TensorKey
from wire.stream_sender import Payload, StreamSender
from wire.telemetry import DIRECT

LARGE = RunConfig(
    model=ModelSection(hidden=2048, heads=16, kv_heads=16, vocab=151936, sequence=1024, tied=True),
    training=TrainingSection(global_batch=8, microbatch=1),
    pipeline=PipelineSection(stages=2, head="last"),
)
"""Its tied gradient alone takes 1.2 GB."""
SMALL = replace(
    LARGE,
    model=replace(LARGE.model, hidden=32, heads=4, kv_heads=4, vocab=256, sequence=16),
    pipeline=replace(LARGE.pipeline, chunks=2),
)


class NoEvents:
    """Expects nothing, so every tensor that arrives is dropped."""

    def expect(self, peer: Peer, key: TensorKey) -> int | None:
        return None

    def arrived(self, peer: Peer, key: TensorKey, buffer: bytearray) -> None:
        raise AssertionError(f"{key} was not expected")

    def link_lost(self, peer: Peer, error: ThinwireError) -> None:
        raise error

    def silent(self, peer: Peer) -> None:
        pass


@contextlib.asynccontextmanager
async def both_ends(
    config: RunConfig, folder: Path, settings: LinkSettings, listen: Sequence[bool] = (True, True)
) -> AsyncIterator[list[Link]]:
    """The links between two stages, as each of them opens its own, the first stage's first."""
    authority = new_authority()
    nodes = new_node(authority), new_node(authority)
    ends = [EpochLinks(IdentityHolder(node, folder), settings) for node in nodes]
    ports = [await end.start("127.0.0.1:0" if on else "") for end, on in zip(ends, listen, strict=True)]
    stages = tuple(
        PlacedStage(node_id=node.node_id, address=f"127.0.0.1:{port}" if port else "")
        for node, port in zip(nodes, ports, strict=True)
    )
    opened: list[asyncio.Future[Link]] = [asyncio.get_running_loop().create_future() for _ in ends]
    over = asyncio.Event()

    async def hold(stage: int) -> None:
        placement = Placement(epoch=EPOCH, stage=stage, stages=stages)
        peer = Peer(0, 1 - stage)
        async with ends[stage].open(placement, (peer,), config, NoEvents()) as links:
            opened[stage].set_result(cast(Link, links[peer]))
            await over.wait()

    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            for stage in range(len(ends)):
                group.create_task(hold(stage))
            yield list(await asyncio.gather(*opened))
            over.set()
    finally:
        for end in ends:
            await end.stop()


def of_a_step(config: RunConfig, step: int) -> list[tuple[TensorKey, Payload]]:
    """All tensors that the second of two stages sends in a step, uncompressed, without touched memory."""
    model, training, chunks = config.model, config.training, config.pipeline.chunks
    packed_bytes = codec("fp32").format.packed_bytes
    boundary = packed_bytes((training.microbatch, model.sequence, model.hidden))
    found: list[tuple[TensorKey, Payload]] = []
    for microbatch in range(config.microbatches):
        for chunk in range(chunks):
            key = TensorKey(EPOCH, step, microbatch, 2 * chunk, Direction.GRADIENT)
            found.append((key, memoryview(mmap.mmap(-1, boundary))))
            if chunk < chunks - 1 or config.pipeline.head == "first":
                key = TensorKey(EPOCH, step, microbatch, 2 * chunk + 1, Direction.ACTIVATION)
                found.append((key, memoryview(mmap.mmap(-1, boundary))))
    if model.tied and config.pipeline.head == "last":
        tied = memoryview(mmap.mmap(-1, packed_bytes((model.vocab, model.hidden))))
        found.append((TensorKey(EPOCH, step, 0, 0, Direction.TIED_SHARE), tied))
    return found


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("tied", "head"), [(True, "last"), (True, "first"), (False, "last")])
def test_a_large_runs_tensors_in_flight_fit(chunks: int, tied: bool, head: str) -> None:
    pipeline = replace(LARGE.pipeline, chunks=chunks, head=head)
    config = replace(LARGE, model=replace(LARGE.model, tied=tied), pipeline=pipeline)
    sender = StreamSender(tag=1, outbox_bytes=outbox_bytes(config, 2), resend_seconds=1.0)
    for step in (0, 1):
        for key, payload in of_a_step(config, step):
            sender.send(key, payload)
    assert sender.queued_bytes == outbox_bytes(config, 2)


async def test_both_ends_of_a_link_take_what_the_run_may_have_in_flight(tmp_path: Path) -> None:
    """A step's tensors fit even if the settings allow less; nothing is acknowledged in between."""
    async with both_ends(SMALL, tmp_path, replace(quick(), outbox_bytes=1)) as links:
        for link in links:
            for step in (0, 1):
                for key, payload in of_a_step(SMALL, step):
                    link.send(key, payload)
            with pytest.raises(LinkError, match="cannot queue"):
                link.send(TensorKey(EPOCH, 2, 0, 0, Direction.GRADIENT), b"x")


@pytest.mark.parametrize(("listen", "dialler"), [((True, True), 0), ((False, True), 0), ((True, False), 1)])
async def test_the_one_that_cannot_be_dialled_dials(
    tmp_path: Path, listen: tuple[bool, bool], dialler: int
) -> None:
    """There is no relay here, so the links open only if both agree."""
    async with both_ends(SMALL, tmp_path, quick(), listen) as links:
        assert [isinstance(link, DialledLink) for link in links] == [end == dialler for end in range(2)]
        assert [link.figures.path for link in links] == [DIRECT, DIRECT]


@pytest.mark.parametrize(
    ("lower", "upper", "found"),
    [
        ("", "", (True, False)),
        ("a:1", "", (False, True)),
        ("", "b:1", (True, False)),
        ("a:1", "b:1", (True, False)),
    ],
)
def test_which_row_dials_the_other(lower: str, upper: str, found: tuple[bool, bool]) -> None:
    stages = PlacedStage(node_id="a", address=lower), PlacedStage(node_id="b", address=upper)
    rows = tuple(PlacedRow(node=stage, groups=(row,)) for row, stage in enumerate(stages))
    placements = (
        Placement(epoch=EPOCH, stage=0, stages=(row.node,), replica=number, rows=rows)
        for number, row in enumerate(rows)
    )
    assert tuple(dials(one, Peer(1 - one.replica, 0)) for one in placements) == found


async def test_a_small_run_keeps_the_room_of_the_settings(tmp_path: Path) -> None:
    async with both_ends(SMALL, tmp_path, quick()) as links:
        for link in links:
            link.send(TensorKey(EPOCH, 0, 0, 0, Direction.GRADIENT), bytes(outbox_bytes(SMALL, 2)))
            link.send(TensorKey(EPOCH, 0, 1, 0, Direction.GRADIENT), b"x")


async def test_links_open_without_a_neighbour_that_dies_meanwhile(tmp_path: Path) -> None:
    """Nobody waits for its process, nor for the time that links may take."""
    authority = new_authority()
    nodes = new_node(authority), new_node(authority)
    ends = [EpochLinks(IdentityHolder(node, tmp_path), quick()) for node in nodes]
    ports = [await end.start("127.0.0.1:0") for end in ends]
    first, second = (
        PlacedStage(node_id=node.node_id, address=f"127.0.0.1:{port}")
        for node, port in zip(nodes, ports, strict=True)
    )
    await ends[1].stop()
    peer = Peer(0, 1)
    placement = Placement(epoch=EPOCH, stage=0, stages=(first, second))
    empty = replace(placement, stages=(first, PlacedStage(node_id="", address="")))

    async def opened() -> int:
        async with ends[0].open(placement, (peer,), SMALL, NoEvents()) as links:
            return len(links)

    try:
        async with asyncio.timeout(SECONDS):
            opening = asyncio.create_task(opened())
            await asyncio.sleep(0)
            assert not opening.done()
            ends[0].renew(empty, (peer,))
            assert await opening == 0
    finally:
        await ends[0].stop()


async def test_a_node_that_enters_names_the_neighbour_to_which_no_link_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of the other row has its link ready; the one of the other stage refuses it."""
    monkeypatch.setattr(epoch_links, "ENTERING_SECONDS", 3.0)
    authority = new_authority()
    nodes = [new_node(authority) for _ in range(3)]
    ends = [EpochLinks(IdentityHolder(node, tmp_path), quick()) for node in nodes]
    ports = [await end.start("127.0.0.1:0") for end in ends]
    own, stage, row = (
        PlacedStage(node_id=node.node_id, address=f"127.0.0.1:{port}")
        for node, port in zip(nodes, ports, strict=True)
    )
    nobody = PlacedStage(node_id="", address="")
    rows = tuple(PlacedRow(node=node, groups=(at,)) for at, node in enumerate((own, row)))
    placement = Placement(epoch=EPOCH, stage=0, stages=(own, stage), rows=rows, enters=True)
    other = Placement(epoch=EPOCH, stage=0, stages=(row, nobody), replica=1, rows=rows)
    named = asyncio.get_running_loop().create_future()

    class Events(NoEvents):
        def silent(self, peer: Peer) -> None:
            named.set_result(peer)

    async def hold(end: EpochLinks, placed: Placement, *peers: Peer) -> None:
        async with end.open(placed, peers, SMALL, Events()):
            await asyncio.Event().wait()

    try:
        async with asyncio.timeout(SECONDS):
            holding = [
                asyncio.create_task(hold(ends[0], placement, Peer(0, 1), Peer(1, 0))),
                asyncio.create_task(hold(ends[2], other, Peer(0, 0))),
            ]
            assert await named == Peer(0, 1)
            for task in holding:
                task.cancel()
            await asyncio.wait(holding)
    finally:
        for end in ends:
            await end.stop()


@pytest.mark.parametrize("dials", [True, False])
async def test_nobody_dials_a_node_that_is_known_to_be_gone(tmp_path: Path, dials: bool) -> None:
    """Neither its address, nor a relay at which it would be met."""
    dialled, again = 0, asyncio.Event()

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        writer.close()
        if dialled > 2:
            again.set()

    authority = new_authority()
    nodes = new_node(authority), new_node(authority)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    there = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    end = EpochLinks(IdentityHolder(nodes[0], tmp_path), quick(), "" if dials else there)
    await end.start("")
    stages = [PlacedStage(node_id=node.node_id, address="") for node in nodes]
    own, peer = (0, Peer(0, 1)) if dials else (1, Peer(0, 0))
    if dials:
        stages[1] = replace(stages[1], address=there)
    else:
        stages.reverse()
    before = asyncio.all_tasks()
    placement = Placement(epoch=EPOCH, stage=own, stages=tuple(stages))

    async def opened() -> int:
        async with end.open(placement, (peer,), SMALL, NoEvents()) as links:
            dials_of = asyncio.all_tasks() - before - {opening}
            if dials_of:
                await asyncio.wait(dials_of)
            return len(links)

    try:
        async with asyncio.timeout(SECONDS):
            opening = asyncio.create_task(opened())
            await again.wait()
            end.renew(None, (peer,))
            assert await opening == 0
            known = dialled
            server.close()
            await server.wait_closed()
            assert dialled == known
    finally:
        server.close()
        await end.stop()
