"""A step simulated over lines."""

from dataclasses import replace

import pytest

from node.schedule.floor import LinkRate, Network
from node.schedule.schedule import Kind, schedule
from node.schedule.simulation import simulate
from node.view.machines import parse_machine
from node.view.pace import ACKNOWLEDGED, StepWork, acknowledgements, lines_of, simulated

WORK = StepWork(
    microbatches=24,
    forward=(0.1,) * 4,
    backward=(0.2,) * 4,
    activation_bytes=1e5,
    gradient_bytes=2e5,
    lines=(LinkRate(up=5e5, down=5e5),) * 4,
)


def test_the_window_is_the_narrowest_that_is_as_good_as_wider_ones() -> None:
    """On lines that bind transfers need one; on fast lines none."""
    slow, fast = simulated(WORK), simulated(replace(WORK, lines=(LinkRate(up=1e9, down=1e9),) * 4))
    assert fast.window == 0 and slow.window > 0
    assert simulated(WORK, 0).seconds > 1.1 * slow.seconds
    assert slow.seconds == pytest.approx(min(simulated(WORK, width).seconds for width in range(9)), rel=0.03)
    for pace, work in ((slow, WORK), (fast, replace(WORK, lines=(LinkRate(up=1e9, down=1e9),) * 4))):
        assert 1 <= pace.seconds / work.floor().seconds < 1.15


def test_a_long_step_is_as_busy_in_its_middle() -> None:
    """Not all of it is simulated."""
    long = replace(WORK, microbatches=64)
    orders = schedule(4, 1, 64, 8)
    whole = simulate(
        orders,
        0.1,
        0.2,
        network=Network(4, [], WORK.lines),
        sizes={Kind.FORWARD: WORK.activation_bytes, Kind.BACKWARD: WORK.gradient_bytes},
        swap=True,
    )
    assert simulated(long, 8).seconds == pytest.approx(whole.total, rel=0.03)


def test_what_follows_the_last_backward_is_added() -> None:
    for count in (8, 200):
        work = replace(WORK, microbatches=count)
        assert simulated(replace(work, after=7.0)).seconds == simulated(work).seconds + 7.0
    assert simulated(replace(WORK, forward=(0.1,), backward=(0.2,), lines=WORK.lines[:1])).seconds == (
        pytest.approx(24 * 0.3)
    )


def test_acknowledgements_take_their_part_of_a_slow_line() -> None:
    assert [acknowledgements(mbit) for mbit, _ in ACKNOWLEDGED] == [share for _, share in ACKNOWLEDGED]
    assert acknowledgements(1) == acknowledgements(10) > acknowledgements(30) > acknowledgements(1000) > 0
    machine = parse_machine("cpu,4/40")
    both, only_up = lines_of([machine] * 2, [(1e6, 1e6), (1e6, 0)])
    assert only_up.up == machine.up and both.up == pytest.approx(machine.up / 1.04)
