"""The window's plan: near the best that any even window gives, within memory, no wider than it must be."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.schedule.floor import LinkRate, Network, PipelineStep, chunk_shares
from node.schedule.schedule import Kind, held_activations, schedule
from node.schedule.simulation import simulate
from node.telemetry.events import StageCost, StepCosts
from node.tuning.window_plan import KEEP, TOLERANCE, StepMeasures, Windows, measured, plan_windows
from tests.support.examples import examples
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

PLENTY = 10**6


def measures(stages: int = 4, *, rate: float = math.inf, latency: float = 0.0) -> StepMeasures:
    """Forward 1 s, backward 2 s, ten bytes each way."""
    return StepMeasures(
        forward=(1.0,) * stages,
        backward=(2.0,) * stages,
        activation_bytes=10.0,
        gradient_bytes=10.0,
        links=(LinkRate(up=rate, down=rate, latency=latency),) * (stages - 1),
    )


def plan(
    given: StepMeasures, *, chunks: int = 1, microbatches: int = 32, most: int = PLENTY, current: Windows = ()
) -> Windows:
    held = (most,) * len(given.forward)
    return plan_windows(given, chunks=chunks, microbatches=microbatches, most_held=held, current=current)


def seconds(given: StepMeasures, windows: Windows, chunks: int = 1, microbatches: int = 32) -> float:
    stages, share = len(given.forward), given.head_share
    shares = chunk_shares(stages, chunks, share)
    return simulate(
        schedule(stages, chunks, microbatches, windows, head_first=share is not None),
        lambda chunk, _: given.forward[chunk % stages] * shares[chunk],
        lambda chunk, _: given.backward[chunk % stages] * shares[chunk],
        network=Network(stages, given.links, given.lines),
        sizes={Kind.FORWARD: given.activation_bytes, Kind.BACKWARD: given.gradient_bytes},
        swap=chunks == 1,
    ).total


def test_links_that_cost_nothing_need_no_window() -> None:
    assert plan(measures()) == (0, 0, 0)
    assert plan(measures(stages=1)) == ()


def test_a_round_trip_is_covered_by_compute() -> None:
    """9 s there and back against 3 s of compute a microbatch: three more in flight, one for caution and
    one for steps that are less even."""
    (first, *rest) = plan(measures(latency=4.5))
    assert 4 <= first <= 5
    assert all(4 <= window <= 5 for window in rest)
    assert seconds(measures(latency=4.5), (first, *rest)) < 0.5 * seconds(measures(latency=4.5), (0, 0, 0))


def test_a_link_that_its_window_made_slow_gets_a_wider_one() -> None:
    """30 s there and back, one tensor on its way: the link seems to take 30 s for each."""
    starved = measures(rate=10 / 30, latency=15.0)
    windows = plan(starved, current=(1, 1, 1))
    assert windows == plan(measures(latency=15.0))
    narrow = (5, 5, 5)
    assert min(windows) > max(narrow)
    assert seconds(starved, narrow) < 1.01 * seconds(starved, windows)


def test_a_slow_link_gets_the_widest_window() -> None:
    given = measures()
    given = replace(given, links=(LinkRate(), LinkRate(latency=9.0), LinkRate()))
    first, slow, last = plan(given)
    assert slow >= 5
    assert max(first, last) < slow


def test_memory_bounds_the_window() -> None:
    given = measures(latency=30.0)
    wide = plan(given)
    narrow = plan(given, most=9)
    held = [held_activations(order) for order in schedule(4, 1, 32, narrow)]
    assert max(held) <= 9 < held_activations(schedule(4, 1, 32, wide)[0])
    assert plan(given, most=1) == (0, 0, 0), "window 0 is what the placement was made for"


def test_a_window_as_good_as_the_plan_stays() -> None:
    given = measures(latency=4.5)
    best = plan(given)
    wider = tuple(window + 1 for window in best)
    assert seconds(given, wider) <= seconds(given, best) * (1 + KEEP)
    assert plan(given, current=wider) == wider
    held = held_activations(schedule(4, 1, 32, best)[0])
    assert held_activations(schedule(4, 1, 32, plan(given, current=wider, most=held))[0]) <= held
    assert plan(given, current=(0, 0, 0)) == best
    assert plan(given, current=(7,)) == best, "windows of another placement say nothing"


@settings(max_examples=examples(40))
@example(  # (0, 0, 2) makes a step longer than (0, 0, 0) does
    stages=4,
    chunks=1,
    microbatches=3,
    most=3,
    times=[1.0, 1.0, 4.0] + [1.0] * 7,
    rates=[2.0, 2.0, 6.0, 1.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0],
    latencies=[0.0, 0.0, 1.0, 0.0, 0.0],
    head_share=None,
)
@given(
    st.integers(2, 5),
    st.integers(1, 2),
    st.integers(1, 24),
    st.integers(1, 30),
    st.lists(st.floats(0.01, 10), min_size=10, max_size=10),
    st.lists(st.floats(0.5, 1000), min_size=10, max_size=10),
    st.lists(st.floats(0, 20), min_size=5, max_size=5),
    st.none() | st.floats(0, 1),
)
def test_any_plan_fits_and_is_near_the_best_that_fits(
    stages: int,
    chunks: int,
    microbatches: int,
    most: int,
    times: list[float],
    rates: list[float],
    latencies: list[float],
    head_share: float | None,
) -> None:
    head_first = head_share is not None
    hops = stages - 1 + head_first
    joints = stages - 1 + ((chunks > 1 or head_first) and stages > 2)
    given = StepMeasures(
        forward=tuple(times[:stages]),
        backward=tuple(times[5 : 5 + stages]),
        activation_bytes=20.0,
        gradient_bytes=50.0,
        links=tuple(LinkRate(up=rates[i], down=rates[5 + i], latency=latencies[i]) for i in range(joints)),
        head_share=head_share,
    )
    windows = plan(given, chunks=chunks, microbatches=microbatches, most=most)
    assert len(windows) == hops and min(windows) >= 0
    orders = schedule(stages, chunks, microbatches, windows, head_first=head_first)
    held = max(map(held_activations, orders))
    least = schedule(stages, chunks, microbatches, 0, head_first=head_first)
    assert held <= max(most, max(map(held_activations, least)))

    cautious = replace(
        given,
        links=tuple(
            LinkRate(up=link.up / 1.1, down=link.down / 1.1, latency=link.latency * 1.1)
            for link in given.links
        ),
    )

    def even(width: int) -> float:
        return seconds(cautious, (width,) * hops, chunks, microbatches)

    def fits(width: int) -> bool:
        orders = schedule(stages, chunks, microbatches, (width,) * hops, head_first=head_first)
        return all(held_activations(order) <= most for order in orders)

    best = min(even(width) for width in range(9) if width == 0 or fits(width))
    assert seconds(cautious, windows, chunks, microbatches) <= best * (1 + TOLERANCE) * (1 + 1e-9)
    settled = plan(given, chunks=chunks, microbatches=microbatches, most=most, current=windows)
    assert settled == windows or held > most, "the same measures change nothing"


@pytest.mark.parametrize("round_trip", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("mbit", [1000, 500, 300, 100, 30])
def test_planned_windows_reach_nine_tenths_of_the_floor(mbit: int, round_trip: float) -> None:
    """Four stages, 10 and 20 ms, a mebibyte each way: compute binds at most rates, links at the least."""
    link = LinkRate(up=mbit * 125e3, down=mbit * 125e3, latency=round_trip / 2)
    given = StepMeasures(
        forward=(0.01,) * 4,
        backward=(0.02,) * 4,
        activation_bytes=2.0**20,
        gradient_bytes=2.0**20,
        links=(link,) * 3,
    )
    floor = PipelineStep(
        microbatches=16,
        forward=given.forward,
        backward=given.backward,
        activation_bytes=given.activation_bytes,
        gradient_bytes=given.gradient_bytes,
        links=given.links,
    ).floor()
    windows = plan(given, microbatches=16)
    assert floor.share(seconds(given, windows, microbatches=16)) >= 0.9
    assert floor.share(seconds(given, (0, 0, 0), microbatches=16)) < 0.9, "what the plan is for"


MEGABIT = 0.956 * 125e3
"""Payload bytes a second."""


@pytest.mark.parametrize(
    ("stages", "line", "latency", "compute", "size", "microbatches"),
    [
        pytest.param(8, LinkRate(up=1000, down=200), 0.05, 0.005, 3.2e6, 16, id="the public meter, 3 bits"),
        pytest.param(8, LinkRate(up=1000, down=200), 0.05, 0.03, 4.7e6, 12, id="slower cards, 4.41 bits"),
        pytest.param(4, LinkRate(up=20, down=100), 0.01, 0.02, 1e6, 24, id="a home's upload"),
        pytest.param(4, LinkRate(up=50, down=50), 0.1, 0.1, 0.5e6, 24, id="far apart, the line half used"),
        pytest.param(3, LinkRate(up=1000, down=30), 0.0, 0.01, 2e6, 24, id="no round trip"),
        pytest.param(6, LinkRate(up=1000, down=1000), 0.05, 0.05, 1e6, 12, id="compute binds"),
    ],
)
def test_no_fixed_window_beats_the_plan_on_shared_lines(
    stages: int, line: LinkRate, latency: float, compute: float, size: float, microbatches: int
) -> None:
    """Each machine has one line for both neighbours, and links were measured at their share of it."""
    rate = LinkRate(up=line.up * MEGABIT, down=line.down * MEGABIT)
    share = min(rate.up, rate.down) / 2
    given = StepMeasures(
        forward=(compute,) * stages,
        backward=(2 * compute,) * stages,
        activation_bytes=size,
        gradient_bytes=size,
        links=(LinkRate(up=share, down=share, latency=latency),) * (stages - 1),
        lines=(rate,) * stages,
    )
    truth = replace(given, links=(LinkRate(latency=latency),) * (stages - 1))
    windows = plan(given, microbatches=microbatches)
    taken = seconds(truth, windows, microbatches=microbatches)
    fixed = [seconds(truth, (w,) * (stages - 1), microbatches=microbatches) for w in (0, 1, 2, 4, 8, 16)]
    assert taken <= min(fixed) * (1 + TOLERANCE)
    alone = plan(replace(given, lines=()), microbatches=microbatches)
    assert sum(windows) <= sum(alone), "as if each link had a line of its own"


def test_links_of_a_full_line_get_no_margin() -> None:
    """A window more would only make its queue longer; where compute binds it makes up for delays."""
    for rate, full in ((4.0, True), (1000.0, False)):
        given = replace(measures(latency=3.0), lines=(LinkRate(down=rate),) * 4)
        cautious = replace(given, links=(LinkRate(latency=3.3),) * 3, lines=(LinkRate(down=rate / 1.1),) * 4)
        taken = [seconds(cautious, (width,) * 3) for width in range(9)]
        need = next(width for width in range(9) if taken[width] <= min(taken) * (1 + TOLERANCE))
        windows = plan(given)
        assert max(windows) == need if full else max(windows) >= need
        wider = tuple(w + 1 for w in windows)
        assert (plan(given, current=wider) == wider) != full, "a wider one stays where it is free"


def costs(*, aborted: bool = False, idle_stage: bool = False) -> StepCosts:
    busy = {"forward": 8.0, "backward": 16.0, "encode": 3.0, "decode": 1.0, "wait-upstream": 5.0}
    stages = tuple(
        StageCost(stage=s, node_id=f"n{s}", wall_seconds=33.0, seconds={} if idle_stage and s else busy)
        for s in range(2)
    )

    def link(source: int, direction: Direction, size: int) -> LinkFigures:
        flow = FlowFigures(direction=direction, codec="bf16", bytes=size, elements=1)
        return LinkFigures(
            source=source,
            target=1 - source,
            bytes=size,
            flows=(flow,),
            busy_seconds=1.0,
            # Only the lower stage has measured anything yet.
            capacity=0.0 if source else 100.0,
            round_trip_seconds=9.0,
            least_round_trip_seconds=0.0 if source else 0.5,
            retransmits=0,
            rejects=0,
            queued_bytes=0,
        )

    return StepCosts(
        step=1,
        seconds=33.0,
        aborted=aborted,
        stages=stages,
        links=(link(0, Direction.ACTIVATION, 80), link(1, Direction.GRADIENT, 160)),
    )


def test_a_line_carries_what_was_seen_at_least() -> None:
    """What a machine says of its line is no less than what one of its links carries, or a step has shown."""

    def seen(stage: int) -> LinkRate:
        return LinkRate(up=1.0, down=1.0) if stage else LinkRate()

    found = measured(replace(costs(), seconds=0.5), chunks=1, microbatches=8, line_of=seen)
    assert found is not None
    # Stage 1 sent 160 bytes in half a second; its link brings 100 a second, and the step showed 160.
    assert found.lines == (LinkRate(), LinkRate(up=320.0, down=160.0))


def test_measures_are_a_microbatchs() -> None:
    assert measured(costs(), chunks=1, microbatches=8) == StepMeasures(
        forward=(1.25, 1.25),
        backward=(2.25, 2.25),
        activation_bytes=10.0,
        gradient_bytes=20.0,
        links=(LinkRate(up=100.0, down=math.inf, latency=0.25),),
        packing=(0.5, 0.5),
        lines=(LinkRate(), LinkRate()),
    )
    # With the head on the first stage twice as many tensors of each kind cross the link of two stages.
    assert measured(costs(), chunks=1, microbatches=8, head_share=0.5) == StepMeasures(
        forward=(1.25, 1.25),
        backward=(2.25, 2.25),
        activation_bytes=5.0,
        gradient_bytes=10.0,
        links=(LinkRate(up=100.0, down=math.inf, latency=0.25),),
        head_share=0.5,
        packing=(0.5, 0.5),
        lines=(LinkRate(), LinkRate()),
    )


@pytest.mark.parametrize("silent", [costs(aborted=True), costs(idle_stage=True)])
def test_a_step_without_measurements_plans_nothing(silent: StepCosts) -> None:
    assert measured(silent, chunks=1, microbatches=8) is None
