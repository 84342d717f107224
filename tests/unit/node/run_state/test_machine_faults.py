"""The run's state machine when something fails: who is lost, what runs again, and when the run stops."""

import math

import pytest

from node.run_state.actions import (
    Aborted,
    Action,
    Announce,
    Released,
    Send,
)
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_RETRIES, MAX_STRIKES
from tests.support.machine_driver import (
    RECONNECT,
    REGROUP,
    SILENT,
    Driver,
    aborts,
    finishes,
    of_kind,
    placement_of,
    restore_of,
    sent,
    stop_of,
)
from wire.messages import Abort, Begin, Commit, FailureKind, Restore

EVERY_PHASE = pytest.mark.parametrize("phase", list(Phase))


# ---- death


@EVERY_PHASE
def test_a_spare_takes_a_dead_nodes_stage_at_once(phase: Phase) -> None:
    run = Driver(steps=3, every=100).started("abc", 2)
    run.hello("x")
    run.into(phase)
    before = run.epoch
    actions = run.die("b")
    assert of_kind(actions, Released) == [
        Released(node_id="b", reason="its connection closed and did not come back")
    ]
    assert aborts(actions) == ["a", "c"], "the dead hear nothing"
    assert [aborted.epoch for aborted in of_kind(actions, Aborted)] == [before.number]
    assert placement_of(actions) == ("a", "x", "c")
    assert run.epoch.phase is Phase.PLACING


@EVERY_PHASE
def test_without_a_spare_the_run_waits_and_goes_on_when_somebody_joins(phase: Phase) -> None:
    run = Driver(steps=3, every=100).started("abc", 2).into(phase)
    number = run.epoch.number
    run.die("b")
    assert run.machine.epoch is None
    assert run.tick(1000.0) == []
    assert placement_of(run.hello("x")) == ("a", "x", "c")
    assert run.epoch.number == number + 1


def test_a_node_survives_a_brief_disconnect() -> None:
    run = Driver().started("abc")
    run.machine.disconnected("b", run.time)
    assert run.tick(RECONNECT) == []
    assert sent(run.hello("b", epoch=1)) == [Begin(epoch=1, step=0)]
    assert run.tick(RECONNECT + 1) == []
    assert run.epoch.number == 1


def test_a_silent_node_is_lost_and_whoever_is_heard_is_not() -> None:
    run = Driver().started("abc")
    run.time += SILENT
    assert run.machine.tick(run.time) == []
    for node in "ac":
        run.machine.heard(node, run.time)
    run.time += 0.5
    actions = run.machine.tick(run.time)
    assert of_kind(actions, Released) == [
        Released(node_id="b", reason="it has been silent for more than 15 s")
    ]
    assert run.machine.members.keys() == {"a", "c"}


def test_a_late_node_learns_that_its_epoch_is_over_and_becomes_a_spare() -> None:
    run = Driver(every=2).started("abc", 3)
    run.hello("x")
    run.die("b")
    run.restored()
    late = run.hello("b", epoch=1)
    assert late[0] == Send(node_id="b", message=Abort(epoch=1, reason="that epoch is over"))
    assert run.epoch.hosts == ("a", "x", "c")
    assert [type(message).__name__ for message in sent(late)] == ["Abort", "Prefetch"]


def test_a_node_that_missed_a_new_placement_gets_both() -> None:
    run = Driver(stages=2).started("ab", 2)
    run.machine.disconnected("b", run.time)
    run.failed("a")
    assert run.machine.epoch is None, "its seat is kept for a moment"
    assert run.tick(0.5) == []
    abort, *rest = sent(run.hello("b", epoch=1), "b")
    assert abort == Abort(epoch=1, reason="that epoch is over")
    assert [type(message).__name__ for message in rest] == ["Placement"]
    assert run.epoch.hosts == ("a", "b")


@EVERY_PHASE
def test_a_node_started_again_is_another(phase: Phase) -> None:
    """Its memory is gone; its new session stays open; nobody learns that it left."""
    run = Driver(steps=3, every=100).started("abc", 2).into(phase)
    actions = run.hello("b", again=True)
    assert of_kind(actions, Announce) == [Announce(text="node b was started again")]
    assert of_kind(actions, Released) == []
    assert aborts(actions) == ["a", "c"]
    assert placement_of(actions) == ("a", "b", "c")
    assert run.machine.members["b"].process_nonce == 2


# ---- which state an epoch goes on from


def placed_again(run: Driver, *answers: tuple[int, bool]) -> Restore:
    """The epoch ends, and in the next the stages hold these states."""
    run.failed(run.epoch.hosts[0])
    actions: list[Action] = []
    for node, (held, voted) in zip(run.epoch.hosts, answers, strict=True):
        actions = run.placed(node, held, voted=voted)
    return restore_of(actions)


COMMIT_4 = Commit(epoch=2, step=4, clip_coefficient=1.0 / (1.0 + math.sqrt(2)), lr=4.5)


@pytest.mark.parametrize(
    ("first", "second"),
    [((4, True), (5, False)), ((5, False), (4, True)), ((4, True), (4, True)), ((5, False), (5, False))],
)
def test_a_commit_that_some_nodes_missed_is_applied_by_all_voters(
    first: tuple[int, bool], second: tuple[int, bool]
) -> None:
    run = Driver(stages=2, every=3).started("ab", 4)
    run.all_vote()
    assert placed_again(run, first, second) == Restore(epoch=2, step=5, missed=COMMIT_4, lineage=1)
    assert sent(run.all_ready(), "a") == [Begin(epoch=2, step=5)]


@pytest.mark.parametrize(
    ("first", "second"),
    [((4, False), (5, False)), ((5, False), (-1, False)), ((5, False), (3, True)), ((-1, True), (-1, True))],
)
def test_stages_that_cannot_agree_go_back_to_the_snapshot(
    first: tuple[int, bool], second: tuple[int, bool]
) -> None:
    run = Driver(stages=2, every=3).started("ab", 4)
    run.all_vote()
    restore = placed_again(run, first, second)
    assert (restore.step, restore.uncompressed) == (3, False)


def test_a_node_that_returns_with_old_state_gets_the_snapshots() -> None:
    """The step is the same, but the others came to it a second time, perhaps with other bits."""
    run = Driver(every=4).started("abc", 6)
    run.hello("x")
    run.die("a")
    run.all_placed(-1)
    run.all_ready()
    run.steps(2)
    run.hello("a")
    run.die("x")
    assert run.epoch.hosts == ("a", "b", "c") and run.lineage == 2
    run.placed("b", 6)
    run.placed("c", 6)
    assert restore_of(run.placed("a", 6, lineage=1)) == Restore(epoch=3, step=4, lineage=3)


def test_a_vote_without_a_commit_on_record_is_no_state() -> None:
    run = Driver(stages=2, every=3).started("ab", 4)
    run.vote("a")
    assert placed_again(run, (4, True), (4, True)) == Restore(
        epoch=2,
        step=4,
        missed=Commit(epoch=2, step=3, clip_coefficient=COMMIT_4.clip_coefficient, lr=3.5),
        lineage=1,
    )


def test_a_state_from_before_a_rollback_still_belongs_to_the_run() -> None:
    """One stage, rolled back from 6 to 3: a node that holds 5 agrees with the record."""
    run = Driver(stages=1, every=3).started("a", 5)
    run.hello("b")
    run.die("a")
    run.restored()
    assert run.epoch.step == 3
    assert placed_again(run, (5, False)).step == 5


# ---- steps that fail


@EVERY_PHASE
def test_a_failed_step_runs_again_with_the_same_nodes(phase: Phase) -> None:
    run = Driver(steps=3, every=100).started("abc", 2).into(phase)
    number = run.epoch.number
    actions = run.failed("b", why="no activation came")
    assert aborts(actions) == ["a", "b", "c"]
    (aborted,) = of_kind(actions, Aborted)
    assert aborted.reason == "stage 1: no activation came" and aborted.epoch == number
    assert placement_of(actions) == ("a", "b", "c")
    assert run.epoch.number == number + 1


def test_a_step_that_cannot_be_applied_stops_the_run() -> None:
    """Though the next one begins with its commit, and it is committed each time."""
    run = Driver(stages=2, every=100).started("ab")
    for _ in range(MAX_RETRIES):
        run.all_vote()
        assert of_kind(run.failed("b", step=0), Aborted)
        run.restored(-1)
        assert run.epoch.step == 0
    run.all_vote()
    notes = [one.text for one in of_kind(run.failed("b", step=0), Announce)]
    assert notes == ["step 1 failed 4 times in a row: the run ends once what its stages hold is on disk"]


def test_a_step_that_the_next_one_followed_at_once_starts_the_count_afresh() -> None:
    run = Driver(stages=2, every=100).started("ab", 3)
    for _ in range(MAX_RETRIES):
        run.failed("b")
        run.restored(3)
    run.all_vote()
    for _ in range(MAX_RETRIES):
        assert of_kind(run.failed("b"), Aborted)
        run.restored(4)
    assert any("step 5 failed 4 times" in one.text for one in of_kind(run.failed("b"), Announce))


def test_a_step_that_is_done_or_a_death_starts_the_count_afresh() -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    for _ in range(MAX_RETRIES):
        run.failed("b")
        run.restored(3)
    run.steps(1)
    for _ in range(MAX_RETRIES):
        run.failed("b")
        run.restored(4)
    run.hello("x")
    run.die("a")
    run.restored(4)
    for _ in range(MAX_RETRIES):
        assert of_kind(run.failed("b"), Aborted)
        run.restored(4)
    assert stop_of(run.failed("b")).failed


def test_the_run_goes_on_failing_within_its_limit_on_fewer_stages_than_asked_for() -> None:
    run = Driver(stages=3, min_stages=1, every=2).started("abc", 2)
    run.die("b")
    run.tick(REGROUP)
    assert run.epoch.hosts == ("a", "c")
    run.restored()
    assert placement_of(run.failed("c")) == ("a", "c")


# ---- quarantine


def test_a_neighbour_that_keeps_sending_nonsense_is_quarantined() -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    for accuser in "aca"[: MAX_STRIKES - 1]:
        actions = run.failed(accuser, FailureKind.PEER, peer=1, why="frame of 9 GB")
        assert placement_of(actions) == ("a", "b", "c"), "there is no spare"
        run.restored(2)
    run.hello("x")
    actions = run.failed("a", FailureKind.PEER, peer=1, why="frame of 9 GB")
    why = "quarantined: it had a part in all of 3 failures with a and c"
    assert finishes(actions) == {"b": why}
    assert of_kind(actions, Released) == [Released(node_id="b", reason=why)]
    assert placement_of(actions) == ("a", "x", "c")
    assert len(of_kind(actions, Aborted)) == 1


def test_a_quarantined_node_stays_out() -> None:
    run = Driver(stages=2, every=2).started("ab", 2)
    for _ in range(MAX_STRIKES):
        actions = run.machine.refused("b", "nonsense", run.time)
    why = "quarantined: nonsense, the last of 3 such faults"
    assert finishes(actions) == {"b": why}
    assert run.machine.refused("b", "nonsense", run.time) == [], "its calls fill no log"
    for again in (False, True):
        actions = run.hello("b", again=again)
        assert finishes(actions) == {"b": why}
        assert of_kind(actions, Released) == [Released(node_id="b", reason=why)]
        assert "b" not in run.machine.members and run.machine.epoch is None
    assert placement_of(run.hello("x")) == ("a", "x")


@pytest.mark.parametrize("peer", [-1, 0, 2, 4, 99])
def test_only_a_neighbours_word_counts(peer: int) -> None:
    """Stage 0 of four knows stages 1 and 3."""
    run = Driver(stages=4, every=2).started("abcd", 2)
    for _ in range(MAX_RETRIES):
        run.failed("a", FailureKind.PEER, peer=peer)
        run.restored(2)
    assert run.machine.quarantined == {}
    assert stop_of(run.failed("a", FailureKind.PEER, peer=peer)).failed
