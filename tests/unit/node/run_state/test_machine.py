"""The run's state machine when nothing fails: placement, steps, commits, snapshots, the end, resending."""

import math
from dataclasses import replace

import pytest

from node.run_state.actions import (
    Aborted,
    AbortKind,
    Action,
    Announce,
    OpenSnapshot,
    RecordCommit,
    RecordPlacement,
    RecordRestored,
    Released,
    Send,
    StepDone,
    costs_last,
    without_old_work,
)
from node.run_state.epoch import Phase
from node.run_state.machine import RunMachine
from node.run_state.run_plan import Past
from node.run_state.stage_assignment import Candidate
from node.tuning.device_memory import Devices
from tests.support.machine_driver import (
    REGROUP,
    UNITS,
    Driver,
    aborts,
    finishes,
    of_kind,
    placement_of,
    prefetches,
    sent,
    step_plan,
    stop_of,
)
from wire.messages import (
    Applied,
    Begin,
    Commit,
    Finish,
    Placed,
    PlacedStage,
    Placement,
    Prefetch,
    Ready,
    Restore,
    StepFailed,
    TakeSnapshot,
    Telemetry,
    Vote,
)
from wire.messages import FailureKind as Kind


def test_a_run_starts_when_there_is_a_node_for_every_stage() -> None:
    run = Driver(stages=3)
    assert run.hello("a") == []
    assert run.hello("b") == []
    assert run.tick(1000.0) == []
    stages = tuple(PlacedStage(node_id=node, address=f"{node}:1") for node in "abc")
    assert run.hello("c") == [
        RecordPlacement(epoch=1, nodes=("a", "b", "c"), addresses=("a:1", "b:1", "c:1")),
        *(
            Send(node_id=node, message=Placement(epoch=1, stage=stage, stages=stages))
            for stage, node in enumerate("abc")
        ),
    ]


def test_stages_restore_once_all_are_placed_and_begin_once_all_are_ready() -> None:
    run = Driver(stages=2)
    run.join("ab")
    assert run.placed("a") == []
    assert run.placed("a") == []
    restore = Restore(epoch=1, step=0, lineage=1)
    assert run.placed("b") == [Send(node_id="a", message=restore), Send(node_id="b", message=restore)]
    assert run.ready("b") == []
    assert run.ready("b") == []
    assert run.ready("a") == [
        RecordRestored(epoch=1, step=0, nodes=("a", "b")),
        Send(node_id="a", message=Begin(epoch=1, step=0)),
        Send(node_id="b", message=Begin(epoch=1, step=0)),
    ]


def test_a_step_is_recorded_when_all_have_voted_before_anybody_hears_of_it() -> None:
    run = Driver(stages=2).started("ab")
    assert run.vote("b", norm=16.0, loss=3.0) == []
    commit = Commit(epoch=1, step=0, clip_coefficient=1.0 / 6.0, lr=0.5, then=Begin(epoch=1, step=1))
    assert run.vote("a", norm=9.0) == [
        RecordCommit(
            epoch=1,
            step=0,
            loss=3.0,
            grad_norm=5.0,
            lr=0.5,
            clip_coefficient=1.0 / 6.0,
            norms={0: 9.0, 1: 0.0, 2: 0.0, 3: 16.0, 4: 0.0, 5: 0.0},
        ),
        Send(node_id="a", message=commit),
        Send(node_id="b", message=commit),
        StepDone(epoch=1, step=0, nodes=("a", "b")),
    ]


@pytest.mark.parametrize("why", ["due", "asked for", "measurement", "stop", "leave", "last step"])
def test_a_commit_goes_alone_where_something_is_to_be_done_before_the_next_step(why: str) -> None:
    every, steps = 3 if why == "due" else 100, 3 if why == "last step" else 20
    run = Driver(stages=2, every=every, steps=steps).started("ab", 2)
    match why:
        case "asked for":
            run.machine.save()
        case "measurement":
            run.validating(3)
        case "stop":
            run.stop()
        case "leave":
            run.leave("b")
    actions = run.all_vote()
    assert [one.then for one in sent(actions) if isinstance(one, Commit)] == [None, None]
    assert of_kind(actions, StepDone) == [] and run.epoch.phase is Phase.APPLYING
    assert len(of_kind(run.all_applied(), StepDone)) == 1


def test_a_step_with_something_to_do_after_it_ends_when_all_have_applied_it() -> None:
    run = Driver(stages=2, every=1, steps=2).started("ab")
    assert sent(run.all_vote(), "a")[0].then is None
    assert run.applied("a") == []
    assert run.applied("a") == []
    done = run.applied("b")
    take = TakeSnapshot(epoch=1, step=1)
    begun = [
        Send(node_id="a", message=Begin(epoch=1, step=1)),
        Send(node_id="b", message=Begin(epoch=1, step=1)),
    ]
    assert done == [
        StepDone(epoch=1, step=0, nodes=("a", "b")),
        OpenSnapshot(step=1),
        Send(node_id="a", message=take),
        Send(node_id="b", message=take),
        *begun,
    ]
    # The next step begins before this one's costs are summed up. Other actions keep their order.
    assert costs_last([done[0], *begun]) == [*begun, done[0]]
    assert costs_last(done) == done
    others = [*done, OpenSnapshot(step=1)]
    assert costs_last(others) == others and costs_last([]) == []


def test_of_several_begins_in_a_row_a_node_is_sent_the_newest() -> None:
    begins = [
        Send(node_id=node, message=Begin(epoch=1, step=4, generation=generation))
        for generation in (1, 2)
        for node in ("a", "b")
    ]
    commit = Send(node_id="a", message=Commit(epoch=1, step=3, clip_coefficient=1.0, lr=0.1))
    stop = Send(node_id="c", message=begins[0].message)
    assert without_old_work([commit, *begins[:2], stop, *begins[2:]]) == [commit, stop, *begins[2:]]
    assert without_old_work(begins[:2]) == begins[:2]


def test_the_norm_does_not_depend_on_the_order_of_votes() -> None:
    def norm(order: str) -> float:
        run = Driver(stages=3).started("abc")
        for node in order:
            actions = run.vote(node, norm={"a": 1e16, "b": 1.0, "c": 1.0}[node])
        return of_kind(actions, RecordCommit)[0].grad_norm

    assert len({norm(order) for order in ("abc", "cba", "bac", "cab")}) == 1


# ---- snapshots


def test_a_snapshot_that_is_asked_for_is_taken_once_after_the_running_step() -> None:
    run = Driver(stages=1, every=100).started("a", 2)
    assert run.machine.save() == []
    run.all_vote()
    assert of_kind(run.all_applied(), OpenSnapshot) == [OpenSnapshot(step=3)]
    run.all_vote()
    assert of_kind(run.all_applied(), OpenSnapshot) == []


def test_a_snapshot_that_is_asked_for_waits_while_two_are_being_stored() -> None:
    run = Driver(stages=1, every=100).started("a")
    for taken in (True, True, False):
        run.machine.save()
        run.all_vote()
        assert bool(of_kind(run.all_applied(), OpenSnapshot)) is taken
    run.stored(2)
    run.all_vote()
    assert of_kind(run.all_applied(), OpenSnapshot) == [OpenSnapshot(step=4)]


def test_a_run_ends_when_its_last_state_is_on_disk() -> None:
    run = Driver(stages=2, steps=2, every=100).started("ab", 1)
    run.all_vote()
    actions = run.all_applied()
    assert of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=2)]
    assert sent(actions) == [TakeSnapshot(epoch=1, step=2)] * 2
    waits = Announce(text="the snapshot of step 2 waits for node a, node b")
    assert run.tick(600.0) == [waits], "nobody hands in anything: it may not be the nodes"
    end = run.stored(2)
    assert finishes(end) == {"a": "all steps are done", "b": "all steps are done"}
    assert stop_of(end).failed is False
    assert run.machine.stopped and run.machine.epoch is None


def test_a_snapshot_that_comes_late_is_the_newest_but_ends_no_wait_for_another() -> None:
    run = Driver(stages=1, steps=4, every=2).started("a")
    run.steps(4, store=False)
    assert run.epoch.phase is Phase.IDLE
    assert run.stored(2) == []
    assert run.machine.newest_snapshot == 2
    assert run.stored(2) == []
    assert stop_of(run.stored(4)).reason == "all steps are done"


def test_a_snapshot_that_an_epoch_did_not_live_to_see_is_taken_by_the_next() -> None:
    run = Driver(stages=2, every=3).started("ab")
    run.steps(3, store=False)
    run.failed("a")
    run.all_placed(3)
    assert of_kind(run.all_ready(), OpenSnapshot) == [OpenSnapshot(step=3)]


# ---- spares


def test_a_spare_is_sent_for_the_newest_snapshot_when_it_comes_and_when_there_is_a_newer_one() -> None:
    run = Driver(stages=3, every=2).started("abc")
    assert run.hello("x") == [], "nothing is on disk yet"
    run.steps(1)
    run.all_vote()
    run.all_applied()
    (first,) = prefetches(run.stored(2)).items()
    assert first[0] == "x" and first[1].step == 2 and first[1].units == UNITS
    (second,) = prefetches(run.hello("y")).items()
    assert second[0] == "y" and second[1].units == (*UNITS[2:], *UNITS[:2])
    run.steps(1)
    run.all_vote()
    run.all_applied()
    assert {node: p.step for node, p in prefetches(run.stored(4)).items()} == {"x": 4, "y": 4}


def test_who_waits_for_a_runs_first_epoch_fetches_the_weights_of_its_stage() -> None:
    run = Driver(stages=3, first_weights=True)
    for node, units in (("a", UNITS[:2]), ("b", UNITS[2:4])):
        assert prefetches(run.hello(node)) == {node: Prefetch(step=0, units=units)}
    assert prefetches(run.hello("c")) == {}, "it has its stage"
    assert prefetches(run.hello("d")) == {} and prefetches(Driver(stages=2).hello("a")) == {}


# ---- what is said to a node whose connection broke


def again(run: Driver, node_id: str) -> list[object]:
    """Its connection breaks, and it comes back at once, in the epoch that it knows."""
    epoch = run.epoch.number
    assert run.machine.disconnected(node_id, run.time) == []
    assert run.tick(0.5) == []
    return list(sent(run.hello(node_id, epoch=epoch), node_id))


def test_earlier_output_is_repeated() -> None:
    run = Driver(stages=2, steps=4, every=2)
    run.join("ab")
    (placement,) = again(run, "b")
    assert isinstance(placement, Placement) and placement.stage == 1
    run.placed("b")
    assert again(run, "b") == [placement], "although it has answered"
    run.all_placed()
    assert again(run, "a") == [Restore(epoch=1, step=0, lineage=1)]
    run.all_ready()
    assert again(run, "a") == [Begin(epoch=1, step=0)]
    run.vote("a")
    assert again(run, "a") == [Begin(epoch=1, step=0)]
    run.vote("b")
    clip = 1.0 / (1.0 + math.sqrt(2))
    commit = Commit(epoch=1, step=0, clip_coefficient=clip, lr=0.5, then=Begin(epoch=1, step=1))
    assert again(run, "a") == [commit]
    run.vote("a")
    assert again(run, "a") == [commit]
    run.steps(1, store=False)
    assert again(run, "b") == [TakeSnapshot(epoch=1, step=2), Begin(epoch=1, step=2)]
    run.all_vote()
    commit = Commit(epoch=1, step=2, clip_coefficient=clip, lr=2.5, then=Begin(epoch=1, step=3))
    assert again(run, "b") == [TakeSnapshot(epoch=1, step=2), commit]
    run.all_vote()
    assert again(run, "b") == [Commit(epoch=1, step=3, clip_coefficient=clip, lr=3.5)]
    run.all_applied()
    assert again(run, "b") == [TakeSnapshot(epoch=1, step=4)]


def test_answers_that_come_twice_change_nothing() -> None:
    run = Driver(stages=2, every=1).started("ab")  # with a snapshot to take, the next step waits for all
    assert run.ready("a") == [] and run.placed("a", 0) == []
    assert run.vote("a") == [] and run.vote("a") == []
    assert len(of_kind(run.vote("b"), RecordCommit)) == 1
    assert run.vote("a") == [] and run.vote("b") == []
    assert run.applied("b") == [] and run.applied("b") == []
    assert len(of_kind(run.applied("a"), StepDone)) == 1
    stale = Vote(epoch=1, step=0, norms={0: 1.0}, loss=None)
    assert run.machine.message("a", stale, run.time) == []
    assert run.machine.message("b", stale, run.time) == []
    assert run.epoch.step == 1 and run.epoch.phase is Phase.STEPPING


# ---- who is not meant


def test_messages_of_other_epochs_and_strangers_are_dropped() -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    run.failed("a")
    number = run.epoch.number
    assert number == 2
    run.hello("x")
    for wrong in (1, 3):
        for message in (
            Placed(epoch=wrong, held_step=3, voted=False),
            Vote(epoch=wrong, step=3, norms={0: math.nan}, loss=None),
            StepFailed(epoch=wrong, step=3, kind=Kind.INTERNAL, message="x"),
        ):
            assert run.machine.message("a", message, run.time) == []
    for stranger in ("x", "nobody"):
        for message in (
            Placed(epoch=number, held_step=3, voted=False),
            Vote(epoch=number, step=3, norms={0: 1.0}, loss=None),
            StepFailed(epoch=number, step=3, kind=Kind.INTERNAL, message="x"),
        ):
            assert run.machine.message(stranger, message, run.time) == []
    assert "nobody" not in run.machine.members
    run.placed("b", 3)
    assert run.epoch.phase is Phase.PLACING, "nobody has answered for a"


def test_an_answer_from_the_epoch_before_does_not_count_in_the_same_phase_of_this_one() -> None:
    run = Driver(stages=2).started("ab", 3)
    run.failed("a")
    run.all_placed(3)
    run.ready("a")
    assert run.machine.message("b", Ready(epoch=1, telemetry=Telemetry()), run.time) == []
    assert run.epoch.phase is Phase.RESTORING
    run.ready("b")
    run.vote("a")
    assert run.machine.message("b", Vote(epoch=1, step=3, norms={1: 1.0}, loss=2.0), run.time) == []
    assert run.epoch.outstanding("a") == [Begin(epoch=2, step=3)]
    run.vote("b")
    run.applied("a")
    late = Applied(epoch=1, step=3, telemetry=Telemetry())
    assert run.machine.message("b", late, run.time) == []
    assert len(of_kind(run.applied("b"), StepDone)) == 1


def test_heartbeats_and_goodbyes_of_strangers_are_dropped() -> None:
    run = Driver(stages=2).started("ab")
    run.machine.heard("nobody", run.time)
    assert run.machine.disconnected("nobody", run.time) == []
    assert run.leave("nobody") == []
    assert run.machine.lost("nobody", "evicted", run.time) == []
    assert run.machine.members.keys() == {"a", "b"}


def test_a_stopped_run_answers_everything_with_the_end() -> None:
    run = Driver(stages=1).started("a")
    stop_of(run.machine.fail("the disk is full"))
    assert finishes(run.hello("a")) == {"a": "the disk is full"}
    assert finishes(run.hello("b")) == {"b": "the disk is full"}
    assert run.machine.fail("again") == []
    assert run.stop() == [] and run.leave("a") == [] and run.tick(100.0) == [] and run.stored(5) == []
    assert run.machine.message("a", Vote(epoch=1, step=0, norms={}, loss=None), run.time) == []
    assert run.machine.lost("a", "evicted", run.time) == []


# ---- memory


def test_a_stage_goes_to_a_node_that_it_fits() -> None:
    run = Driver(stages=2, memory={"small": 2, "large": 9, "other": 3})
    run.hello("small")
    assert of_kind(run.hello("large"), RecordPlacement) == []
    assert placement_of(run.hello("other")) == ("large", "other")


def test_missing_memory_is_reported_once_and_the_run_regroups() -> None:
    # Four stages need 1, 2, 1 and 2.
    run = Driver(stages=4, min_stages=1, memory={"a": 6, "b": 1, "c": 1, "d": 1})
    run.join("abc")
    (told,) = run.hello("d")
    assert isinstance(told, Announce)
    assert told.text.startswith("waiting for a node with more memory: the stages need ")
    assert run.tick(0.5) == []
    assert placement_of(run.tick(10.0)) == ("a",)


def test_a_node_that_no_stage_fits_is_sent_away_with_the_estimate() -> None:
    run = Driver(stages=3, min_stages=2, memory={"a": 3, "b": 3, "c": 1, "d": 2})
    run.join("ab")
    sent, released = run.hello("c")
    assert isinstance(sent, Send) and isinstance(released, Released)
    assert isinstance(sent.message, Finish) and sent.message.failed
    assert sent.message.reason == released.reason
    assert "the smallest of 3 stages" in released.reason
    assert "c" not in run.machine.members
    assert placement_of(run.hello("d")) == ("a", "b", "d")


def test_a_node_whose_devices_cannot_share_a_stage_is_sent_away() -> None:
    """One that enrolled before, with other options: nobody checks those again but here."""
    run = Driver(stages=2)
    plan = replace(run.plan, sharing=lambda devices: f"{devices.count} is odd" if devices.count % 2 else None)
    machine = RunMachine(plan, step_plan, Past())

    def hello(node_id: str, count: int) -> list[Action]:
        return machine.hello(
            Candidate(node_id=node_id, memory_bytes=0, devices=Devices(count=count)),
            address=f"{node_id}:1",
            process_nonce=1,
            epoch=0,
            now=0.0,
        )

    sent, released = hello("a", 3)
    assert isinstance(sent, Send) and isinstance(sent.message, Finish) and isinstance(released, Released)
    assert sent.message.reason == released.reason == "3 is odd"
    assert list(machine.members) == []
    assert hello("b", 2) == [] and placement_of(hello("c", 4)) == ("b", "c")


def test_a_node_that_returns_too_small_gives_up_its_stage() -> None:
    memory = {"a": 3, "b": 3, "c": 3}
    run = Driver(stages=3, memory=memory).started("abc")
    memory["c"] = 1
    actions = run.hello("c", again=True)
    assert of_kind(actions, Released)[0].node_id == "c"
    assert "c" not in run.machine.members and run.machine.epoch is None


# ---- the run's state machine as nodes come and go of their own will, and as the operator ends the run


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
