"""What deaths cost, from the events of a run."""

from node.telemetry.costs import Work
from node.telemetry.events import Event, SeatLost, StageCost, StepCosts


def costs(step: int, seconds: float, *, aborted: bool = False) -> StepCosts:
    stages = tuple(StageCost(stage=stage, node_id=f"n{stage}") for stage in range(4))
    return StepCosts(step=step, seconds=seconds, aborted=aborted, stages=stages, links=())


def lost(seconds: float) -> SeatLost:
    return SeatLost(epoch=1, step=3, node_id="n", row=0, stage=1, reason="gone", lost_seconds=seconds)


def after(*events: Event) -> Work:
    work = Work()
    for event in events:
        work = work.after(event)
    return work


def test_goodput_is_the_share_of_work_that_stays() -> None:
    assert Work().goodput is None
    assert after(costs(1, 2.0), costs(2, 2.0)).goodput == 1.0
    assert after(costs(1, 2.0), lost(4.0), costs(2, 2.0)).goodput == 0.75
    assert after(costs(1, 3.0), costs(2, 1.0, aborted=True), costs(2, 4.0)).goodput == 0.875


def test_a_step_that_runs_again_after_a_rollback_counts_once() -> None:
    work = after(costs(1, 1.0), costs(2, 1.0), costs(2, 1.0), costs(3, 1.0))
    assert (work.spent, work.lost, work.highest) == (16.0, 4.0, 3)
