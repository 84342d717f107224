"""The phases of a laboratory's run, with a network and a run that take no time but say that they did."""

import asyncio
import io
import json
import time
from collections.abc import Sequence

import pytest

from node.lab.network import WireBytes
from node.lab.phase import Phases
from node.lab.processes import Step
from node.lab.shape import Shape, uniform
from node.telemetry.events import StepCosts, StepDone
from wire.errors import RunError


class Network:
    """Counts what the run has sent when it is asked; its links change once so many steps have gone by."""

    def __init__(self) -> None:
        self.sent = 0
        self.shapes: list[Shape | None] = []
        self.checked: list[Shape] = []

    def shape(self, shape: Shape | None) -> None:
        self.shapes.append(shape)

    def check(self, shape: Shape) -> None:
        self.checked.append(shape)

    def counters(self) -> tuple[WireBytes, ...]:
        return (WireBytes(self.sent, 2 * self.sent),)


class Run:
    """Steps of 0.1 s that send 1000 bytes each, a second apart. `stale` of them began before the links had
    changed, and the first take as long as `slow` says."""

    def __init__(self, network: Network, stale: int, steps: int, slow: Sequence[float] = ()) -> None:
        self.network, self.stale, self.steps, self.slow = network, stale, steps, slow
        self.number = 0

    async def next_step(self, seconds: float) -> Step:
        if self.number == self.steps:
            raise RunError("the run in the lab ended")
        self.number += 1
        self.network.sent += 1000
        began = time.monotonic() + (-1.0 if self.number <= self.stale else self.number)
        seconds = self.slow[self.number - 1] if self.number <= len(self.slow) else 0.1
        done = StepDone(
            step=self.number,
            steps=self.steps,
            loss=1.0,
            lr=1e-3,
            grad_norm=1.0,
            seconds=seconds,
            tokens_per_second=80.0,
            idle=(),
            bits_forward=0.0,
            bits_backward=0.0,
            up_mbit=(),
            down_mbit=(),
        )
        costs = StepCosts(step=self.number, seconds=seconds, aborted=False, stages=(), links=())
        return Step(done=done, costs=costs, at=began + seconds)


def phases(
    stale: int,
    *,
    warmup: int,
    spare: int,
    steps: int,
    round_trips: int = 0,
    slow: Sequence[float] = (),
) -> tuple[Phases, Network, io.StringIO]:
    network, log = Network(), io.StringIO()
    measured = Phases(
        network,
        Run(network, stale, steps, slow),
        warmup_steps=warmup,
        warmup_round_trips=round_trips,
        spare_steps=spare,
        step_seconds=1.0,
        log=log,
    )
    return measured, network, log


@pytest.mark.parametrize("stale", [0, 1, 2, 3, 7])
def test_steps_that_went_by_while_links_changed_are_made_up_for(stale: int) -> None:
    """Measured are three steps, by themselves, whatever the number of those before."""
    discarded = max(2, stale)
    which, network, log = phases(stale, warmup=2, spare=5, steps=discarded + 3)
    shape = uniform("100", 0.0, 1)
    phase, steps = asyncio.run(which.measure(shape, 3))
    assert [costs.step for costs in phase.costs] == [discarded + 1, discarded + 2, discarded + 3]
    assert [step.done.step for step in steps] == list(range(1, discarded + 4))
    assert phase.wires == (WireBytes(3000, 6000),)
    assert network.shapes == network.checked == [shape]
    kinds = [json.loads(line)["kind"] for line in log.getvalue().splitlines()]
    assert kinds == ["warmup"] * 2 * discarded + ["measured"] * 6


def test_phases_share_what_a_run_has_to_spare() -> None:
    which, network, _ = phases(4, warmup=2, spare=3, steps=100)
    asyncio.run(which.measure(None, 1))
    run = which._processes
    assert isinstance(run, Run) and run.number == 5
    run.stale = run.number + 4
    with pytest.raises(RunError, match=r"lab.warmup_steps \(now 2\)"):
        asyncio.run(which.measure(None, 1))
    assert network.checked == []


@pytest.mark.parametrize(
    ("round_trips", "spare", "discarded"), [(0, 50, 2), (10, 50, 2), (40, 50, 4), (75, 50, 8), (75, 3, 5)]
)
def test_steps_are_discarded_for_round_trips(round_trips: int, spare: int, discarded: int) -> None:
    """A round trip of 0.1 s and steps that end 1.1, 2.1, 3.1... s after the links changed."""
    which, _, _ = phases(0, warmup=2, spare=spare, steps=100, round_trips=round_trips)
    phase, steps = asyncio.run(which.measure(uniform("100", 100.0, 1), 2))
    assert [costs.step for costs in phase.costs] == [discarded + 1, discarded + 2]
    assert len(steps) == discarded + 2


@pytest.mark.parametrize(
    ("slow", "round_trip", "spare", "discarded"),
    [
        ((0.5, 0.4, 0.3, 0.2, 0.199), 100.0, 50, 5),
        ((0.5, 0.1), 100.0, 50, 3),
        # One that is slower ends it: what follows is no growth.
        ((0.5, 0.4, 0.45, 0.2), 100.0, 50, 3),
        ((0.5, 0.4, 0.3, 0.2), 100.0, 1, 3),
        ((0.5, 0.4, 0.3, 0.2), 0.0, 50, 2),
        ((), 100.0, 50, 2),
    ],
)
def test_steps_are_discarded_while_they_get_faster(
    slow: tuple[float, ...], round_trip: float, spare: int, discarded: int
) -> None:
    which, _, _ = phases(0, warmup=2, spare=spare, steps=100, round_trips=1, slow=slow)
    phase, steps = asyncio.run(which.measure(uniform("100", round_trip, 1), 2))
    assert [costs.step for costs in phase.costs] == [discarded + 1, discarded + 2]
    assert len(steps) == discarded + 2
