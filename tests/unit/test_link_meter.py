"""The link's meter: the rate that bytes were delivered at, whatever the pauses between them."""

import pytest

from wire.link_meter import LinkMeter

RATE = 1000.0
ROUND_TRIP = 0.3


def deliver(meter: LinkMeter, done: int, size: int, at: float, pieces: int = 1) -> tuple[int, float]:
    """Queue `size` bytes on an idle link of RATE at `at`; acknowledged in equal pieces. Gives total, end."""
    meter.queued(done, at)
    for piece in range(1, pieces + 1):
        here = done + size * piece // pieces
        now = at + (here - done) / RATE + ROUND_TRIP
        meter.acknowledged(here, idle=piece == pieces, round_trip=ROUND_TRIP, now=now)
    return done + size, at + size / RATE + ROUND_TRIP


def test_nothing_is_known_before_anything_was_sent() -> None:
    meter = LinkMeter()
    assert (meter.capacity, meter.busy_seconds(9.0)) == (0.0, 0.0)
    meter.acknowledged(0, idle=True, round_trip=0.1, now=1.0)
    assert (meter.capacity, meter.busy_seconds(9.0)) == (0.0, 0.0)


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_pauses_and_round_trips_do_not_count(pieces: int) -> None:
    meter, done, now = LinkMeter(), 0, 0.0
    for _ in range(5):
        done, now = deliver(meter, done, 2000, now, pieces)
        now += 100.0
    assert meter.capacity == pytest.approx(RATE)
    assert meter.busy_seconds(now) == pytest.approx(5 * (2.0 + ROUND_TRIP))


def test_a_link_that_changes_is_followed_within_its_busy_period() -> None:
    meter, now = LinkMeter(), 0.0
    meter.queued(0, now)
    done = 0
    for rate in (1000.0, 100.0):
        for _ in range(20):
            now += 1.0
            done += int(rate)
            meter.acknowledged(done, idle=False, round_trip=0.0, now=now)
        assert meter.capacity == pytest.approx(rate, rel=0.1)
    assert meter.busy_seconds(now + 1) == pytest.approx(41)


def test_what_arrives_within_a_round_trip_is_noise() -> None:
    meter = LinkMeter()
    meter.queued(0, 0.0)
    meter.acknowledged(500, idle=True, round_trip=0.3, now=0.3)
    assert meter.capacity == 0.0
    assert meter.busy_seconds(5.0) == 0.3


def test_an_outage_is_not_the_links_speed() -> None:
    meter = LinkMeter()
    done, now = deliver(meter, 0, 2000, 0.0)
    meter.queued(done, now)
    meter.interrupted(now + 0.1)
    meter.queued(done, now + 100)  # the connection is back, and the rest goes on
    meter.acknowledged(done + 2000, idle=True, round_trip=ROUND_TRIP, now=now + 102.3)
    assert meter.capacity == pytest.approx(RATE)
    assert meter.busy_seconds(now + 200) == pytest.approx(2.3 + 0.1 + 2.3)
