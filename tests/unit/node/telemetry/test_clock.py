"""Time accounting, whose kinds sum to wall time, and a node's clock against the coordinator's."""

from threading import Barrier, Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.telemetry.clock import MOST_REPLIES, ClockSync, SpanRing, StageClock, TimeKind, difference


class InventedClock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_every_moment_goes_to_the_running_kind() -> None:
    clock = InventedClock()
    stage = StageClock(clock)
    clock.advance(1)
    assert stage.switch(TimeKind.FORWARD) is TimeKind.WAIT_COORDINATOR
    clock.advance(2)
    assert stage.switch(TimeKind.WAIT_DOWNSTREAM) is TimeKind.FORWARD
    clock.advance(4)
    assert stage.switch(TimeKind.FORWARD) is TimeKind.WAIT_DOWNSTREAM
    clock.advance(8)

    expected = dict.fromkeys(TimeKind, 0.0)
    expected |= {TimeKind.WAIT_COORDINATOR: 1, TimeKind.FORWARD: 10, TimeKind.WAIT_DOWNSTREAM: 4}
    assert stage.snapshot() == expected
    assert stage.snapshot() == expected, "taking a snapshot must change nothing"


def test_a_wait_is_for_votes_as_long_as_the_coordinator_says_and_in_no_report_before() -> None:
    clock, ring = InventedClock(), SpanRing()
    stage = StageClock(clock, TimeKind.FORWARD)
    stage.record(ring)
    clock.advance(1)
    stage.switch(TimeKind.WAIT_COORDINATOR)
    clock.advance(8)
    assert sum(stage.settled().values()) == 1 and sum(stage.snapshot().values()) == 9
    stage.waited_for_votes(5)
    clock.advance(2)
    stage.switch(TimeKind.OPTIMIZER)
    spent = {TimeKind.FORWARD: 1.0, TimeKind.WAIT_VOTES: 5.0, TimeKind.WAIT_COORDINATOR: 5.0}
    assert stage.settled() == stage.snapshot() == {**dict.fromkeys(TimeKind, 0.0), **spent}
    assert [(span.kind, span.seconds) for span in ring.take()[0]] == list(spent.items())
    # An answer that comes again, or says more than there was, moves no other time.
    stage.waited_for_votes(100)
    clock.advance(1)
    stage.switch(TimeKind.WAIT_COORDINATOR)
    clock.advance(3)
    stage.waited_for_votes(100)
    assert stage.snapshot()[TimeKind.WAIT_VOTES] == 8 and stage.snapshot()[TimeKind.OPTIMIZER] == 1


def test_spent_restores_the_previous_kind_also_nested_and_after_an_error() -> None:
    clock = InventedClock()
    stage = StageClock(clock, TimeKind.BACKWARD)
    with pytest.raises(ZeroDivisionError), stage.spent(TimeKind.ENCODE):
        clock.advance(1)
        with stage.spent(TimeKind.WAIT_UPSTREAM):
            clock.advance(2)
        clock.advance(4)
        _ = 1 / 0
    clock.advance(8)

    times = stage.snapshot()
    assert times[TimeKind.ENCODE] == 5
    assert times[TimeKind.WAIT_UPSTREAM] == 2
    assert times[TimeKind.BACKWARD] == 8


@given(st.lists(st.tuples(st.sampled_from(TimeKind), st.integers(0, 10**9)), max_size=50))
def test_kinds_sum_to_wall_time(switches: list[tuple[TimeKind, int]]) -> None:
    clock = InventedClock(0.0)
    stage = StageClock(clock)
    for kind, ticks in switches:
        stage.switch(kind)
        # Multiples of 2**-20 s, so that sums are exact and equality can be asked for.
        clock.advance(ticks * 2.0**-20)
    assert sum(stage.snapshot().values()) == clock.now


def test_snapshots_from_another_thread_sum_to_wall_time_and_never_go_back() -> None:
    """The clock ticks once a reading, so a reading that is lost or counted twice shows in the sum."""
    ticks = 0

    def tick() -> float:
        nonlocal ticks
        ticks += 1
        return float(ticks)

    stage = StageClock(tick)
    begin, done = Barrier(2, timeout=60), Event()

    def compute() -> None:
        begin.wait()
        for _ in range(5000):
            with stage.spent(TimeKind.FORWARD), stage.spent(TimeKind.ENCODE):
                pass
        done.set()

    thread = Thread(target=compute)
    thread.start()
    begin.wait()
    previous = stage.snapshot()
    snapshots = 1
    while not done.is_set():
        times = stage.snapshot()
        snapshots += 1
        assert min(difference(times, previous).values()) >= 0
        assert sum(times.values()) > sum(previous.values())
        previous = times
    thread.join(timeout=60)
    assert not thread.is_alive()

    # One reading at the start, four a round, one a snapshot, and this one; the first reading is time zero.
    assert sum(stage.snapshot().values()) == 4 * 5000 + snapshots + 1


def test_nothing_is_known_before_the_first_answer() -> None:
    sync = ClockSync()
    assert not sync.known and sync.offset == sync.error == 0.0
    sync.answer(sent=5.0, received=4.0, at=1000.0)
    assert not sync.known, "an answer cannot come before its question"


def test_the_answer_with_the_least_round_trip_counts() -> None:
    sync = ClockSync()
    sync.answer(sent=10.0, received=11.0, at=1010.9)
    sync.answer(sent=12.0, received=12.1, at=1012.05)
    sync.answer(sent=14.0, received=15.0, at=1014.0)
    assert sync.offset == pytest.approx(1000.0)
    assert sync.error == pytest.approx(0.05)


def test_old_answers_are_forgotten_so_that_drift_does_not_add_up() -> None:
    sync = ClockSync()
    sync.answer(sent=0.0, received=0.0, at=1.0)
    for second in range(MOST_REPLIES):
        sync.answer(sent=second, received=second + 0.5, at=second + 2.25)
    assert sync.offset == pytest.approx(2.0)


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=40),
    st.floats(-1e9, 1e9),
)
def test_the_error_bounds_the_truth(answers: list[tuple[float, float, float]], true_offset: float) -> None:
    """Whatever the two ways take, as long as the clocks do not drift."""
    sync = ClockSync()
    for sent, there, back in answers:
        sync.answer(sent=sent, received=sent + there + back, at=sent + there + true_offset)
    assert abs(sync.offset - true_offset) <= sync.error + 1e-5
