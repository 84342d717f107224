"""Whatever ends a run, or a stage's part in it, what the stages hold goes to disk first, if it can be had.

Between two epochs too: the links of the next may never come up, and a snapshot needs none.
"""

import math
from dataclasses import replace

import pytest

from node.run_state.actions import (
    Aborted,
    Action,
    Announce,
    OpenSnapshot,
    Released,
    SnapshotAgreed,
    StepDone,
)
from node.run_state.epoch import PLACING_SECONDS, Phase
from node.run_state.failures import MAX_RETRIES
from tests.support.machine_driver import (
    REGROUP,
    Driver,
    aborts,
    finishes,
    of_kind,
    placement_of,
    restore_of,
    sent,
    stop_of,
)
from wire.messages import Begin, FailureKind, Finish, Restore, TakeSnapshot

ASKED = "asked to stop"
TO_NODES = (
    f"{ASKED}: the run was stopped before its last step; the same join line works again once it is resumed"
)
LEFT = "you have left the run"
NO_SNAPSHOT = "no snapshot is complete yet"
SAVES = [OpenSnapshot(step=2)]


def in_phase(phase: Phase) -> Driver:
    """Two steps are done, nothing is on disk, and no snapshot is due."""
    return Driver(steps=3, every=100).started("abc", 2).into(phase)


def failing(run: Driver, times: int) -> list[Action]:
    """The same step fails so often; in between all stages are restored to it."""
    actions: list[Action] = []
    for time in range(times):
        if time:
            run.restored(run.epoch.step)
        actions = run.failed("b", why="no link")
    return actions


# ---- the operator ends the run between two epochs


def test_a_stop_waits_for_a_commit_that_somebody_missed() -> None:
    run = in_phase(Phase.APPLYING)
    run.failed("a")
    run.stop()
    run.placed("a", 3)
    run.placed("b", 2, voted=True)
    actions = run.placed("c", 3)
    assert restore_of(actions).step == 3 and of_kind(actions, OpenSnapshot) == []
    assert of_kind(run.all_ready(), OpenSnapshot) == [OpenSnapshot(step=3)]


def test_a_stop_between_epochs_with_nothing_new_is_immediate() -> None:
    run = Driver(every=2).started("abc", 2)
    run.failed("a")
    assert run.machine.newest_snapshot == run.epoch.step == 2
    assert stop_of(run.stop()).reason == ASKED


def test_a_stop_ends_once_it_is_known_that_nothing_new_is_left() -> None:
    """The coordinator and the nodes were restarted: the nodes' state is lost."""
    run = Driver(every=2).started("abc", 3)
    run.die("b")
    run.hello("x")
    assert run.epoch.phase is Phase.PLACING
    assert run.stop() == []
    actions = run.all_placed(-1)
    assert stop_of(actions).reason == ASKED
    assert not any(isinstance(message, Restore) for message in sent(actions)), "nothing is fetched for it"


@pytest.mark.parametrize("phase", Phase)
def test_an_immediate_stop_does_not_wait(phase: Phase) -> None:
    run = in_phase(phase)
    assert run.stop() == []
    assert stop_of(run.stop(at_once=True)).reason == ASKED
    assert run.stop() == [] == run.stop(at_once=True)


@pytest.mark.parametrize("phase", Phase)
def test_a_stop_that_is_asked_for_again_still_saves_what_stages_hold(phase: Phase) -> None:
    """Twice from the page, or from the page and then by Ctrl-C: each was promised a snapshot."""
    run = in_phase(phase)
    assert run.stop() == [] == run.stop()
    asked: list[Action] = []
    match phase:
        case Phase.PLACING:
            asked = run.all_placed(2)
        case Phase.RESTORING:
            asked = run.all_ready()
        case Phase.STEPPING:
            run.all_vote()
            asked = run.all_applied()
        case Phase.APPLYING:
            asked = run.all_applied()
        case Phase.VALIDATING:
            asked = run.all_validated()
        case Phase.IDLE:
            pass  # it was asked for as the phase began
    held = run.epoch.step
    assert phase is Phase.IDLE or of_kind(asked, OpenSnapshot) == [OpenSnapshot(step=held)]
    assert run.stop() == []
    assert not stop_of(run.stored(held)).failed
    assert run.machine.newest_snapshot == held


def test_a_reconnected_node_gets_its_requests_again() -> None:
    run = in_phase(Phase.PLACING)
    run.stop()
    run.all_placed(2)
    run.machine.disconnected("b", run.time)
    assert sent(run.hello("b", epoch=run.epoch.number)) == [TakeSnapshot(epoch=2, step=2)]


# ---- a failure while the run is to end


@pytest.mark.parametrize("phase", Phase)
def test_a_failure_while_the_run_is_to_end_costs_no_state(phase: Phase) -> None:
    """All nodes are here: they are placed again and upload their state."""
    run = in_phase(phase)
    run.stop()
    number, held = run.epoch.number, run.epoch.step + (phase is Phase.APPLYING)
    actions = run.failed("b")
    assert len(of_kind(actions, Aborted)) == 1 and aborts(actions) == ["a", "b", "c"]
    assert placement_of(actions) == ("a", "b", "c") and run.epoch.number == number + 1
    assert of_kind(run.all_placed(held), OpenSnapshot) == [OpenSnapshot(step=held)]
    end = stop_of(run.stored(held))
    assert end.reason == ("all steps are done" if held == 3 else ASKED) and not end.failed


def test_a_step_that_is_not_finite_while_the_run_is_to_end_costs_no_state() -> None:
    run = in_phase(Phase.STEPPING)
    run.stop()
    assert of_kind(run.vote("b", norm=math.nan), Announce) == [], "it is not run again"
    assert of_kind(run.all_placed(2), OpenSnapshot) == SAVES
    assert stop_of(run.stored(2)).reason == ASKED


# ---- a stage leaves between two epochs


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.RESTORING])
def test_a_stage_that_leaves_between_epochs_is_held_until_its_state_is_on_disk(phase: Phase) -> None:
    run = in_phase(phase)
    run.hello("x")
    assert run.leave("b") == [] == run.leave("b")
    actions = run.all_placed(2) if phase is Phase.PLACING else run.all_ready()
    assert of_kind(actions, OpenSnapshot) == SAVES and of_kind(actions, Released) == []
    actions = run.stored(2)
    assert finishes(actions) == {"b": LEFT} and placement_of(actions) == ("a", "x", "c")
    run.placed("a", 2)
    run.placed("x")
    assert restore_of(run.placed("c", 2)).step == 2, "nothing is lost"
    assert any(isinstance(message, Begin) for message in sent(run.all_ready()))


# ---- the run is given up


def test_an_abandoned_run_saves_what_its_stages_hold() -> None:
    run = in_phase(Phase.STEPPING)
    actions = failing(run, MAX_RETRIES + 1)
    (note,) = of_kind(actions, Announce)
    assert "step 3 failed 4 times in a row" in note.text
    assert placement_of(actions) == ("a", "b", "c")
    actions = run.all_placed(2)
    assert of_kind(actions, OpenSnapshot) == SAVES
    assert not any(isinstance(message, Restore) for message in sent(actions)), "links are what failed"
    end = stop_of(run.stored(2))
    assert end.failed
    assert "last at stage 1: no link; the snapshot of step 2 is intact" in end.reason


@pytest.mark.parametrize("how", ["failure", "death", "stuck", "nothing held", "two stops"])
def test_an_abandoned_run_ends_even_if_nothing_can_be_saved(how: str) -> None:
    run = in_phase(Phase.STEPPING)
    failing(run, MAX_RETRIES + 1)
    match how:
        case "failure":
            actions = run.failed("a", FailureKind.INTERNAL, why="the disk is full")
        case "death":
            actions = run.die("a")
        case "stuck":
            actions = run.tick(PLACING_SECONDS + 1)
        case "nothing held":
            actions = run.all_placed(-1)
        case _:
            assert run.stop() == []
            actions = run.stop(at_once=True)
    end = stop_of(actions)
    assert end.failed and NO_SNAPSHOT in end.reason and "failed" in end.reason


def test_a_last_step_whose_snapshot_keeps_failing_may_yet_be_saved() -> None:
    run = in_phase(Phase.IDLE)
    failing(run, MAX_RETRIES + 1)
    assert of_kind(run.all_placed(3), OpenSnapshot) == [OpenSnapshot(step=3)]
    end = stop_of(run.stored(3))
    assert end.reason == "all steps are done" and not end.failed


# ---- what comes to an end is at an end


def test_nothing_is_begun_after_the_snapshot_of_a_run_that_ends() -> None:
    run = in_phase(Phase.PLACING)
    run.stop()
    run.all_placed(2)
    waits = Announce(text="the snapshot of step 2 waits for node a, node b, node c")
    assert run.tick(600.0) == [waits]
    run.stored(2)
    assert run.machine.stopped and run.machine.epoch is None
    assert run.tick(REGROUP) == []
    late = sent(run.hello("x"))
    assert late == [Finish(reason=TO_NODES, failed=True, paused=True)]
    assert of_kind(run.stored(2), StepDone) == []


# ---- what nodes make of it


def goodbyes(actions: list[Action]) -> set[Finish]:
    return {message for message in sent(actions) if isinstance(message, Finish)}


def test_nodes_of_a_run_that_is_stopped_with_steps_left_are_to_come_again() -> None:
    """For the operator it went as planned; what keeps a node up must start it again."""
    run = in_phase(Phase.STEPPING)
    run.stop()
    run.all_vote()
    run.all_applied()
    end = run.stored(3)
    assert goodbyes(end) == {Finish(reason="all steps are done", failed=False)}, "it was the last"

    run = in_phase(Phase.PLACING)
    run.stop()
    run.all_placed(2)
    end = run.stored(2)
    assert goodbyes(end) == {Finish(reason=TO_NODES, failed=True, paused=True)}
    assert stop_of(end).reason == ASKED and not stop_of(end).failed
    assert run.machine.goodbye == Finish(reason=TO_NODES, failed=True, paused=True), (
        "for those who come as it ends"
    )


def test_a_run_whose_last_state_is_on_disk_has_no_steps_left() -> None:
    """Its snapshot was complete only after its epoch had ended."""
    run = in_phase(Phase.IDLE)
    run.die("b")
    run.stored(3)
    end = run.stop()
    assert goodbyes(end) == {Finish(reason=ASKED, failed=False)}
    assert not stop_of(end).failed


def test_a_node_that_leaves_by_itself_is_not_asked_back() -> None:
    run = Driver(every=2).started("abc", 2)
    run.failed("a")
    assert goodbyes(run.leave("b")) == {Finish(reason=LEFT, failed=False)}


def test_who_dies_before_it_has_handed_in_the_last_snapshot_is_replaced_by_another_row() -> None:
    run = Driver(stages=1, steps=2, groups=3, follows=True).started("abc")
    run.step()
    run.step()
    assert run.epoch.snapshot_nodes == ("a",)
    run.holds("b")
    run.holds("c")
    actions = run.die("a")
    # Both have to say again what they hold.
    again = TakeSnapshot(epoch=run.epoch.number, step=2, attempt=1)
    taken = [message for message in sent(actions) if isinstance(message, TakeSnapshot)]
    assert taken == [again, replace(again, only_hashes=True)]
    assert of_kind(run.holds("b"), SnapshotAgreed) == []
    assert [one.step for one in of_kind(run.holds("c"), SnapshotAgreed)] == [2]
    assert not stop_of(run.stored(2)).failed
