"""A port behind its front, crowded by strangers: members get in, and the process keeps its descriptors."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.links import SECONDS, End, eventually, quick
from tests.support.pki import RUN_ID, new_authority, new_node
from wire import link_server
from wire.admission import Limits, Phase
from wire.front import TLS_HANDSHAKE, Front
from wire.link import DialledLink, dial_link
from wire.link_server import LinkServer
from wire.pacing import LEAST_PIECE, Pacer

CROWD = 400
"""Fewer than the kernel's queue holds: it would drop others, which would then never be closed."""
FEW = 300
"""Descriptors that the port's limits are made for."""


@contextlib.asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[LinkServer, Front, int, DialledLink]]:
    """A link port with room for few connections, and a neighbour's link that has not dialled yet."""
    monkeypatch.setattr(link_server, "raise_limit", lambda: FEW)
    authority = new_authority()
    lower, upper = new_node(authority), new_node(authority)
    server = LinkServer(identity=upper, run_id=RUN_ID, settings=quick())
    port = await server.start("127.0.0.1:0")
    assert server._door is not None
    ends = End(), End()
    accepted = server.expect_peer(
        epoch=1,
        stage=1,
        peer_node_id=lower.node_id,
        peer_stage=0,
        expect=lambda _: 1,
        on_tensor=ends[1].on_tensor,
    )
    dialled = dial_link(
        identity=lower,
        run_id=RUN_ID,
        epoch=1,
        stage=0,
        peer_node_id=upper.node_id,
        peer_stage=1,
        peer_address=f"127.0.0.1:{port}",
        expect=lambda _: 1,
        on_tensor=ends[0].on_tensor,
        settings=quick(),
    )
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        group.create_task(accepted.run())
        try:
            yield server, server._door.front, port, dialled
        finally:
            await dialled.close()
            await server.stop()


@contextlib.contextmanager
def crowd(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open `count` connections that send nothing."""
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
            silent.append(one)
        yield silent


def client_hello() -> bytes:
    """The first message of a TLS client that names no server."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def hung_up(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_idle_connections_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits.of_members(FEW)
    async with served(monkeypatch) as (server, front, port, link):
        with crowd(port, CROWD) as silent:
            running = asyncio.create_task(link.run())
            await link.ready(SECONDS)
            await eventually(lambda: sum(map(hung_up, silent)) >= CROWD - limits.silent)
            assert front.admission.count(Phase.SILENT) <= limits.silent
            await eventually(
                lambda: (
                    [one.admission.count(Phase.PROVEN) for one in (server._front, server._bulk_front) if one]
                    == [1, 1]
                )
            )
            assert link.up
        await link.close()
        await running


async def test_who_has_spoken_is_not_dropped_for_those_that_came_while_the_loop_was_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits.of_members(FEW)
    async with served(monkeypatch) as (server, _, port, _link):
        with contextlib.ExitStack() as stack:
            ours: list[socket.socket] = []
            # The loop runs none of this time, so all wait in the kernel's queue.
            for number in range(2 * limits.silent):
                one = stack.enter_context(socket.socket())
                one.bind((f"127.1.0.{1 + number}", 0))
                one.connect(("127.0.0.1", port))
                one.setblocking(False)
                ours.append(one)
            ours[0].send(client_hello())
            await eventually(lambda: sum(map(hung_up, ours)) == limits.silent - 1)
            assert server._front is not None and server._front.admission.count(Phase.HANDSHAKE) == 1
            assert not hung_up(ours[0])


async def test_a_port_survives_that_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with served(monkeypatch) as (_, _front, port, link):
        with crowd(port, 20) as silent:
            taken: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
            try:
                with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                # They wait in the kernel's queue; each is accepted with the spare descriptor and closed.
                await eventually(lambda: all(map(hung_up, silent)))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in taken:
                    os.close(descriptor)
            running = asyncio.create_task(link.run())
            await link.ready(SECONDS)
        await link.close()
        await running


async def test_a_connection_that_says_too_much_waits_and_others_do_not() -> None:
    heard: dict[str, int] = {}

    class Backend(asyncio.Protocol):
        peer = ""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.peer = transport.get_extra_info("peername")

        def data_received(self, data: bytes) -> None:
            heard[self.peer] = heard.get(self.peer, 0) + len(data)

    # Two reads of a piece pass at most; then nothing for hours.
    free = 100
    front = Front(Limits.of_strangers(FEW, 60.0), pacer=lambda: Pacer(1.0, ahead=free))
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(Backend, front.backend.removeprefix("unix:"))
    port = front.listen("127.0.0.1:0")
    try:
        async with asyncio.timeout(SECONDS):
            with contextlib.ExitStack() as stack:
                ours = [stack.enter_context(socket.socket()) for _ in range(2)]
                for number, (one, size) in enumerate(zip(ours, (4 * LEAST_PIECE, free), strict=True)):
                    one.connect(("127.0.0.1", port))
                    one.setblocking(False)
                    await loop.sock_sendall(one, TLS_HANDSHAKE * size)
                    await eventually(lambda more=number: len(heard) > more)
                first, second = heard
                await eventually(lambda: heard[second] == free)
                front.unpace(second)
                await loop.sock_sendall(ours[1], bytes(4 * LEAST_PIECE))
                await eventually(lambda: heard[second] == free + 4 * LEAST_PIECE)
                assert heard[first] <= free + 2 * LEAST_PIECE
    finally:
        await front.close()
        server.close()


async def test_the_address_of_a_call_is_the_callers_and_its_directory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources: list[str] = []
    prove = Front.prove

    def noted(front: Front, peer: str, owner: str) -> None:
        sources.append(front.host(peer))
        prove(front, peer, owner)

    monkeypatch.setattr(Front, "prove", noted)
    async with served(monkeypatch) as (server, _, _, link):
        fronts = [one for one in (server._front, server._bulk_front) if one is not None]
        directories = [Path(front.backend.removeprefix("unix:")).parent for front in fronts]
        assert [directory.stat().st_mode & 0o777 for directory in directories] == [0o700, 0o700]
        running = asyncio.create_task(link.run())
        await link.ready(SECONDS)
        await link.close()
        await running
    assert sources == ["127.0.0.1", "127.0.0.1"]
    assert not any(directory.exists() for directory in directories)
