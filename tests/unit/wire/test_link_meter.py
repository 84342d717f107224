"""The meters of a link and of a line: the rate that bytes were carried at, whatever the pauses."""

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest

from wire.figures import FlowFigures, LinkFigures
from wire.frames import HEADER_BYTES, MOST_FRAME_BYTES, MOST_PIECES, PAYLOAD_BYTES, Frame, pack_frame
from wire.line_meter import LEAST_SPANS, SPANS, Line, LineMeter
from wire.link_meter import LinkMeter
from wire.link_state import LinkSettings, LinkState
from wire.pacing import BURST_SECONDS, LEAST_PIECE, YIELD_SECONDS, YIELD_TIMES, BesideTraining, Pacer
from wire.spec import Direction, TensorKey

RATE = 1000.0
ROUND_TRIP = 0.3


def carry(meter: LinkMeter, tensors: list[tuple[float, int]], rate: float = RATE) -> float:
    """Queue (when, bytes) on a link of `rate`, acknowledge each in its time; gives the time of the last."""
    free, total, news = 0.0, 0, []
    events: list[tuple[float, int, int]] = []
    for at, size in tensors:
        total += size
        free = max(free, at) + size / rate
        events.append((at, 0, total))
        news.append(free + ROUND_TRIP)
        events.append((free + ROUND_TRIP, 1, total))
    for now, kind, end in sorted(events):
        if kind == 0:
            meter.queued(end, now)
        else:
            meter.acknowledged(end, round_trip=ROUND_TRIP, now=now)
    return news[-1]


def test_nothing_is_known_before_anything_was_sent() -> None:
    meter = LinkMeter()
    assert (meter.capacity, meter.busy_seconds(9.0)) == (0.0, 0.0)
    meter.acknowledged(0, round_trip=0.1, now=1.0)
    assert (meter.capacity, meter.busy_seconds(9.0)) == (0.0, 0.0)


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.1, 0.5, 100.0])
def test_the_rate_is_the_links_however_far_apart_tensors_are(gap: float) -> None:
    """100 bytes take 0.1 s: gaps below that queue up, and with those below 0.4 s several are on their way."""
    meter = LinkMeter()
    carry(meter, [(gap * i, 100) for i in range(50)])
    assert meter.capacity == pytest.approx(RATE)


def test_bursts_of_many_sizes() -> None:
    draw = random.Random(7)
    meter = LinkMeter()
    carry(meter, [(2.0 * (i // 4), draw.randrange(1, 900)) for i in range(200)])
    assert meter.capacity == pytest.approx(RATE)


def test_an_acknowledgement_of_several_tensors_counts_all() -> None:
    meter = LinkMeter()
    for i in range(4):
        meter.queued(500 * (i + 1), 0.0)
    meter.acknowledged(1700, round_trip=ROUND_TRIP, now=1.5 + ROUND_TRIP)  # three whole tensors
    meter.acknowledged(2000, round_trip=ROUND_TRIP, now=2.0 + ROUND_TRIP)
    assert meter.capacity == pytest.approx(RATE)


def test_busy_time_is_that_in_which_something_waits() -> None:
    meter = LinkMeter()
    end = carry(meter, [(10.0 * i, 2000) for i in range(3)])
    assert meter.busy_seconds(end + 50) == pytest.approx(3 * (2.0 + ROUND_TRIP))
    meter.queued(10**6, end + 60)
    assert meter.busy_seconds(end + 65) == pytest.approx(3 * (2.0 + ROUND_TRIP) + 5)


def test_what_is_acknowledged_late_counts_from_when_it_had_arrived() -> None:
    at_once, late = LinkMeter(), LinkMeter()
    for meter in (at_once, late):
        meter.queued(500, 0.0)
    arrived = [(500, 0.5 + ROUND_TRIP), (1500, 4.0 + ROUND_TRIP), (2500, 5.0 + ROUND_TRIP)]
    at_once.acknowledged(*arrived[0][:1], round_trip=ROUND_TRIP, now=arrived[0][1])
    for meter in (at_once, late):
        meter.queued(1500, 3.0)
        meter.queued(2500, 3.0)
    seen = late.busy_seconds(5.0)
    for end, now in arrived[1:]:
        at_once.acknowledged(end, round_trip=ROUND_TRIP, now=now)
    for end, now in arrived:
        late.acknowledged(end, round_trip=ROUND_TRIP, now=now)
    assert late.capacity == at_once.capacity == pytest.approx(RATE)
    assert at_once.busy_seconds(9.0) == pytest.approx(0.5 + 2.0 + 2 * ROUND_TRIP)
    assert late.busy_seconds(9.0) == seen == 5.0, "never less than was said before"
    for meter in (at_once, late):
        meter.queued(3500, 20.0)
        meter.acknowledged(3500, round_trip=ROUND_TRIP, now=21.0 + ROUND_TRIP)
    gain = at_once.busy_seconds(30.0) - (0.5 + 2.0 + 2 * ROUND_TRIP)
    assert gain == pytest.approx(1.0 + ROUND_TRIP)


def test_a_link_that_changes_is_followed() -> None:
    meter = LinkMeter()
    end = carry(meter, [(0.0, 1000)] * 20)
    meter.queued(30_000, end)
    meter.acknowledged(30_000, round_trip=ROUND_TRIP, now=end + ROUND_TRIP + 100.0)
    assert meter.capacity == pytest.approx(100.0)


def test_what_arrives_within_a_round_trip_takes_no_time() -> None:
    """The next tensor's time tells; a rate of nothing by nothing is not known."""
    meter = LinkMeter()
    meter.queued(500, 0.0)
    meter.acknowledged(500, round_trip=0.3, now=0.2)
    assert meter.capacity == 0.0


def test_an_outage_is_not_the_links_speed() -> None:
    meter = LinkMeter()
    end = carry(meter, [(0.0, 1000), (0.0, 1000)])
    meter.queued(4000, end)
    meter.interrupted(end + 0.1)
    meter.interrupted(end + 100)  # it is back, and the tensor goes again
    meter.acknowledged(4000, round_trip=ROUND_TRIP, now=end + 100 + 2.0 + ROUND_TRIP)
    assert meter.capacity == pytest.approx(RATE)


class Bucket:
    """A link whose shaper lets so much idle time be made up for, on a line ten times as fast."""

    def __init__(self, rate: float, saves: float) -> None:
        self.rate, self.saves = rate, saves
        self.meter = LinkMeter()
        self._held = rate * saves
        self._free = 0.0
        self._total = 0

    def send(self, at: float, sizes: list[int]) -> None:
        """Tensors that are queued at once, and acknowledged as they arrive."""
        start = max(self._free, at)
        self._held = min(self.rate * self.saves, self._held + self.rate * (start - self._free))
        self._free = start
        for size in sizes:
            self._total += size
            self.meter.queued(self._total, at)
        end = self._total - sum(sizes)
        for size in sizes:
            end += size
            # The bucket gains while it is emptied.
            fast = min(size, self._held * 10 / 9)
            seconds = fast / (10 * self.rate) + (size - fast) / self.rate
            self._held -= fast - self.rate * (fast / (10 * self.rate))
            self._free += seconds
            self.meter.acknowledged(end, round_trip=ROUND_TRIP, now=self._free + ROUND_TRIP)


@pytest.mark.parametrize("saves", [0.004, 0.05])
@pytest.mark.parametrize("tensor_seconds", [0.008, 0.02, 0.1])
def test_what_a_bucket_had_saved_up_is_not_the_links_rate(saves: float, tensor_seconds: float) -> None:
    """Once tensors have followed each other, single ones, which seem faster, change nothing any more."""
    link = Bucket(1e6, saves)
    size = round(1e6 * tensor_seconds)
    for i in range(20):
        link.send(float(i), [size])
    link.send(20.0, [size] * 50)
    assert link.meter.capacity == pytest.approx(1e6, rel=0.1)
    for i in range(500):
        link.send(30.0 + i, [size])
    assert link.meter.capacity == pytest.approx(1e6, rel=0.1)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_single_tensors_lower_a_links_rate_and_never_raise_it(factor: float) -> None:
    link = Bucket(1e6, 0.004)
    link.send(0.0, [50_000] * 50)
    link.rate *= factor
    for i in range(100):
        link.send(10.0 + i, [50_000])
    assert link.meter.capacity == pytest.approx(1e6 * min(1.0, factor), rel=0.1)
    link.send(200.0, [50_000] * 600)
    assert link.meter.capacity == pytest.approx(1e6 * factor, rel=0.1)


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


# ---- `wire.link_state`: what a link counts of the frames that it sends


TOTAL = PAYLOAD_BYTES + 100
"""Of a tensor of two frames."""
KEY = TensorKey(1, 0, 0, 0, Direction.GRADIENT)


def frame(number: int, key: TensorKey = KEY) -> bytes:
    """The first or the second of the tensor's frames."""
    offset = number * PAYLOAD_BYTES
    payload = np.zeros(min(PAYLOAD_BYTES, TOTAL - offset), dtype=np.uint8)
    return pack_frame(
        Frame(session=1, sequence=number, key=key, total=TOTAL, offset=offset, payload=payload.data), tag=0
    )


def created(settings: LinkSettings) -> LinkState:
    return LinkState.create(
        run_id="run",
        epoch=1,
        stage=0,
        peer_stage=1,
        settings=settings,
        expect=lambda key: None,
        on_tensor=lambda key, buffer: None,
    )


def test_bytes_and_elements_of_a_direction_grow_by_whole_tensors() -> None:
    """A report between two frames of a tensor must not show bits an element that no codec has."""
    state = created(LinkSettings())
    state.elements.append(7)
    state.frame_sent(frame(0), again=False)
    assert state.figures == LinkFigures(bytes=HEADER_BYTES + PAYLOAD_BYTES)
    state.frame_sent(frame(0), again=True)
    state.frame_sent(frame(1), again=False)
    whole = TOTAL + 2 * HEADER_BYTES
    size = whole + HEADER_BYTES + PAYLOAD_BYTES
    assert state.figures.flows == (FlowFigures(direction=KEY.direction, codec="", bytes=size, elements=7),)
    assert state.frames_sent == 3 and not state.elements


def test_activations_of_held_out_samples_are_counted_apart() -> None:
    state = created(LinkSettings(held_out_from=KEY.microbatch))
    state.elements.append(7)
    for number in (0, 1):
        state.frame_sent(frame(number, KEY._replace(direction=Direction.ACTIVATION)), again=False)
    size = TOTAL + 2 * HEADER_BYTES
    assert state.figures.flows == (
        FlowFigures(direction=Direction.HELD_OUT, codec="", bytes=size, elements=7),
    )
    assert state.figures.held_out_bytes == size


@pytest.mark.parametrize(
    ("window_pieces", "pieces"), [(1, 1), (8, 2), (64, MOST_PIECES), (4096, MOST_PIECES)]
)
def test_a_frame_of_a_fast_line_takes_a_quarter_of_the_window_at_most(
    window_pieces: int, pieces: int
) -> None:
    state = created(LinkSettings(window_bytes=window_pieces * PAYLOAD_BYTES))
    state.meter.queued(10**10, 0.0)
    state.meter.acknowledged(10**10, round_trip=0.0, now=1.0)
    state.sender.send(KEY, bytes(2 * MOST_FRAME_BYTES))
    state.sender.acknowledge(0, credit_limit=window_pieces)
    data = state.next_frame(0.0)
    assert data is not None and len(data) == HEADER_BYTES + pieces * PAYLOAD_BYTES


# ---- the bandwidth limit, with an invented clock


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

    async def sleep(self, seconds: float) -> None:
        """Sleeps of several tasks overlap."""
        until = self.now + seconds
        self.meanwhile()
        await asyncio.sleep(0)
        self.now = max(self.now, until)


def test_of_many_that_may_wait_others_wait_for_one() -> None:
    # Those that wait for their turn do so in real time.
    clock, own, waited, sent = Clock(), 0.005, list[float](), 0
    pacer = Pacer(1e6, ahead=own)
    size, turns, asked = int(own * pacer.rate), list[float | None](), list[float]()

    def gives_up(seconds: float) -> bool:
        asked.append(seconds)
        return False

    def meanwhile() -> None:
        waited.append(pacer.reserve(1, clock.now))
        turns.append(pacer.reserve_behind(size, clock.read, gives_up))

    clock.meanwhile = meanwhile
    for _ in range(9):
        seconds = pacer.reserve_behind(size, clock.read, clock.wait)
        assert seconds is not None
        clock.now += seconds
        sent += 1
    assert waited and max(waited) <= own
    assert sent >= 4 and {*turns} == {None} and {*asked} == {0.0}, "they take turns"


def test_what_may_wait_gets_a_part_of_a_busy_line_and_gives_up_when_it_is_told() -> None:
    pacer, clock, own = Pacer(1e6), Clock(), 0.02
    size, began = int(own * pacer.rate), clock.now
    pacer.reserve(1000 * size, began)
    left = pacer.reserve_behind(size, clock.read, clock.wait)
    assert left is not None and left > own and clock.now - began >= YIELD_TIMES * own * (1 - 1e-9)
    assert pacer.reserve_behind(size, clock.read, lambda seconds: False) is None


async def test_a_tensor_waits_for_one_small_piece_of_other_traffic_however_many_transfers_there_are() -> None:
    pacer, clock, waits = Pacer(1e6), Clock(), list[float]()
    beside = BesideTraining(pacer, lambda: False, clock.read, clock.sleep)
    clock.meanwhile = lambda: waits.append(pacer.reserve(1, clock.now))
    began, own = clock.now, pacer.piece / pacer.rate
    await asyncio.gather(*(beside.pass_through(20 * pacer.piece) for _ in range(4)))
    # For one piece, beside the one on the line, and for the bytes of these tensors. It would be four.
    assert len(waits) >= 4 * 20 - 2 and max(waits) <= 2 * own + len(waits) / pacer.rate
    assert clock.now - began == pytest.approx(4 * 20 * own, rel=0.03), "the line is never idle"


async def test_other_traffic_yields_to_tensors_but_not_for_ever() -> None:
    clock = Clock()
    began = clock.now
    await BesideTraining(None, lambda: True, clock.read, clock.sleep).pass_through(1)
    assert clock.now - began == pytest.approx(YIELD_SECONDS)


async def test_on_a_slow_line_a_piece_waits_several_times_as_long_as_it_takes() -> None:
    clock, busy_for = Clock(), 3 * YIELD_SECONDS
    began, slow = clock.now, Pacer(LEAST_PIECE / YIELD_SECONDS)
    beside = BesideTraining(slow, lambda: clock.now - began < busy_for, clock.read, clock.sleep)
    await beside.pass_through(LEAST_PIECE)
    assert clock.now - began >= busy_for
