"""Complaints between neighbours: one of two is wrong, and only other partners show which."""

from node.run_state.actions import Action, Announce, Released
from node.run_state.failures import MAX_STRIKES, MEMORY_STEPS
from tests.support.machine_driver import Driver, finishes, of_kind
from wire.messages import FailureKind, StepFailed


def complaint(run: Driver, epoch: int, peer: int = 1) -> StepFailed:
    step = run.epoch.step
    return StepFailed(epoch=epoch, step=step, kind=FailureKind.PEER, message="nonsense", peer_stage=peer)


def complains(run: Driver, node_id: str) -> list[Action]:
    """Of its neighbour on the left, or of the one on the right; the run then restores its stages."""
    stage = run.epoch.hosts.index(node_id)
    actions = run.failed(node_id, FailureKind.PEER, peer=stage - 1 if stage else 1, why="nonsense")
    if run.machine.epoch is not None:
        run.restored(run.epoch.step)
    return actions


def test_two_nodes_that_disagree_are_parted_at_once() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.join("xy")
    actions = complains(run, "b")
    assert run.epoch.hosts == ("x", "b", "c")
    assert run.machine.quarantined == {}
    assert "a" in run.machine.members, "it stays, as a spare"
    (note,) = of_kind(actions, Announce)
    assert "a spare takes stage 0 from node a" in note.text
    # A liar gives up its stage at the second complaint.
    run.steps(1)
    complains(run, "b")
    assert run.epoch.hosts == ("x", "y", "c")
    assert run.machine.quarantined == {}


def test_who_failed_with_several_partners_is_shut_out() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.join("xy")
    complains(run, "b")
    complains(run, "b")
    assert run.epoch.hosts == ("x", "y", "c")
    for node in "ay":
        run.die(node)
        if run.machine.epoch is not None:
            run.restored(run.epoch.step)
    assert run.epoch.hosts == ("x", "b", "c"), "nobody else is left"
    actions = complains(run, "b")
    why = "it had a part in all of 3 failures with a and x"
    assert run.machine.quarantined == {"b": why}
    assert finishes(actions) == {"b": f"quarantined: {why}"}
    assert "node b is shut out" in of_kind(actions, Announce)[0].text
    assert of_kind(actions, Released)[0].node_id == "b"


def test_one_identity_alone_gets_nobody_shut_out() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    for _ in range(MAX_STRIKES):
        run.failed("b", FailureKind.PEER, peer=0, why="nonsense")
        run.restored(2)
    assert run.machine.quarantined == {}


def test_a_node_that_breaks_the_protocol_with_both_neighbours_is_quarantined() -> None:
    """The node at fault may see its link closed, and report that, before its neighbours are heard."""
    run = Driver(stages=3, every=2).started("abc", 2)
    for attempt in range(2):
        epoch = run.epoch.number
        run.failed("b", FailureKind.LINK, why="stage 2 refused the link")
        for neighbour in "ac"[: 2 - attempt]:
            run.machine.message(neighbour, complaint(run, epoch), run.time)
        if run.machine.epoch is not None:
            run.restored(2)
    assert run.machine.quarantined.keys() == {"b"}


def test_a_complaint_counts_once_an_epoch() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    epoch = run.epoch.number
    run.failed("a", FailureKind.PEER, peer=1)
    for _ in range(2 * MAX_STRIKES):
        run.machine.message("a", complaint(run, epoch), run.time)
        run.machine.message("b", complaint(run, epoch, peer=0), run.time)
    run.restored(2)
    run.failed("c", FailureKind.PEER, peer=1)
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


def test_complaints_are_forgotten_after_many_steps() -> None:
    run = Driver(stages=3, every=2, steps=10 * MEMORY_STEPS).started("abc", 2)
    for accuser, peer in (("a", 1), ("c", 1), ("a", 1)):
        run.failed(accuser, FailureKind.PEER, peer=peer)
        run.restored(run.epoch.step)
        run.steps(MEMORY_STEPS + 1)
    assert run.machine.quarantined == {}
