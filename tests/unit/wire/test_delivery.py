"""`wire.delivery`: when a connection on which no frame arrives is given up."""

import pytest

from wire.delivery import LEAST_SECONDS, PATIENCE, Delivery, Service

LEAST = 10.0


def test_frames_that_are_written_and_not_acknowledged_are_a_stall() -> None:
    delivery = Delivery(LEAST)
    assert not delivery.stalled(1000.0)  # nothing is under way
    delivery.written(again=False, now=1000.0)
    assert not delivery.stalled(1000.0 + LEAST)
    assert delivery.stalled(1000.1 + LEAST)
    assert not delivery.stalled(2000.0)  # said once


def test_a_frame_that_is_sent_again_does_not_start_the_wait_again() -> None:
    delivery = Delivery(LEAST)
    delivery.written(again=False, now=0.0)
    delivery.written(again=True, now=9.0)
    assert delivery.stalled(LEAST + 0.1)
    delivery.written(again=False, now=20.0)
    delivery.written(again=False, now=29.0)  # the stream takes more
    assert not delivery.stalled(20.0 + 2 * LEAST + 0.1)


def test_acknowledgements_keep_a_connection_and_the_last_one_ends_the_wait() -> None:
    delivery = Delivery(LEAST)
    for number in range(2):
        delivery.written(again=False, now=float(number))
    for now in (9.0, 18.0, 27.0):
        assert not delivery.stalled(now)
        delivery.acknowledged(all_of_it=now == 27.0, now=now)
    assert not delivery.stalled(1e6)


def test_a_slow_link_is_waited_for_longer_after_each_stall_and_then_by_what_it_took() -> None:
    """A frame takes 25 s here."""
    delivery, began, stalls = Delivery(LEAST), 0.0, 0
    while True:
        delivery.connected()
        delivery.written(again=stalls > 0, now=began)
        assert stalls < 4
        if not delivery.stalled(began + 25.0):
            break
        began, stalls = began + 25.0, stalls + 1
    delivery.acknowledged(all_of_it=True, now=began + 25.0)
    assert stalls == 2 and delivery.limit == PATIENCE * 25.0
    delivery.written(again=False, now=1000.0)
    assert not delivery.stalled(1070.0)


def served(size: int, rate: float, wait: float, *, seconds: float = 30.0, pause: float = 0.1) -> list[float]:
    """When a relay counts as slow that carries frames of `size` bytes, each acknowledged before the next, at
    a rate and after a wait; looked at every half second."""
    service, now, slow = Service(), 0.0, []
    while now < seconds:
        service.written(size, now)
        end = now + size / rate + wait
        looks = [0.5 * look for look in range(int(2 * now) + 1, int(2 * end) + 1)]
        slow += [look for look in looks if service.is_slow(look)]
        service.acknowledged(all_of_it=True, now=end)
        now = end + pause
    return slow


@pytest.mark.parametrize("size", [1000, 64_000, 256_000])
@pytest.mark.parametrize("wait", [1.0, 2.0, 8.0])
def test_a_relay_that_waits_before_each_frame_is_slow_within_seconds(size: int, wait: float) -> None:
    wait *= max(1, size // 16_000)  # by the pieces that it reads
    assert served(size, 1e9, wait)[0] <= 4.0 + 2 * size / 125_000


@pytest.mark.parametrize("rate", [1.0, 1000.0, 20_000.0])
def test_a_relay_that_trickles_is_slow_within_seconds(rate: float) -> None:
    assert served(64_000, rate, 0.1)[0] <= 3.0


@pytest.mark.parametrize("size", [100, 64_000, 256_000])
@pytest.mark.parametrize(("rate", "wait"), [(125_000.0, 0.3), (1e6, 0.4), (1e9, 0.01)])
def test_a_relay_that_gives_what_it_owes_is_not_slow(size: int, rate: float, wait: float) -> None:
    assert served(size, rate, wait) == []


def test_frames_without_a_pause_count_by_their_rate() -> None:
    for rate, slow in ((30_000.0, True), (125_000.0, False)):
        service = Service()
        for second in range(60):
            service.written(int(rate), float(second))
            service.acknowledged(all_of_it=False, now=second + 0.9)
        assert service.is_slow(60.0) is slow


def test_one_stall_is_forgotten_and_a_new_connection_begins_anew() -> None:
    service = Service()
    service.written(1000, 0.0)
    assert not service.is_slow(LEAST_SECONDS - 0.1) and service.is_slow(LEAST_SECONDS + 0.1)
    service.connected()
    assert service.times(10.0) == 0.0 and not service.is_faster(100.0, 10.0)
    for number in range(4):
        assert service.is_faster(100.0, 10.0) is (number == 3)
        service.written(1000, 10.0 + number)
        service.acknowledged(all_of_it=True, now=10.1 + number)
    assert service.is_faster(100.0, 20.0) and not service.is_faster(0.5, 20.0)
