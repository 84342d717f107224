"""`wire.delivery`: when a connection on which no frame arrives is given up."""

from wire.delivery import PATIENCE, Delivery

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
