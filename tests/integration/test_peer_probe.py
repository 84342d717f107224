"""The line between two nodes is measured over real sockets and TLS, in bounded bytes, and only by members."""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from node.stage.layer_peers import LayerPeers
from tests.support.pki import RUN_ID, new_authority, new_node
from wire.channels import open_channel
from wire.errors import LinkError
from wire.identity.credentials import NodeIdentity
from wire.link_server import LinkServer
from wire.messages import PlacedStage
from wire.pacing import Pacer
from wire.peer_probe import (
    CHUNK_BYTES,
    CHUNKS,
    PROBE_METHOD,
    PROBES_AN_HOUR,
    ProbeServer,
    measure_line,
    rate_of,
)

SECONDS = 60.0


async def at_once(_size: int) -> None:
    return None


@dataclass
class Scene:
    me: NodeIdentity
    other: NodeIdentity
    server: LinkServer
    address: str
    now: float = 0.0

    @property
    def peer(self) -> PlacedStage:
        return PlacedStage(node_id=self.other.node_id, address=self.address)

    def channel(self, identity: NodeIdentity | None = None) -> grpc.aio.Channel:
        me = identity or self.me
        return open_channel(self.address, identity=me, server_name=me.server_name(self.other.node_id))


@contextlib.asynccontextmanager
async def scene(pacer: Pacer | None = None) -> AsyncIterator[Scene]:
    authority = new_authority()
    me, other = new_node(authority), new_node(authority)
    server = LinkServer(identity=other, run_id=RUN_ID)
    port = await server.start("127.0.0.1:0")
    here = Scene(me, other, server, f"127.0.0.1:{port}")
    server.probes = ProbeServer(pacer.pass_through if pacer else at_once, lambda: here.now)
    async with asyncio.timeout(SECONDS):
        try:
            yield here
        finally:
            await server.stop()


async def test_both_directions_and_the_round_trip_are_measured() -> None:
    async with scene() as here:
        peers = LayerPeers(here.me)
        found = await peers.measure_line(here.peer, at_once)
        assert found is not None
        assert 0 < found.round_trip < SECONDS
        assert found.up > 0
        assert found.down > 0
        await peers.close()


async def test_each_end_keeps_to_its_owners_limit() -> None:
    """The one that asks may send 500 kB a second, the other 2 MB: the probe ends in time, and finds both."""
    async with scene(Pacer(2e6)) as here, here.channel() as channel:
        found = await measure_line(channel, Pacer(0.5e6).pass_through)
        assert found.up < 0.6e6
        assert found.down < 2.4e6


async def test_a_node_answers_one_probe_at_a_time_and_each_other_node_a_few_times_an_hour() -> None:
    async with scene() as here, here.channel() as channel:
        for _ in range(PROBES_AN_HOUR):
            await measure_line(channel, at_once)
        with pytest.raises(LinkError, match="times in an hour"):
            await measure_line(channel, at_once)
        third = new_node(new_authority())
        probes = here.server.probes
        assert probes is not None
        assert probes.refusal(third.node_id) is None, "others have their own count"
        here.now = 3601.0
        await measure_line(channel, at_once)
        probes._busy = True
        with pytest.raises(LinkError, match="another node is measuring"):
            await measure_line(channel, at_once)


async def test_nobody_but_members_measures_and_nobody_who_was_shut_out() -> None:
    async with scene() as here:
        async with here.channel(new_node(new_authority())) as channel:
            with pytest.raises(LinkError):
                await measure_line(channel, at_once)
        here.server.shut_out = frozenset({here.me.node_id})
        async with here.channel() as channel:
            with pytest.raises(LinkError, match="shut out"):
                await measure_line(channel, at_once)


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"x"],
        [b"c" + bytes(CHUNK_BYTES + 1)],
        [b"s" + struct.pack("<H", CHUNKS + 1)],
        [b"c"] * (CHUNKS + 1),
        [b"p"] * 7,
        [random.Random(2).randbytes(300)],
    ],
)
async def test_more_than_a_probe_has_is_refused(messages: list[bytes]) -> None:
    async with scene() as here, here.channel() as channel:
        stub: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PROBE_METHOD)
        call = stub()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            while isinstance(await call.read(), bytes):
                pass
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await measure_line(channel, at_once)  # the node goes on


async def test_a_node_that_answers_something_else_is_an_error_and_no_measurement() -> None:
    async with scene() as here, here.channel() as channel:
        probes = here.server.probes
        assert probes is not None

        async def serve(_node: str, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
            while isinstance(await context.read(), bytes):
                await context.write(b"zzz")

        probes.serve = serve  # type: ignore[method-assign]
        with pytest.raises(LinkError, match="unexpected answer"):
            await measure_line(channel, at_once)


def test_a_rate_is_that_of_the_second_half() -> None:
    slow_start = [(0.0, 0), (1.0, 1000), (1.5, 2000), (1.6, 3000), (1.7, 4000)]
    assert rate_of(slow_start) == pytest.approx(10_000)
    assert rate_of([(0.0, 0), (2.0, 1000)]) == pytest.approx(500)
    assert rate_of([(0.0, 0)]) == 0.0
    assert rate_of([]) == 0.0
