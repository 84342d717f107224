"""Rates by link and direction: as many bits as cost no time, changed seldom, and on record for replays."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.schedule.floor import LinkRate
from node.schedule.schedule import BoundaryTensor, Kind, schedule
from node.schedule.simulation import simulate
from node.tuning.codec_plan import (
    FREE,
    PACKING_CAUTION,
    CodecPlan,
    Lines,
    PackingTimes,
    Way,
    of_gradients,
    plan_codecs,
    seconds_of,
)
from node.tuning.decisions import WATCHED, StepHistory
from node.tuning.rate_control import MORE_BITS, RISE, RateControl
from node.tuning.window_plan import StepMeasures
from tests.support.examples import examples
from wire.codecs.formats import codec_format, ladder
from wire.errors import ConfigError
from wire.spec import Direction
from wire.telemetry import CodecTime

SHAPE = (1, 1024, 768)
RUNGS = ladder(2)
MBIT = 1e6 / 8


def lines(*mbit: float, compute: float = 0.2, latency: float = 0.0, window: int = 4) -> Lines:
    """A stage more than lines; the backward takes twice the forward."""
    stages = len(mbit) + 1
    measures = StepMeasures(
        forward=(compute / 3,) * stages,
        backward=(compute * 2 / 3,) * stages,
        activation_bytes=0.0,
        gradient_bytes=0.0,
        links=tuple(LinkRate(up=rate * MBIT, down=rate * MBIT, latency=latency) for rate in mbit),
    )
    return Lines(measures=measures, chunks=1, shape=SHAPE, windows=(window,) * len(mbit))


def same(given: Lines, codec: str) -> CodecPlan:
    """One codec everywhere."""
    return CodecPlan(
        activations=(codec,) * given.boundaries, gradients=(of_gradients(codec),) * given.boundaries
    )


def rung_of(plan: CodecPlan, way: Way) -> int:
    return RUNGS.index(plan.name(way).replace("dither", "trellis"))


def step_seconds(given: Lines, plan: CodecPlan, microbatches: int = 32) -> float:
    """Of a simulated step of one chunk a stage."""

    def transfer(tensor: BoundaryTensor) -> float:
        kind = Direction.ACTIVATION if tensor.kind is Kind.FORWARD else Direction.GRADIENT
        way = tensor.boundary, kind
        return given.transfer(way, plan.name(way))[0]

    forward, backward = given.measures.forward[0], given.measures.backward[0]
    orders = schedule(given.stages, 1, microbatches, given.windows)
    return simulate(orders, forward, backward, transfer, given.measures.links[0].latency, swap=True).total


def bits(given: Lines, plan: CodecPlan) -> int:
    return sum(codec_format(plan.name(way)).packed_bytes(SHAPE) for way in given.ways())


def test_one_slow_line_costs_the_others_no_bits() -> None:
    given = lines(1000, 300, 100, 30)
    plan = plan_codecs(given, RUNGS)
    rungs = [RUNGS.index(name) for name in plan.activations]
    assert rungs == sorted(rungs, reverse=True) and rungs[0] == len(RUNGS) - 1 and rungs[-1] < rungs[-2]
    fixed = {codec: step_seconds(given, same(given, codec)) for codec in RUNGS}
    best = min(fixed.values())
    assert best / step_seconds(given, plan) >= 0.9
    # No line has fewer bits than with the most precise single codec of that speed.
    finest = max((codec for codec in RUNGS if fixed[codec] <= best / 0.9), key=RUNGS.index)
    assert bits(given, plan) > bits(given, same(given, finest))
    assert bits(given, plan) > 1.5 * bits(given, same(given, RUNGS[0]))


def test_where_the_line_binds_anyway_the_run_gets_the_fewest_bits_it_allows() -> None:
    given = lines(10, 1000)
    assert plan_codecs(given, ladder(3)).activations == ("trellis-3", "trellis-8")
    assert plan_codecs(lines(math.inf), ladder(4.41)) == same(lines(1), "trellis-8")
    with pytest.raises(ConfigError, match="at most 8"):
        ladder(9)


def test_a_long_round_trip_is_covered_by_the_window() -> None:
    """1 s there and back is five microbatches of compute. A wide window hides it; with a narrow one fewest
    bits leave it no longer than need be."""
    far = lines(100, latency=0.5, window=8)
    assert plan_codecs(far, RUNGS) == plan_codecs(replace(far, measures=lines(100).measures), RUNGS)
    assert plan_codecs(replace(far, windows=(1,)), RUNGS) == same(far, RUNGS[0])


def test_tensors_of_one_direction_share_it() -> None:
    """With a ring over two stages activations and gradients go both ways."""
    alone = lines(100)
    ring = replace(alone, chunks=2)
    assert ring.boundaries == 3
    assert bits(ring, plan_codecs(ring, RUNGS)) < 3 * bits(alone, plan_codecs(alone, RUNGS))
    head = replace(alone, measures=replace(alone.measures, head_share=0.5), windows=(4, 4))
    assert head.boundaries == 2 and {head.ends(way) for way in head.ways()} == {(0, 1), (1, 0)}
    single = replace(alone, measures=replace(alone.measures, forward=(1.0,), backward=(2.0,), links=()))
    assert plan_codecs(single, RUNGS) == CodecPlan(activations=(), gradients=())


@settings(max_examples=examples(60))
@given(
    st.lists(st.floats(1, 2000), min_size=1, max_size=5),
    st.floats(0.001, 2),
    st.floats(0, 0.3),
    st.integers(0, 12),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_plan_costs_time_and_none_could_have_more(
    rates: list[float], compute: float, latency: float, window: int, chunks: int, head: bool
) -> None:
    given = lines(*rates, compute=compute, latency=latency, window=window)
    if chunks > 1 or head:
        closing = () if given.stages == 2 else given.measures.links[:1]
        links, share = (*given.measures.links, *closing), 0.3 if head else None
        given = replace(
            given,
            chunks=chunks,
            measures=replace(given.measures, links=links, head_share=share),
            windows=(window,) * (given.stages - 1 + head),
        )
    plan, least = plan_codecs(given, RUNGS), same(given, RUNGS[0])
    assert seconds_of(given, plan) <= seconds_of(given, least) * (1 + 1e-9)
    if latency == 0 and window >= 4:
        allowed = seconds_of(given, least)
        for ends in {given.ends(way) for way in given.ways()}:
            ways = [way for way in given.ways() if given.ends(way) == ends]
            if all(rung_of(plan, way) < len(RUNGS) - 1 for way in ways):
                finer = {
                    way: next(r for r in RUNGS[rung_of(plan, way) + 1 :] if r.startswith("trellis"))
                    for way in ways
                }
                assert sum(given.transfer(way, codec)[0] for way, codec in finer.items()) > allowed
    # A bound on every direction holds.
    held = plan_codecs(given, RUNGS, lambda way, rung: rung <= 3)
    assert all(rung_of(held, way) <= 3 for way in given.ways())


def run_steps(control: RateControl, given: Lines, seconds: float) -> CodecPlan | None:
    """As many steps as a plan is judged by."""
    plans = [control.step_done(given, seconds) for _ in range(WATCHED)]
    assert plans[:-1] == [None] * (WATCHED - 1)
    return plans[-1]


def test_rates_rise_by_steps_and_then_stay() -> None:
    given = lines(1000, 30)
    control = RateControl(RUNGS, same(given, "trellis-4.41"))
    seen = [control.current]
    while (plan := run_steps(control, given, seconds_of(given, control.current))) is not None:
        assert plan == control.current
        for way in given.ways():
            sizes = [codec_format(one.name(way)).packed_bytes(SHAPE) for one in (plan, seen[-1])]
            assert sizes[0] <= RISE * sizes[1]
        seen.append(plan)
    assert 1 < len(seen) <= 4
    assert seconds_of(given, control.current) == pytest.approx(seconds_of(given, same(given, RUNGS[0])))
    # A tenth more or less changes nothing.
    for factor in (0.95, 1.05, 1.0):
        slower = replace(
            given,
            measures=replace(
                given.measures,
                links=tuple(
                    LinkRate(up=link.up * factor, down=link.down * factor) for link in given.measures.links
                ),
            ),
        )
        assert run_steps(control, slower, seconds_of(given, control.current)) is None


def test_a_line_that_was_said_to_be_fast_is_believed_once() -> None:
    true, said = lines(8, 300), lines(1000, 300)
    start = same(true, "trellis-2")
    control = RateControl(RUNGS, start)
    risen = run_steps(control, said, seconds_of(true, start))
    assert risen is not None and risen.activations[0] == "trellis-3"
    assert run_steps(control, said, seconds_of(true, risen)) == start
    for _ in range(4):
        plan = run_steps(control, said, seconds_of(true, control.current))
        assert plan is None or plan.activations[0] == "trellis-2"


def test_a_stage_that_says_it_is_slow_is_believed_up_to_the_measured_step() -> None:
    given = lines(100, 100)
    boast = replace(given, measures=replace(given.measures, forward=(0.1, 1e9, 0.1)))
    control = RateControl(RUNGS, same(given, "trellis-4"))
    measured = seconds_of(given, control.current)
    plan = run_steps(control, boast, measured) or control.current
    assert max(given.busy({way: plan.name(way) for way in given.ways()}).values()) <= measured


def slow_packing(trellis: float, fixed: float = 0.001) -> PackingTimes:
    """Seconds to pack a tensor by `trellis` or `dither`, and by `fixed`; unpacking takes a fifth."""
    elements = math.prod(SHAPE)
    each = {"trellis-4.41": trellis, "dither-4.41": trellis, "fixed-8": fixed}
    return PackingTimes(
        tuple(
            CodecTime(codec=codec, pack=seconds / elements, unpack=seconds / 5 / elements)
            for codec, seconds in each.items()
        )
    )


def test_a_slow_processor_packs_cheaply_where_the_lines_carry_it() -> None:
    """A microbatch computes for 0.2 s; with `trellis` its tensors take the middle stage longer to pack."""
    given = lines(1000, 50)
    slow = replace(given, packing=(slow_packing(0.1),) * 3)
    assert seconds_of(slow, same(slow, "trellis-8")) == pytest.approx(2.4 * 0.1 * PACKING_CAUTION)
    plan = plan_codecs(slow, RUNGS)
    assert (
        seconds_of(slow, plan)
        == pytest.approx(0.2)
        == pytest.approx(seconds_of(given, plan_codecs(given, RUNGS)))
    )
    assert min(map(RUNGS.index, (name.replace("dither", "trellis") for name in plan.activations))) > 5
    assert any(name.startswith("fixed") for name in (*plan.activations, *plan.gradients))
    # Only where nothing else fits is packing the pace.
    starved = replace(lines(4, 4), packing=(slow_packing(2.0),) * 3)
    found = plan_codecs(starved, RUNGS)
    assert seconds_of(starved, found) <= min(seconds_of(starved, same(starved, rung)) for rung in RUNGS) * (
        1 + 1e-6
    )


@settings(max_examples=examples(40))
@given(st.lists(st.floats(1, 500), min_size=1, max_size=4), st.floats(0, 0.5), st.floats(0, 0.1))
def test_no_single_codec_is_faster_than_the_plan_whatever_packing_takes(
    rates: list[float], trellis: float, fixed: float
) -> None:
    given = lines(*rates)
    given = replace(given, packing=(slow_packing(trellis, fixed),) * given.stages)
    found = seconds_of(given, plan_codecs(given, RUNGS))
    assert found <= min(seconds_of(given, same(given, rung)) for rung in RUNGS) * (1 + 1e-6)


@settings(max_examples=examples(40))
@given(
    st.lists(st.floats(1, 500), min_size=1, max_size=4),
    st.floats(0, 0.5),
    st.floats(0, 0.1),
    st.integers(1, 64),
)
@example(rates=[1.0, 4.0], trellis=0.25, fixed=0.0, microbatches=1)
def test_no_single_codec_has_a_much_shorter_step_than_the_plan(
    rates: list[float], trellis: float, fixed: float, microbatches: int
) -> None:
    """The ramp counts where microbatches are few."""
    given = replace(lines(*rates), microbatches=microbatches)
    given = replace(given, packing=(slow_packing(trellis, fixed),) * given.stages)
    found = seconds_of(given, plan_codecs(given, RUNGS))
    assert found <= min(seconds_of(given, same(given, rung)) for rung in RUNGS) * (1 + FREE)


def test_few_microbatches_get_codecs_that_pack_fast() -> None:
    """Packing hides behind compute of many microbatches; in a short step each boundary's adds to the ramp."""
    given = replace(lines(1000, 300, 100, 30), packing=(slow_packing(0.04),) * 5)
    assert all(name.startswith("trellis") for name in plan_codecs(given, RUNGS).activations[:3])
    short = replace(given, microbatches=12)
    plan = plan_codecs(short, RUNGS)
    # The slowest line's tensors are most of the ramp: there fewer bytes count for more.
    assert {*plan.activations[:3], *plan.gradients[:3]} == {"fixed-6", "fixed-8"}
    assert all(seconds_of(short, plan) < 0.99 * seconds_of(short, same(short, rung)) for rung in RUNGS)
    control = RateControl(RUNGS, same(given, "trellis-4.41"))
    moved = run_steps(control, short, 0.3)
    assert moved is not None
    assert set(moved.activations[:3]) == {"fixed-6"}, "at most half as many bytes again"


def test_what_a_node_says_of_its_packing_is_believed_up_to_the_measured_step() -> None:
    given = lines(100, 100)
    start = same(given, "trellis-4.41")
    honest, boast = slow_packing(0.0, 0.0), slow_packing(1e9, 1e9)
    said = replace(given, packing=(honest, boast, honest), microbatch_seconds=0.25)
    believed = said.believed(start)
    assert seconds_of(believed, start) == pytest.approx(0.25)
    control = RateControl(RUNGS, start)
    plan = run_steps(control, said, 0.25) or start
    # No line is made to carry longer than the steps took.
    assert max(given.busy({way: plan.name(way) for way in given.ways()}).values()) <= 0.25
    # One that says packing is free has what its lines carry, until a step shows that it is worse.
    liar = RateControl(RUNGS, same(given, "fixed-6"))
    risen = run_steps(liar, given, seconds_of(given, liar.current))
    assert risen is not None and risen.activations[0].startswith("trellis")
    assert run_steps(liar, given, 2 * seconds_of(given, risen)) == same(given, "fixed-6")
    again = run_steps(liar, given, seconds_of(given, liar.current))
    assert again is None or not set(again.activations) & set(risen.activations)


def test_a_replay_has_the_codecs_that_the_steps_first_had() -> None:
    given = lines(100)
    first, second = same(given, "trellis-4"), same(given, "trellis-3")
    history = StepHistory().instead(0, first).instead(40, second)
    assert [history.at(step) for step in (0, 39, 40, 99)] == [first, first, second, second]
    assert StepHistory().at(3) is None
    # An epoch that ended before its first step leaves no trace.
    assert history.instead(40, first).at(40) == first
    with pytest.raises(ConfigError, match="ascending"):
        StepHistory(((4, first), (4, second)))


def test_a_little_more_precision_is_not_worth_an_epoch() -> None:
    given = lines(math.inf)
    assert codec_format("trellis-8").precision < (1 + MORE_BITS) * codec_format("trellis-7").precision
    assert run_steps(RateControl(RUNGS, same(given, "trellis-7")), given, 0.2) is None
    assert run_steps(RateControl(RUNGS, same(given, "trellis-5")), given, 0.2) is not None
