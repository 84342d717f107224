"""Limits on a member's messages: a correct node stays below all of them, a flood does not."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from node.coordinator import sessions
from node.coordinator.sessions import (
    CALLS,
    HEARTBEATS_KEPT,
    MOST_LINKS,
    OTHERS_A_SECOND,
    PART_BYTES,
    ControlSession,
    Greetings,
    MessageLimits,
    SessionDesk,
    heartbeat_pause,
    measured,
)
from node.run_file.loader import default_config
from node.tuning.device_memory import GIB
from tests.support.control_handler import NobodyAsks
from tests.support.pki import hello
from wire.figures import LinkFigures
from wire.messages import Heartbeat, Hello, NodeMessage, Ready, Vote
from wire.messages_proto import node_message_to_proto
from wire.telemetry import MOST_SPANS, SPAN_COLUMNS, Span, SpanColumns, StepSpans, Telemetry

CONFIG = default_config(["coordinator.heartbeat_seconds=1", "telemetry.trace=off"])
LINK = LinkFigures(target=0, bytes=1, bytes_received=1, retransmits=0, rejects=0, round_trip_seconds=0.0)


NAMES = SpanColumns(1, ["forged"] * 40_000, [()] * len(SPAN_COLUMNS))
"""Names without spans."""


def spans(step: int) -> StepSpans:
    return StepSpans(
        epoch=1,
        step=step,
        stage=0,
        clock_offset=0.0,
        clock_error=0.0,
        dropped=0,
        spans=(Span("pack", 0.0, 1.0),) * MOST_SPANS,
    )


def refusals(limits: MessageLimits, messages: list[NodeMessage], *, every: float) -> Iterator[str]:
    """Of messages that come so many seconds apart."""
    for at, one in enumerate(messages):
        why = limits.refusal(measured(node_message_to_proto(one)), every * at)
        if why is not None:
            yield why


def test_heartbeats_of_many_members_come_less_often_but_some_in_every_silence() -> None:
    settings = replace(CONFIG.coordinator, heartbeat_seconds=2.0, silent_seconds=14.0)
    assert [heartbeat_pause(members, settings) for members in (1, 500, 750, 10_000)] == [2.0, 2.0, 3.0, 4.0]
    slow = replace(settings, heartbeat_seconds=5.0)
    assert heartbeat_pause(10_000, slow) == 5.0, "never more often than the run file says"


def test_a_correct_node_is_never_refused() -> None:
    limits = MessageLimits(replace(CONFIG, telemetry=replace(CONFIG.telemetry, trace="all")))
    telemetry = Telemetry(epoch=1, links=(LINK,) * MOST_LINKS, seconds={"forward": 1.0})
    heartbeats: list[NodeMessage] = [Heartbeat(telemetry=telemetry)] * 1000
    assert [*refusals(limits, heartbeats, every=0.5)] == []
    votes: list[NodeMessage] = [Vote(epoch=1, step=2, norms=dict.fromkeys(range(100), 1.0), loss=2.0)] * 1000
    assert [*refusals(limits, votes, every=0.01)] == []
    assert [*refusals(limits, [spans(step) for step in range(100)], every=0.2)] == []


def test_heartbeats_queued_during_an_outage_are_accepted_at_once() -> None:
    assert [*refusals(MessageLimits(CONFIG), [Heartbeat(telemetry=Telemetry())] * 300, every=0.0)] == []


def test_a_flood_is_refused_from_its_first_message_on() -> None:
    links: list[NodeMessage] = [Heartbeat(telemetry=Telemetry(links=(LINK,) * 4000))] * 20
    for flood in (links, [spans(2)] * 20):
        assert len([*refusals(MessageLimits(CONFIG), flood, every=0.0)]) == 20


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Heartbeat(telemetry=Telemetry()), "more heartbeat messages"),
        (Ready(epoch=1, telemetry=Telemetry()), "more ready messages"),
        (spans(1), "more spans than steps can have"),
        (replace(spans(1), spans=NAMES), "more spans than steps can have"),
    ],
)
def test_more_than_a_node_has_reason_to_send_is_refused(message: NodeMessage, why: str) -> None:
    limits = MessageLimits(replace(CONFIG, telemetry=replace(CONFIG.telemetry, trace="all")))
    assert next(refusals(limits, [message] * 1000, every=0.001)).startswith(why)


def test_large_messages_come_less_often() -> None:
    """Reading 200 a second of the largest votes took one member most of the coordinator's event loop."""
    rows = MessageLimits(replace(CONFIG, pipeline=replace(CONFIG.pipeline, groups=100)))
    vote = Vote(epoch=1, step=2, norms={}, loss=None, group_losses=dict.fromkeys(range(8000), 1.0))
    size = node_message_to_proto(vote).ByteSize()
    assert [*refusals(rows, [vote] * 20, every=0.5)] == []
    count = 100
    taken = count - len([*refusals(rows, [vote] * count, every=0.005)])
    assert taken * size <= PART_BYTES * (HEARTBEATS_KEPT + OTHERS_A_SECOND * 0.005 * count)


def test_reports_name_the_links_that_a_stage_can_have() -> None:
    report = Ready(epoch=1, telemetry=Telemetry(links=(LINK,) * (MOST_LINKS + 1)))
    (why,) = refusals(MessageLimits(CONFIG), [report], every=0.0)
    assert "5 links" in why
    rows = MessageLimits(replace(CONFIG, pipeline=replace(CONFIG.pipeline, groups=4)))
    assert [*refusals(rows, [report], every=0.0)] == [], "each other row is one link more"


def test_connections_are_held_up_when_they_come_too_often() -> None:
    limits = MessageLimits(CONFIG)
    taken = [limits.connections.take(0.1 * at) for at in range(100)]
    assert 20 <= sum(taken) <= 30


async def test_a_node_that_comes_with_other_devices_each_time_has_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a large model's stages need on them takes the coordinator seconds to estimate."""
    monkeypatch.setattr(sessions, "RECONNECT_SECONDS", 0.0)
    desk = SessionDesk(NobodyAsks(), lambda: MessageLimits(CONFIG), relays=True)
    first = hello("")

    async def comes(node_id: str, host_bytes: int) -> bool:
        async def say() -> Hello:
            return replace(first, hardware=replace(first.hardware, host_bytes=host_bytes))

        try:
            return isinstance(await desk.greet(node_id, "127.0.0.1", say), ControlSession)
        except TimeoutError:
            return False

    assert all([await comes("node-a", 0) for _ in range(10)])
    came = [await comes("node-b", GIB * number) for number in range(8)]
    assert came == [True] * 4 + [False] * 4
    assert await comes("node-b", 3 * GIB), "as it came last"


@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_a_kind_are_served_at_its_rate(kind: str) -> None:
    limits, (rate, burst) = MessageLimits(CONFIG), CALLS[kind]
    size = max(1, int(burst / 10))
    assert [limits.serves(kind, size, 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert not limits.serves(kind, size, 0.9 * size / rate)
    assert limits.serves(kind, size, 1.1 * size / rate)
    assert limits.serves("batch", 1, 0.0)


async def test_a_newer_session_that_ends_first_does_not_trouble_the_older_one() -> None:
    greetings, never = Greetings(), asyncio.Event()

    async def greet() -> None:
        async with greetings.newest("node"):
            await never.wait()

    older = asyncio.create_task(greet())
    await asyncio.sleep(0)
    async with greetings.newest("node"):
        assert len(greetings.waiting) == 1
    with pytest.raises(TimeoutError):
        await older
    assert not greetings.waiting


async def test_an_address_that_is_none_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said = hello("a\n12:00:00 ERROR node.coordinator: forged\x1b[31m" + "x" * 10_000)

    async def say() -> Hello:
        return said

    desk = SessionDesk(NobodyAsks(), relays=True)
    session = await desk.greet("node-a", "127.0.0.1", say)
    assert isinstance(session, ControlSession) and session.address == ""
    (line,) = caplog.messages
    assert line.isprintable() and len(line) < 200 and "forged" in line
