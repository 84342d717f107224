"""Layers of snapshots between nodes, over real sockets and TLS."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
import torch

from node.stage import layer_peers
from node.stage.layer_peers import LayerPeers, LayerPlace, LayersHeld
from node.stage.sums_kept import SumsKept
from node.state.snapshot_cache import SnapshotCache
from tests.support.pki import RUN_ID, new_authority, new_node
from wire import layer_exchange
from wire.channels import open_channel
from wire.errors import LinkError, ProtocolViolationError
from wire.identity.credentials import NodeIdentity
from wire.layer_exchange import (
    AGAIN_SECONDS,
    AT_ONCE,
    CHUNK_BYTES,
    LAYER_METHOD,
    LEAST_SHARE,
    MOST_COUNTED,
    MOST_OF_A_NODE,
    MOST_TRANSFERS,
    LayerRequest,
    LayerServer,
    NotHeldError,
    get_layer,
)
from wire.link_server import LinkServer
from wire.messages import PlacedStage
from wire.pacing import BesideTraining
from wire.v1 import control_pb2

STEP, UNIT = 4, "block.0000"
pytestmark = pytest.mark.usefixtures("_small_chunks")
DATA = random.Random(1).randbytes(3 * CHUNK_BYTES + 17)
SECONDS = 60.0


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick the line is."""
    monkeypatch.setattr(layer_exchange, "QUICK_SECONDS", 0.0)


@dataclass
class Holder(LayersHeld):
    """A node that serves its disk, and may break off or hang after so many chunks."""

    cache: SnapshotCache
    sums: SumsKept
    breaks_after: int = -1
    hangs_after: int = -1
    offsets: list[int] = field(default_factory=list)
    lies: bytes = b""
    """What it sends instead of its file."""
    chunk_seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__init__(self.cache, self.sums, BesideTraining(None, lambda: False))
        self._sent = 0

    async def read(self, request: LayerRequest) -> bytes | None:
        self.offsets.append(request.offset)
        return self.lies or await super().read(request)

    async def pass_through(self, size: int) -> None:
        if self._sent == self.breaks_after:
            raise RuntimeError("the process is gone")
        if self._sent == self.hangs_after:
            await asyncio.Event().wait()
        await asyncio.sleep(self.chunk_seconds)
        self._sent += 1


@dataclass
class Scene:
    identity: NodeIdentity
    holders: list[Holder]
    placed: tuple[PlacedStage, ...]
    peers: LayerPeers
    servers: list[LinkServer]

    others: Callable[[], NodeIdentity]
    """Makes further members."""

    def place(self, *order: int) -> LayerPlace:
        holders = tuple(self.placed[number] for number in order)
        return LayerPlace(
            step=STEP, unit=UNIT, bytes=len(DATA), sha256=sha256(DATA).hexdigest(), holders=holders
        )

    async def fetch(self, *order: int, bad: set[str] | None = None) -> bytes:
        bad = set() if bad is None else bad
        # Holders are tried in an order of the node's own: give it one at a time in ours.
        self.peers._order = lambda holders, unit: list(holders)  # type: ignore[method-assign]
        return await self.peers.fetch(self.place(*order), len(DATA), bad)


@contextlib.asynccontextmanager
async def scene(directory: Path, holders: int = 2) -> AsyncIterator[Scene]:
    authority = new_authority()
    me = new_node(authority)
    peers = LayerPeers(me)
    servers, made, placed = [], [], []
    async with asyncio.timeout(SECONDS):
        for number in range(holders):
            identity = new_node(authority)
            cache = SnapshotCache(directory / str(number), 10**7)
            cache.put(STEP, UNIT, DATA)
            server = LinkServer(identity=identity, run_id=RUN_ID)
            holder = Holder(cache, SumsKept(directory / f"{number}-sums", 10**7))
            server.layers = LayerServer(holder)
            port = await server.start("127.0.0.1:0")
            servers.append(server)
            made.append(holder)
            placed.append(PlacedStage(node_id=identity.node_id, address=f"127.0.0.1:{port}"))
        try:
            yield Scene(me, made, tuple(placed), peers, servers, lambda: new_node(authority))
        finally:
            await peers.close()
            for server in servers:
                await server.stop()
            for holder in made:
                holder.sums.close()


async def test_a_node_is_sent_a_file_a_few_times_and_others_all_the_same(tmp_path: Path) -> None:
    async with scene(tmp_path, 1) as here:
        for _ in range(AT_ONCE):
            assert await here.fetch(0) == DATA
        with pytest.raises(LinkError, match="too often"):
            await here.fetch(0)
        server = here.servers[0].layers
        assert server is not None
        request, other = LayerRequest(step=STEP, unit=UNIT), LayerRequest(step=STEP, unit="head")
        me, now = here.identity.node_id, time.monotonic()
        assert not server._may_send(me, request, 0.5, now)
        assert server._may_send(me, request, 0.5, now + AGAIN_SECONDS), "time forgives"
        assert server._may_send("node-another000", request, 1.0, now) and server._may_send(
            me, other, 1.0, now
        )
        for at in range(2 * MOST_COUNTED):
            server._may_send(me, LayerRequest(step=at, unit="none"), LEAST_SHARE, now)
        assert not server._may_send(me, request, 0.5, now), "other requests do not make it forget"
        assert server._may_send("node-another000", request, 1.0, now), "nor do they concern others"
        assert server._may_send(me, request, 0.5, now + AGAIN_SECONDS)


@pytest.mark.parametrize("offset", [0, len(DATA), len(DATA) + 1])
async def test_a_member_that_asks_again_and_again_has_the_file_read_a_few_times(
    tmp_path: Path, offset: int
) -> None:
    async with scene(tmp_path, 1) as here:
        placed = here.placed[0]
        name = here.identity.server_name(placed.node_id)
        request = LayerRequest(step=STEP, unit=UNIT, sha256="0" * 64 if not offset else here.place(0).sha256)
        async with open_channel(placed.address, identity=here.identity, server_name=name) as channel:
            for _ in range(200):
                with contextlib.suppress(LinkError):
                    async for _ in get_layer(channel, replace(request, offset=offset)):
                        pass
        assert len(here.holders[0].offsets) <= AT_ONCE / LEAST_SHARE + 1


async def test_members_that_do_not_read_keep_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them took all places of a node, and nobody else got a layer or a gradient from it."""
    monkeypatch.setattr(layer_exchange, "TURN_SECONDS", 0.2)
    monkeypatch.setattr(layer_exchange, "HANG_UP_SECONDS", 0.2)
    async with scene(tmp_path, 1) as here, contextlib.AsyncExitStack() as stack:
        placed, large = here.placed[0], bytes(8_000_000)
        here.holders[0].cache.put(STEP, "head", large)
        digest = sha256(large).hexdigest()
        ask = control_pb2.PeerLayerRequest(step=STEP, unit="head", sha256=digest).SerializeToString()
        name, calls = here.identity.server_name(placed.node_id), []
        for _ in range(MOST_TRANSFERS // MOST_OF_A_NODE):
            deaf = open_channel(
                placed.address, identity=here.others(), server_name=name, unread_bytes=CHUNK_BYTES
            )
            await stack.enter_async_context(deaf)
            calls += [deaf.unary_stream(LAYER_METHOD)(ask) for _ in range(MOST_OF_A_NODE)]
        for call in calls:
            await call.read()
        assert await here.fetch(0) == DATA


class Trickle:
    """A call that brings a few bytes every 25 seconds of a clock of its own."""

    def __init__(self) -> None:
        self.clock, self.cancelled = 0.0, False

    def unary_stream(self, method: str) -> "Trickle":
        assert method == LAYER_METHOD
        return self

    def __call__(self, message: bytes) -> "Trickle":
        return self

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        self.clock += 25.0
        return b"few"

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_holder_that_sends_a_little_now_and_then_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    call, came = Trickle(), []
    monkeypatch.setattr(layer_exchange, "time", SimpleNamespace(monotonic=lambda: call.clock))
    request = LayerRequest(step=STEP, unit=UNIT, sha256=sha256(DATA).hexdigest(), offset=0)
    with pytest.raises(LinkError, match="the rate was below"):
        async for chunk in get_layer(cast(grpc.aio.Channel, call), request):
            came.append(chunk)
    assert came == [b"few"] * 3 and call.cancelled, "two silences are all it gets at this rate"


async def test_a_layer_arrives_complete(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        assert await here.fetch(0, 1) == DATA
        assert [holder.offsets for holder in here.holders] == [[0], []]


async def test_a_node_that_was_shut_out_gets_no_layer_though_it_knows_the_hash(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.servers[0].shut_out = {here.identity.node_id}
        bad: set[str] = set()
        assert await here.fetch(0, 1, bad=bad) == DATA
        assert [holder.offsets for holder in here.holders] == [[], [0]]
        here.servers[1].shut_out = {here.identity.node_id}
        with pytest.raises(LinkError, match="shut out"):
            await here.fetch(0, 1)
        assert [holder.offsets for holder in here.holders] == [[], [0]]


async def test_a_transfer_that_breaks_goes_on_at_another_holder(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.holders[0].breaks_after = 2
        assert await here.fetch(0, 1) == DATA
        assert here.holders[0].offsets == [0] and here.holders[1].offsets == [2 * CHUNK_BYTES]


async def test_a_transfer_goes_on_at_another_holder_when_one_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the least rate that is allowed, a liar had others replaced for not having their state in time."""
    monkeypatch.setattr(layer_exchange, "SILENT_SECONDS", 3600.0)
    turns = list[asyncio.Timeout]()

    def turn(_seconds: float) -> asyncio.Timeout:
        turns.append(asyncio.timeout(3600.0))
        return turns[-1]

    async def first_turn_ends(channel: grpc.aio.Channel, request: LayerRequest) -> AsyncIterator[bytes]:
        async for chunk in get_layer(channel, request):
            yield chunk
            if len(turns) == 1:
                turns[0].reschedule(0.0)

    async with scene(tmp_path) as here:
        here.holders[0].hangs_after = 1
        with monkeypatch.context() as patch:
            patch.setattr(layer_peers, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": turn}))
            patch.setattr(layer_peers, "get_layer", first_turn_ends)
            assert await here.fetch(0, 1) == DATA
        assert here.holders[0].offsets == [0] and here.holders[1].offsets == [CHUNK_BYTES]
        monkeypatch.setattr(layer_peers, "TURN_SECONDS", 0.5)
        here.holders[0].hangs_after = 1
        for holder in here.holders:
            holder.sums.keep(STEP, UNIT, [torch.full((100,), 7, dtype=torch.uint8)])
        assert await here.peers.fetch_sums(here.placed, STEP, UNIT, 100) == bytes([7] * 100)


async def test_a_damaged_copy_is_never_sent_and_is_dropped(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        (path,) = (tmp_path / "0").rglob("*.layer")
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        bad: set[str] = set()
        assert await here.fetch(0, 1, bad=bad) == DATA
        assert bad == {here.placed[0].node_id} and not path.exists()


async def test_a_holder_that_sends_other_bytes_is_found_by_the_hash(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.holders[0].lies = DATA[:-1] + bytes([DATA[-1] ^ 1])
        bad: set[str] = set()
        assert await here.fetch(0, 1, bad=bad) == DATA
        assert bad == {here.placed[0].node_id}
        assert here.holders[1].offsets == [0], "nothing of it is used"


async def test_after_a_damaged_mixture_all_comes_from_one(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.holders[0].lies, here.holders[0].breaks_after = b"x" * len(DATA), 1
        bad: set[str] = set()
        assert await here.fetch(0, 1, bad=bad) == DATA
        assert here.holders[1].offsets == [CHUNK_BYTES, 0] and bad == set()


async def test_a_liar_that_sends_little_does_not_keep_a_file_that_takes_longer_than_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its bad bytes, all has to come from one holder, in one turn."""
    monkeypatch.setattr(layer_peers, "TURN_SECONDS", 0.2)
    monkeypatch.setattr(layer_peers, "LEAST_PROGRESS", 1)
    async with scene(tmp_path) as here:
        here.holders[0].lies, here.holders[0].hangs_after = b"x" * len(DATA), 1
        here.holders[1].chunk_seconds = 0.1
        assert await here.fetch(0, 1) == DATA


async def test_missing_layers_are_reported_and_sizes_checked_first(tmp_path: Path) -> None:
    async with scene(tmp_path, 1) as here:
        with pytest.raises(ProtocolViolationError, match="expected at most 10"):
            await here.peers.fetch(here.place(0), 10, set())
        assert here.holders[0].offsets == []
        here.holders[0].cache.drop(STEP, UNIT)
        with pytest.raises(LinkError, match="any holder"):
            await here.fetch(0)
        here.holders[0].lies = DATA + b"more"
        with pytest.raises(LinkError, match="any holder"):
            await here.fetch(0)


async def test_only_a_node_that_knows_the_hash_gets_the_file(tmp_path: Path) -> None:
    async with scene(tmp_path, 1) as here:
        placed = here.placed[0]
        name = here.identity.server_name(placed.node_id)
        channel = open_channel(placed.address, identity=here.identity, server_name=name)
        for digest in ("", "0" * 64):
            with pytest.raises(NotHeldError):
                async for _ in get_layer(channel, LayerRequest(step=STEP, unit=UNIT, sha256=digest)):
                    raise AssertionError("something came")
        call = channel.unary_stream(LAYER_METHOD)(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()
        stranger = new_node(new_authority())
        with pytest.raises(LinkError):
            await LayerPeers(stranger).fetch(here.place(0), len(DATA), set())


@pytest.mark.parametrize("unit", ["{secret}", "../../secret", "../../secret\0", ".", "", "x" * 5000])
async def test_no_name_of_a_layer_reaches_another_file(tmp_path: Path, unit: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a private key")
    async with scene(tmp_path, 1) as here:
        here.holders[0].sums.keep_bytes(STEP, UNIT, DATA)
        placed = here.placed[0]
        name = here.identity.server_name(placed.node_id)
        async with open_channel(placed.address, identity=here.identity, server_name=name) as channel:
            for sums in (True, False):
                asked = LayerRequest(step=STEP, unit=unit.format(secret=secret), sums=sums)
                with pytest.raises(NotHeldError):
                    async for _ in get_layer(channel, asked):
                        raise AssertionError("something came")


async def test_summed_gradients_come_from_whoever_keeps_them(tmp_path: Path) -> None:
    async with scene(tmp_path, 3) as here:
        here.holders[1].sums.keep(STEP, UNIT, [torch.full((100,), 7, dtype=torch.uint8)])
        here.holders[2].sums.keep(STEP, UNIT, [torch.full((101,), 8, dtype=torch.uint8)])
        assert await here.peers.fetch_sums(here.placed, STEP, UNIT, 100) == bytes([7] * 100)
        assert await here.peers.fetch_sums(here.placed[::-1], STEP, UNIT, 100) == bytes([7] * 100)
        with pytest.raises(LinkError, match="does not send 99 bytes"):
            await here.peers.fetch_sums(here.placed, STEP, UNIT, 99)
        with pytest.raises(LinkError, match="is not held here"):
            await here.peers.fetch_sums(here.placed, STEP + 1, UNIT, 100)
