"""Links over two relays of which one fails: every tensor arrives, once and whole, by the other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from tests.support.faulty_relay import LAZY, Faulty
from tests.support.links import SECONDS, content, eventually, key, quick
from tests.support.pki import new_authority, new_node
from tests.support.relayed_link import Ends, Served, relayed_link, relaying
from wire import delivery
from wire.telemetry import relay_path

LENGTH = 400_000
TENSORS = 8
AUTHORITY = new_authority()
LOWER, UPPER = new_node(AUTHORITY), new_node(AUTHORITY)
RELAYS = new_node(AUTHORITY), new_node(AUTHORITY)


def relay_of(number: int) -> AbstractAsyncContextManager[Served]:
    """A volunteer's relay."""
    return relaying(RELAYS[number], AUTHORITY, (LOWER, UPPER))


def linked(
    first: Served, one: int, second: Served, other: int = 0, left: Callable[[str], None] | None = None
) -> AbstractAsyncContextManager[Ends]:
    """A link whose both ends know two relays by these ports, the first of them better. `left` is told of
    those it leaves."""
    relays = [
        (relay_path(relay.identity.node_id), relay, port) for relay, port in ((first, one), (second, other))
    ]
    return relayed_link((LOWER, UPPER), relays, LENGTH, replace(quick(), on_relay_left=left))


@asynccontextmanager
async def failing(
    fault: str, left: Callable[[str], None] | None = None
) -> AsyncIterator[tuple[Ends, Faulty]]:
    """A ready link over two relays. The first one has this fault."""
    async with (
        relay_of(0) as first,
        relay_of(1) as second,
        Faulty(first.port, fault) as faulty,
        linked(first, faulty.port, second, left=left) as ends,
    ):
        await ends.lower.ready(SECONDS)
        yield ends, faulty


@pytest.mark.parametrize("fault", ["dies", "freezes", "drops", "repeats", "reorders", "corrupts"])
async def test_a_link_leaves_a_relay_that_fails(fault: str) -> None:
    async with failing(fault) as (ends, faulty):
        assert ends.lower.path == relay_path(RELAYS[0].node_id)
        await exchange(ends)
        assert faulty.spoilt > 0
        await eventually(lambda: ends.lower.path == relay_path(RELAYS[1].node_id))


async def test_relays_that_make_links_wait_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds at the same time, each on a link of its own. Who stays needs minutes."""
    # More than a busy machine adds, or they are left before they make anybody wait.
    monkeypatch.setattr(delivery, "OWED_SECONDS", 2.0)
    monkeypatch.setattr(delivery, "LEAST_SECONDS", 5.0)
    async with asyncio.TaskGroup() as links:
        for fault in LAZY:
            links.create_task(is_left(fault))


async def is_left(fault: str) -> None:
    left: list[str] = []
    async with failing(fault, left.append) as (ends, faulty):
        await exchange(ends, both=True)
        assert faulty.spoilt > 0, fault
        await eventually(lambda: left == [relay_path(RELAYS[0].node_id)])
        assert ends.lower.path == relay_path(RELAYS[1].node_id), fault


async def test_two_slow_relays_are_compared_and_nobody_is_named() -> None:
    left: list[str] = []
    async with (
        relay_of(0) as first,
        relay_of(1) as second,
        Faulty(first.port, "throttles") as one,
        Faulty(second.port, "throttles") as other,
        linked(first, one.port, second, other.port, left.append) as ends,
    ):
        await ends.lower.ready(SECONDS)
        await exchange(ends)
        assert one.spoilt + other.spoilt > 0 and left == []


async def test_slow_relays_carry_the_same_bytes() -> None:
    async with asyncio.TaskGroup() as links:
        for fault in ("delays", "throttles"):
            links.create_task(carries_all(fault))


async def carries_all(fault: str) -> None:
    async with failing(fault) as (ends, faulty):
        await exchange(ends)
        assert faulty.spoilt > 0, fault


async def exchange(ends: Ends, *, both: bool = False) -> None:
    """Tensors upward, or both ways; each arrives once, whole and in order."""
    for number in range(TENSORS):
        ends.lower.send(key(number), content(key(number), LENGTH))
        if both:
            assert ends.at_upper.link is not None
            ends.at_upper.link.send(key(number), content(key(number), LENGTH))
            await ends.at_lower.until(number + 1)
        await ends.at_upper.until(number + 1)
    assert ends.at_upper.arrived == [key(number) for number in range(TENSORS)]
    assert all(bytes(ends.at_upper.buffers[one]) == content(one, LENGTH) for one in ends.at_upper.arrived)
