"""Nodes that come to a run of rows follow its steps, and fill empty seats without a wait."""

import random

import pytest

from node.run_state.actions import (
    Action,
    Announce,
    OpenSnapshot,
    RecordPlacement,
    SeatFilled,
    SeatLost,
    Send,
)
from node.run_state.epoch import ENTERING_SECONDS, Phase
from node.run_state.failures import LEAST_ENDS, MEMORY_STEPS
from node.run_state.grid import LEAST_STEPS
from node.run_state.newcomers import LATE_SECONDS, MOST_BEHIND, MOST_STEPS, OPEN_STEPS
from tests.support.machine_driver import (
    Driver,
    aborts,
    begins,
    follows,
    of_kind,
    placement_of,
    prefetches,
    sent,
    unit_numbers,
)
from tests.support.machine_world import World
from wire.messages import (
    FailureKind,
    Follow,
    FollowStep,
    PeerSilent,
    Placed,
    PlacedStage,
    Placement,
    Seat,
    Vote,
)

SEEDS = 12
EVERY = 50
SOURCES = {0: (PlacedStage(node_id="a", address="a:1"),), 1: (PlacedStage(node_id="b", address="b:1"),)}


def grid(steps: int = 1, *, nodes: str = "ab", groups: int = 4, total: int = 200) -> Driver:
    """A row of two stages in step `steps`; the next snapshot that is due is far away."""
    return Driver(stages=2, groups=groups, every=EVERY, steps=total, follows=True).started(nodes, steps)


def keeps_sums(actions: list[Action]) -> set[bool]:
    return {begin.keep_sums for begin in begins(actions)}


def followed(run: Driver) -> Driver:
    """x and y have come in step 1 and hold the snapshot of step 2, and the run is in step 2."""
    run.join("xy")
    run.step()
    run.stored(2)
    for node in "xy":
        run.following(node, 2, 2)
    return run


def entering(run: Driver) -> Driver:
    """Step 3 runs with an empty row, and x and y are to open the links of its seats."""
    followed(run)
    assert placement_of(run.step()) == ("a", "b", "", "")
    for node in "xy":
        run.following(node, 2, 3)
    assert not run.epoch.entering, "the hosts open their links first"
    run.restored(3)
    assert [*run.epoch.entering] == ["x", "y"] and run.epoch.step == 3
    return run


def test_when_a_row_could_enter_a_snapshot_is_taken_and_steps_go_on() -> None:
    run = grid()
    run.join("x")
    assert of_kind(run.step(), OpenSnapshot) == [], "one node is no row"
    run.join("y")
    actions = run.step()
    assert of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=3)]
    assert keeps_sums(actions) == {True}
    assert (run.epoch.phase, run.epoch.step) == (Phase.STEPPING, 3)


def test_a_row_can_enter_beside_empty_seats() -> None:
    """In a run whose nodes come and go all the time, there is hardly a moment without an empty seat."""
    run = grid(nodes="abcd")
    run.die("c")
    run.join("xyz")
    run.step()
    orders = {node: order for node, (order, *_) in follows(run.stored(2)).items()}
    assert sorted(order.stage for order in orders.values() if isinstance(order, Follow)) == [0, 0, 1]
    for node in "xyz":
        run.following(node, 2, 2)
    (first,) = run.epoch.entering
    assert run.epoch.entering_seat(first) == Seat(1, 0), "the empty seat comes first"
    run.placed(first, 2)
    run.ready(first)
    assert placement_of(run.step()) == ("a", "b", "", "d", "", "")


def test_a_newcomer_of_a_row_to_come_takes_the_seat_of_a_host_that_dies() -> None:
    run = followed(grid(nodes="abcd"))
    run.die("c")
    assert [*run.epoch.entering] == ["x"] and run.epoch.entering_seat("x") == Seat(1, 0)
    assert run.machine.epoch is run.epoch


def test_an_empty_row_for_which_nobody_comes_is_closed() -> None:
    """While a row is empty, steps do not show how fast rows are."""
    run = entering(grid())
    for node in "xy":
        run.die(node)
    for _ in range(OPEN_STEPS + 2):
        if placements := of_kind(run.step(), RecordPlacement):
            assert [placement.nodes for placement in placements] == [("a", "b")]
            return
    pytest.fail("the row stays")


def test_a_node_with_much_memory_leaves_small_stages_to_others() -> None:
    memory = {node: 2 if node in "abcdwy" else 1 for node in "abcdwxyz"}
    run = Driver(stages=4, groups=4, every=EVERY, steps=200, follows=True, memory=memory).started("abcd", 1)
    run.join("wyxz")
    run.step()
    orders = follows(run.stored(2))
    assert {node: order.stage for node, (order, *_) in orders.items() if isinstance(order, Follow)} == {
        "x": 0,
        "w": 1,
        "z": 2,
        "y": 3,
    }


def test_newcomers_get_the_snapshot_and_then_every_step_since() -> None:
    run = grid()
    run.join("xy")
    run.step()
    assert follows(run.step()) == {}, "the snapshot of step 2 is on its way"
    actions = run.stored(2)
    assert prefetches(actions) == {}, "they fetch it once"
    orders = follows(actions)
    lineage = run.epoch.lineage
    assert [orders[node][0] for node in "xy"] == [
        Follow(step=2, stage=stage, stages=2, lineage=lineage, sources=SOURCES[stage]) for stage in (0, 1)
    ]
    (told,) = orders["y"][1:]
    assert isinstance(told, FollowStep) and (told.snapshot, told.step, told.lr) == (2, 2, 2.5)
    assert told.norms == {3: 1.0, 4: 0.0, 5: 0.0}, "of its own stage"
    (next_one,) = follows(run.step())["x"]
    assert isinstance(next_one, FollowStep) and next_one.step == 3


def test_newcomers_whose_snapshot_is_never_complete_follow_from_the_next_one() -> None:
    """The node that saved a layer of it died before another one had a copy."""
    run = grid()
    run.join("xy")
    run.step()
    run.step()
    run.machine.save()
    run.step()
    told = follows(run.stored(4))
    assert {*told} == {"x", "y"}
    for order, *steps in told.values():
        assert isinstance(order, Follow) and order.step == 4 and steps == []
    assert follows(run.stored(2)) == {}
    (step,) = follows(run.step())["x"]
    assert isinstance(step, FollowStep) and (step.snapshot, step.step) == (4, 4)


def test_a_snapshot_of_which_a_layer_is_gone_is_taken_again_for_newcomers() -> None:
    run = grid()
    run.join("xy")
    run.step()
    assert run.machine.snapshot_gone(2, "no node that has its layer embed is here", run.time)
    assert of_kind(run.step(), OpenSnapshot) == [OpenSnapshot(step=3)]
    late = run.machine.snapshot_gone(2, "late", run.time)
    assert of_kind(late, Announce) == [], "it was reported before"
    assert {*follows(run.stored(3))} == {"x", "y"}
    assert run.machine.snapshot_gone(3, "it is complete", run.time) == []


def test_they_take_the_seats_of_the_row_and_nothing_is_loaded() -> None:
    run = entering(grid())
    epoch = run.epoch
    for node in "xy":
        run.placed(node, 3)
        run.ready(node)
    filled = of_kind(run.step(), SeatFilled)
    assert [(one.node_id, one.row, one.stage, one.step) for one in filled] == [("x", 1, 0, 4), ("y", 1, 1, 4)]
    assert run.epoch is epoch and epoch.whole_rows == [0, 1] and epoch.step == 4


def test_newcomers_of_a_row_stop_if_the_run_goes_back_to_a_snapshot() -> None:
    run = followed(grid())
    run.step()
    actions = run.restored(-1)
    assert run.epoch.is_loaded and run.epoch.step == 2
    for told in map(follows(actions).__getitem__, "xy"):
        assert isinstance(told[1], Follow)
        assert (told[0], told[1].lineage) == (Follow(step=2), run.epoch.number), "and begin anew"


def test_nobody_waits_for_one_that_is_behind() -> None:
    run = grid()
    run.join("xy")
    run.step()
    run.stored(2)
    run.following("x", 2, 2)
    for _ in range(3):
        assert of_kind(run.step(), RecordPlacement) == []
    for node in "xy":
        run.following(node, 2, 5)
    assert placement_of(run.step()) == ("a", "b", "", "")


@pytest.mark.parametrize("how", ["it dies", "it leaves", "it says that it cannot"])
def test_a_newcomer_that_is_lost_costs_nobody_else_a_seat(how: str) -> None:
    run = followed(grid())
    match how:
        case "it dies":
            run.die("y")
        case "it leaves":
            run.leave("y")
        case _:
            run.following("y", 2, 0, failed="no room")
    assert of_kind(run.step(), RecordPlacement) == [], "one node is no row"
    (order,) = [one for one in follows(run.join("z"))["z"] if isinstance(one, Follow)]
    assert (order.step, order.stage) == (2, 1), "another one is to have the seat"


def test_those_that_cannot_follow_enter_at_a_snapshot_that_is_due() -> None:
    run = followed(grid())
    for node in "xy":
        run.following(node, 2, 0, failed="no room")
    run.steps(EVERY - 3)
    actions = run.step()
    assert of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=EVERY)]
    assert run.epoch.phase is Phase.IDLE, "all wait, once"
    assert placement_of(run.stored(EVERY)) == ("a", "b", "x", "y")


def test_one_that_cannot_keep_up_is_told_to_stop() -> None:
    run = grid()
    run.join("xy")
    run.step()
    run.stored(2)
    run.following("x", 2, 2)
    for _ in range(MOST_STEPS):
        run.step()
        run.following("x", 2, run.epoch.step)
    assert follows(run.all_vote()) == {"x": [Follow(step=2)], "y": [Follow(step=2)]}


def test_one_that_keeps_up_is_told_of_steps_until_its_links_are_open() -> None:
    run = grid(nodes="abcd")
    run.die("c")
    run.join("x")
    run.step()
    run.stored(2)
    for _ in range(MOST_STEPS + 5):
        run.following("x", 2, run.epoch.step)
        (told,) = follows(run.step())["x"]
        assert isinstance(told, FollowStep) and told.step == run.epoch.step - 1


def test_a_newcomer_that_reconnects_is_told_again() -> None:
    run = followed(grid())
    run.machine.disconnected("x", run.time)
    assert of_kind(run.step(), RecordPlacement) == [], "the new node may have died meanwhile"
    told = follows(run.hello("x"))["x"]
    assert [type(one).__name__ for one in told] == ["Follow", "FollowStep"]
    run.following("x", 2, 3)
    run.following("y", 2, 3)
    assert placement_of(run.step()) == ("a", "b", "", "")


def test_there_is_nothing_to_follow_where_gradients_are_not_summed_by_groups() -> None:
    run = Driver(stages=2, groups=4, every=EVERY, steps=200).started("ab", 1)
    run.join("xy")
    assert of_kind(run.step(), OpenSnapshot) == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_replicas_die_and_join_by_seeded_schedules(seed: int) -> None:
    """Whatever they do, every step ends with the one right outcome, which the world asserts."""
    rng = random.Random(seed)
    world = World(
        stages=2,
        min_stages=2,
        total_steps=30,
        snapshot_every=rng.choice([3, 10]),
        groups=4,
        most_rows=3,
        follows=True,
        group_seconds=rng.choice([0.0, 3.0]),
    )
    for _ in range(2):
        world.add_node()
    world.run(400, rng)
    for _ in range(4):
        world.add_node()
    for _ in range(6):
        world.run(rng.randrange(20, 150), rng)
        world.check_nodes()
        node = rng.choice(world.nodes)
        match rng.randrange(5):
            case 0 if node.alive:
                node.die()
                node.start()
            case 1 if world.sessions:
                rng.choice(world.sessions).broken = True
            case 2:
                world.tick(1.5)
            case 3:
                world.add_node()
            case 4 if node.alive:
                node.leave()
            case _:
                pass
    assert world.settle().reason == "all steps are done"
    assert max(world.disk.snapshots) == 30 == len(world.disk.commits)


def test_a_node_of_a_broken_row_makes_another_one_whole_within_the_step() -> None:
    """Groups that nobody needs yet wait for it."""
    run = Driver(stages=2, groups=12, every=EVERY, steps=200, follows=True).started("abcdef", 1)
    for _ in range(LEAST_STEPS):
        run.machine.row_speeds(dict.fromkeys("abcdef", 6.0), 24.0, run.time)
    epoch = run.epoch
    lost = of_kind(run.die("a"), SeatLost)[0]
    assert lost.groups == (0, 1, 2, 3)
    assert epoch.waits and epoch.groups_of(0) == () and epoch.portions[-1] == (3, (0, 1, 2, 3))
    actions = run.die("d")
    assert of_kind(actions, SeatLost)[1].node_id == "c", "which holds the state of row 0's empty seat"
    assert not aborts(run.tick(0.5)) and run.epoch is epoch
    assert [one.enters for one in sent(actions, "c") if isinstance(one, Placement)] == [True]
    run.machine.message("c", Placed(epoch=epoch.number, held_step=1, voted=False, lineage=1), run.time)
    actions = run.ready("c")
    (filled,) = of_kind(actions, SeatFilled)
    assert (filled.node_id, filled.row, filled.stage, filled.step) == ("c", 0, 0, 1)
    (begin,) = begins(actions, "b")
    assert begin.late == (Seat(0, 0),) and {*begin.absent} == {Seat(1, 0), Seat(1, 1)}
    assert epoch.groups_of(0) == (4, 5), "none that the row has had, and one ahead"
    assert run.vote("e") == [], "groups wait"
    given = {*epoch.groups_of(0)}
    for _ in range(60):
        run.tick(1.0)
        given |= {*epoch.groups_of(0)}
    assert not epoch.waits and given >= {4, 5} and given.isdisjoint({0, 1, 2, 3})
    shared = [group for _, groups in epoch.portions for group in groups]
    assert sorted(shared) == [*range(12)]
    assert epoch.newcomers == set(), "a node that moves is no newcomer, so its row may hand in snapshots"
    run.all_vote()
    run.all_applied()
    assert (run.epoch, run.epoch.step) == (epoch, 2) and epoch.whole_rows == [0, 2]


def test_where_seats_change_in_every_step_groups_wait_by_what_uneven_steps_took() -> None:
    run = Driver(stages=2, groups=12, every=EVERY, steps=200, follows=True).started("abcdef", 1)
    epoch = run.epoch
    run.die("a")
    assert not epoch.waits, "how long a group takes is not known"
    run.all_vote()
    assert epoch.was_uneven(1) and epoch.computed(1) == (0, 6, 6)
    assert run.machine.uneven_speeds({"c": 6.0, "d": 7.0, "e": 6.0, "f": 6.0}) == []
    run.all_vote()
    assert epoch.step == 3 and epoch.whole_rows == [1, 2]
    assert (epoch.groups_of(1), epoch.groups_of(2)) == ((0, 1), (6, 7)) and epoch.waits
    assert epoch.computed(7) == (), "it has not been"


def test_who_comes_for_a_seat_that_has_just_become_empty_follows_within_the_step() -> None:
    run = grid(nodes="abcdef")
    told = run.die("a")
    assert of_kind(told, OpenSnapshot) == [OpenSnapshot(step=1)] and keeps_sums(told) == {True}
    assert follows(run.hello("x")) == {}
    (order,) = follows(run.stored(1))["x"]
    assert isinstance(order, Follow) and (order.step, run.epoch.step) == (1, 1)
    run.following("x", 1, 1)
    run.placed("x", 1)
    run.ready("x")
    assert run.step() and run.epoch.has("x")


def test_who_comes_after_another_snapshot_follows_from_that_one() -> None:
    run = Driver(stages=2, groups=4, every=3, steps=200, follows=True).started("abcdef", 1)
    run.die("a")
    run.stored(1)
    run.steps(3)
    run.stored(3)
    order, *steps = follows(run.hello("x"))["x"]
    assert isinstance(order, Follow) and order.step == 3
    assert [(step.snapshot, step.step) for step in steps if isinstance(step, FollowStep)] == [(3, 3)]


def test_a_snapshot_within_a_step_is_taken_again_from_another_row_if_a_node_of_the_first_dies() -> None:
    run = grid(nodes="abcdef")
    run.die("a")
    maker = run.epoch.snapshot_nodes[1]
    told = run.die(maker)
    assert OpenSnapshot(step=1) in told and maker not in run.epoch.snapshot_nodes


def test_an_epoch_begins_with_the_empty_seats_of_broken_rows() -> None:
    run = Driver(stages=2, groups=4, every=EVERY, steps=200, follows=True).started("abcdef", 1)
    run.die("a")
    placed = placement_of(run.failed("c"))
    assert placed == ("c", "d", "e", "f", "", "b")
    assert run.epoch.whole_rows == [0, 1] and run.epoch.vacant == [Seat(2, 0)]
    (own,) = [one for one in sent(run.epoch.announce(), "b") if isinstance(one, Placement)]
    assert [stage.node_id for stage in own.stages] == ["", "b"]


def test_who_comes_back_gets_an_empty_seat_of_the_stage_that_it_had() -> None:
    """As another process: the files of its stage are still on its disk."""
    run = grid(nodes="abcdef")
    for node in "cf":
        run.die(node)
    run.step()
    run.stored(2)
    (order,) = [one for one in follows(run.hello("f", again=True))["f"] if isinstance(one, Follow)]
    assert order.stage == 1, "row 1 lacks a node of stage 0, and comes first"
    (order,) = [one for one in follows(run.hello("x"))["x"] if isinstance(one, Follow)]
    assert order.stage == 0


def dies_and_returns(run: Driver, node: str) -> tuple[bool, list[Action]]:
    """A host dies, and a new process of it comes in the next step: whether it is to have its seat again; it
    takes it then. Gives what its death did, too."""
    told = run.die(node)
    for asked in of_kind([*told, *run.step()], OpenSnapshot):
        run.stored(asked.step)
    orders = [one for one in follows(run.hello(node, again=True)).get(node, ()) if isinstance(one, Follow)]
    step = run.epoch.step
    if orders:
        run.following(node, orders[0].step, step)
        run.placed(node, step)
        run.ready(node)
        run.step()
    return run.epoch.has(node), told


def test_who_ended_too_often_gets_a_seat_that_nobody_else_takes_and_not_after_one_more_end() -> None:
    run = grid(nodes="abcdef")
    returned = [dies_and_returns(run, "f") for _ in range(LEAST_ENDS + 1)]
    assert [has_seat for has_seat, _ in returned] == [True] * LEAST_ENDS + [False]
    stood_out = [any("others do not" in one.text for one in of_kind(told, Announce)) for _, told in returned]
    assert stood_out == [False] * (LEAST_ENDS - 1) + [True, False], "it is said once"
    run.hello("x")
    assert [*follows(run.hello("x"))] == ["x"], "another node has the seat"


FAILS = ["in its first step", "as it opens links", "as it follows", "by its end as it follows", "over a link"]


def tries(run: Driver, how: str) -> bool:
    """A step passes. If "x" is to have a seat, it fails, and starts again."""
    for asked in of_kind(run.step(), OpenSnapshot):
        run.stored(asked.step)
    order = next(
        (one for one in follows(run.hello("x")).get("x", ()) if isinstance(one, Follow) and one.sources), None
    )
    if order is None:
        return False
    step = run.epoch.step
    match how:
        case "by its end as it follows":
            pass
        case "as it follows":
            run.following("x", order.step, 0, failed="no room")
        case _:
            run.following("x", order.step, step)
            run.placed("x", step)
            if how == "in its first step":
                run.ready("x")
                run.step()
                assert run.epoch.has("x")
            run.failed("x", FailureKind.LINK if how == "over a link" else FailureKind.INTERNAL)
    assert not run.epoch.has("x")
    if how != "over a link":
        run.hello("x", again=True)
    return True


@pytest.mark.parametrize("how", FAILS)
def test_a_newcomer_that_fails_as_it_enters_waits_longer_each_time(how: str) -> None:
    run = grid(nodes="abcdef", total=2000)
    for asked in of_kind(run.die("f"), OpenSnapshot):
        run.stored(asked.step)
    failed = [run.epoch.step for _ in range(6 * MEMORY_STEPS) if tries(run, how)]
    assert 1 < len(failed) <= 6 and run.epoch.step > 5 * MEMORY_STEPS


@pytest.mark.parametrize("how", FAILS)
def test_others_have_the_seat_before_a_newcomer_that_failed(how: str) -> None:
    """Though it had the stage before, so that its files may still be there."""
    run = grid(nodes="abcdef")
    for asked in of_kind(run.die("f"), OpenSnapshot):
        run.stored(asked.step)
    assert any(tries(run, how) for _ in range(3))
    run.machine.lost("x", "it ends", run.time)
    run.steps(OPEN_STEPS + 1)
    run.join("xy")
    told = [action for _ in range(2) for action in (*run.step(), *run.stored(run.epoch.step))]
    assert {*follows(told)} == {"y"}


def one_seat(links: float | None = None) -> Driver:
    """x is to have the seat of f, which is gone; y is here, too. If `links` are given, those of another node
    took as many seconds to open."""
    run = grid(nodes="abcdef")
    for node in "f" if links is None else "df":
        run.die(node)
    run.step()
    run.stored(2)
    if links is not None:
        run.join("z")
        run.following("z", 2, run.epoch.step)
        run.placed("z", run.epoch.step)
        run.tick(links)
        run.ready("z")
        run.step()
        assert run.epoch.has("z")
    run.join("xy")
    return run


def opens(run: Driver, node: str) -> None:
    """It holds the state, and begins to open its links."""
    run.following(node, 2, run.epoch.step)
    run.placed(node, run.epoch.step)
    assert [*run.epoch.entering] == [node]


def seconds_until(run: Driver, node: str) -> int:
    """After how many seconds another node is to have the seat."""
    for seconds in range(2 * int(ENTERING_SECONDS)):
        if node in follows(run.tick(1.0)):
            return seconds
    return -1


@pytest.mark.parametrize("how", ["says nothing", "does not follow", "opens no links"])
def test_a_newcomer_without_progress_does_not_keep_the_seat_from_another(how: str) -> None:
    run = one_seat(links=2.0)
    if how == "does not follow":
        run.following("x", 2, 2)
        run.step()
        assert run.epoch.step > 2 + MOST_BEHIND
    if how == "opens no links":
        opens(run, "x")
    assert 0 < seconds_until(run, "y") < ENTERING_SECONDS / 2
    opens(run, "y")
    assert seconds_until(run, "x") >= ENTERING_SECONDS, "it has failed more often than y"


def accuses(run: Driver, node: str, *hosts: str) -> list[Action]:
    """It is to have an empty seat, and says that its links to these hosts do not open; it leaves at last."""
    run.join(node)
    told = [*run.step(), *run.stored(run.epoch.step)]
    (snapshot,) = {order.step for order, *_ in follows(told).values() if isinstance(order, Follow)}
    run.following(node, snapshot, run.epoch.step)
    run.placed(node, run.epoch.step)
    assert [*run.epoch.entering] == [node]
    actions = []
    for host in hosts:
        row, stage = run.epoch.replica_of(host), run.epoch.stage_of(host)
        silent = PeerSilent(epoch=run.epoch.number, stage=stage, replica=row)
        actions += run.machine.message(node, silent, run.time)
    run.machine.lost(node, "it ends", run.time)
    run.steps(OPEN_STEPS + 1)
    return actions


def test_a_host_to_which_no_newcomer_gets_a_link_gives_up_its_seat() -> None:
    run = grid(nodes="abcdef", total=2000)
    run.die("f")
    for node in "xyz":
        assert run.epoch.has("e")
        actions = accuses(run, node, "e")
    assert not run.epoch.has("e") and "e" in run.machine.members
    assert [action.about for action in of_kind(actions, Announce) if action.about] == ["e"]
    run.join("vw")
    told = [action for _ in range(2) for action in (*run.step(), *run.stored(run.epoch.step))]
    assert follows(told).keys() == {"v", "w"}, "others come first"


@pytest.mark.parametrize("how", ["few", "of several hosts", "of no neighbour", "one got a link"])
def test_a_few_newcomers_do_not_drive_hosts_out(how: str) -> None:
    run = grid(nodes="abcdef", total=4000)
    run.die("f")
    hosts = {"of several hosts": "de", "of no neighbour": "c"}.get(how, "e")
    for node in "xyxy" if how == "few" else "xyz":
        if how == "one got a link" and node == "z":
            run.machine._newcomers.opened(1.0, ["b", "d", "e"])
        accuses(run, node, *hosts)
    assert {*"bcde"} <= {*run.epoch.hosts}


def test_a_newcomer_is_heeded_once() -> None:
    """Else three of them could drive out one host after another."""
    newcomers = grid().machine._newcomers
    assert [newcomers.unlinked(node, "b") for node in "xxyz"] == [False, False, False, True]
    assert not any(newcomers.unlinked(node, "a") for node in "xyz")
    assert [newcomers.unlinked(node, "a") for node in "uvw"] == [False, False, True]


def test_a_newcomer_that_follows_step_by_step_keeps_the_seat() -> None:
    run = one_seat(links=2.0)
    run.steps(4)
    for held in range(2, run.epoch.step - MOST_BEHIND):
        run.following("x", 2, held)
        for _ in range(int(LATE_SECONDS) - 1):
            assert follows(run.tick(1.0)) == {}
    assert seconds_until(run, "y") > 0


def test_links_may_take_a_few_times_as_long_as_those_of_others() -> None:
    run = one_seat(links=15.0)
    opens(run, "x")
    assert ENTERING_SECONDS / 3 < seconds_until(run, "y") < ENTERING_SECONDS


def test_a_newcomer_without_a_rival_has_all_the_time() -> None:
    run = one_seat(links=2.0)
    run.machine.lost("y", "it ends", run.time)
    opens(run, "x")
    for _ in range(int(ENTERING_SECONDS)):
        run.tick(1.0)
    assert [*run.epoch.entering] == ["x"]
    run.tick(1.0)
    assert [*run.epoch.entering] == []


def test_a_word_of_where_it_was_does_not_keep_a_node_that_moves_from_its_seat() -> None:
    """It said so before it heard that it had a seat, and is to have another one."""
    run = grid(nodes="abcdef")
    run.die("f")
    run.step()
    run.stored(2)
    run.hello("f", again=True)
    step = run.epoch.step
    run.following("f", 2, step)
    run.placed("f", step)
    run.ready("f")
    run.die("e")
    run.die("d")
    run.step()
    assert [*run.epoch.entering] == ["f"] and run.epoch.entering_seat("f") == Seat(1, 1)
    run.following("f", 2, step + 1)
    assert [*run.epoch.entering] == ["f"]


def test_nodes_that_enter_hear_who_else_enters() -> None:
    """They open links to each other: to the process that comes, not to the one that is gone."""
    run = grid(nodes="abcdef")
    for node in "df":
        run.die(node)
    run.step()
    run.stored(2)
    step = run.epoch.step
    run.hello("d", again=True)
    run.following("d", 2, step)
    run.hello("f", again=True)
    told = of_kind(run.following("f", 2, step), Send)
    assert [*run.epoch.entering] == ["d", "f"]
    seat = run.epoch.entering_seat("f")
    renewed = {
        one.node_id: one.message.renewed
        for one in told
        if isinstance(one.message, Placement) and not one.message.enters
    }
    assert renewed == dict.fromkeys("bde", (seat,)), "its neighbour, and the nodes of its stage"


@pytest.mark.parametrize(("gone", "hear"), [("c", "d"), ("f", "bdeh")])
def test_nodes_that_enter_hear_whose_seat_is_empty(gone: str, hear: str) -> None:
    """They do not wait for links to it, whether it had its seat or was about to. Nodes that have opened a
    link to one that was about to have it close that link."""
    run = grid(nodes="abcdefgh", groups=8)
    for node in "df":
        run.die(node)
    run.step()
    run.stored(2)
    step = run.epoch.step
    for node in "df":
        run.hello(node, again=True)
        run.following(node, 2, step)
    (seat,) = [Seat(at // 2, at % 2) for at, node in enumerate(run.epoch.placed_nodes) if node == gone]
    told = [
        (one.node_id, one.message.renewed, placed(one.message, seat).node_id)
        for one in of_kind(run.die(gone), Send)
        if isinstance(one.message, Placement) and not one.message.enters
    ]
    assert sorted(told) == [(node, (seat,), "") for node in hear]


def placed(placement: Placement, seat: Seat) -> PlacedStage:
    """Who has a seat, as a node of its row or its stage hears."""
    own_row = seat.row == placement.replica
    return placement.stages[seat.stage] if own_row else placement.rows[seat.row].node


FIRST, LAST = unit_numbers(2)


@pytest.mark.parametrize(
    ("nodes", "units", "counts"),
    [("ab", (), True), ("ab", LAST, False), ("abcd", LAST, True), ("abcd", FIRST | LAST, False)],
)
def test_a_vote_speaks_for_no_sums_but_its_own(nodes: str, units: frozenset[int], counts: bool) -> None:
    """Nodes that follow the run would otherwise look for other gradients than those of their stage."""
    run = grid(nodes=nodes)
    epoch = run.epoch
    vote = Vote(
        epoch=epoch.number,
        step=epoch.step,
        norms=dict.fromkeys(LAST, 1.0),
        loss=None,
        group_losses=dict.fromkeys(epoch.groups_of(0), 0.5),
        generation=epoch.generation,
        sums=dict.fromkeys(units, bytes(16)),
    )
    said = of_kind(run.machine.message("b", vote, run.time), Announce)
    assert ("b" in epoch.votes) is counts and bool(said) is not counts
