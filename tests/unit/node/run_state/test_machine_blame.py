"""A step keeps failing although no node is dead: spares replace hosts, the most suspect one first."""

import random
from collections.abc import Callable, Iterable

import pytest

from node.coordinator.sessions import OTHERS_A_SECOND, Measured, MessageLimits
from node.run_file.loader import default_config
from node.run_state.actions import Aborted, Action, Announce, RecordPlacement, Released, SeatFilled, SeatLost
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_RETRIES, MAX_STRIKES, MEMORY_STEPS
from node.run_state.machine import RunMachine
from node.run_state.membership import ALARM_SECONDS, ANSWER_SECONDS, MOST_ALARMS
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
    sent,
    stop_of,
)
from tests.support.machine_world import World
from wire.messages import AskHeartbeat, FailureKind, Follow, PeerSilent, Placement, Restore, Seat, StepFailed

Told = tuple[str, StepFailed] | None
INTERNAL = FailureKind.INTERNAL


def said(run: Driver, node_id: str, kind: FailureKind, peer: str = "") -> Told:
    stage = run.epoch.hosts.index(peer) if peer else -1
    words = f"the link to stage {stage} (node {peer}) was not up within 60 s" if peer else "the disk is full"
    return node_id, StepFailed(
        epoch=run.epoch.number,
        step=run.epoch.step,
        kind=kind,
        message=words,
        peer_stage=stage,
    )


def link(run: Driver, node_id: str, peer: str) -> Told:
    return said(run, node_id, FailureKind.LINK, peer)


def attempts(run: Driver, fault: Callable[[Driver], Told], most: int = 100) -> list[Action]:
    """Stages take their places and the step fails, until it does not or the run ends; gives all actions."""
    actions: list[Action] = []
    for _ in range(most):
        told = fault(run) if run.machine.epoch is not None else None
        if told is None:
            break
        node_id, message = told
        actions += run.machine.message(node_id, message, run.time)
        if run.machine.epoch is not None:
            run.all_placed(run.epoch.step)
    return actions


def broken(*nodes: str) -> Callable[[Driver], Told]:
    """Every start of a stage on these nodes fails."""

    def fault(run: Driver) -> Told:
        seated = [node for node in run.epoch.hosts if node in nodes]
        return said(run, seated[0], INTERNAL) if seated else None

    return fault


def cut_off(bad: str, accusers: Iterable[str] = ()) -> Callable[[Driver], Told]:
    """No link to this node comes up. `accusers` tell of it, in turn, where they are at an end of one."""
    turn = 0

    def fault(run: Driver) -> Told:
        nonlocal turn
        hosts = run.epoch.hosts
        if bad not in hosts:
            return None
        at = hosts.index(bad)
        around = [hosts[stage] for stage in (at - 1, at + 1) if 0 <= stage < len(hosts)]
        teller = [*accusers][turn % len([*accusers])] if accusers else around[0]
        turn += 1
        if teller == bad:
            return link(run, bad, around[turn % len(around)])
        return link(run, teller if teller in around else around[0], bad)

    return fault


def with_spares(spares: str, nodes: str = "abc") -> Driver:
    run = Driver(stages=len(nodes), every=2).started(nodes, 2)
    run.join(spares)
    return run


def test_a_spare_takes_the_stage_of_a_node_that_keeps_failing() -> None:
    run = with_spares("x")
    actions = attempts(run, broken("b"))
    assert run.epoch.hosts == ("a", "x", "c")
    assert len(of_kind(actions, Aborted)) == MAX_RETRIES + 1
    (note,) = of_kind(actions, Announce)
    assert "the disk is full: a spare takes stage 1 from node b" in note.text
    assert finishes(actions) == {} and "b" in run.machine.members, "it stays, as a spare"
    run.all_ready()
    run.steps(1)
    assert run.epoch.step == 3


def test_the_accused_end_of_a_link_is_replaced_before_the_accuser() -> None:
    run = with_spares("xy")
    run.stored(2)

    def fault(run: Driver) -> Told:
        if "a" not in run.epoch.hosts:
            return None
        return said(run, "a", FailureKind.LINK, run.epoch.hosts[1])

    attempts(run, fault, MAX_RETRIES + 1)
    assert run.epoch.hosts == ("a", "x", "c")
    attempts(run, fault)
    assert run.epoch.hosts == ("y", "x", "c")


@pytest.mark.parametrize("accuser", ["", "x"])
def test_an_unreachable_replacement_is_replaced_even_if_it_complained_first(accuser: str) -> None:
    run = with_spares("xy")
    run.die("b")
    assert run.epoch.hosts == ("a", "x", "c")
    run.all_placed(2)
    attempts(run, cut_off("x", accuser))
    assert run.epoch.hosts == ("a", "y", "c")


def test_an_accuser_that_was_wrong_is_replaced_before_another_spare() -> None:
    """It blames one neighbour after the other, also those that are new."""
    run = with_spares("xyz")
    attempts(run, cut_off("a", "a"))
    assert "a" not in run.epoch.hosts
    assert len(set(run.epoch.hosts) & set("xyz")) == 2


def test_a_node_that_gave_up_a_stage_gets_none_in_this_step() -> None:
    run = with_spares("xy")
    attempts(run, broken("b", "x"))
    assert run.epoch.hosts == ("a", "y", "c")


def test_when_no_spare_is_left_the_run_is_given_up() -> None:
    run = with_spares("xy")
    actions = attempts(run, lambda run: said(run, run.epoch.hosts[1], INTERNAL))
    end = stop_of(actions)
    assert end.failed and end.reason.startswith("step 3 failed 4 times in a row, last at stage 1")
    assert len(of_kind(actions, Announce)) == 2, "twice a spare took over"
    assert len(of_kind(actions, Aborted)) == 3 * (MAX_RETRIES + 1) - 1


def test_a_finished_step_clears_all_blame() -> None:
    run = with_spares("x")
    attempts(run, broken("b"))
    run.all_ready()
    run.steps(1, store=False)
    run.die("c")
    assert run.epoch.hosts == ("a", "x", "b")


def test_a_node_that_gave_up_a_stage_is_used_if_there_is_no_other() -> None:
    run = with_spares("x")
    attempts(run, broken("b"))
    run.all_ready()
    assert placement_of(run.die("x")) == ("a", "b", "c")


def test_a_split_of_fewer_stages_changes_hands_too() -> None:
    run = Driver(stages=4, min_stages=2, every=2).started("abcd", 2)
    run.die("b")
    run.die("d")
    run.tick(REGROUP)
    assert run.epoch.hosts == ("a", "c")
    run.restored()
    run.hello("x")
    actions = attempts(run, broken("c"))
    assert run.epoch.hosts == ("a", "x")
    assert len(of_kind(actions, Aborted)) == MAX_RETRIES + 1
    run.all_ready()
    assert run.epoch.phase is Phase.STEPPING, "no epoch is ended for a third stage on the node that failed"


@pytest.mark.parametrize("kind", [FailureKind.LINK, INTERNAL])
def test_a_node_that_fails_a_few_times_in_each_step_is_replaced(kind: FailureKind) -> None:
    """Of a link its other end is tried first. If it breaks again, the one that reports it is next."""
    run, aborted = with_spares("xy"), 0
    while run.epoch.has("a"):
        assert aborted <= 4 * MAX_RETRIES
        for _ in range(MAX_RETRIES - 1):
            if run.epoch.has("a"):
                run.failed("a", kind, peer=1 if kind is FailureKind.LINK else -1)
                run.restored(run.epoch.step)
                aborted += 1
        run.steps(1)
    assert run.machine.quarantined == {}


# ---- complaints between neighbours: one of two is wrong, and only other partners show which


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


def accused_twice(nodes: str) -> tuple[Driver, list[Action]]:
    """Both neighbours of "b" complain in the first of two epochs, and one of them in the second."""
    run = Driver(stages=len(nodes), every=2).started(nodes, 2)
    actions: list[Action] = []
    for attempt in range(2):
        epoch = run.epoch.number
        run.failed("b", FailureKind.LINK, why="stage 2 refused the link")
        for neighbour in "ac"[: 2 - attempt]:
            actions = run.machine.message(neighbour, complaint(run, epoch), run.time)
        if run.machine.epoch is not None:
            run.restored(2)
    return run, actions


@pytest.mark.parametrize("nodes", ["abc", "abcd"])
def test_a_node_that_breaks_the_protocol_with_both_neighbours_is_quarantined(nodes: str) -> None:
    """The node at fault may see its link closed, and report that, before its neighbours are heard."""
    run, _ = accused_twice(nodes)
    assert run.machine.quarantined.keys() == {"b"}


@pytest.mark.parametrize("nodes", ["abcde", "abcdef"])
def test_two_neighbours_that_may_both_lie_get_nobody_shut_out(nodes: str) -> None:
    """Fewer than half of all accuse it: its process ends, another node would have its stage, and without one
    it may come back."""
    run, actions = accused_twice(nodes)
    why = "it had a part in all of 3 failures with a and c: start it again"
    assert finishes(actions) == {"b": why} and run.machine.quarantined == {}
    assert f"node b ends: {why}" in [note.text for note in of_kind(actions, Announce)]
    run.hello("b", again=True)
    run.restored(2)
    assert sorted(run.epoch.hosts) == sorted(nodes)


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


# ---- nodes that their neighbours do not hear: who is dead is known early, and nobody is thrown out by a word


def grid(steps: int = 2, nodes: str = "abcd") -> Driver:
    """Rows of two stages: a, b and c, d."""
    return Driver(stages=2, groups=4, every=50, steps=200, follows=True).started(nodes, steps)


def suspects(run: Driver, node: str, stage: int, row: int = 0) -> list[Action]:
    """A node says that it does not hear the neighbour at this place."""
    news = PeerSilent(epoch=run.epoch.number, stage=stage, replica=row)
    return run.machine.message(node, news, run.time)


def pass_time(run: Driver, seconds: float, *, without: str = "") -> list[Action]:
    """All others are heard, twice a second."""
    actions: list[Action] = []
    for _ in range(round(2 * seconds)):
        run.time += 0.5
        for node in set(run.machine.members) - set(without):
            run.machine.heard(node, run.time)
        actions += run.machine.tick(run.time)
    return actions


def gone(actions: list[Action]) -> list[str]:
    return [one.node_id for one in of_kind(actions, Released)]


def test_a_node_that_answers_is_not_lost_whatever_its_neighbours_say() -> None:
    run = grid()
    for _ in range(MOST_ALARMS):
        assert sent(suspects(run, "b", 0), "a") == [AskHeartbeat()]
        assert suspects(run, "c", 0) == [], "it was asked already"
        assert gone(pass_time(run, ANSWER_SECONDS)) == []


def test_who_often_says_so_of_a_node_that_lives_is_not_believed_for_a_while() -> None:
    """Else each neighbour would be lost that is slow to answer once."""
    run = grid()
    for _ in range(MOST_ALARMS):
        suspects(run, "b", 0)
        pass_time(run, ANSWER_SECONDS)
    assert suspects(run, "b", 0) == []
    assert gone(pass_time(run, 2 * ANSWER_SECONDS, without="a")) == []
    pass_time(run, ALARM_SECONDS)
    suspects(run, "b", 0)
    assert gone(pass_time(run, 2 * ANSWER_SECONDS + 1, without="a")) == ["a"]


def test_others_are_believed_who_said_so_of_no_node_that_lives() -> None:
    run = grid()
    for _ in range(MOST_ALARMS):
        suspects(run, "b", 0)
        pass_time(run, ANSWER_SECONDS)
    suspects(run, "c", 0)
    assert gone(pass_time(run, 2 * ANSWER_SECONDS, without="a")) == ["a"]


def test_false_reports_do_not_bring_a_node_over_the_limit_of_its_messages() -> None:
    run, limits = grid(), MessageLimits(default_config())
    for _ in range(60 * int(OTHERS_A_SECOND)):
        run.time += 1 / OTHERS_A_SECOND
        if sent(suspects(run, "b", 0), "a"):
            run.machine.heard("a", run.time)
            assert limits.refusal(Measured("heartbeat", 100), run.time) is None


def test_a_node_that_neither_answers_nor_is_heard_by_a_neighbour_is_lost_soon() -> None:
    run = grid()
    suspects(run, "b", 0)
    assert gone(pass_time(run, ANSWER_SECONDS, without="a")) == []
    actions = pass_time(run, 0.5, without="a")
    assert gone(actions) == ["a"]
    assert [one.node_id for one in of_kind(actions, SeatLost)] == ["a"], "and the step goes on"
    assert of_kind(actions, RecordPlacement) == [] and begins(actions, "c")


def test_a_silence_that_no_neighbour_speaks_of_is_waited_for() -> None:
    run = grid()
    assert gone(pass_time(run, SILENT, without="a")) == []
    assert gone(pass_time(run, 0.5, without="a")) == ["a"]


@pytest.mark.parametrize("first", ["its connection", "a neighbour"])
def test_a_node_whose_connections_all_close_is_lost_at_once(first: str) -> None:
    run = grid()
    if first == "its connection":
        assert run.machine.disconnected("a", run.time) == []
        actions = suspects(run, "b", 0)
    else:
        suspects(run, "b", 0)
        actions = run.machine.disconnected("a", run.time)
    assert gone(actions) == ["a"] and of_kind(actions, SeatLost)


def test_a_link_that_broke_before_is_no_evidence() -> None:
    run = grid()
    suspects(run, "b", 0)
    pass_time(run, RECONNECT + 0.5)
    assert run.machine.disconnected("a", run.time) == []
    assert gone(pass_time(run, RECONNECT)) == []
    assert gone(pass_time(run, 0.5)) == ["a"]


def test_a_node_that_was_silent_for_long_lately_has_as_long_to_answer() -> None:
    run = grid()
    pass_time(run, 6.0, without="a")
    run.machine.heard("a", run.time)
    suspects(run, "b", 0)
    assert gone(pass_time(run, 6.0, without="a")) == []
    assert gone(pass_time(run, 0.5, without="a")) == ["a"]


def test_what_a_node_says_of_others_than_its_neighbours_is_dropped() -> None:
    run = grid()
    for stage, row in ((1, 1), (0, 0), (0, 2), (7, 0)):
        assert suspects(run, "a", stage, row) == []
    assert sent(suspects(run, "a", 1)) == sent(suspects(run, "a", 0, 1)) == [AskHeartbeat()]


@pytest.mark.parametrize("spare", [False, True])
def test_where_nobody_can_do_its_work_a_node_is_waited_for(spare: bool) -> None:
    run = Driver(stages=2).started("abx" if spare else "ab", 2)
    suspects(run, "b", 0)
    actions = pass_time(run, ANSWER_SECONDS + 0.5, without="a")
    if spare:
        assert placement_of(actions) == ("x", "b")
        return
    assert gone(actions) == []
    assert run.machine.disconnected("a", run.time) == [] == suspects(run, "b", 0)


def test_the_coordinators_own_silence_is_not_a_nodes() -> None:
    run = grid()
    suspects(run, "b", 0)
    run.time += 30.0
    assert gone(run.machine.tick(run.time, unseen=30.0)) == []


def lost(run: Driver) -> Driver:
    """a was not heard in the step that runs, which goes on without it."""
    suspects(run, "b", 0)
    assert gone(pass_time(run, ANSWER_SECONDS + 0.5, without="a")) == ["a"]
    return run


def test_one_that_is_back_in_the_step_has_its_seat_again() -> None:
    run = lost(grid())
    number = run.epoch.number
    actions = run.hello("a", epoch=number)
    assert aborts(actions) == ["a"]
    (place,) = [one for one in sent(actions, "a") if isinstance(one, Placement)]
    assert (place.enters, place.replica, place.stage) == (True, 0, 0)
    assert [type(one) for one in sent(run.placed("a", 2), "a")] == [Restore]
    actions = run.ready("a")
    assert [one.node_id for one in of_kind(actions, SeatFilled)] == ["a"]
    (begin,) = begins(actions, "c")
    assert begin.late == (Seat(0, 0),) and not begin.absent
    assert run.epoch.number == number and run.epoch.whole_rows == [0, 1]
    run.step()
    assert run.epoch.step == 3


@pytest.mark.parametrize("how", ["a new process", "another state", "a later step"])
def test_one_that_does_not_hold_the_state_is_one_more_newcomer(how: str) -> None:
    run = lost(grid())
    number = run.epoch.number
    if how == "a later step":
        run.step()
        assert (run.epoch.step, run.epoch.number) == (3, number)
    actions = run.hello("a", epoch=0 if how == "a new process" else number)
    if how == "another state":
        assert [*run.epoch.entering] == ["a"]
        assert aborts(run.placed("a", 1)) == ["a"]
    else:
        assert [one for one in sent(actions, "a") if isinstance(one, Placement)] == []
    assert run.epoch.entering == {} and run.epoch.number == number


def test_who_follows_the_run_for_that_seat_makes_room() -> None:
    run = grid(nodes="abcdef")
    suspects(run, "d", 0, 1)
    pass_time(run, ANSWER_SECONDS + 0.5, without="c")
    run.step()
    run.stored(3)
    lost(run)
    run.hello("x")
    actions = run.hello("a", epoch=run.epoch.number)
    assert follows(actions)["x"] == [Follow(step=3)], "it follows no longer"
    assert [*run.epoch.entering] == ["a"]
    assert run.epoch.entering_seat("a") == Seat(0, 0)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_node_that_wakes_makes_its_row_whole(seed: int, goes_on: bool) -> None:
    """In an invented world; the run ends with the one right state."""
    rng = random.Random(seed)
    world = World(
        stages=2, total_steps=60, snapshot_every=5, groups=4, most_rows=2, follows=True, group_seconds=3.0
    )
    nodes = [world.add_node() for _ in range(4)]
    frozen = rng.choice(nodes)

    def is_in_step(machine: RunMachine | None) -> bool:
        epoch = None if machine is None else machine.epoch
        return epoch is not None and len(epoch.hosts) == 4 and 0 < epoch.step == frozen.state_step

    while not is_in_step(world.machine):
        world.run(1, rng) if world.possible() else world.tick(0.5)
    frozen.frozen = True
    for node in nodes:
        if node is not frozen:
            node.suspect(frozen)
    world.run(15, rng)
    for _ in range(8):
        # With messages under way the step ends before the node wakes.
        world.run(10 if goes_on else 0, rng)
        world.tick(0.5)
    assert world.machine is not None and frozen.node_id not in world.machine.members
    assert (world.lost, world.filled) == (1, 0)
    epoch = world.machine.epoch
    assert epoch is not None
    is_at_it = (epoch.phase, epoch.step) == (Phase.STEPPING, frozen.state_step)
    world.notes.clear()
    for node in nodes:
        node.frozen = not goes_on and node is not frozen
    world.run(60, rng)
    end = world.settle()
    assert end.reason == "all steps are done" and not end.failed
    assert (world.disk.last_epoch, world.filled) == (epoch.number, 1), "it has its seat in the same epoch"
    assert any("the state is here" in note for note in world.notes) is (goes_on or not is_at_it), (
        "at once if it can"
    )
