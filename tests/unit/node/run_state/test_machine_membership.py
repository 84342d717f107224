"""The run's state machine as nodes come and go of their own will, and as the operator ends the run."""

import pytest

from node.run_state.actions import (
    Aborted,
    AbortKind,
    Action,
    Announce,
    OpenSnapshot,
    RecordPlacement,
    Released,
    Send,
    StepDone,
)
from node.run_state.epoch import Phase
from tests.support.machine_driver import (
    REGROUP,
    Driver,
    aborts,
    finishes,
    of_kind,
    placement_of,
    sent,
    stop_of,
)
from wire.messages import Begin, Finish, Restore, TakeSnapshot

EVERY_PHASE = pytest.mark.parametrize("phase", list(Phase))
LEFT = "you have left the run"


def in_phase(phase: Phase) -> Driver:
    return Driver(steps=3, every=100).started("abc", 2).into(phase)


def end_of_step(run: Driver) -> list[Action]:
    """From wherever the step is to its end."""
    if run.epoch.phase is Phase.STEPPING:
        run.all_vote()
    return run.all_applied()


# ---- a node ends


@EVERY_PHASE
def test_a_stage_that_says_that_it_ends_is_replaced_without_a_wait(phase: Phase) -> None:
    """A node that ended has lost its state; one that only lost its connection is waited for."""
    run = in_phase(phase)
    run.hello("x")
    actions = run.machine.lost("b", "it ended: out of memory", run.time)
    assert actions[0] == Released(node_id="b", reason="it ended: out of memory")
    (over,) = of_kind(actions, Aborted)
    assert (over.kind, over.reason) == (AbortKind.LOST, "node b is gone: it ended: out of memory")
    assert aborts(actions) == ["a", "c"] and finishes(actions) == {}
    assert placement_of(actions) == ("a", "x", "c")
    assert run.machine.lost("b", "it ended: again", run.time) == []


# ---- a node leaves


def test_a_node_in_the_lobby_leaves_at_once() -> None:
    run = Driver(stages=2)
    run.hello("a")
    assert run.leave("a") == [
        Send(node_id="a", message=Finish(reason=LEFT, failed=False)),
        Released(node_id="a", reason="it left"),
    ]
    run.hello("b")
    assert run.machine.epoch is None
    assert run.leave("a") == []


@EVERY_PHASE
def test_a_spare_leaves_at_once_while_the_run_goes_on(phase: Phase) -> None:
    run = in_phase(phase)
    run.hello("x")
    number = run.epoch.number
    assert run.leave("x") == [
        Send(node_id="x", message=Finish(reason=LEFT, failed=False)),
        Released(node_id="x", reason="it left"),
    ]
    assert (run.epoch.number, run.epoch.phase) == (number, phase)
    assert "x" not in run.machine.members


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.APPLYING])
def test_a_stage_leaves_after_the_step_and_a_snapshot(phase: Phase) -> None:
    # With a snapshot to take, the next step waits for all.
    run = Driver(every=3 if phase is Phase.APPLYING else 100).started("abc", 2)
    run.hello("x")
    if phase is Phase.APPLYING:
        run.all_vote()
    assert run.leave("b") == []
    assert run.leave("b") == []
    actions = end_of_step(run)
    assert of_kind(actions, StepDone) and of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=3)]
    assert sent(actions) == [TakeSnapshot(epoch=1, step=3)] * 3
    waits = Announce(text="the snapshot of step 3 waits for node a, node b, node c")
    assert run.tick(600.0) == [waits], "it is held until its state is on disk"
    actions = run.stored(3)
    assert finishes(actions) == {"b": LEFT}
    assert placement_of(actions) == ("a", "x", "c")
    assert aborts(actions) == ["a", "b", "c"]
    run.placed("a", 3)
    run.placed("x")
    (restore,) = set(sent(run.placed("c", 3)))
    assert isinstance(restore, Restore) and restore.step == 3, "nothing is lost"


# ---- the operator stops the run


@pytest.mark.parametrize("how", ["death", "new process"])
@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.APPLYING, Phase.IDLE])
def test_a_stop_does_not_outwait_an_epoch_that_ends_otherwise(phase: Phase, how: str) -> None:
    """There may be no nodes to finish the step with; a resume goes on from the snapshot on disk."""
    run = in_phase(phase)
    run.stop()
    actions = run.die("b") if how == "death" else run.hello("b", again=True)
    assert stop_of(actions).reason == "asked to stop"
    assert len(of_kind(actions, Aborted)) == 1
    assert run.machine.stopped


# ---- fewer stages, and more again


def test_a_run_goes_on_with_fewer_stages_when_it_has_waited_long_enough() -> None:
    run = Driver(stages=3, min_stages=2, every=4).started("abc", 6)
    run.die("b")
    assert run.tick(REGROUP - 1.0) == []
    assert placement_of(run.tick(1.0)) == ("a", "c")
    run.placed("a", -1)
    (restore,) = set(sent(run.placed("c", -1)))
    assert isinstance(restore, Restore) and restore.step == 4, "other layers come from the snapshot"
    assert sent(run.all_ready(), "a")[-1] == Begin(epoch=2, step=4)


def test_a_run_waits_below_its_least_number_of_stages() -> None:
    run = Driver(stages=3, min_stages=2).started("abc")
    run.die("b")
    run.die("c")
    assert run.tick(10 * REGROUP) == []
    assert placement_of(run.hello("x")) == ("a", "x")


def test_a_node_that_comes_in_time_keeps_the_split() -> None:
    run = Driver(stages=3, min_stages=1).started("abc", 2)
    run.die("b")
    run.tick(REGROUP - 1.0)
    assert placement_of(run.hello("b", again=True)) == ("a", "b", "c")


def regrouped() -> Driver:
    run = Driver(stages=3, min_stages=1, every=4).started("abc", 5)
    run.die("b")
    run.tick(REGROUP)
    assert run.epoch.hosts == ("a", "c")
    run.restored()
    return run


def test_a_run_grows_at_a_snapshot_once_that_is_on_disk() -> None:
    run = regrouped()
    assert of_kind(run.hello("x"), RecordPlacement) == []
    run.steps(3)
    assert run.epoch.number == 2, "not before"
    run.all_vote()
    actions = run.all_applied()
    assert of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=8)]
    assert sent(actions) == [TakeSnapshot(epoch=2, step=8)] * 2, "and no step begins"
    actions = run.stored(8)
    assert [aborted.reason for aborted in of_kind(actions, Aborted)] == ["the placement changes"]
    assert placement_of(actions) == ("a", "c", "x")
    (restore,) = set(sent(run.all_placed()))
    assert isinstance(restore, Restore) and restore.step == 8


def test_a_run_grows_without_waiting_for_a_snapshot_that_is_there() -> None:
    """Replayed steps pass one that was stored before the death."""
    run = Driver(stages=2, min_stages=1, every=2).started("ab", 3)
    run.steps(1, store=False)
    run.die("b")
    run.tick(REGROUP)
    run.restored()
    assert run.epoch.step == 2
    run.hello("x")
    run.stored(4)  # the upload had gone on
    run.steps(1)
    run.all_vote()
    actions = run.all_applied()
    assert of_kind(actions, OpenSnapshot) == []
    assert placement_of(actions) == ("a", "x")


def test_a_run_stays_as_it_is_when_the_newcomer_leaves() -> None:
    run = regrouped()
    run.hello("x")
    run.steps(3)
    run.all_vote()
    run.all_applied()
    run.leave("x")
    assert placement_of(run.stored(8)) == ("a", "c")
    run.all_placed(8)
    assert sent(run.all_ready(), "a") == [Begin(epoch=3, step=8)]


def test_a_run_does_not_grow_while_a_node_is_briefly_away() -> None:
    run = regrouped()
    run.hello("x")
    run.steps(3)
    run.all_vote()
    run.applied("c")
    run.machine.disconnected("c", run.time)
    actions = run.applied("a")
    assert sent(actions, "a") == [TakeSnapshot(epoch=2, step=8), Begin(epoch=2, step=8)]
