"""Who complains first does not matter: a node that breaks the protocol gets its strike all the same."""

from node.coordinator.complaints import MAX_STRIKES
from tests.support.machine_driver import Driver
from wire.messages import FailureKind, StepFailed


def complaint(run: Driver, epoch: int, peer: int = 1) -> StepFailed:
    step = run.epoch.step
    return StepFailed(epoch=epoch, step=step, kind=FailureKind.PEER, message="nonsense", peer_stage=peer)


def test_a_complaint_counts_although_the_culprit_complained_first() -> None:
    """The node at fault sees its link closed; that ends the epoch before its neighbour is heard."""
    run = Driver(stages=3, every=2).started("abc", 2)
    run.hello("x")
    for _ in range(MAX_STRIKES):
        epoch = run.epoch.number
        run.failed("b", FailureKind.LINK, why="stage 2 refused the link")
        run.machine.message("c", complaint(run, epoch), run.time)
        run.restored(2)
    assert run.machine.quarantined == {"b": "nonsense"}
    assert run.epoch.seats == ("a", "x", "c")


def test_two_neighbours_that_complain_about_one_epoch_count_as_one() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    for _ in range(MAX_STRIKES - 1):
        epoch = run.epoch.number
        run.failed("a", FailureKind.PEER, peer=1)
        for _ in range(MAX_STRIKES):
            run.machine.message("c", complaint(run, epoch), run.time)
        run.restored(2)
    assert run.machine.quarantined == {}


def test_a_complaint_about_an_older_epoch_or_by_a_stranger_is_dropped() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.hello("x")
    first = run.epoch.number
    for _ in range(MAX_STRIKES):
        run.failed("b", FailureKind.LINK)
        run.machine.message("x", complaint(run, run.epoch.number - 1), run.time)
        if run.epoch.number - 1 > first:
            run.machine.message("c", complaint(run, first), run.time)
        run.restored(2)
    assert run.machine.quarantined == {}
