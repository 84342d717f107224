"""A node's session with the coordinator: broken connections, and the reason given when it ends."""

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from node.stage import session as module
from node.stage.coordinator_client import CoordinatorClient
from node.stage.session import Session, short_reason
from wire.errors import (
    DeviceLostError,
    LinkError,
    LinkLostError,
    MemoryExhaustedError,
    NotYetError,
    RefusalCode,
    Refused,
    RunError,
)
from wire.identity.enrolment import Hardware
from wire.messages import LONGEST_REASON, Abort, CoordinatorMessage, Hello, Leave, NodeMessage, Placed

SECONDS = 20.0
HELLO = Hello(
    version="0.1.0",
    protocol=1,
    peer_address=":1",
    hardware=Hardware("cpu", 2, 0),
    flops=1.0,
    download_rate=1.0,
    epoch=0,
    process_nonce=1,
)
ABORT = Abort(epoch=1, reason="over")
PLACED = Placed(epoch=1, held_step=-1, voted=False)


class Wire:
    """Stands for a `CoordinatorClient`: connections that the test answers, breaks and reads."""

    address = "coordinator:1"
    outage_seconds = SECONDS

    def __init__(self) -> None:
        self.dialled = asyncio.Semaphore(0)
        self.accepts = True
        self.refusal: Exception = LinkError("connection refused")
        self.heard: asyncio.Queue[NodeMessage] = asyncio.Queue()
        self.replies: asyncio.Queue[CoordinatorMessage | Exception] = asyncio.Queue()

    async def session(
        self,
        hello: Hello,
        outbox: asyncio.Queue[NodeMessage],
        handle: Callable[[CoordinatorMessage], Awaitable[None]],
        connected: Callable[[], None],
    ) -> None:
        self.dialled.release()
        if not self.accepts:
            raise self.refusal
        self.heard.put_nowait(hello)
        connected()

        async def send() -> None:
            while True:
                self.heard.put_nowait(await outbox.get())

        sender = asyncio.create_task(send())
        try:
            while True:
                reply = await self.replies.get()
                if isinstance(reply, Exception):
                    raise reply
                await handle(reply)
        finally:
            sender.cancel()

    async def said(self) -> NodeMessage:
        return await asyncio.wait_for(self.heard.get(), SECONDS)

    def closes(self) -> None:
        self.replies.put_nowait(LinkError("the coordinator closed the control connection"))


def a_session(wire: Wire) -> Session:
    return Session(cast(CoordinatorClient, wire))


async def run(
    session: Session, handle: Callable[[CoordinatorMessage], Awaitable[None]] | None = None
) -> None:
    async def ignore(_message: CoordinatorMessage) -> None:
        return None

    await session.run(lambda: HELLO, handle or ignore)


async def cancel(task: asyncio.Task[None]) -> None:
    """As a task group does when another of its tasks has failed."""
    task.cancel()
    await asyncio.wait([task], timeout=SECONDS)
    assert task.cancelled()


async def test_the_last_word_is_said_on_the_connection_that_is_there() -> None:
    wire, handled = Wire(), []

    async def handle(message: CoordinatorMessage) -> None:
        handled.append(message)

    session = a_session(wire)
    running = asyncio.create_task(run(session, handle))
    assert await wire.said() == HELLO
    await cancel(running)
    told = asyncio.create_task(session.farewell("out of memory"))
    wire.replies.put_nowait(ABORT)
    assert await wire.said() == Leave(reason="out of memory", failed=True)
    assert not told.done(), "the coordinator has not answered"
    wire.closes()
    await asyncio.wait_for(told, SECONDS)
    await session.close()
    assert wire.heard.empty(), "it does not come back"
    assert handled == [], "a node that ends begins nothing"


async def test_nothing_that_waits_is_said_before_it() -> None:
    wire = Wire()
    wire.accepts = False
    session = a_session(wire)
    running = asyncio.create_task(run(session))
    await asyncio.wait_for(wire.dialled.acquire(), SECONDS)
    session.post(PLACED)
    session.leave("asked to")
    await cancel(running)
    told = asyncio.create_task(session.farewell("a disk is full"))
    wire.accepts = True
    assert await wire.said() == HELLO, "the connection was broken: it is dialled again"
    assert await wire.said() == Leave(reason="a disk is full", failed=True)
    wire.closes()
    await asyncio.wait_for(told, SECONDS)
    assert wire.heard.empty()
    await session.close()


@pytest.mark.parametrize("there", [True, False])
async def test_an_unresponsive_coordinator_delays_nobody(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.3)
    wire = Wire()
    wire.accepts = there
    session = a_session(wire)
    running = asyncio.create_task(run(session))
    await asyncio.wait_for(wire.dialled.acquire(), SECONDS)
    await cancel(running)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await session.farewell("out of memory")
    assert 0.25 < loop.time() - began < SECONDS / 2
    await session.close()
    assert loop.time() - began < SECONDS / 2


async def test_a_node_that_never_had_a_session_says_nothing() -> None:
    session = a_session(Wire())
    await asyncio.wait_for(session.farewell("out of memory"), SECONDS)
    await session.close()


async def test_a_failure_during_a_message_is_still_reported() -> None:
    """And no further message is taken up by a node that ends."""
    wire, handled = Wire(), []

    async def handle(message: CoordinatorMessage) -> None:
        handled.append(message)
        raise MemoryError("a model")

    session = a_session(wire)
    running = asyncio.create_task(run(session, handle))
    assert await wire.said() == HELLO
    wire.replies.put_nowait(ABORT)
    wire.replies.put_nowait(ABORT)
    with pytest.raises(MemoryError, match="a model"):
        await asyncio.wait_for(running, SECONDS)
    told = asyncio.create_task(session.farewell("out of memory"))
    wire.replies.put_nowait(ABORT)
    assert await wire.said() == Leave(reason="out of memory", failed=True)
    wire.closes()
    await asyncio.wait_for(told, SECONDS)
    await session.close()
    assert handled == [ABORT]


async def test_a_broken_connection_is_dialled_again_and_asks_to_leave_again() -> None:
    wire = Wire()
    session = a_session(wire)
    running = asyncio.create_task(run(session))
    assert await wire.said() == HELLO
    session.leave("the volunteer asked to leave")
    assert await wire.said() == Leave(reason="the volunteer asked to leave")
    wire.closes()
    assert await wire.said() == HELLO
    assert await wire.said() == Leave(reason="repeated after a reconnect")
    running.cancel()
    await session.close()


async def test_a_port_that_cannot_be_reached_for_a_moment_ends_no_node_that_was_in() -> None:
    wire = Wire()
    session = a_session(wire)
    running = asyncio.create_task(run(session))
    assert await wire.said() == HELLO
    wire.accepts = False
    wire.refusal = Refused(RefusalCode.UNREACHABLE, "neighbours cannot reach this node")
    wire.closes()
    for _ in range(3):
        await asyncio.wait_for(wire.dialled.acquire(), SECONDS)
    wire.accepts = True
    assert await wire.said() == HELLO
    assert not running.done()
    # As with every other outage, there is a limit.
    wire.accepts, wire.outage_seconds = False, 0.2
    wire.closes()
    with pytest.raises(LinkLostError, match=r"for 0\.2 s"):
        await asyncio.wait_for(running, SECONDS)
    await session.close()


async def test_a_starting_coordinator_does_not_use_up_the_outage_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire = Wire()
    session = a_session(wire)
    running = asyncio.create_task(run(session))
    assert await wire.said() == HELLO
    wire.accepts, wire.outage_seconds = False, 0.2
    wire.refusal = NotYetError("the coordinator is reading")
    wire.closes()
    with caplog.at_level(logging.WARNING):
        for _ in range(4):  # the waits before them: 0.1, 0.2, 0.4 and 0.8 s
            await asyncio.wait_for(wire.dialled.acquire(), SECONDS)
        assert not running.done()
        assert [record.message for record in caplog.records].count("the coordinator is reading") == 1
        wire.refusal = LinkError("connection refused")
        with pytest.raises(LinkLostError, match=r"for 0\.2 s: connection refused"):
            await asyncio.wait_for(running, SECONDS)
    await session.close()


async def test_a_port_that_was_never_reached_ends_the_node_at_once() -> None:
    wire = Wire()
    wire.accepts = False
    wire.refusal = Refused(RefusalCode.UNREACHABLE, "neighbours cannot reach this node")
    with pytest.raises(Refused, match="neighbours cannot reach this node"):
        await asyncio.wait_for(run(a_session(wire)), SECONDS)


async def test_a_refusal_and_a_long_outage_end_it_and_leave_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 3600.0)
    wire = Wire()
    session = a_session(wire)
    running = asyncio.create_task(run(session))
    assert await wire.said() == HELLO
    wire.replies.put_nowait(Refused(RefusalCode.EVICTED, "you were evicted"))
    with pytest.raises(Refused, match="evicted"):
        await asyncio.wait_for(running, SECONDS)
    await asyncio.wait_for(session.farewell("you were evicted"), SECONDS)
    await session.close()
    monkeypatch.setattr(wire, "accepts", False)
    monkeypatch.setattr(wire, "outage_seconds", 0.2)
    session = a_session(wire)
    with caplog.at_level(logging.WARNING), pytest.raises(LinkLostError, match=r"did not answer for 0\.2 s"):
        await asyncio.wait_for(run(session), SECONDS)
    await asyncio.wait_for(session.farewell("nobody is there"), SECONDS)
    await session.close()
    assert wire.heard.empty()


# ---- what is said


def test_an_error_for_users_speaks_for_itself() -> None:
    lost = DeviceLostError("the process of this node's cuda:1 (rank 1) ended with exit code -9")
    assert short_reason(lost) == str(lost)
    assert short_reason(MemoryExhaustedError("it ran out: do this", happened="it ran out")) == "it ran out"
    assert short_reason(MemoryExhaustedError("it ran out")) == "it ran out"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("tw-secret"), "a fault in thinwire (KeyError)"),
        (RuntimeError("CUDA error: /home/volunteer"), "a fault in thinwire (RuntimeError)"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/volunteer/key.pem"),
            "its system refused an operation (No space left on device)",
        ),
        (OSError("of no number: /home/volunteer"), "a fault in thinwire (OSError)"),
    ],
)
def test_only_the_kind_of_other_errors_is_reported(error: Exception, said: str) -> None:
    assert short_reason(error) == said


def test_the_message_is_one_short_line() -> None:
    said = short_reason(RunError("\x1b[2Jthe stage\r\ndid not let go " + 1000 * "x"))
    assert said.startswith(" [2Jthe stage  did not let go xxx") and said.endswith("x...")
    assert len(said) == LONGEST_REASON and said.isprintable()
