"""Several rows: which go on when nodes die, join or leave, what a commit needs, and finding wrong values."""

import math

import pytest

from node.run_state.actions import (
    Action,
    Announce,
    OpenSnapshot,
    RecordCommit,
    RecordPlacement,
    Released,
    Send,
    SnapshotDropped,
)
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_STRIKES
from node.run_state.grid import REMEMBERED_STEPS, SHARED_STEPS
from node.run_state.newcomers import EARLY_SECONDS
from node.run_state.wrong_values import _Doubt
from tests.support.machine_driver import (
    Driver,
    aborts,
    begins,
    of_kind,
    placement_of,
    prefetches,
    restore_of,
    sent,
    stop_of,
)
from wire.messages import Begin, FailureKind, Restore, TakeSnapshot, Validate, Vote


def grid(steps: int = 0, *, nodes: str = "abcd", groups: int = 4, every: int = 5, total: int = 20) -> Driver:
    """In step `steps` of a run of two stages; all are there before it begins."""
    run = Driver(stages=2, groups=groups, every=every, steps=total)
    return run.started(nodes, steps)


def groups_of(actions: list[Action]) -> tuple[tuple[int, ...], ...]:
    (placement,) = of_kind(actions, RecordPlacement)
    return placement.groups


def notes(actions: list[Action]) -> list[str]:
    return [action.text for action in of_kind(actions, Announce)]


def places(run: Driver) -> list[tuple[int, int]]:
    return [(run.epoch.replica_of(node), run.epoch.stage_of(node)) for node in run.epoch.hosts]


# ---- placing


def test_nodes_that_come_before_the_first_step_is_done_enter_at_once() -> None:
    run = Driver(stages=2, groups=4)
    assert placement_of(run.join("ab")) == ("a", "b")
    run.restored()
    assert of_kind(run.join("c"), RecordPlacement) == []
    actions = run.join("d")
    assert placement_of(actions) == ("a", "b", "c", "d")
    assert groups_of(actions) == ((0, 1), (2, 3))
    assert places(run) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (own,) = [m for m in sent(actions, "d") if not isinstance(m, Restore)]
    assert (own.replica, own.stage, [row.groups for row in own.rows]) == (1, 1, [(0, 1), (2, 3)])
    assert [stage.node_id for stage in own.stages] == ["c", "d"]


def test_nodes_that_come_and_go_do_not_keep_the_first_step_from_being_done() -> None:
    """Each whole row that comes back begins the first step again, for a minute; later it waits."""
    run = Driver(stages=2, groups=4, follows=True)
    run.join("abcd")
    run.restored()
    begun = []
    for _ in range(4):
        run.machine.lost("d", "gone", run.time)
        run.time += EARLY_SECONDS / 2
        begun.append(len(of_kind(run.join("d"), RecordPlacement)))
        if begun[-1]:
            run.restored()
    assert begun == [1, 1, 0, 0]


@pytest.mark.parametrize("phase", list(Phase))
def test_the_other_rows_take_the_groups_of_a_dead_node_at_once(phase: Phase) -> None:
    run = grid(2, total=3)
    held = 3 if phase in (Phase.VALIDATING, Phase.IDLE) else 2
    run.into(phase)
    run.join("xy")
    actions = run.die("a")
    assert placement_of(actions) == ("c", "d"), "and no newcomer, who would have to start from the disk"
    assert groups_of(actions) == ((0, 1, 2, 3),)
    voted = phase is Phase.APPLYING
    run.placed("c", held, voted=voted)
    assert restore_of(run.placed("d", held, voted=voted)).step == held + voted


def test_nodes_of_two_broken_rows_make_one() -> None:
    run = grid(2)
    run.machine.disconnected("a", run.time)
    assert placement_of(run.die("d")) == ("c", "b")
    run.placed("c", 2)
    assert restore_of(run.placed("b", 2)).step == 2


def test_with_no_copy_of_a_stage_left_all_go_back_to_the_disk_and_newcomers_enter() -> None:
    run = grid(7)
    run.join("xy")
    run.machine.disconnected("a", run.time)
    assert placement_of(run.die("c")) == ("x", "b", "y", "d")
    for node in "xby":
        run.placed(node, 7 if node == "b" else -1)
    assert restore_of(run.placed("d", 7)).step == 5


def test_newcomers_enter_at_the_next_snapshot_that_is_due() -> None:
    run = grid(1, nodes="ab")
    run.join("xy")
    assert run.epoch.hosts == ("a", "b")
    run.steps(3)
    run.all_vote()
    actions = run.all_applied()
    assert of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=5)] and run.epoch.phase is Phase.IDLE
    actions = run.stored(5)
    assert placement_of(actions) == ("a", "b", "x", "y")
    for node, held in zip("abx", [5, 5, -1], strict=True):
        run.placed(node, held)
    assert restore_of(run.placed("y")).step == 5


def test_a_row_that_leaves_costs_no_snapshot() -> None:
    run = grid(2)
    assert run.leave("b") == []
    run.all_vote()
    actions = run.all_applied()
    assert of_kind(actions, OpenSnapshot) == [] and placement_of(actions) == ("c", "d")
    assert of_kind(actions, Released)[0].node_id == "b"
    run.placed("c", 3)
    assert restore_of(run.placed("d", 3)).step == 3


def test_a_node_with_the_last_copy_of_a_stage_hands_it_in_before_leaving() -> None:
    run = grid(2)
    run.leave("b")
    run.leave("d")
    run.all_vote()
    assert of_kind(run.all_applied(), OpenSnapshot) == [OpenSnapshot(step=3)]


def test_spares_prepare_for_the_stage_that_they_had() -> None:
    run = grid(6)
    run.die("a")
    run.restored(6)
    run.steps(4)
    asked = prefetches(run.stored(10))
    assert asked["b"].units[0] == "block.2"


# ---- one row for all


def test_rows_take_turns_at_snapshots() -> None:
    run = grid(4)
    for nodes in (["c", "d"], ["a", "b"], ["c", "d"]):
        run.all_vote()
        actions = run.all_applied()
        told = {a.node_id: a.message for a in of_kind(actions, Send) if isinstance(a.message, TakeSnapshot)}
        assert [node for node, take in told.items() if not take.only_hashes] == nodes
        assert told.keys() == {*"abcd"}, "the other row says what it holds, too"
        assert run.epoch.snapshot_nodes == tuple(nodes)
        for node, take in told.items():
            assert take in run.epoch.outstanding(node)
        run.stored(run.epoch.step)
        run.steps(4)


@pytest.mark.parametrize("follows", [False, True])
def test_a_snapshot_that_is_not_taken_is_told_once_with_the_reason(follows: bool) -> None:
    """Nodes c and d hand it in; the epoch goes on without c if it can."""
    run = Driver(stages=2, groups=4, every=5, steps=20, follows=follows).started("abcd", 4)
    run.all_vote()
    run.all_applied()
    for node in "bd":
        run.holds(node, step=5)
    told = [*run.die("c"), *run.die("a"), *run.die("d")]
    assert {dropped.step for dropped in of_kind(told, SnapshotDropped)} == {5}
    lines = [line for line in notes(told) if "snapshot of step 5" in line]
    assert ["node c is gone" in line for line in lines] == [follows]


@pytest.mark.parametrize(
    ("kinds", "hand_in"),
    [
        ({"a": "its own"}, "c d, e f, g h"),
        ({"d": "its own"}, "a b, e f, g h"),
        ({"d": "its own", "f": "another"}, "a b, g h"),
        ({"g": "theirs", "h": "theirs"}, "a b, c d, e f"),
        ({"e": "theirs", "g": "theirs"}, "a b, c d, e f, g h"),
        (dict(zip("aceg", "1234", strict=True)), "a b, c d, e f, g h"),
    ],
)
def test_who_names_a_kind_of_its_own_hands_in_no_layer_that_others_could_check(
    kinds: dict[str, str], hand_in: str
) -> None:
    run = Driver(stages=2, steps=100, every=1, groups=4)
    run.kinds = kinds
    run.started("abcdefgh")
    asked = set()
    for _ in range(8):
        run.steps(1)
        asked.add(" ".join(run.epoch.snapshot_nodes))
    assert ", ".join(sorted(asked)) == hand_in


def test_held_out_passes_run_on_one_row() -> None:
    run = grid(1).validating(2)
    run.all_vote()
    actions = run.all_applied()
    asked = [a.node_id for a in of_kind(actions, Send) if isinstance(a.message, Validate)]
    assert asked == ["a", "b"] == list(run.epoch.asked)
    assert run.epoch.outstanding("c") == []
    assert run.validated("d") == []
    assert any(isinstance(m, Begin) for m in sent(run.all_validated(), "c"))


# ---- what a commit needs


@pytest.mark.parametrize("losses", [{0: 1.0, 1: 1.0}, {2: 1.0}, {}, {2: 1.0, 3: 1.0, 4: 1.0}])
def test_a_row_speaks_for_its_own_groups(losses: dict[int, float]) -> None:
    run = grid()
    vote = Vote(
        epoch=run.epoch.number, step=0, norms={3: 1.0, 4: 0.0, 5: 0.0}, loss=None, group_losses=losses
    )
    assert "the losses of groups" in notes(run.machine.message("d", vote, run.time))[0]
    for node in "abc":
        run.vote(node)
    assert run.epoch.phase is Phase.STEPPING


def test_groups_are_added_in_their_order_whatever_the_rows() -> None:
    losses = {0: 1.0, 1: 1e-16, 2: 1e-16, 3: 1e-16}
    found = set()
    for nodes in ("ab", "abcd", "abcdefgh"):
        run = grid(nodes=nodes)
        actions: list[Action] = []
        for node in reversed(run.epoch.hosts):
            epoch = run.epoch
            own = {group: losses[group] for group in epoch.groups[epoch.replica_of(node)]}
            units = run.plan.unit_numbers(2)[epoch.stage_of(node)]
            norms = dict.fromkeys(units, 1.0)
            last = own if epoch.stage_of(node) else {}
            vote = Vote(epoch=epoch.number, step=0, norms=norms, loss=None, group_losses=last)
            actions = run.machine.message(node, vote, run.time)
        found.add(of_kind(actions, RecordCommit)[0].loss)
    assert found == {1.0} != {sum(reversed(losses.values()))}


# ---- who is wrong


def test_a_step_whose_rows_differ_runs_again_and_the_odd_one_of_three_is_named() -> None:
    run = grid(3, nodes="abcdef")
    for node in "abcde":
        run.vote(node, 2.0 if node == "c" else 1.0)
    actions = run.vote("f")
    assert of_kind(actions, RecordCommit) == [] and placement_of(actions) == tuple("abcdef")
    (note,) = notes(actions)
    assert "the gradient of stage 0 is not the same in all rows" in note
    run.restored(3)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit)
    (note,) = notes(actions)
    assert note.startswith("node c: its gradient of step 4")


def test_a_row_that_was_sent_another_sum_of_the_same_norm_is_found_before_the_commit() -> None:
    """Else its state was another, and it was shut out for that at the next snapshot."""
    run = grid(3, nodes="abcdef")
    for node in "abcde":
        run.vote(node, sums=b"c" * 16 if node == "c" else b"a" * 16)
    actions = run.vote("f", sums=b"a" * 16)
    assert of_kind(actions, RecordCommit) == [] and placement_of(actions) == tuple("abcdef")
    run.restored(3)
    assert of_kind(run.all_vote(), RecordCommit) and run.machine.quarantined == {}


def test_one_that_differs_again_is_left_out() -> None:
    run = grid(3, nodes="abcdef")
    for _ in range(2):
        actions: list[Action] = []
        for node in run.epoch.hosts:
            actions = run.vote(node, 2.0 if node == "c" else 1.0)
        placed = placement_of(actions)
        run.restored(3)
    assert placed == ("a", "b", "e", "f")
    assert of_kind(run.all_vote(), RecordCommit)


def differ(run: Driver, liar: str, *said: float) -> list[Action]:
    """All vote; the liar says another norm in each attempt, the last of which is over when this returns."""
    for attempt, norm in enumerate(said):
        actions: list[Action] = []
        for node in run.epoch.hosts:
            actions = run.vote(node, norm if node == liar else 1.0)
        if attempt < len(said) - 1:
            run.restored(3)
    return actions


def test_who_holds_another_sum_is_not_shut_out_for_it() -> None:
    """Another row may have sent it the wrong part of the sum."""
    run = grid(3, nodes="abcdef")
    for _ in range(MAX_STRIKES - 1):
        run.machine.refused("c", "nonsense", run.time)
    differ(run, "c", 2.0)
    run.restored(3)
    assert "node c: its gradient" in notes(run.all_vote())[0]
    assert run.machine.quarantined == {}


@pytest.mark.parametrize("said", [(2.0, 3.0), (2.0, 2.0)])
@pytest.mark.parametrize("liar", "ac")
def test_of_two_whose_norms_differ_neither_is_chosen_where_no_third_is_of_their_kind(
    liar: str, said: tuple[float, ...]
) -> None:
    """Who says something else each time may be honest: the other one changes its sum."""
    run = Driver(stages=2, groups=4)
    run.kinds = {"a": "one", "b": "two", "c": "one", "d": "two"}
    run.started("abcd", 3)
    actions = differ(run, liar, *said)
    # The state before the step is handed in, and is the same in both rows.
    assert placement_of(actions) == tuple("abcd") and of_kind(actions, RecordCommit) == []
    run.all_placed(3)
    for node in "abcd":
        run.holds(node)
    stop = stop_of(run.stored(3))
    assert stop.failed and run.machine.newest_snapshot == 3
    assert "stage 0" in stop.reason and "a (stage 0 of row 0) and c (stage 0 of row 1)" in stop.reason
    assert run.machine.quarantined == {}


def test_of_two_whose_norms_differ_who_stays_when_the_other_goes_is_named() -> None:
    run = Driver(stages=2, groups=4)
    run.kinds = {"a": "one", "b": "two", "c": "one", "d": "two"}
    run.started("abcd", 3)
    differ(run, "a", 2.0)
    run.restored(3)
    run.die("c")
    run.restored(3)
    assert run.epoch.hosts == ("a", "b")
    run.vote("a", 2.0)
    (line,) = notes(run.vote("b"))
    assert "as node a alone computes stage 0; node c" in line


def test_four_rows_of_which_two_say_one_thing_and_two_another() -> None:
    doubt = _Doubt(step=4, stages=1)
    doubt.results[0] = {"a": 1, "b": 1, "c": 2, "d": 2}
    assert doubt.odd_results(newcomers=()) == []
    doubt.results[0]["e"] = 1
    assert doubt.odd_results(newcomers=()) == ["c", "d"]


@pytest.mark.parametrize("liar", "ac")
def test_of_two_rows_that_differ_a_node_of_another_stage_decides_where_there_is_no_spare(liar: str) -> None:
    run = grid(3)
    actions = differ(run, liar, 2.0, 2.0)
    assert of_kind(actions, OpenSnapshot) == [OpenSnapshot(step=3)]
    assert "once node c and node d have changed places, to tell who is wrong" in notes(actions)[0]
    assert placement_of(run.stored(3)) == ("a", "b", "d", "c")
    for node in "abd":
        run.placed(node, 3 if node in "ab" else -1)
    assert restore_of(run.placed("c")).step == 3
    run.all_ready()
    actions = []
    for node in run.epoch.hosts:
        actions = run.vote(node, 2.0 if node == liar else 1.0)
    assert f"it runs again, without node {liar}" in notes(actions)[0]
    assert placement_of(actions) == (("d", "c") if liar == "a" else ("a", "b"))
    run.restored(3)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit)
    assert notes(actions)[0].startswith(f"node {liar}: its gradient of step 4 was not that of other nodes")
    run.all_applied()
    assert run.machine.quarantined == {} and set("abcd") == set(run.machine.members)


def test_a_node_that_spoils_the_sum_of_its_stage_is_found() -> None:
    """All rows report it; the first to report is left out first, and is not to blame."""
    run = grid(3)
    actions = run.vote("a", math.nan)
    assert placement_of(actions) == ("c", "d")
    run.restored(3)
    actions = run.vote("c", math.nan)
    assert "a" in placement_of(actions) and "c" not in placement_of(actions)
    run.restored(3)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit)
    assert any(line.startswith("node c: what it gave for stage 0") for line in notes(actions))


@pytest.mark.parametrize("liar", "ace")
@pytest.mark.parametrize("stops", [False, True])
def test_a_member_that_spoils_sums_is_never_the_only_one_left_of_its_stage(liar: str, *, stops: bool) -> None:
    """It does so until another is left out, or until nobody else is left. All nodes of the stage vote for the
    same, whoever sent a part of it. Who is left out for it follows the run and enters again."""
    run = Driver(stages=2, groups=6, every=50, steps=300, follows=True).started("abcdef", 20)
    attempts: list[int] = []
    wrong = list[str]()
    for _ in range(40):
        epoch = run.epoch
        if epoch.phase is Phase.PLACING:
            run.restored(epoch.step)
        elif epoch.phase is Phase.APPLYING:
            run.all_applied()
        enter_again(run)
        epoch, column = run.epoch, run.epoch.column(0)
        assert column != [liar], "nobody could check it"
        attempts.append(epoch.step)
        lies = liar in column and not (stops and attempts.count(epoch.step) > 1)
        for node in epoch.hosts:
            said = notes(run.vote(node, 1e12 if lies and node in column else 1.0))
            wrong += [line[5] for line in said if "was wrong, as another node found" in line]
            if run.epoch is not epoch or run.epoch.phase is not Phase.STEPPING:
                break
    assert not run.epoch.has(liar) and wrong[-1] == liar and len(wrong) <= 3


def test_a_member_whose_values_others_find_to_be_wrong_gives_up_its_stage_after_a_few_of_them() -> None:
    """They pass through another stage, so that it is no neighbour of the node that finds them."""
    run = Driver(stages=5, groups=10, every=50, steps=300, follows=True).started("abcdefghij", 20)
    run.join("wxyz")
    wrong = list[str]()
    for _ in range(60):
        epoch = run.epoch
        if epoch.phase is Phase.PLACING:
            run.restored(epoch.step)
        elif epoch.phase is Phase.APPLYING:
            run.all_applied()
        enter_again(run)
        epoch = run.epoch
        row = epoch.row(epoch.replica_of("f")) if epoch.has("f") else ()
        if all(row) and row:
            wrong += [line[5] for line in notes(run.failed(row[2], FailureKind.NON_FINITE))]
            continue
        for node in epoch.hosts:
            said = notes(run.vote(node))
            wrong += [line[5] for line in said if "was wrong, as another node found" in line]
    assert not run.epoch.has("f") and wrong[-1] == "f"


@pytest.mark.parametrize("second", "cx")
def test_a_second_node_of_a_stage_that_breaks_soon_after_another_is_left_out_too(second: str) -> None:
    run = Driver(stages=2, groups=4, every=50, steps=300, follows=True).started("abcd", 20)
    run.join("x")
    run.failed("a", FailureKind.NON_FINITE)
    run.restored(20)
    run.stored(20)
    for _ in range(6):
        run.step()
        enter_again(run)
    assert sorted(run.epoch.column(0)) == ["c", "x"]
    run.epoch.newcomers = frozenset()
    while run.epoch.has(second):
        run.failed(second, FailureKind.NON_FINITE)
        assert not run.machine.stopped
        run.restored(run.epoch.step)
    assert "cx".replace(second, "") in run.epoch.column(0)


def enter_again(run: Driver) -> None:
    """Nodes without a seat follow the run from its newest state, and take seats that are empty."""
    epoch = run.epoch
    if epoch.step > run.machine.newest_snapshot and run.machine._newcomers.need(epoch.step):
        run.stored(epoch.step)
    for node in set(run.machine.members) - {*epoch.hosts}:
        run.following(node, run.machine.newest_snapshot, epoch.step)
        if node in epoch.entering:
            run.placed(node, epoch.step)
            run.ready(node)


# ---- speed


def test_groups_go_to_the_faster_row_once_it_is_known_to_be() -> None:
    run = grid(SHARED_STEPS - 2, every=1000, total=1000)
    slow, fast = ({"a": one, "b": 1.0, "c": 4.0 - one, "d": 1.0} for one in (1.0, 3.0))
    for _ in range(REMEMBERED_STEPS):
        run.machine.row_speeds(slow, 7.0, run.time)
    assert of_kind(run.steps(1), RecordPlacement) == []
    run.all_vote()
    actions = run.all_applied()
    assert groups_of(actions) == ((0, 1, 2), (3,))
    assert placement_of(actions) == ("a", "b", "c", "d")
    assert aborts(actions) == list("abcd")
    run.restored(SHARED_STEPS)
    assert run.epoch.groups == ((0, 1, 2), (3,))
    # One slow step changes nothing, and what changes for good has to last twice as long now.
    run.machine.row_speeds(fast, 7.0, run.time)
    assert of_kind(run.steps(SHARED_STEPS), RecordPlacement) == []
    for _ in range(REMEMBERED_STEPS):
        run.machine.row_speeds(fast, 7.0, run.time)
    assert of_kind(run.steps(SHARED_STEPS - 1), RecordPlacement) == []
    assert groups_of(run.steps(1)) == ((0,), (1, 2, 3))


@pytest.mark.parametrize("said", [0.0, 1e-9, 1e9])
def test_whatever_a_node_says_of_its_speed_each_row_keeps_a_group(
    said: float,
) -> None:
    run = grid(1, every=1000, total=1000)
    actions: list[Action] = []
    for _ in range(4 * SHARED_STEPS):
        run.machine.row_speeds({"a": said, "b": 1.0, "c": 1.0, "d": 1.0}, 4.0, run.time)
        done = run.steps(1)
        actions += done
        if of_kind(done, RecordPlacement):
            run.restored(run.epoch.step)
    assert of_kind(actions, Released) == [] and set(run.machine.members) == set("abcd")
    assert run.epoch.hosts == tuple("abcd") and min(map(len, run.epoch.groups)) >= 1
    assert len(of_kind(actions, RecordPlacement)) <= 3, "what changes nothing is not tried again and again"


def test_windows_are_planned_for_each_row() -> None:
    run = grid(1)
    run.machine.plan_windows(run.epoch.number, (2, 5))
    run.all_vote()
    actions = run.all_applied()
    windows = [begin.link_windows for node in "abcd" for begin in begins(actions, node)]
    assert windows == [(2,), (2,), (5,), (5,)]
