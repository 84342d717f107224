"""Two ends of a link in one process, over real sockets and TLS, with a relay between."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tests.support.pki import RUN_ID, new_authority, new_node
from tests.support.relay import Relay
from wire.identity.credentials import NodeIdentity
from wire.link import DialledLink, Link, LinkSettings, dial_link
from wire.link_server import AcceptedLink, LinkServer
from wire.spec import Direction, TensorKey
from wire.stream_receiver import Expect

EPOCH = 3
SECONDS = 120.0
"""Bound of every wait in these tests."""


def key(microbatch: int, direction: Direction = Direction.ACTIVATION) -> TensorKey:
    return TensorKey(EPOCH, 0, microbatch, 0, direction)


def content(key: TensorKey, size: int) -> bytes:
    return random.Random(10 * key.microbatch + key.direction).randbytes(size)


@dataclass
class End:
    """One end's consumer: what arrived, and whether it is released at once."""

    releases: bool = True
    link: Link | None = None
    arrived: list[TensorKey] = field(default_factory=list)
    buffers: dict[TensorKey, bytearray] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def on_tensor(self, key: TensorKey, buffer: bytearray) -> None:
        self.arrived.append(key)
        self.buffers[key] = bytearray(buffer)  # after its release the link uses it again
        if self.releases:
            assert self.link is not None
            self.link.release(key)
        self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, count: int) -> None:
        """Wait until so many tensors have arrived."""
        async with asyncio.timeout(SECONDS):
            while len(self.arrived) < count:
                self._changed.clear()
                await self._changed.wait()


async def eventually(holds: Callable[[], bool]) -> None:
    """Poll until a condition holds that has no event of its own."""
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for, and the wait is bounded
            await asyncio.sleep(0.002)


def quick(
    *,
    window_bytes: int = 16 * 1024 * 1024,
    silent_seconds: float = 5.0,
    connect_seconds: float = 5.0,
    lost_after_seconds: float = 10.0,
) -> LinkSettings:
    """Short times, so that failures are noticed in a test's time."""
    return LinkSettings(
        window_bytes=window_bytes,
        ping_seconds=0.1,
        silent_seconds=silent_seconds,
        connect_seconds=connect_seconds,
        backoff_seconds=0.02,
        max_backoff_seconds=0.05,
        lost_after_seconds=lost_after_seconds,
    )


@dataclass
class Pair:
    """Stage 0 (`lower`, the dialler) and stage 1 (`upper`), not yet running."""

    lower: DialledLink
    upper: AcceptedLink
    server: LinkServer
    relay: Relay
    lower_end: End
    upper_end: End
    nodes: tuple[NodeIdentity, NodeIdentity]

    async def ready(self) -> None:
        await asyncio.gather(self.lower.ready(SECONDS), self.upper.ready(SECONDS))


@contextlib.asynccontextmanager
async def make_pair(
    size: int | Expect, settings: LinkSettings | None = None, *, run: bool = True
) -> AsyncIterator[Pair]:
    """Two warm links whose tensors have `size` bytes; closed on exit."""
    settings = settings or quick()
    authority = new_authority()
    nodes = new_node(authority), new_node(authority)
    server = LinkServer(identity=nodes[1], run_id=RUN_ID, settings=settings)
    port = await server.start("127.0.0.1:0")
    expect: Expect = size if callable(size) else lambda key: size
    lower_end, upper_end = End(), End()
    async with Relay(port) as relay:
        upper = server.expect_peer(
            epoch=EPOCH,
            stage=1,
            peer_node_id=nodes[0].node_id,
            peer_stage=0,
            expect=expect,
            on_tensor=upper_end.on_tensor,
        )
        lower = dial_link(
            identity=nodes[0],
            run_id=RUN_ID,
            epoch=EPOCH,
            stage=0,
            peer_node_id=nodes[1].node_id,
            peer_stage=1,
            peer_address=f"127.0.0.1:{relay.port}",
            expect=expect,
            on_tensor=lower_end.on_tensor,
            settings=settings,
        )
        lower_end.link, upper_end.link = lower, upper
        pair = Pair(lower, upper, server, relay, lower_end, upper_end, nodes)
        try:
            async with asyncio.TaskGroup() as group:
                if run:
                    group.create_task(lower.run())
                    group.create_task(upper.run())
                    await pair.ready()
                yield pair
                await lower.close()
                await upper.close()
        finally:
            await server.stop()
