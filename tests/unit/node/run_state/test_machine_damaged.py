"""A snapshot is found to be damaged during the run: which one the run goes back to, and what it prints."""

from node.run_state.actions import OpenSnapshot
from tests.support.machine_driver import Driver, of_kind, restore_of
from wire.messages import FailureKind

DAMAGED = "head.safetensors is damaged"


def gone_back() -> Driver:
    """Snapshots of steps 4 and 2 exist, and a stage has lost its state."""
    run = Driver(every=2).started("abc", 4)
    run.hello("x")
    run.die("b")
    run.tick(20.0)
    assert restore_of(run.all_placed()).step == 4
    return run


def test_the_next_epoch_returns_to_the_complete_snapshot() -> None:
    run = gone_back()
    assert run.machine.snapshot_damaged(4, 2) == []
    assert run.machine.newest_snapshot == 2
    run.failed("x", FailureKind.INTERNAL, why=DAMAGED)
    assert restore_of(run.all_placed()).step == 2
    run.all_ready()
    assert of_kind(run.steps(1), OpenSnapshot) == [OpenSnapshot(step=3)], "not only when one is due"
    assert of_kind(run.steps(1), OpenSnapshot) == [OpenSnapshot(step=4)], "the damaged one is made again"
    assert run.machine.newest_snapshot == 4


def test_stages_that_hold_newer_state_go_on_with_it() -> None:
    """A spare found the damage: no stage has to go back."""
    run = Driver(every=4).started("abc", 9)
    run.machine.snapshot_damaged(8, 4)
    run.failed("b")
    assert restore_of(run.all_placed(9)).step == 9
    assert of_kind(run.all_ready(), OpenSnapshot) == [OpenSnapshot(step=9)], "a failure now would cost more"
    run.stored(9)
    assert run.machine.newest_snapshot == 9
