"""The line's meter measures the most that all links of a machine carry together."""

import pytest

from wire.line_meter import LEAST_SPANS, SPANS, Line, LineMeter

RATE = 1000.0


def test_nothing_is_known_before_a_span_was_whole() -> None:
    meter = LineMeter()
    assert meter.rate(9.0) == 0.0
    meter.carried(500, 10.0, 10.5)
    assert meter.rate(10.9) == 0.0
    assert meter.rate(12.0) == 500.0


def test_links_that_take_turns_show_the_line_and_links_of_their_own_the_sum() -> None:
    shared, own = LineMeter(), LineMeter()
    for i in range(40):
        start, end = 0.25 * i, 0.25 * (i + 1)
        shared.carried(250, start, end)  # one link, then the other
        own.carried(250, start, end)
        own.carried(250, start, end)
    assert shared.rate(20.0) == pytest.approx(RATE)
    assert own.rate(20.0) == pytest.approx(2 * RATE)


def test_pauses_do_not_lower_the_most() -> None:
    meter = LineMeter()
    for i in range(30):
        meter.carried(2000, 10.0 * i, 10.0 * i + 2.0)
    assert meter.rate(400.0) == pytest.approx(RATE)


def test_what_took_long_counts_where_it_was_carried() -> None:
    meter = LineMeter()
    meter.carried(4000, 0.5, 4.5)
    assert meter.rate(9.0) == pytest.approx(RATE)


def test_links_whose_tensors_take_long_count_together() -> None:
    """Each acknowledgement covers four seconds, and those of the two links take turns."""
    meter = LineMeter()
    for i in range(20):
        meter.carried(2000, 4.0 * i, 4.0 * i + 4.0)
        meter.carried(2000, 4.0 * i - 2.0, 4.0 * i + 2.0)
    assert meter.rate(90.0) == pytest.approx(RATE)


def test_a_burst_that_no_other_span_repeats_does_not_count() -> None:
    meter = LineMeter()
    for i in range(40):
        meter.carried(50_000 if i == 20 else 1000, float(i), i + 0.9)
    assert meter.rate(60.0) == pytest.approx(RATE)


def test_a_line_that_became_slower_is_known_after_its_newest_spans() -> None:
    meter = LineMeter()
    for i in range(10):
        meter.carried(5000, float(i), i + 0.9)
    for i in range(10, 10 + SPANS):
        meter.carried(1000, float(i), i + 0.9)
    assert meter.rate(500.0) == pytest.approx(RATE)


@pytest.mark.parametrize("step", [8.0, 0.5, 200.0])
def test_a_line_that_became_slower_is_known_after_two_steps(step: float) -> None:
    """Of a step's seconds the line is full in the first half, and half full in the second."""
    meter = LineMeter()

    def steps(first: float, count: int, rate: float) -> float:
        seconds = count * step
        for number in range(count):
            meter.step_begins(first + number * step)
            begin, half = first + number * step, step / 2
            spans = max(1, round(half))
            for span in range(spans):
                at = begin + span * half / spans
                meter.carried(round(rate * half / spans), at, at + half / spans)
            meter.carried(round(rate * half / 2), begin + half, begin + step)
        return first + seconds

    count = max(4, round(30 / step))
    now = steps(0.0, count, 5 * RATE)
    full = meter.rate(now)
    now = steps(now, max(2, round(LEAST_SPANS / step) + 1), RATE)
    meter.step_begins(now)
    assert meter.rate(now + 1.0) == pytest.approx(full / 5, rel=0.05)
    assert full == pytest.approx(5 * RATE, rel=0.3), "a step shorter than a span shows its mean"


@pytest.mark.parametrize("start", [-1e9, 5.0])
def test_clocks_that_are_off_take_no_room(start: float) -> None:
    meter = LineMeter()
    meter.carried(1000, start, 4.0)
    assert 0.0 <= meter.rate(1e9) <= RATE


def test_an_upload_that_is_set_is_no_measurement() -> None:
    line = Line(most_up=123.0)
    line.sent.carried(1000, 0.0, 0.9)
    line.received.carried(1000, 0.0, 0.9)
    assert line.up(9.0) == 123.0 and line.down(9.0) == RATE
