"""Nodes that die before an epoch's first step, while all take their seats and load their state."""

import random

import pytest

from node.run_state.actions import (
    Action,
    RecordPlacement,
    RecordRestored,
    Released,
    SeatFilled,
    SeatLost,
    Send,
)
from node.run_state.epoch import Phase
from tests.support.machine_driver import (
    Driver,
    aborts,
    begins,
    follows,
    of_kind,
    placement_of,
    restore_of,
    sent,
)
from tests.support.machine_world import World
from wire.messages import FailureKind, Follow, PeerSilent, Placement, Restore, Seat

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
