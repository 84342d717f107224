"""Opening a session with the coordinator: which errors end a node, and which it retries."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from node.coordinator import control_service
from node.coordinator import sessions as module
from node.coordinator.control_service import ControlService
from node.coordinator.sessions import ControlSession
from node.stage.coordinator_client import CoordinatorClient
from tests.support.control_handler import NobodyAsks
from tests.support.links import eventually
from tests.support.pki import hello, new_authority, new_node
from tests.support.ports import free_port
from wire.errors import LinkError, RefusalCode, Refused
from wire.messages import CoordinatorMessage, Finish, NodeMessage
from wire.messages_proto import node_message_to_proto
from wire.v1 import control_pb2_grpc

SECONDS = 20.0
NODE = new_node(new_authority())


class Admits(NobodyAsks):
    """The part of a `Handler` that a session's beginning meets."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def opened(self, session: ControlSession) -> None:
        self.addresses.append(session.address)
        session.send(Finish(reason="welcome", failed=False))
        session.close()

    def heard(self, session: ControlSession, message: NodeMessage) -> None: ...

    def closed(self, session: ControlSession) -> None: ...


class Service(ControlService):
    """Takes a caller's node id from its metadata."""

    async def _member(self, context: Any) -> str:
        return str(dict(context.invocation_metadata()).get("node", "node-aaaaaaaaaa"))


class Client(CoordinatorClient):
    def _dial(self, *, session: bool = False) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)


@contextlib.asynccontextmanager
async def coordinator(handler: Admits | None = None) -> AsyncIterator[tuple[int, Service]]:
    front: Any = SimpleNamespace(host=lambda peer: "127.0.0.1", end=None)
    server, service = grpc.aio.server(), Service(handler or Admits(), front)
    control_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield port, service
    finally:
        await server.stop(0)


async def join(port: int, address: str) -> None:
    """Be a node until the session ends. Raises Refused, or LinkError where it may try again."""

    async def handle(_message: CoordinatorMessage) -> None: ...

    client = Client(f"127.0.0.1:{port}", lambda: NODE, SECONDS)
    await client.session(hello(address), asyncio.Queue(), handle, lambda: None)


@contextlib.asynccontextmanager
async def raw_session(port: int, node_id: str = "node-aaaaaaaaaa") -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield control_pb2_grpc.CoordinatorStub(channel).Session(metadata=(("node", node_id),))


async def test_a_hello_that_comes_late_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "HELLO_SECONDS", 0.0)
    async with coordinator() as (port, _):
        # Not RunError, which would end the node. The message depends on whether the hello was already sent.
        with pytest.raises(LinkError):
            await join(port, f"127.0.0.1:{port}")


async def test_a_session_that_ends_without_a_hello_may_come_again() -> None:
    async with coordinator() as (port, _), raw_session(port) as session:
        await session.done_writing()
        assert await session.code() is grpc.StatusCode.UNAVAILABLE


async def test_only_the_newest_silent_session_of_a_node_waits() -> None:
    handler = Admits()
    async with coordinator(handler) as (port, service), contextlib.AsyncExitStack() as stack:

        async def silent(node_id: str) -> Any:
            before = service.desk.greetings.waiting.get(node_id)
            session = await stack.enter_async_context(raw_session(port, node_id))
            await eventually(lambda: service.desk.greetings.waiting.get(node_id) not in (None, before))
            return session

        other = await silent("node-bbbbbbbbbb")
        sessions = [await silent("node-aaaaaaaaaa") for _ in range(3)]
        for older in sessions[:-1]:
            assert await older.code() is grpc.StatusCode.UNAVAILABLE
        for waiting in (sessions[-1], other):
            await waiting.write(node_message_to_proto(hello(f"127.0.0.1:{port}")))
            assert await waiting.read() is not grpc.aio.EOF
        assert len(handler.addresses) == 2
        await eventually(lambda: not service.desk.greetings.waiting)


async def test_an_unreachable_port_differs_from_other_refusals() -> None:
    async with coordinator() as (port, _):
        for address in (f"127.0.0.1:{free_port()}", "nowhere", "a\0b:1"):
            with pytest.raises(Refused, match="neighbours cannot reach this node") as refused:
                await join(port, address)
            assert refused.value.code is RefusalCode.UNREACHABLE


async def test_the_coordinator_dials_only_where_the_node_dials_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a member could have it knock on any host and port of its network."""
    dialled: list[tuple[str, int]] = []

    async def connect(hosts: Iterable[str], port: int) -> None:
        dialled.extend((host, port) for host in hosts)

    monkeypatch.setattr(module, "knock", connect)
    async with coordinator() as (port, _):
        for address in ("192.0.2.7:22", "localhost:7", ":8", "127.0.0.1:9"):
            with pytest.raises(LinkError, match="the coordinator closed the control connection"):
                await join(port, address)
    assert dialled == [("127.0.0.1", 7), ("127.0.0.1", 8), ("127.0.0.1", 9)]


async def test_a_slow_name_lookup_delays_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the loop write the run's records."""
    asked: list[tuple[str, str]] = []
    answer = threading.Event()

    def getaddrinfo(host: str, port: None, *, type: int) -> list[Any]:
        asked.append((host, threading.current_thread().name))
        if host == "slow.example":
            assert answer.wait(SECONDS)
        return [(socket.AF_INET, type, 0, "", ("127.0.0.1", 0))]

    names = SimpleNamespace(getaddrinfo=getaddrinfo, SOCK_STREAM=socket.SOCK_STREAM)
    monkeypatch.setattr(module, "socket", names)
    handler = Admits()
    async with coordinator(handler) as (port, service):
        monkeypatch.setattr(module, "REACH_SECONDS", 0.1)
        tries = 0
        while not asked or tries < 3:
            tries += 1
            with pytest.raises(Refused, match="cannot reach"):
                await join(port, f"slow.example:{port}")
        # The one that goes on is not asked again: there is a thread for each.
        assert [host for host, _ in asked] == ["slow.example"]
        assert all(thread.startswith("names") for _, thread in asked)
        monkeypatch.setattr(module, "REACH_SECONDS", SECONDS)
        answer.set()
        await eventually(lambda: not service.desk.names._under_way)
        for name in ("slow.example", "quick.example"):
            with pytest.raises(LinkError, match="closed the control connection"):
                await join(port, f"{name}:{port}")
        assert handler.addresses == [f"slow.example:{port}", f"quick.example:{port}"]
