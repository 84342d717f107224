"""The run's state machine when something fails: who is lost, what runs again, and when the run stops."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from node.run_state.actions import (
    Aborted,
    Action,
    Announce,
    OpenSnapshot,
    RecordPlacement,
    RecordRestored,
    Released,
    SeatFilled,
    SeatLost,
    Send,
)
from node.run_state.epoch import Committed, Phase
from node.run_state.failures import MAX_RETRIES, MAX_STRIKES
from node.run_state.run_plan import Past
from node.tuning.decisions import StepHistory
from tests.support.machine_driver import (
    RECONNECT,
    REGROUP,
    SILENT,
    Driver,
    aborts,
    begins,
    finishes,
    follows,
    of_kind,
    placement_of,
    restore_of,
    sent,
    stop_of,
)
from tests.support.machine_world import World
from wire.messages import Abort, Begin, Commit, FailureKind, Follow, PeerSilent, Placement, Restore, Seat

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


# ---- a snapshot is found to be damaged during the run: which one the run goes back to, and what it prints


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


# ---- a coordinator that has died and goes on from its database: whom it waits for, and from which state


def past(*, step: int | None, snapshot: int = 0, hosts: str = "ab") -> Past:
    committed = None if step is None else Committed(step=step, clip_coefficient=0.25, lr=0.125)
    return Past(last_epoch=7, newest_snapshot=snapshot, committed=committed, hosts=tuple(hosts))


def test_a_restarted_coordinator_waits_for_nodes_that_had_a_stage() -> None:
    run = Driver(stages=2, past=past(step=5, snapshot=4))
    run.join("xyz")
    actions = run.hello("b", epoch=7)
    assert sent(actions, "b") == [Abort(epoch=7, reason="that epoch is over")]
    assert of_kind(actions, RecordPlacement) == []
    assert run.tick(REGROUP - 0.5) == []
    assert placement_of(run.hello("a", epoch=7)) == ("a", "b")
    assert run.epoch.number == 8


def test_a_restarted_coordinator_reassigns_stages_of_absent_nodes() -> None:
    run = Driver(stages=2, past=past(step=5, snapshot=4))
    run.join("xb")
    assert placement_of(run.tick(REGROUP)) == ("x", "b")


def test_a_coordinator_that_died_after_the_last_snapshot_is_done() -> None:
    run = Driver(stages=2, steps=6, past=past(step=5, snapshot=6))
    run.join("ab")
    assert stop_of(run.restored(6)).reason == "all steps are done"


def test_no_step_begins_with_a_split_that_is_not_its_own() -> None:
    """The request to continue the run with the next split takes a moment, and steps may be shorter."""
    splits = StepHistory(((0, (3, 2)), (5, (3, 2)), (6, (4, 1))))
    run = Driver(stages=2, every=20, past=replace(past(step=8, snapshot=4), splits=splits))
    run.join("ab")
    run.restored(4)
    run.steps(1)
    assert (run.epoch.phase, run.epoch.step) == (Phase.STEPPING, 5)
    actions = run.step()
    assert [opened.step for opened in of_kind(actions, OpenSnapshot)] == [6]
    assert run.stored(6) == [] and run.tick(1.0) == []
    assert stop_of(run.stop()).reason


def test_a_single_stage_row_goes_on_alone() -> None:
    run = Driver(stages=2, min_stages=1, past=past(step=5, snapshot=4, hosts="a"))
    assert placement_of(run.hello("a", epoch=7)) == ("a",)


@pytest.mark.parametrize(
    ("stages", "held", "stay", "begins"),
    [
        (1, {"a": (8, 3), "b": (8, 3), "c": (8, 9)}, "ab", (8, 3)),
        (2, {"a": (8, 3), "b": (8, 3), "c": (8, 3), "d": (8, 3), "e": (8, 9), "f": (8, 9)}, "abcd", (8, 3)),
        (2, {"a": (8, 3), "b": (8, 3), "c": (8, 3), "d": (8, 3), "e": (8, 3), "f": (8, 9)}, "abcde", (8, 3)),
        (1, {"a": (8, 3), "b": (8, 9)}, "ab", (4, 8)),  # no majority says which of them lies
        (1, {"a": (8, 3), "b": (8, 3), "c": (7, 3)}, "ab", (8, 3)),
        (1, {"a": (8, 3), "b": (6, 2)}, "a", (8, 3)),
        (1, {"a": (-1, 0), "b": (-1, 0), "c": (8, 3)}, "c", (8, 3)),
    ],
)
def test_who_names_another_lineage_does_not_go_on_without_the_others(
    stages: int, held: Mapping[str, tuple[int, int]], stay: str, begins: tuple[int, int]
) -> None:
    """Which lineages the run has had is not on record, so any counts."""
    rows = len(held) // stages
    before = replace(past(step=7, snapshot=4, hosts="".join(held)), rows=rows)
    run = Driver(stages=stages, groups=rows, follows=True, past=before)
    run.join("".join(held))
    actions: list[Action] = []
    for _ in range(2):  # the second time without those that the others leave behind
        for node in run.epoch.hosts if run.epoch.phase is Phase.PLACING else ():
            step, lineage = held[node]
            actions = run.placed(node, step, lineage=lineage)
    restore = restore_of(actions)
    assert run.epoch.hosts == tuple(stay)
    assert (restore.step, restore.lineage) == begins


# ---- nodes that die before an epoch's first step, while all take their seats and load their state


SEEDS = 12
HELD = 2


def grid(phase: Phase, nodes: str = "abcdef", *, follows: bool = True) -> Driver:
    """Rows of two stages that hold the state of step 2, in an epoch that is in this phase."""
    run = Driver(stages=2, groups=6, every=50, steps=200, follows=follows).started(nodes, HELD)
    run.failed("a", FailureKind.INTERNAL)
    if phase is Phase.RESTORING:
        run.all_placed(HELD)
    assert run.epoch.phase is phase and run.epoch.steps_done == 0
    return run


def renewed(actions: list[Action]) -> dict[str, tuple[Seat, ...]]:
    """The seats whose links nodes replace or drop."""
    sends = of_kind(actions, Send)
    return {one.node_id: one.message.renewed for one in sends if isinstance(one.message, Placement)}


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.RESTORING])
def test_a_death_before_the_first_step_costs_its_seat(phase: Phase) -> None:
    run = grid(phase)
    epoch = run.epoch
    actions = run.die("c")
    assert run.epoch is epoch and epoch.phase is phase
    assert aborts(actions) == [] and of_kind(actions, RecordPlacement) == []
    (lost,) = of_kind(actions, SeatLost)
    assert (lost.node_id, lost.row, lost.stage, lost.groups) == ("c", 1, 0, ())
    assert renewed(actions) == dict.fromkeys("ade", (Seat(1, 0),)), "they open no link to it"
    if phase is Phase.PLACING:
        assert restore_of(run.all_placed(HELD)).step == HELD
    actions = run.all_ready()
    (restored,) = of_kind(actions, RecordRestored)
    assert restored.nodes == ("a", "b", "", "d", "e", "f") and restored.step == HELD
    (begin,) = begins(actions, "d")
    assert begin.absent == (Seat(1, 0),)
    assert sorted((*epoch.groups_of(0), *epoch.groups_of(2))) == [*range(6)] and epoch.groups_of(1) == ()
    run.step()
    assert run.epoch is epoch and epoch.step == HELD + 1


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.APPLYING, Phase.VALIDATING])
def test_neighbours_hear_of_a_death_at_once(phase: Phase) -> None:
    """Within a step, with the groups that they get."""
    run = Driver(stages=2, groups=6, every=50, steps=3, follows=True).started("abcdef", 2).into(phase)
    actions = run.die("c")
    seat = Seat(1, 0)
    if phase is Phase.STEPPING:
        assert all(begins(actions, node)[0].absent == (seat,) for node in "abdef")
    assert renewed(actions) == ({} if phase is Phase.STEPPING else dict.fromkeys("ade", (seat,)))


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.RESTORING])
def test_nobody_waits_for_the_answer_of_a_dead_node(phase: Phase) -> None:
    run = grid(phase)
    answer = run.ready if phase is Phase.RESTORING else lambda node: run.placed(node, HELD)
    for node in "abdef":
        answer(node)
    actions = run.die("c")
    if phase is Phase.PLACING:
        assert {one.node_id for one in of_kind(actions, Send) if isinstance(one.message, Restore)} == {
            *"abdef"
        }
        assert run.epoch.phase is Phase.RESTORING
    else:
        assert (
            of_kind(actions, RecordRestored) and {*begins(actions, "b")} and run.epoch.phase is Phase.STEPPING
        )


def test_what_a_dead_node_said_that_it_holds_does_not_count() -> None:
    """It held less than all others, so that they would have had to go back."""
    run = grid(Phase.PLACING)
    run.placed("c", -1)
    run.die("c")
    assert restore_of(run.all_placed(HELD)).step == HELD


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.RESTORING])
def test_the_epoch_ends_where_no_row_is_whole(phase: Phase) -> None:
    """Survivors of two rows hold all stages, and make a row of the next epoch."""
    run = grid(phase, "abcd")
    run.die("c")
    assert run.epoch.whole_rows == [0]
    actions = run.die("b")
    assert aborts(actions) == ["a", "d"] and placement_of(actions) == ("a", "d")
    assert restore_of(run.all_placed(HELD)).step == HELD


def test_where_nodes_cannot_follow_a_death_ends_the_epoch() -> None:
    run = grid(Phase.RESTORING, follows=False)
    assert placement_of(run.die("c")) == ("a", "b", "e", "f")


def test_an_epoch_that_runs_uncompressed_ends() -> None:
    run = Driver(stages=2, groups=8, every=50, steps=200, follows=True).started("abcdefgh", HELD)
    while not run.epoch.uncompressed:
        run.failed(run.epoch.hosts[0], FailureKind.NON_FINITE)
        run.all_placed(HELD)
        run.all_ready()
    run.failed(run.epoch.hosts[0], FailureKind.LINK)
    run.all_placed(HELD)
    assert run.epoch.uncompressed and len(run.epoch.whole_rows) > 1
    assert of_kind(run.die(run.epoch.hosts[-1]), RecordPlacement)


def test_a_node_that_was_not_there_hears_which_seats_are_empty() -> None:
    """It would otherwise wait for links to a node that is gone."""
    run = grid(Phase.RESTORING)
    number = run.epoch.number
    run.machine.disconnected("a", run.time)
    run.machine.lost("c", "it ends", run.time)
    placement, restore = sent(run.hello("a", epoch=number), "a")
    assert isinstance(placement, Placement) and isinstance(restore, Restore)
    assert placement.renewed == (Seat(1, 0),) and placement.rows[1].node.node_id == ""


def test_a_node_whose_connections_close_as_it_restores_is_lost_at_once() -> None:
    run = grid(Phase.RESTORING)
    run.machine.disconnected("c", run.time)
    news = PeerSilent(epoch=run.epoch.number, stage=0, replica=1)
    actions = run.machine.message("d", news, run.time)
    assert [one.node_id for one in of_kind(actions, Released)] == ["c"] and of_kind(actions, SeatLost)


def test_that_it_had_restored_gives_nobody_a_seat_whose_links_are_not_open() -> None:
    """It was lost before the coordinator heard so, and is back within the first step."""
    run = grid(Phase.RESTORING)
    for node in "abdef":
        run.ready(node)
    run.die("c")
    assert run.epoch.phase is Phase.STEPPING
    run.hello("c", epoch=run.epoch.number)
    assert of_kind(run.ready("c"), SeatFilled) == [] and not run.epoch.has("c")
    assert [type(one) for one in sent(run.placed("c", HELD), "c")] == [Restore]
    assert of_kind(run.ready("c"), SeatFilled) and run.epoch.has("c")


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.RESTORING])
def test_the_seat_is_filled_beside_the_steps(phase: Phase) -> None:
    run = grid(phase)
    epoch = run.epoch
    run.die("c")
    run.join("c")
    if phase is Phase.PLACING:
        run.all_placed(HELD)
    run.all_ready()
    (order,) = [one for one in follows(run.stored(HELD))["c"] if isinstance(one, Follow)]
    assert (order.step, order.stage) == (HELD, 0)
    run.following("c", HELD, HELD)
    run.placed("c", HELD)
    run.ready("c")
    (filled,) = of_kind(run.step(), SeatFilled)
    assert (filled.node_id, filled.row, filled.stage) == ("c", 1, 0)
    assert run.epoch is epoch and epoch.whole_rows == [0, 1, 2]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_deaths_and_returns_before_the_first_step_change_no_commit(seed: int) -> None:
    """The world asserts that each step ends as it does without them."""
    rng = random.Random(seed)
    world = World(
        stages=2, min_stages=2, total_steps=60, snapshot_every=3, groups=4, most_rows=3, follows=True
    )
    for _ in range(6):
        world.add_node()
    for _ in range(6):
        world.run_until(rng.choice([Phase.PLACING, Phase.RESTORING]), rng)
        world.run(rng.randrange(8), rng)
        node = rng.choice(world.nodes)
        node.die()
        if rng.random() < 0.5:
            node.start()
        world.tick(1.5)
        if rng.random() < 0.5:
            world.failures += 1
            for other in world.nodes:
                if world.may_fail() and other.running and other.epoch is not None:
                    other.fail(FailureKind.INTERNAL)
                    break
        world.heal()
        world.run(rng.randrange(30), rng)
    assert world.settle().reason == "all steps are done"
    assert max(world.disk.snapshots) == 60 == len(world.disk.commits)
