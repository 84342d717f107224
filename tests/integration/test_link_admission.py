"""Which nodes may connect to each other, and the error that a refused one gets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import wire.link
from tests.support.links import EPOCH, SECONDS, End, eventually, quick
from tests.support.pki import RUN_ID, new_authority, new_node
from tests.support.ports import free_port
from wire.byte_stream import ClientStream, StreamDroppedError
from wire.channels import bulk_name, open_channel
from wire.errors import LinkLostError, RefusalCode, Refused, ThinwireError, UserError
from wire.identity.credentials import NodeIdentity
from wire.link import BULK_METHOD, CONTROL_METHOD, METADATA_PREFIX, DialledLink, dial_link
from wire.link_server import AcceptedLink, LinkServer
from wire.version import PROTOCOL

AUTHORITY = new_authority()
LOWER, UPPER, STRANGER = (new_node(AUTHORITY) for _ in range(3))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[LinkServer, int]]:
    server = LinkServer(identity=UPPER, run_id=RUN_ID, settings=quick())
    port = await server.start("127.0.0.1:0")
    try:
        yield server, port
    finally:
        await server.stop()


def expect(server: LinkServer, node: NodeIdentity, epoch: int = EPOCH) -> AcceptedLink:
    return server.expect_peer(
        epoch=epoch,
        stage=1,
        peer_node_id=node.node_id,
        peer_stage=0,
        expect=lambda key: None,
        on_tensor=End().on_tensor,
    )


def dial(
    node: NodeIdentity, port: int, *, epoch: int = EPOCH, peer: NodeIdentity = UPPER, stage: int = 0
) -> DialledLink:
    return dial_link(
        identity=node,
        run_id=RUN_ID,
        epoch=epoch,
        stage=stage,
        peer_node_id=peer.node_id,
        peer_stage=1,
        peer_address=f"127.0.0.1:{port}",
        expect=lambda key: None,
        on_tensor=End().on_tensor,
        settings=quick(),
    )


async def outcome(link: DialledLink, seconds: float = SECONDS, trouble: str = "") -> ThinwireError:
    """Run the link until it gives up, by itself or `seconds` after it had that `trouble`; say with what."""
    async with asyncio.TaskGroup() as group:
        group.create_task(link.run())
        await eventually(lambda: trouble in link.trouble)
        with pytest.raises(ThinwireError) as failure:
            await link.ready(seconds)
        await link.close()
    assert "\n" not in str(failure.value)
    return failure.value


async def test_stranger_of_the_same_run_is_refused() -> None:
    async with serving() as (server, port):
        expect(server, LOWER)
        error = await outcome(dial(STRANGER, port))
    assert isinstance(error, Refused) and error.code is RefusalCode.NOT_A_NEIGHBOUR
    assert f"node {STRANGER.node_id} is no neighbour of node {UPPER.node_id} in epoch 3" in str(error)


async def test_node_of_another_run_gets_no_connection() -> None:
    outsider = new_node(new_authority())
    trouble = "not from this run"
    async with serving() as (server, port):
        expect(server, outsider)
        error = await outcome(dial(outsider, port), 0.1, trouble)
    assert isinstance(error, LinkLostError)
    assert trouble in str(error)


async def test_dialler_rejects_a_node_that_is_not_the_placed_one() -> None:
    trouble = "another node answers"
    async with serving() as (server, port):
        link = expect(server, LOWER)
        error = await outcome(dial(LOWER, port, peer=STRANGER), 0.1, trouble)
        assert link._session is None  # no call came through
    assert isinstance(error, LinkLostError)
    assert trouble in str(error)


async def test_the_end_of_waiting_for_nobody_is_reported() -> None:
    error = await outcome(dial(LOWER, free_port()), 0.1, "Connection refused")
    assert isinstance(error, LinkLostError)
    assert "Connection refused" in str(error)


async def test_epoch_that_is_not_known_yet_is_waited_for() -> None:
    async with serving() as (server, port):
        expect(server, LOWER, epoch=EPOCH)
        link = dial(LOWER, port, epoch=EPOCH + 1)
        async with asyncio.TaskGroup() as group:
            group.create_task(link.run())
            await eventually(lambda: link.trouble == "epoch 4 is not known there yet")
            upper = expect(server, LOWER, epoch=EPOCH + 1)
            group.create_task(upper.run())
            await link.ready(SECONDS)
            assert not link.lost.done()
            await link.close()
            await upper.close()


async def test_epoch_that_is_over_is_refused() -> None:
    async with serving() as (server, port):
        expect(server, LOWER, epoch=EPOCH)
        error = await outcome(dial(LOWER, port, epoch=EPOCH - 1))
    assert isinstance(error, Refused) and error.code is RefusalCode.STALE_EPOCH
    assert "epoch 3" in str(error)


async def test_second_process_in_one_epoch_is_refused() -> None:
    async with serving() as (server, port):
        upper, first = expect(server, LOWER), dial(LOWER, port)
        async with asyncio.TaskGroup() as group:
            group.create_task(upper.run())
            group.create_task(first.run())
            await first.ready(SECONDS)
            error = await outcome(dial(LOWER, port))
            assert first.up
            await first.close()
            await upper.close()
    assert isinstance(error, Refused) and error.code is RefusalCode.STALE_EPOCH


async def test_neighbour_with_another_stage_in_mind_is_a_violation() -> None:
    async with serving() as (server, port):
        upper = expect(server, LOWER)
        async with asyncio.TaskGroup() as group:
            group.create_task(upper.run())
            error = await outcome(dial(LOWER, port, stage=5))
            assert "the placement here says" in str(await upper.lost)
    assert "the placement here says" in str(error)


async def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.link, "PROTOCOL", 99)
    async with serving() as (server, port):
        expect(server, LOWER)
        error = await outcome(dial(LOWER, port))
    assert isinstance(error, Refused) and error.code is RefusalCode.VERSION_MISMATCH


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", str(2**64)),
        ("session", "9" * 20),
        ("session", "9" * 5000),
        ("attempt", str(2**32)),
        ("epoch", str(2**32)),
        ("stage", "-1"),
        ("protocol", "one"),
    ],
    ids=["session-2**64", "session-20", "session-5000", "attempt", "epoch", "stage", "protocol"],
)
async def test_numbers_that_a_greeting_cannot_hold_are_refused(name: str, value: str) -> None:
    """Said by a neighbour that is let in otherwise: its call ends, and the link here goes on."""
    numbers = {"protocol": PROTOCOL, "epoch": EPOCH, "stage": 0, "rows": 0, "session": 1, "attempt": 1}
    metadata = tuple((METADATA_PREFIX + key, str(number)) for key, number in {**numbers, name: value}.items())
    async with serving() as (server, port):
        upper = expect(server, LOWER)
        async with asyncio.TaskGroup() as group:
            group.create_task(upper.run())
            for method in (BULK_METHOD, CONTROL_METHOD):
                server_name = LOWER.server_name(UPPER.node_id)
                if method == BULK_METHOD:
                    server_name = bulk_name(server_name)
                async with open_channel(
                    f"127.0.0.1:{port}", identity=LOWER, server_name=server_name
                ) as channel:
                    stream = ClientStream(channel.stream_stream(method)(metadata=metadata))
                    async with asyncio.timeout(SECONDS):
                        with pytest.raises(StreamDroppedError, match=f"no number thinwire-{name}") as refused:
                            await stream.read()
                assert refused.value.refusal == RefusalCode.BAD_REQUEST
            assert not upper.lost.done()
            honest = dial(LOWER, port)
            group.create_task(honest.run())
            await honest.ready(SECONDS)
            await honest.close()
            await upper.close()


async def test_link_that_was_closed_there_is_not_refused_for_good() -> None:
    """Neighbours end an epoch one after the other: who is later must not take that for a failure."""
    async with serving() as (server, port):
        upper, lower = expect(server, LOWER), dial(LOWER, port)
        async with asyncio.TaskGroup() as group:
            group.create_task(upper.run())
            group.create_task(lower.run())
            await lower.ready(SECONDS)
            await upper.close()
            await eventually(lambda: lower.trouble == "the link of epoch 3 was closed there")
            assert not lower.lost.done()
            await lower.close()


async def test_taken_port_is_one_clear_line() -> None:
    async with serving() as (_, port):
        other = LinkServer(identity=UPPER, run_id=RUN_ID)
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port} .*: take a free port"):
            await other.start(f"127.0.0.1:{port}")
