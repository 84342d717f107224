"""Bytes that are no message, on real sockets: the session ends, the process and its other sessions go on."""

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
import pytest

from node.coordinator import control_service
from node.coordinator.control_service import ControlService
from node.coordinator.sessions import ControlSession
from node.model.labels import BatchPart
from node.stage.coordinator_client import CoordinatorClient
from tests.support.control_handler import NobodyAsks
from tests.support.pki import hello, new_authority, new_node
from wire.admission import Limits
from wire.channels import make_server, open_channel
from wire.errors import ProtocolViolationError, RunError, ThinwireError
from wire.front import Front, start_behind
from wire.identity.credentials import mutual_tls
from wire.messages import CoordinatorMessage, Finish, Heartbeat, NodeMessage
from wire.messages_proto import coordinator_message_to_proto, node_message_to_proto
from wire.telemetry import Telemetry
from wire.v1 import control_pb2

AUTHORITY = new_authority()
NODE, OTHER = new_node(AUTHORITY), new_node(AUTHORITY)
SECONDS = 20.0
NOT_MESSAGES = (
    b"\xff" * 40,  # no field has such a tag
    b"\x0a\x7f\x00",  # a length beyond the end
    b"\x0a\x04\x0a\x02\xff\xfe",  # text that is no UTF-8
    b"",  # no body
    b"\x9a\x06\x01x",  # a field that nobody knows
)


@dataclass
class FakeHandler(NobodyAsks):
    """Admits everybody and remembers what happened."""

    open: dict[str, ControlSession] = field(default_factory=dict)
    messages: list[NodeMessage] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    happened: asyncio.Condition = field(default_factory=asyncio.Condition)

    def opened(self, session: ControlSession) -> None:
        self.open[session.node_id] = session
        session.send(Finish(reason="hello", failed=False))

    def heard(self, session: ControlSession, message: NodeMessage) -> None:
        self.messages.append(message)
        session.send(Finish(reason="heard", failed=False))

    def refused(self, node_id: str, why: str) -> None:
        self.refusals.append(why)

    def closed(self, session: ControlSession) -> None:
        del self.open[session.node_id]


@contextlib.asynccontextmanager
async def coordinator(
    handler: FakeHandler | None = None, *handlers: grpc.GenericRpcHandler
) -> AsyncIterator[int]:
    """The coordinator's mutual-TLS port: the product's service for `handler`, or `handlers` in its place."""
    server, front = make_server(handlers), Front(Limits.of_members(256))
    if handler is not None:
        ControlService(handler, front).add_to(server)
    credentials = AUTHORITY.coordinator_credentials(timedelta(hours=1), time.time())
    await start_behind(front, server, mutual_tls(lambda: credentials, AUTHORITY.certificate_pem))
    try:
        yield front.listen("127.0.0.1:0")
    finally:
        await server.stop(0)
        await front.close()


@contextlib.asynccontextmanager
async def raw_session(port: int, node: Any = NODE) -> AsyncIterator[Any]:
    """A session whose messages are bytes."""
    channel = open_channel(f"127.0.0.1:{port}", identity=node, server_name=node.coordinator_name)
    async with asyncio.timeout(SECONDS):
        yield channel.stream_stream("/thinwire.wire.v1.Coordinator/Session")()
    await channel.close()


@pytest.mark.parametrize("junk", NOT_MESSAGES)
async def test_malformed_bytes_end_only_their_session(junk: bytes) -> None:
    handler = FakeHandler()
    async with (
        coordinator(handler) as port,
        raw_session(port) as bad,
        raw_session(port, OTHER) as good,
    ):
        greeting = node_message_to_proto(hello(f"127.0.0.1:{port}")).SerializeToString()
        for session in (bad, good):
            await session.write(greeting)
            assert await session.read() != grpc.aio.EOF
        await bad.write(junk)
        assert await bad.read() == grpc.aio.EOF
        assert await bad.code() is grpc.StatusCode.OK
        assert len(handler.refusals) == 1, "it is held against the sender"
        assert list(handler.open) == [OTHER.node_id]
        await good.write(node_message_to_proto(Heartbeat(telemetry=Telemetry())).SerializeToString())
        assert await good.read() != grpc.aio.EOF
        assert handler.messages == [Heartbeat(telemetry=Telemetry())]


async def test_messages_that_came_together_are_heard_one_after_another() -> None:
    handler = FakeHandler()
    said = [Heartbeat(telemetry=Telemetry(epoch=epoch)) for epoch in (3, 1, 2)]
    several = control_pb2.Several(messages=map(node_message_to_proto, said))
    async with coordinator(handler) as port, raw_session(port) as session:
        await session.write(node_message_to_proto(hello(f"127.0.0.1:{port}")).SerializeToString())
        assert await session.read() != grpc.aio.EOF
        await session.write(control_pb2.NodeMessage(several=several).SerializeToString())
        for _ in said:
            assert await session.read() != grpc.aio.EOF
        assert handler.messages == said and not handler.refusals


async def test_messages_that_wait_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    each, came = control_service.each, list[int]()

    def counted(request: control_pb2.NodeMessage) -> Sequence[control_pb2.NodeMessage]:
        found = each(request)
        came.append(len(found))
        return found

    async def handle(_message: CoordinatorMessage) -> None:
        if handler.messages == said:
            all_heard.set()

    monkeypatch.setattr(control_service, "each", counted)
    handler, all_heard = FakeHandler(), asyncio.Event()
    said: list[NodeMessage] = [Heartbeat(telemetry=Telemetry(epoch=epoch)) for epoch in (3, 1, 2)]
    outbox: asyncio.Queue[NodeMessage] = asyncio.Queue()
    for message in said:
        outbox.put_nowait(message)
    async with coordinator(handler) as port, asyncio.timeout(SECONDS):
        client = CoordinatorClient(f"127.0.0.1:{port}", lambda: NODE, SECONDS)
        session = client.session(hello(f"127.0.0.1:{port}"), outbox, handle, lambda: None)
        running = asyncio.create_task(session)
        await all_heard.wait()
        running.cancel()
        await asyncio.wait([running])
    assert came == [len(said)]


@pytest.mark.parametrize(
    "messages", [(), (control_pb2.NodeMessage(several=control_pb2.Several()),)], ids=["none", "nested"]
)
async def test_several_messages_are_some_and_of_kinds_that_count(
    messages: tuple[control_pb2.NodeMessage, ...],
) -> None:
    handler = FakeHandler()
    several = control_pb2.NodeMessage(several=control_pb2.Several(messages=messages))
    async with coordinator(handler) as port, raw_session(port) as session:
        await session.write(node_message_to_proto(hello(f"127.0.0.1:{port}")).SerializeToString())
        assert await session.read() != grpc.aio.EOF
        await session.write(several.SerializeToString())
        assert await session.read() == grpc.aio.EOF
        assert handler.refusals == ["a node sent an empty control message"]


@pytest.mark.parametrize("junk", NOT_MESSAGES)
async def test_a_session_that_begins_with_junk_is_refused_in_words(junk: bytes) -> None:
    handler = FakeHandler()
    async with (
        coordinator(handler) as port,
        raw_session(port) as session,
    ):
        await session.write(junk)
        assert await session.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await session.details()).endswith(("cannot be parsed", "empty control message"))
        assert handler.open == {}


async def hear(session: Any, heard: list[CoordinatorMessage]) -> None:
    """A node's session with a coordinator that says what `session` yields."""
    handlers: dict[str, Any] = {"Session": grpc.stream_stream_rpc_method_handler(session)}
    service = grpc.method_handlers_generic_handler("thinwire.wire.v1.Coordinator", handlers)

    async def handle(message: CoordinatorMessage) -> None:
        heard.append(message)

    async with coordinator(None, service) as port:
        client = CoordinatorClient(f"127.0.0.1:{port}", lambda: NODE, 5.0)
        async with asyncio.timeout(SECONDS):
            await client.session(hello(":1"), asyncio.Queue(), handle, lambda: None)


@pytest.mark.parametrize("junk", NOT_MESSAGES)
async def test_a_node_ends_a_session_in_which_it_hears_junk(junk: bytes) -> None:
    async def session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield coordinator_message_to_proto(Finish(reason="well", failed=False)).SerializeToString()
        yield junk

    heard: list[CoordinatorMessage] = []
    with pytest.raises(ProtocolViolationError):
        await hear(session, heard)
    assert heard == [Finish(reason="well", failed=False)]


async def test_a_node_receives_messages_of_a_stream_that_ended_before_its_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def session(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield coordinator_message_to_proto(Finish(reason="well", failed=False)).SerializeToString()
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such node")

    made = importlib.import_module("grpc.aio._call").StreamStreamCall
    write = made.write

    async def late(call: Any, request: Any) -> None:
        await call.code()  # the stream has ended
        await write(call, request)

    monkeypatch.setattr(made, "write", late)
    heard: list[CoordinatorMessage] = []
    with pytest.raises(RunError, match="refused: no such node"):
        await hear(session, heard)
    assert heard == [Finish(reason="well", failed=False)]


@pytest.mark.parametrize("junk", NOT_MESSAGES)
async def test_a_node_refuses_bulk_data_that_is_junk(junk: bytes) -> None:
    async def batch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield junk

    handlers: dict[str, Any] = {"GetBatch": grpc.unary_stream_rpc_method_handler(batch)}
    service = grpc.method_handlers_generic_handler("thinwire.wire.v1.Coordinator", handlers)
    async with coordinator(None, service) as port:
        client = CoordinatorClient(f"127.0.0.1:{port}", lambda: NODE, 5.0)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(ThinwireError):
                await client.batch(0, part=BatchPart.INPUTS, size=8)
        await client.close()
