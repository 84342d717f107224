"""`wire.splice.Pipe` on real sockets: every byte passes in order, memory is bounded, an end ends both."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time

import pytest

from tests.support.links import eventually
from wire import splice
from wire.pacing import BURST_SECONDS, Pacer
from wire.splice import STORE_BYTES, Pipe

SECONDS = 20.0
LENGTH = 5_000_000


@pytest.fixture(params=["in the kernel", "in a buffer"], autouse=True)
def _store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in a buffer":
        monkeypatch.setattr(splice, "_store", splice._buffer)
    elif sys.platform != "linux":
        pytest.skip("only Linux has splice(2)")


class Joined:
    """Two pairs of sockets, one of TCP and one of Unix, whose inner ends a pipe joins."""

    def __init__(self, pacer: Pacer | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.left = socket.create_connection(server.getsockname())
            one, _ = server.accept()
        other, self.right = socket.socketpair()
        for each in (self.left, one, other, self.right):
            each.setblocking(False)
        self.inner = one, other
        self.ends = 0
        self.pipe = Pipe(self._ended, pacer)
        self.pipe.join(one, other)

    def _ended(self) -> None:
        self.ends += 1

    def close(self) -> None:
        self.pipe.abort()
        self.left.close()
        self.right.close()


async def receive(source: socket.socket, length: int) -> bytes:
    """So many bytes, fewer at the end of the stream."""
    data = bytearray()
    async with asyncio.timeout(SECONDS):
        while len(data) < length:
            piece = await asyncio.get_running_loop().sock_recv(source, length - len(data))
            if not piece:
                break
            data += piece
    return bytes(data)


async def fill(source: socket.socket) -> int:
    """Send until nothing more is taken in many turns of the loop, which moves bytes on; how many bytes."""
    sent, refused = 0, 0
    while refused < 30:
        try:
            sent += source.send(bytes(STORE_BYTES))
            refused = 0
        except BlockingIOError:
            refused += 1
            await asyncio.sleep(0.01)
    return sent


async def test_every_byte_passes_both_ways_in_order() -> None:
    joined, loop = Joined(), asyncio.get_running_loop()
    there, back = os.urandom(LENGTH), os.urandom(LENGTH)
    try:
        sending = [
            asyncio.create_task(loop.sock_sendall(joined.left, there)),
            asyncio.create_task(loop.sock_sendall(joined.right, back)),
        ]
        came = await asyncio.gather(receive(joined.right, LENGTH), receive(joined.left, LENGTH))
        assert came == [there, back]
        await asyncio.gather(*sending)
        assert joined.pipe.carried == 2 * LENGTH
    finally:
        joined.close()


async def test_while_nobody_reads_at_most_its_store_is_held() -> None:
    joined = Joined()
    try:
        await fill(joined.left)
        assert [way.held <= STORE_BYTES for way in joined.pipe._ways] == [True, True]
        read = len(await receive(joined.right, 100_000))
        assert read == 100_000
    finally:
        joined.close()


async def test_when_one_end_closes_the_other_gets_its_last_bytes_and_then_the_end() -> None:
    joined = Joined()
    try:
        sent = await fill(joined.left)
        joined.left.close()
        assert len(await receive(joined.right, sent + 1)) == sent
        await eventually(lambda: joined.ends == 1)
        await eventually(lambda: [inner.fileno() for inner in joined.inner] == [-1, -1])
    finally:
        joined.close()


async def test_an_end_that_takes_nothing_more_is_dropped_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splice, "CLOSE_SECONDS", 0.1)
    joined = Joined()
    try:
        await fill(joined.left)
        joined.pipe.closed()
        await eventually(lambda: joined.inner[1].fileno() == -1)
        await eventually(lambda: joined.ends == 1)
    finally:
        joined.close()


async def test_a_direction_that_ends_first_waits_for_the_other_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both directions hold bytes when the pipe closes; one end reads on, the other never."""
    monkeypatch.setattr(splice, "CLOSE_SECONDS", 0.5)
    joined = Joined()
    try:
        await fill(joined.right)
        sent = await fill(joined.left)
        joined.pipe.closed()
        with contextlib.suppress(ConnectionResetError):  # as the pipe drops what the left end never reads
            await receive(joined.right, sent + 1)
        await eventually(lambda: [inner.fileno() for inner in joined.inner] == [-1, -1])
        assert not caplog.records
    finally:
        joined.close()


async def test_an_aborted_pipe_closes_both_and_says_nothing() -> None:
    joined = Joined()
    joined.pipe.abort()
    await eventually(lambda: [inner.fileno() for inner in joined.inner] == [-1, -1])
    assert await receive(joined.left, 1) == await receive(joined.right, 1) == b""
    assert joined.ends == 0
    joined.close()


async def test_sockets_that_come_after_the_end_are_closed() -> None:
    pipe = Pipe(lambda: None)
    pipe.abort()
    one, other = socket.socketpair()
    pipe.join(one, other)
    await eventually(lambda: one.fileno() == other.fileno() == -1)


async def test_where_the_kernel_has_no_splice_bytes_pass_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(os, "splice", refuse, raising=False)
    monkeypatch.setattr(splice, "_spare", [])
    if sys.platform == "linux":
        splice._kernel_moves.cache_clear()
    joined = Joined()
    try:
        joined.left.send(b"a word")
        assert await receive(joined.right, 6) == b"a word"
    finally:
        joined.close()
        if sys.platform == "linux":
            splice._kernel_moves.cache_clear()


async def test_a_pacer_bounds_both_ways_together() -> None:
    rate = 4_000_000.0
    joined, loop = Joined(Pacer(rate)), asyncio.get_running_loop()
    try:
        began = time.monotonic()
        sending = [
            asyncio.create_task(loop.sock_sendall(end, bytes(1_000_000)))
            for end in (joined.left, joined.right)
        ]
        await asyncio.gather(receive(joined.right, 1_000_000), receive(joined.left, 1_000_000), *sending)
        # What a read takes may pass before it is paid for, and so may what the pacer saves up.
        assert time.monotonic() - began > 2_000_000 / rate - 3 * BURST_SECONDS
    finally:
        joined.close()
