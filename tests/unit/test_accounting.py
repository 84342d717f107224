"""What a step cost, from totals that nodes report: differences, and totals that begin anew."""

from dataclasses import replace

import pytest

from node.coordinator.accounting import Accounting
from node.telemetry.clock import TimeKind
from wire.messages import DirectionReport, LinkReport, Telemetry
from wire.spec import Direction

SEATS = ("a", "b")


def totals(steps: float, *, peer: int = 1, received: int = 2000) -> Telemetry:
    """What a stage has to report after `steps` steps: 2 s each, a quarter of it waiting."""
    return Telemetry(
        times={"forward": 1.0 * steps, "backward": 0.5 * steps, "wait-upstream": 0.5 * steps},
        wall_seconds=2.0 * steps,
        links=(
            LinkReport(
                peer_stage=peer,
                bytes_sent=round(1000 * steps),
                bytes_received=round(received * steps),
                retransmits=0,
                rejects=0,
                rtt_seconds=0.01,
            ),
        ),
        directions=(
            DirectionReport(
                direction=Direction.ACTIVATION,
                bytes_sent=round(900 * steps),
                elements_sent=round(1600 * steps),
            ),
            DirectionReport(
                direction=Direction.GRADIENT, bytes_sent=round(100 * steps), elements_sent=round(100 * steps)
            ),
        ),
    )


def began(accounting: Accounting, steps: float = 0) -> None:
    for node in SEATS:
        accounting.report(node, totals(steps))
    accounting.begin_epoch(SEATS)


def test_a_step_costs_the_difference_of_totals() -> None:
    accounting = Accounting()
    began(accounting, steps=10)  # what came before the epoch was ready is nobody's step
    accounting.report("a", totals(11))
    accounting.report("b", totals(12))
    cost = accounting.step(SEATS, seconds=4.0)
    assert cost.idle == (0.25, 0.25)
    assert cost.up_mbit == pytest.approx((0.002, 0.004))
    assert cost.down_mbit == pytest.approx((0.004, 0.008))
    assert cost.bits_forward == pytest.approx(8 * 900 / 1600)
    assert cost.bits_backward == 8.0
    assert accounting.links.bytes_sent == 3000
    assert accounting.links.elements == 3 * 1700
    assert accounting.links.bits(Direction.TIED_SUM) == 0.0


def test_steps_add_up_and_kinds_sum_to_wall_time() -> None:
    accounting = Accounting()
    began(accounting)
    for step in range(1, 6):
        for node in SEATS:
            accounting.report(node, totals(step))
        accounting.step(SEATS, seconds=2.0)
    stages = accounting.stage_times()
    assert [stage.node_id for stage in stages] == list(SEATS)
    for stage in stages:
        assert stage.seconds.keys() == {kind.value for kind in TimeKind}
        assert sum(stage.seconds.values()) == pytest.approx(stage.wall_seconds) == pytest.approx(10.0)
    assert accounting.links.bytes_sent == 10_000


def test_a_report_that_comes_late_is_counted_with_the_next_step() -> None:
    accounting = Accounting()
    began(accounting)
    accounting.report("a", totals(1))
    assert accounting.step(SEATS, 2.0).up_mbit[1] == 0.0
    accounting.report("b", totals(2))
    assert accounting.step(SEATS, 2.0).up_mbit == pytest.approx((0.0, 0.008))


@pytest.mark.parametrize("afresh", [0.0, 0.5])
def test_totals_that_begin_anew_are_counted_from_nothing(afresh: float) -> None:
    accounting = Accounting()
    began(accounting)
    for node in SEATS:
        accounting.report(node, totals(3))
    accounting.step(SEATS, 2.0)
    for node in SEATS:
        accounting.report(node, totals(afresh))
    cost = accounting.step(SEATS, 2.0)
    assert min(cost.up_mbit + cost.down_mbit + cost.idle) >= 0.0
    assert accounting.links.bytes_sent == 6000 + 2 * 1000 * afresh
    assert accounting.stage_times()[0].wall_seconds == pytest.approx(6.0 + 2 * afresh)


def test_a_stage_that_changes_hands_keeps_its_time() -> None:
    accounting = Accounting()
    began(accounting)
    for node in SEATS:
        accounting.report(node, totals(1))
    accounting.step(SEATS, 2.0)
    accounting.report("c", totals(0))
    accounting.begin_epoch(("a", "c"))
    accounting.report("c", totals(1))
    accounting.step(("a", "c"), 2.0)
    stage = accounting.stage_times()[1]
    assert (stage.node_id, stage.wall_seconds) == ("c", 4.0)


def test_a_node_that_reports_nothing_or_invents_kinds_costs_nothing_and_keeps_nothing() -> None:
    accounting = Accounting()
    accounting.begin_epoch(SEATS)
    for step in range(50):
        accounting.report("a", replace(totals(step), times={f"kind {step}": 1.0}))
        cost = accounting.step(SEATS, seconds=0.0)
    assert cost.idle == (0.0, 0.0) and cost.up_mbit == (0.0, 0.0)
    assert len(accounting.stage_times()[0].seconds) == len(TimeKind)
