"""From steps and counters to a cell's figures."""

import json
from dataclasses import asdict

import pytest

from node.lab.figures import (
    Compute,
    PhaseSteps,
    cell_figures,
    cell_floor,
    compute_times,
    floor_figures,
    plan_figures,
    plans_of,
    transfer_seconds,
)
from node.lab.network import WireBytes
from node.lab.shape import PAYLOAD_SHARE, uniform
from node.lab.topology import Wire, lay_out
from node.telemetry.clock import TimeKind
from node.telemetry.events import StageCost, StepCosts, WindowsPlanned
from tests.support.lab_results import calibration
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

MEGABYTE = 1_000_000


def costs(step: int, seconds: float, busy: float = 1.0) -> StepCosts:
    """Two stages: a megabyte out and half of one back, in 4 microbatches."""

    def stage(number: int) -> StageCost:
        spent = dict.fromkeys((kind.value for kind in TimeKind), 0.0)
        spent |= {"forward": 0.2 * busy, "backward": 0.4 * busy, "encode": 0.1 * busy, "decode": 0.1 * busy}
        spent |= {"optimizer": 0.2 * busy, "wait-downstream": seconds - busy}
        return StageCost(stage=number, node_id=f"n{number}", wall_seconds=seconds, seconds=spent)

    def link(source: int, target: int, direction: Direction, size: int) -> LinkFigures:
        flow = FlowFigures(direction=direction, codec="tah", bytes=size, elements=2 * size)
        return LinkFigures(
            source=source,
            target=target,
            bytes=size + 1000,
            flows=(flow,),
            busy_seconds=0.0,
            capacity=0.0,
            round_trip_seconds=0.0,
            retransmits=0,
            rejects=0,
            queued_bytes=0,
        )

    links = (link(0, 1, Direction.ACTIVATION, MEGABYTE), link(1, 0, Direction.GRADIENT, MEGABYTE // 2))
    return StepCosts(step=step, seconds=seconds, aborted=False, stages=(stage(0), stage(1)), links=links)


def phase(
    *seconds: float, wires: tuple[WireBytes, ...] = (WireBytes(0, 0),), busy: float = 1.0
) -> PhaseSteps:
    steps = tuple(costs(number, value, busy) for number, value in enumerate(seconds))
    return PhaseSteps(costs=steps, wires=wires, seconds=sum(seconds))


def wires(topology: str = "links") -> tuple[Wire, ...]:
    return lay_out(2, ((0, 1),), topology=topology, relay=False).wires


def test_figures_are_those_of_the_counters_and_the_steps() -> None:
    shape = uniform("8", 0.0, 1)
    counted = (WireBytes(3 * 1_100_000, 3 * 550_000),)
    figures = cell_figures(
        phase(2.0, 4.0, 3.0, wires=counted), shape, wires(), tokens_per_step=1200, losses=[1]
    )
    assert figures["step_seconds"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert figures["tokens_per_second"] == {"median": 400.0, "least": 300.0, "most": 600.0}
    assert figures["idle"] == pytest.approx([(1 / 2 + 3 / 4 + 2 / 3) / 3] * 2)
    assert figures["bits_forward"] == pytest.approx(4.0)
    for spent in figures["stage_seconds"]:
        assert set(spent) == set(TimeKind)
        assert spent["backward"] == pytest.approx(0.4) and spent["wait-downstream"] == pytest.approx(2.0)
        assert sum(spent.values()) == pytest.approx(3.0)
    up, down = figures["wires"]
    assert (up["sender"], up["own_bytes"], up["wire_bytes"]) == (0, 3 * 1_001_000, 3_300_000)
    assert up["overhead"] == pytest.approx(1_100_000 / 1_001_000 - 1)
    assert up["use"] == pytest.approx(3_300_000 * 8e-6 / 9 / 8)
    assert down["use"] == pytest.approx(up["use"] / 2)


def test_an_interface_carries_all_that_its_node_sends() -> None:
    shape = uniform("8/4", 0.0, 2)
    counted = (WireBytes(1_100_000, 600_000), WireBytes(600_000, 1_100_000))
    figures = cell_figures(
        phase(2.0, wires=counted), shape, wires("interfaces"), tokens_per_step=1, losses=[1]
    )
    own = [(wire["wire"], wire["own_bytes"]) for wire in figures["wires"]]
    assert own == [
        ("interface of 0", 1_001_000),
        ("interface of 0", 501_000),
        ("interface of 1", 501_000),
        ("interface of 1", 1_001_000),
    ]


def test_compute_is_the_least_time_seen_for_a_microbatch() -> None:
    slow, fast = costs(0, 3.0, busy=2.0), costs(1, 2.0, busy=1.0)
    phases = [PhaseSteps(costs=(each,), wires=(), seconds=5.0) for each in (slow, fast)]
    compute = compute_times(phases, microbatches=4)
    assert compute.forward == pytest.approx((0.075, 0.075))
    assert compute.backward == pytest.approx((0.125, 0.125))
    assert compute.after == pytest.approx(0.2)


def test_the_floor_of_a_cell_is_its_bytes_at_the_measured_rate() -> None:
    shape = uniform("8", 0.0, 1)
    measured = phase(3.0)
    compute = Compute(forward=(0.001, 0.001), backward=(0.001, 0.001), after=0.25)
    floor = cell_floor(measured, compute, shape, wires(), calibration(shape), microbatches=4, chunks=1)
    seconds = MEGABYTE / (1e6 * PAYLOAD_SHARE)
    # A megabyte goes out; the last gradient comes back; two forwards and two backwards cannot be hidden.
    assert floor.seconds == pytest.approx(seconds + seconds / 8 + 0.004 + 0.25)
    figures = floor_figures(floor, measured, compute)
    assert figures["binds"] == "link 0 to 1"
    assert figures["share"] == pytest.approx(floor.seconds / 3.0)
    assert json.loads(json.dumps(figures))["compute"] == {
        **asdict(compute),
        "forward": [0.001] * 2,
        "backward": [0.001] * 2,
    }


def test_a_steps_bytes_over_another_shape_take_as_long_as_the_busiest_direction() -> None:
    found = phase(0.5, 0.7)
    # 1,001,000 bytes out and 501,000 back in each step.
    assert transfer_seconds(found, uniform("8", 0.0, 1), wires()) == pytest.approx(1.001)
    assert transfer_seconds(found, uniform("8/2", 0.0, 1), wires()) == pytest.approx(4 * 0.501)
    shared = phase(0.5, wires=(WireBytes(0, 0),) * 2)
    assert transfer_seconds(shared, uniform("8", 0.0, 2), wires("interfaces")) == pytest.approx(1.001)


def test_the_floor_counts_the_way_of_a_shared_interface_once() -> None:
    shape = uniform("8", 40.0, 2)
    compute = Compute(forward=(0.0, 0.0), backward=(0.0, 0.0), after=0.0)
    floor = cell_floor(
        phase(3.0), compute, shape, wires("interfaces"), calibration(shape), microbatches=4, chunks=1
    )
    seconds = MEGABYTE / (1e6 * PAYLOAD_SHARE)
    # One round trip of 40 ms: out with the last activation, back with the last gradient.
    assert floor.seconds == pytest.approx(seconds + seconds / 8 + 0.040)


def test_a_cell_has_the_windows_that_its_steps_may_have_had() -> None:
    def planned(step: int) -> WindowsPlanned:
        one = (1.0,)
        rates = dict.fromkeys(("round_trips", "rates_up", "rates_down", "lines_up", "lines_down"), one)
        return WindowsPlanned(
            epoch=1,
            step=step,
            windows=(step,),
            forward=one,
            backward=one,
            activation_bytes=8.0,
            gradient_bytes=8.0,
            **rates,
        )

    plans = [planned(step) for step in (2, 4, 6, 9)]
    assert [plan.step for plan in plans_of(plans, first=5, last=9)] == [4, 6]
    assert [plan.step for plan in plans_of(plans, first=6, last=10)] == [4, 6, 9]
    assert plans_of(plans, first=1, last=2) == [] == plans_of([], first=1, last=5)
    figures = plan_figures(plans[0])
    assert figures["windows"] == (2,) and figures["lines_down"] == (1.0,)
    assert "epoch" not in figures and "replica" not in figures
