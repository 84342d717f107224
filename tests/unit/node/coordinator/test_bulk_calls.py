"""Bulk calls over real sockets: unread answers take little memory, and no single node can use all of it."""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import grpc.aio
import pytest

from node.config.schema import CoordinatorSection
from node.coordinator import control_service, sessions
from node.coordinator.control_service import (
    CHUNK_BYTES,
    MOST_PROBE_BYTES,
    CallLimit,
    ControlService,
    chunks,
    zeros,
    zeros_sha256,
)
from node.coordinator.control_service import MOST_CALLS as MOST_TURNS
from node.coordinator.layer_service import MOST_CALLS
from node.coordinator.ports import open_ports
from node.coordinator.sessions import CALLS, LAYERS_A_SECOND, LAYERS_AT_ONCE, ControlSession, MessageLimits
from node.coordinator.snapshot_handler import Agreement, NotDueError, ServedLayer, UploadPermit
from node.model.labels import BatchPart
from node.run_file.loader import default_config
from node.stage.coordinator_client import CoordinatorClient
from node.state.manifest import LayerFile, UnitEntry
from node.state.snapshot import NewFile
from tests.support.control_handler import NobodyAsks
from tests.support.pki import hello, new_authority, new_node
from wire.channels import NOT_YET, bulk_name, open_channel
from wire.errors import RunError
from wire.front import Front
from wire.identity.credentials import NodeIdentity
from wire.identity.enrolment import Refusal
from wire.messages import MOST_HELD, Finish, HeldLayer
from wire.messages_proto import node_message_to_proto
from wire.v1 import control_pb2, control_pb2_grpc

AUTHORITY = new_authority()
NODE, OTHER = new_node(AUTHORITY), new_node(AUTHORITY)
SECONDS = 20.0
LAYERS = bulk_name(NODE.coordinator_name)
LAYER = bytes(range(256)) * (40 * CHUNK_BYTES // 256) + b"tail"
FILE = LayerFile.of(LAYER)
AHEAD = b"weights that came ahead" * 1000


class Handler(NobodyAsks):
    """Has one layer, and takes in what it permits."""

    def __init__(self) -> None:
        self.asked = 0
        self.permit: UploadPermit | None = None
        self.stored: list[bytes] = []
        self.files: list[NewFile] = []
        self.renewed: list[str] = []
        self.refusals: list[tuple[str, str]] = []
        self.layers_refused: list[tuple[str, str]] = []

    def refused(self, node_id: str, why: str) -> None:
        self.refusals.append((node_id, why))

    async def renew(self, node_id: str, csr_der: bytes) -> bytes | Refusal:
        self.renewed.append(node_id)
        return b"certificate"

    async def batch(self, *_: object, **__: object) -> bytes:
        return LAYER[:1000]

    async def layer(self, step: int, unit: str) -> ServedLayer:
        return ServedLayer(UnitEntry(unit, "file", len(LAYER), sha256(LAYER).hexdigest(), ""), self._read)

    async def _read(self) -> LayerFile:
        self.asked += 1
        return FILE

    def upload_permit(
        self, node_id: str, step: int, unit: str, *, weights_alone: bool = False
    ) -> UploadPermit:
        if self.permit is None:
            raise NotDueError("was requested")
        return self.permit

    async def layer_refused(self, permit: UploadPermit, why: str) -> None:
        self.layers_refused.append((permit.unit, why))

    async def weights_ahead(self, permit: UploadPermit) -> LayerFile:
        return LayerFile.of(AHEAD)

    async def arriving(self, permit: UploadPermit, size: int) -> NewFile:
        folder = Path(tempfile.gettempdir())
        self.files.append(NewFile(folder, folder / "layer", size))
        return self.files[-1]

    async def store_layer(self, permit: UploadPermit, file: NewFile | None) -> None:
        self.stored.append(b"")
        if file is not None:
            self.stored[-1] = file.read(0, file.size)
            file.close()


@contextlib.asynccontextmanager
async def coordinator(
    handler: Handler, limits: Callable[[], MessageLimits] | None = None
) -> AsyncIterator[tuple[int, ControlService]]:
    service: list[ControlService] = []

    def make(front: Front) -> ControlService:
        service.append(ControlService(handler, front, limits))
        return service[0]

    settings = CoordinatorSection(listen="127.0.0.1:0")
    nobody_joins = Mock()
    async with asyncio.timeout(SECONDS), open_ports(settings, AUTHORITY, nobody_joins, make) as ports:
        yield ports.port, service[0]


@contextlib.asynccontextmanager
async def deaf(
    port: int, node: NodeIdentity, name: str = NODE.coordinator_name
) -> AsyncIterator[control_pb2_grpc.CoordinatorStub]:
    """A client that receives a little and does not read the rest."""
    channel = open_channel(f"127.0.0.1:{port}", identity=node, server_name=name, unread_bytes=65536)
    yield control_pb2_grpc.CoordinatorStub(channel)
    await channel.close()


class Session(Handler):
    """Opens one session."""

    def __init__(self) -> None:
        super().__init__()
        self.open: asyncio.Future[ControlSession] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    def opened(self, session: ControlSession) -> None:
        self.open.set_result(session)

    def closed(self, session: ControlSession) -> None:
        self.ended.set()


async def test_the_session_of_a_node_that_reads_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a node that was shut out or evicted stays a relay and a holder of layers."""
    monkeypatch.setattr(sessions, "WRITE_SECONDS", 0.5)
    handler = Session()
    async with coordinator(handler) as (port, _), deaf(port, NODE) as stub:
        call = stub.Session()
        await call.write(node_message_to_proto(hello(f"127.0.0.1:{port}")))
        session = await handler.open
        for _ in range(1_000):
            session.send(Finish(reason="you were evicted " * 50, failed=True))
        session.close()
        await handler.ended.wait()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


def client(port: int, node: NodeIdentity) -> CoordinatorClient:
    return CoordinatorClient(f"127.0.0.1:{port}", lambda: node, 5.0)


def permit(most_bytes: int, *, is_stored: bool = False) -> UploadPermit:
    agreed: asyncio.Future[Agreement | None] = asyncio.get_running_loop().create_future()
    return UploadPermit(
        node_id=NODE.node_id,
        step=4,
        unit="embed",
        most_bytes=most_bytes,
        hosts={},
        agreed=agreed,
        is_stored=is_stored,
    )


async def test_answers_that_nobody_reads_are_made_as_far_as_they_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    zeros = control_service.zeros

    def counted(size: int) -> Iterator[bytes]:
        for chunk in zeros(size):
            made.append(len(chunk))
            yield chunk

    async with coordinator(Handler()) as (port, _), deaf(port, NODE) as stub:
        with monkeypatch.context() as patch:
            patch.setattr(control_service, "zeros", counted)
            asked = [stub.Probe(control_pb2.ProbeRequest(bytes=MOST_PROBE_BYTES)) for _ in range(8)]
            begun = [asyncio.ensure_future(call.read()) for call in asked]
            done, waiting = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            assert all(task.result().total_bytes == MOST_PROBE_BYTES for task in done)
            other = client(port, OTHER)
            assert await other.measure_download() > 0
            await other.close()
        assert sum(made) < MOST_PROBE_BYTES
        for task in waiting:
            task.cancel()


async def test_one_node_waits_for_itself_alone() -> None:
    handler = Handler()
    async with coordinator(handler) as (port, _):
        async with deaf(port, NODE, LAYERS) as stub:
            asked = [stub.GetLayer(control_pb2.GetLayerRequest(step=4, unit="embed")) for _ in range(8)]
            begun = [asyncio.ensure_future(call.read()) for call in asked]
            answers = await asyncio.gather(*begun, return_exceptions=True)
            sizes = [one.total_bytes for one in answers if not isinstance(one, BaseException)]
            refused = [one.code() for one in answers if isinstance(one, grpc.aio.AioRpcError)]
            assert sizes == [len(LAYER)] * MOST_CALLS and refused == [NOT_YET] * (8 - MOST_CALLS)
            one, other = client(port, NODE), client(port, OTHER)
            assert (await other.layer(4, "embed", len(LAYER))) == FILE
            assert await one.batch(4, part=BatchPart.INPUTS, size=1000) == LAYER[:1000]
            assert handler.asked == MOST_CALLS + 1
        # What it left behind is over, and frees its places.
        assert (await one.layer(4, "embed", len(LAYER))) == FILE
        await one.close()
        await other.close()


async def test_who_calls_too_often_waits_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, clock = Handler(), [0.0]
    monkeypatch.setattr(control_service, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    rate, burst = CALLS["renew"]
    async with coordinator(handler, lambda: MessageLimits(default_config())) as (port, _):
        one, other = client(port, NODE), client(port, OTHER)
        for _ in range(int(burst)):
            assert await one.renew(b"request") == b"certificate"
        late = asyncio.create_task(one.renew(b"request"))
        assert await other.renew(b"request") == b"certificate"
        assert await one.batch(4, part=BatchPart.INPUTS, size=1000) == LAYER[:1000]
        assert handler.renewed == [NODE.node_id] * int(burst) + [OTHER.node_id] and not late.done()
        clock[0] = 1.1 / rate
        assert await late == b"certificate"
        await one.close()
        await other.close()


async def test_a_report_of_more_layers_than_a_node_names_is_held_against_it() -> None:
    handler, layer = Handler(), HeldLayer(step=4, unit="embed", bytes=1, sha256="00" * 32)
    async with coordinator(handler) as (port, _):
        node = client(port, NODE)
        assert len(await node.hold_layers([layer] * MOST_HELD)) == MOST_HELD
        assert handler.refusals == []
        with pytest.raises(RunError, match="201 layers"):
            await node.hold_layers([layer] * MOST_HELD, [(4, "embed")])
        (refused,) = handler.refusals
        assert refused[0] == NODE.node_id and "201 layers" in refused[1]
        await node.close()


async def test_a_request_that_doubts_more_holders_than_there_are_is_held_against_its_node() -> None:
    """Each name costs the event loop time, and a request has room for half a million."""
    handler = Handler()
    async with coordinator(handler) as (port, _):
        node = client(port, NODE)
        doubted = [f"{number:x}" for number in range(MOST_HELD + 1)]
        assert isinstance(await node.layer(4, "embed", 1 << 24, None, doubted[1:]), LayerFile)
        assert handler.refusals == []
        with pytest.raises(RunError, match="201"):
            await node.layer(4, "embed", 1 << 24, None, doubted)
        assert [who for who, _ in handler.refusals] == [NODE.node_id]
        await node.close()


@pytest.mark.parametrize(
    "layer",
    [
        HeldLayer(step=4, unit="embed", bytes=1, sha256="00" * 31),
        HeldLayer(step=4, unit="embed", bytes=1, sha256="00" * 32, weights_sha256="0" * 200_000),
        HeldLayer(step=4, unit="embed", bytes=1, sha256="zz" * 32),
    ],
)
async def test_a_hash_that_is_none_reaches_no_manifest(layer: HeldLayer) -> None:
    handler = Handler()
    async with coordinator(handler) as (port, _):
        node = client(port, NODE)
        with pytest.raises(RunError, match="sha256"):
            await node.hold_layers([layer])
        (refused,) = handler.refusals
        assert refused[0] == NODE.node_id and len(refused[1]) < 200
        await node.close()


@pytest.mark.parametrize("at", [1, 1000, 256 * 1024, 256 * 1024 + 1, len(LAYER) - 1, len(LAYER)])
async def test_weights_that_came_ahead_are_put_where_they_belong(at: int) -> None:
    handler = Handler()
    async with coordinator(handler) as (port, _):
        node = client(port, NODE)
        handler.permit = permit(len(LAYER))
        await node.put_layer(4, "embed", LayerFile.of(LAYER), weights_at=at)
        await node.close()
    assert handler.stored == [LAYER[:at] + AHEAD + LAYER[at:]]


async def test_an_upload_that_nobody_needs_any_more_counts_as_stored() -> None:
    handler = Handler()
    async with coordinator(handler) as (port, _):
        node = client(port, NODE)
        handler.permit = permit(len(LAYER), is_stored=True)
        await node.put_layer(4, "embed", LayerFile.of(LAYER))
        assert handler.stored == [b""]
        handler.permit = permit(len(LAYER))
        await node.put_layer(4, "embed", LayerFile.of(LAYER))
        assert handler.stored[1:] == [LAYER] and handler.refusals == handler.layers_refused == []
        await node.close()


@dataclass(frozen=True)
class Upload:
    """What a node sends that is not the layer it owes."""

    announced: int
    pieces: Iterable[bytes]
    why: str
    """Why it is held against the node; empty if a correct node may send it once."""


PIECE = bytes(CHUNK_BYTES)
UPLOADS = {
    "announces more": Upload(2**40, itertools.repeat(PIECE, 2000), "at most"),
    "announces a little more": Upload(len(LAYER) + 1, [PIECE], "at most"),
    "sends more": Upload(len(LAYER), itertools.repeat(PIECE, 2000), "more than the announced"),
    "sends more than nothing": Upload(0, itertools.repeat(PIECE, 2000), "more than the announced"),
    "ends early": Upload(len(LAYER), [LAYER[:1000]], ""),
    "ends at once": Upload(len(LAYER), [], ""),
}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("name", UPLOADS)
async def test_what_cannot_be_the_layer_is_refused_as_it_comes(name: str, is_stored: bool) -> None:
    """Also of a layer that is stored already, and whose bytes are dropped."""
    handler, upload, read = Handler(), UPLOADS[name], 0
    handler.permit = permit(len(LAYER), is_stored=is_stored)

    async def chunks() -> AsyncIterator[control_pb2.PutLayerChunk]:
        nonlocal read
        first = control_pb2.PutLayerChunk(step=4, unit="embed", total_bytes=upload.announced)
        yield first
        for piece in upload.pieces:
            read += len(piece)
            yield control_pb2.PutLayerChunk(data=piece)

    async with coordinator(handler) as (port, _), deaf(port, NODE, LAYERS) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PutLayer(chunks())
    # The answer is lost if gRPC ends the call while the client still sends.
    assert caught.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL)
    assert handler.stored == [] and read < 2000 * len(PIECE)
    assert not any(file.path.exists() for file in handler.files)
    assert [unit for unit, why in handler.layers_refused if upload.why in why] == ["embed"] * bool(upload.why)
    assert handler.refusals == []


@pytest.mark.parametrize("announced", [0, 1000, 2**40])
async def test_who_goes_on_uploading_what_nobody_asked_for_is_named(announced: int) -> None:
    handler, read = Handler(), 0

    async def chunks() -> AsyncIterator[control_pb2.PutLayerChunk]:
        nonlocal read
        yield control_pb2.PutLayerChunk(step=4, unit="embed", total_bytes=announced)
        while True:
            read += len(PIECE)
            yield control_pb2.PutLayerChunk(data=PIECE)

    free, strikes = int(CALLS["not due"][1]), 3
    limits = MessageLimits(default_config())
    async with coordinator(handler, lambda: limits) as (port, _), deaf(port, NODE, LAYERS) as stub:
        for _ in range(free + strikes):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.PutLayer(chunks())
    assert handler.refusals == [(NODE.node_id, "was requested")] * strikes and handler.stored == []
    assert read < 64 * len(PIECE) * (free + strikes)


async def test_a_layer_is_sent_to_a_node_a_few_times_and_to_others_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = Handler()
    clock = [1000.0]
    monkeypatch.setattr(control_service, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(control_service, "TURN_SECONDS", 0.001)
    async with coordinator(handler, lambda: MessageLimits(default_config())) as (port, _):
        one, other = client(port, NODE), client(port, OTHER)
        for _ in range(int(LAYERS_AT_ONCE)):
            assert (await one.layer(4, "embed", len(LAYER))) == FILE
        more = asyncio.create_task(one.layer(4, "embed", len(LAYER)))
        assert (await other.layer(4, "embed", len(LAYER))) == FILE
        assert (await one.layer(4, "head", len(LAYER))) == FILE, "others are not counted with it"
        assert handler.asked == LAYERS_AT_ONCE + 2 and not more.done()
        clock[0] += 1.01 / LAYERS_A_SECOND
        assert await more == FILE
        await one.close()
        await other.close()


async def test_a_call_too_many_waits_its_turn_and_idle_nodes_are_forgotten() -> None:
    limit, go_on = CallLimit(), asyncio.Event()
    began: asyncio.Queue[str] = asyncio.Queue()

    async def call(node: str, kind: str) -> None:
        async with limit.turn(node, kind):
            began.put_nowait(f"{node} {kind}")
            await go_on.wait()

    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        calls = [group.create_task(call("a", "get")) for _ in range(MOST_TURNS + 2)]
        group.create_task(call("b", "get"))
        group.create_task(call("a", "put"))
        heard = sorted([await began.get() for _ in range(MOST_TURNS + 2)])
        assert heard == [*["a get"] * MOST_TURNS, "a put", "b get"] and began.empty()
        # One that ends while it runs makes room, one that ends while it waits does not.
        calls[-1].cancel()
        calls[0].cancel()
        assert await began.get() == "a get" and began.empty()
        go_on.set()
    assert not limit.slots


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_chunks_are_the_data(size: int) -> None:
    data = LAYER[:size]
    for pieces, whole in ((list(chunks(data)), data), (list(zeros(size)), bytes(size))):
        assert b"".join(pieces) == whole and pieces
        assert all(len(piece) == CHUNK_BYTES for piece in pieces[:-1])
        assert len(pieces[-1]) <= CHUNK_BYTES
    assert zeros_sha256(size) == sha256(bytes(size)).hexdigest()
