"""The bandwidth limit, with an invented clock."""

import asyncio
import time
from collections.abc import Callable

import pytest

from wire.pacing import BURST_SECONDS, LEAST_PIECE, YIELD_SECONDS, YIELD_TIMES, BesideTraining, Pacer


def test_the_rate_holds_for_any_sender() -> None:
    pacer, now, sent = Pacer(rate=1000.0), 100.0, 0
    while now < 110.0:
        now += pacer.reserve(50, now)
        sent += 50
    assert sent == pytest.approx(10_000, rel=0.02)


def test_an_idle_link_saves_up_one_burst_and_no_more() -> None:
    pacer = Pacer(rate=1000.0)
    assert pacer.reserve(50, 0.0) == 0.0
    waits = [pacer.reserve(10, 1000.0) for _ in range(8)]
    at_once = int(1000.0 * BURST_SECONDS / 10)
    assert waits[: at_once + 1] == [0.0] * (at_once + 1)
    assert waits[at_once + 1] > 0.0


def test_more_may_pass_at_once_where_that_is_allowed() -> None:
    pacer = Pacer(rate=1000.0, ahead=4.0)
    assert [pacer.reserve(1000, 10.0) for _ in range(6)] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_one_message_larger_than_a_burst_passes_and_is_paid_for_afterwards() -> None:
    pacer = Pacer(rate=1000.0)
    assert pacer.reserve(5000, 10.0) == 0.0
    assert pacer.reserve(1, 10.0) == pytest.approx(5.0 - BURST_SECONDS)


class Clock:
    """An invented clock, which only waits move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.meanwhile: Callable[[], None] = lambda: None
        """Called in each wait."""

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.meanwhile()
        self.now += max(seconds, 0.001)
        return True


def test_of_many_that_may_wait_others_wait_for_one() -> None:
    pacer, clock, own, waited, sent = Pacer(1e6), Clock(), 0.05, list[float](), 0
    size, turns = int(own * pacer.rate), list[float | None]()

    def meanwhile() -> None:
        waited.append(pacer.reserve(1, clock.now))
        turns.append(pacer.reserve_behind(size, clock.read, lambda seconds: False))

    clock.meanwhile = meanwhile
    for _ in range(9):
        seconds = pacer.reserve_behind(size, clock.read, clock.wait)
        assert seconds is not None
        clock.now += seconds
        sent += 1
    assert waited and max(waited) <= own
    assert sent >= 4 and {*turns} == {None}, "they take turns"


def test_what_may_wait_gets_a_part_of_a_busy_line_and_gives_up_when_it_is_told() -> None:
    pacer, clock, own = Pacer(1e6), Clock(), 0.02
    size, began = int(own * pacer.rate), clock.now
    pacer.reserve(1000 * size, began)
    left = pacer.reserve_behind(size, clock.read, clock.wait)
    assert left is not None and left > own and clock.now - began >= YIELD_TIMES * own * (1 - 1e-9)
    assert pacer.reserve_behind(size, clock.read, lambda seconds: False) is None


async def test_a_tensor_waits_for_one_small_piece_of_other_traffic_however_many_transfers_there_are() -> None:
    pacer = Pacer(1e6)
    beside = BesideTraining(pacer, lambda: False)
    async with asyncio.timeout(20.0):
        transfers = [asyncio.create_task(beside.pass_through(20 * pacer.piece)) for _ in range(4)]
        await asyncio.wait(transfers, timeout=5 * pacer.piece / pacer.rate)
        waits = pacer.reserve(1, time.monotonic())
        for transfer in transfers:
            transfer.cancel()
        await asyncio.gather(*transfers, return_exceptions=True)
    assert waits <= pacer.piece / pacer.rate


async def test_other_traffic_yields_to_tensors_but_not_for_ever() -> None:
    beside = BesideTraining(None, lambda: True)
    began = time.monotonic()
    async with asyncio.timeout(20.0):
        await beside.pass_through(1)
    assert time.monotonic() - began >= 0.9 * YIELD_SECONDS


async def test_on_a_slow_line_a_piece_waits_several_times_as_long_as_it_takes() -> None:
    began, busy_for = time.monotonic(), 3 * YIELD_SECONDS
    slow = Pacer(LEAST_PIECE / YIELD_SECONDS)
    beside = BesideTraining(slow, lambda: time.monotonic() - began < busy_for)
    async with asyncio.timeout(20.0):
        await beside.pass_through(LEAST_PIECE)
    assert time.monotonic() - began >= busy_for
