"""Nodes that their neighbours do not hear: who is dead is known early, and nobody is thrown out by a word."""

import random

import pytest

from node.coordinator.sessions import OTHERS_A_SECOND, Measured, MessageLimits
from node.run_file.loader import default_config
from node.run_state.actions import Action, RecordPlacement, Released, SeatFilled, SeatLost
from node.run_state.epoch import Phase
from node.run_state.machine import RunMachine
from node.run_state.membership import ALARM_SECONDS, ANSWER_SECONDS, MOST_ALARMS
from tests.support.machine_driver import (
    RECONNECT,
    SILENT,
    Driver,
    aborts,
    begins,
    follows,
    of_kind,
    placement_of,
    sent,
)
from tests.support.machine_world import World
from wire.messages import AskHeartbeat, Follow, PeerSilent, Placement, Restore, Seat


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
