"""Who complains first does not matter: a node that breaks the protocol gets its strike all the same."""

from node.coordinator.actions import Action, Released
from node.coordinator.failures import MAX_ALONE, MAX_STRIKES
from tests.support.machine_driver import Driver, finishes, of_kind
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
    assert run.epoch.hosts == ("a", "x", "c")


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


def slandered(run: Driver, liar: str, peer: int) -> list[Action]:
    """It complains of whoever has this stage, until somebody is shut out."""
    actions: list[Action] = []
    for _ in range(MAX_STRIKES):
        actions = run.failed(liar, FailureKind.PEER, peer=peer, why="nonsense")
        run.restored(2)
    return actions


def test_who_finds_fault_with_every_neighbour_is_the_one_who_goes() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.join("wxyz")
    for _ in range(MAX_ALONE):
        slandered(run, "b", 0)
    assert run.machine.quarantined.keys() == {"a", "w"}
    actions = slandered(run, "b", 0)
    assert finishes(actions) == {"b": "quarantined: it alone found fault with a and w, and then with x"}
    assert of_kind(actions, Released)[0].node_id == "b"
    assert run.epoch.hosts == ("x", "y", "c"), "the slandered keeps its seat"
    slandered(run, "c", 1)
    assert "y" in run.machine.quarantined, "others are heard as before"


def test_a_node_that_two_complain_of_goes_whoever_one_of_them_is() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.join("wxyz")
    for _ in range(MAX_ALONE):
        slandered(run, "b", 0)
    run.failed("c", FailureKind.PEER, peer=0)
    run.restored(2)
    slandered(run, "b", 0)
    assert run.machine.quarantined.keys() == {"a", "w", "x"}
    assert run.epoch.hosts == ("y", "b", "c")
