"""A row that has handed over its sums loses nothing when one of its nodes dies."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from node.run_state.actions import Action, Announce, RecordCommit, SeatLost
from node.run_state.epoch import HANDING_STEPS
from node.run_state.grid import LEAST_STEPS
from node.schedule.gradient_groups import GroupTree
from tests.support.machine_driver import Driver, aborts, begins, finishes, of_kind
from tests.support.machine_world import World
from wire.messages import FailureKind, HandedOver, PeerSilent, Seat, SumsMissing

SAID = 0.5
"""The loss of each group as it is handed over; votes have half of it."""
SEEDS = 30


def run_of(rows: int = 4, *, lost: bool = True) -> Driver:
    """Rows of two stages with two groups each, and one more row that has lost a node, if `lost`."""
    names = "abcdefghij"[: 2 * rows]
    run = Driver(stages=2, groups=2 * rows, every=50, steps=200, follows=True).started(names, 2)
    if lost:
        run.die(names[-1])
        run.step()
        assert run.epoch.step == 3 and {one.hands_over for one in begins(run.steps(1))} == {True}
    return run


def hands_over(run: Driver, nodes: str, *, generation: int | None = None) -> list[Action]:
    """Nodes have handed over all groups of their rows."""
    epoch, actions = run.epoch, list[Action]()
    for node in nodes:
        groups = epoch.groups_of(epoch.replica_of(node))
        message = HandedOver(
            epoch=epoch.number,
            step=epoch.step,
            generation=epoch.generation if generation is None else generation,
            groups=groups,
            group_losses=dict.fromkeys(groups, SAID) if epoch.stage_of(node) == epoch.stages - 1 else {},
        )
        actions += run.machine.message(node, message, run.time)
    return actions


def test_calm_runs_hand_nothing_over() -> None:
    run = run_of(2, lost=False)
    assert {one.hands_over for one in begins(run.steps(1))} == {False}
    run.die("d")
    assert {one.hands_over for one in begins(run.steps(1))} == {True}
    run.steps(HANDING_STEPS)
    assert {one.hands_over for one in begins(run.steps(1))} == {False}


@pytest.mark.parametrize("dead", ["c", "d"])
def test_groups_that_are_handed_over_stay_with_the_row_of_a_dead_node(dead: str) -> None:
    """Also if it was the last stage, which alone says their losses."""
    run = run_of()
    groups = run.epoch.groups_of(1)
    assert groups and hands_over(run, "cd") == []
    actions = run.die(dead)
    (lost,) = of_kind(actions, SeatLost)
    assert set(lost.groups) == set(groups) == {*run.epoch.groups_of(1)}
    (begin,) = begins(actions, "a")
    assert Seat(1, "cd".index(dead)) in begin.absent
    while run.epoch.waits:
        run.tick(1.0)
    (commit,) = of_kind(run.all_vote(), RecordCommit)
    assert commit.loss == 8 * SAID / 2 + (len(groups) * SAID / 2 if dead == "d" else 0.0)


def test_a_row_keeps_what_all_its_nodes_have_computed() -> None:
    run = run_of()
    hands_over(run, "c")
    run.die("c")
    assert run.epoch.groups_of(1) == ()


def passes_on(run: Driver, nodes: str, row: int) -> list[Action]:
    """Nodes have passed on all groups of a row that has lost its node of their stage."""
    epoch, actions = run.epoch, list[Action]()
    for node in nodes:
        message = HandedOver(
            epoch=epoch.number,
            step=epoch.step,
            generation=epoch.generation,
            passed_on=epoch.groups_of(row),
        )
        actions += run.machine.message(node, message, run.time)
    return actions


def test_a_second_death_in_the_stage_loses_nothing_that_its_node_had_passed_on() -> None:
    run = run_of(4)
    hands_over(run, "cdef")
    run.die("c")
    kept = run.epoch.groups_of(1), run.epoch.groups_of(2)
    assert all(kept) and passes_on(run, "e", 1) == []
    hands_over(run, "e")
    run.die("e")
    assert (run.epoch.groups_of(1), run.epoch.groups_of(2)) == kept
    run.die("g")
    assert not run.epoch.groups_of(1) and not run.epoch.groups_of(2), "it has not passed on anything"


@pytest.mark.parametrize("when", ["of another stage", "before the death", "not all"])
def test_groups_are_lost_with_a_node_that_has_not_passed_them_on(when: str) -> None:
    run = run_of()
    hands_over(run, "cd")
    groups = run.epoch.groups_of(1)
    before = HandedOver(
        epoch=run.epoch.number, step=run.epoch.step, generation=run.epoch.generation, passed_on=groups
    )
    if when == "before the death":
        run.machine.message("e", before, run.time)
    run.die("c")
    if when == "of another stage":
        passes_on(run, "f", 1)
    if when == "not all":
        part = replace(before, generation=run.epoch.generation, passed_on=groups[1:])
        run.machine.message("e", part, run.time)
    assert run.epoch.groups_of(1)
    run.die("e")
    assert not run.epoch.groups_of(1)


def test_a_second_death_elsewhere_loses_nothing_more() -> None:
    run = run_of()
    hands_over(run, "cdef")
    run.die("c")
    kept = run.epoch.groups_of(1), run.epoch.groups_of(2)
    run.die("f")
    assert (run.epoch.groups_of(1), run.epoch.groups_of(2)) == kept and all(kept)
    assert run.epoch.whole_rows == [0]


def test_what_went_to_a_dead_node_has_to_be_handed_over_again() -> None:
    run = run_of()
    before = run.epoch.generation
    hands_over(run, "efcd")
    run.die("a")
    hands_over(run, "c", generation=before)
    run.die("c")
    assert run.epoch.groups_of(1) == (), "its report was of the time before the death"


def test_a_closed_connection_to_a_dead_node_says_nothing_of_what_it_had_handed_over() -> None:
    """Other rows may hear of the death after the coordinator."""
    run = run_of()
    hands_over(run, "cd")
    run.die("c")
    epoch, groups = run.epoch, run.epoch.groups_of(1)
    closed = PeerSilent(epoch=epoch.number, stage=0, replica=1)
    for node in "ae":
        assert run.machine.message(node, closed, run.time) == []
    assert groups and epoch.groups_of(1) == groups


def test_a_node_that_lacks_what_a_dead_one_said_it_had_handed_over_says_so() -> None:
    """A lie costs the groups of its row, and nobody else anything."""
    run = run_of()
    hands_over(run, "cd")
    run.die("c")
    epoch, groups = run.epoch, run.epoch.groups_of(1)
    news = SumsMissing(epoch=epoch.number, step=epoch.step, replica=1)
    assert run.machine.message("b", news, run.time) == [], "a node of another stage cannot know"
    of_another_step = replace(news, step=epoch.step - 1)
    assert run.machine.message("a", of_another_step, run.time) == [] and epoch.groups_of(1) == groups
    actions = run.machine.message("a", news, run.time)
    assert begins(actions, "a") and epoch.groups_of(1) == ()
    given = {group for row in (0, 2) for group in epoch.groups_of(row)}
    assert given | {*begins(actions, "a")[0].portions[-1].groups} >= set(groups)
    while run.epoch.waits:
        run.tick(1.0)
    assert of_kind(run.all_vote(), RecordCommit)
    assert (
        run.epoch is epoch and not run.machine.quarantined and not finishes(actions) and not aborts(actions)
    )


def test_losses_of_other_groups_are_refused() -> None:
    run = run_of()
    epoch = run.epoch
    message = HandedOver(
        epoch=epoch.number, step=epoch.step, generation=epoch.generation, groups=(0, 1), group_losses={0: 1.0}
    )
    assert run.machine.message("b", message, run.time), "the operator hears of it"
    run.die("b")
    assert not {0, 1}.intersection(epoch.groups_of(0))


def test_passing_on_groups_that_there_are_not_is_refused() -> None:
    run = run_of()
    epoch = run.epoch
    message = HandedOver(epoch=epoch.number, step=epoch.step, generation=epoch.generation, passed_on=(0, 8))
    assert run.machine.message("b", message, run.time), "the operator hears of it"


def test_part_of_a_sum_is_not_handed_over() -> None:
    """The others of its row have sent only the sum of both groups: all would wait for a part in vain."""
    run, tree = run_of(), GroupTree(8)
    epoch = run.epoch
    row, span = next(
        (row, span)
        for row, groups in epoch.portions
        for span in map(tree.span, tree.subtrees(groups))
        if row in epoch.whole_rows and len(span) > 1
    )
    first, last = epoch.row(row)
    hands_over(run, last)
    part = HandedOver(epoch=epoch.number, step=epoch.step, generation=epoch.generation, groups=(span[0],))
    assert run.machine.message(first, part, run.time), "the operator hears of it"
    run.die(first)
    assert span[0] not in epoch.groups_of(row)


def test_nothing_is_handed_over_unasked() -> None:
    run = run_of(2, lost=False)
    assert hands_over(run, "c"), "the operator hears of it"
    run = run_of()
    assert hands_over(run, "c", generation=run.epoch.generation + 1), "the operator hears of it"
    hands_over(run, "d")
    run.die("c")
    assert run.epoch.groups_of(1) == ()


@pytest.mark.parametrize("takes", [1.0, 6.0])
def test_who_says_that_groups_take_no_time_gets_no_more_once_it_has_handed_some_over(takes: float) -> None:
    """Every node takes this long for a group."""
    run = Driver(stages=1, groups=24, every=50, steps=200, follows=True).started("abcd", 1)
    for _ in range(LEAST_STEPS):
        run.machine.row_speeds({"a": 0.0, **dict.fromkeys("bcd", takes)}, 6 * takes, run.time)
    run.die("d")
    had: list[int] = []
    for _ in range(3):
        began, done = run.time, dict.fromkeys(run.epoch.hosts, 0)
        while run.epoch.waits or any(
            done[node] < len(run.epoch.groups_of("abc".index(node))) for node in done
        ):
            run.tick(0.5)
            for node in done:
                groups = run.epoch.groups_of("abc".index(node))
                if done[node] < len(groups) <= (run.time - began) / takes:
                    hands_over(run, node)
                    done[node] = len(groups)
        had.append(len(run.epoch.groups_of(0)))
        run.step()
    assert had[1:] == [12, 14]


def audited_run() -> Driver:
    """Four rows of two stages with four groups each. Two of them have an audit, and one has lost a node."""
    run = Driver(stages=2, groups=16, every=50, steps=200, follows=True)
    run.plan = replace(run.plan, audit_rate=1.0, audit_secret=b"secret", most_rows=4)
    run.restart()
    run.started("abcdefgh")
    audit = run.epoch.audit
    assert audit is not None
    other = next(row for row in range(4) if row not in audit.rows)
    run.die(run.epoch.row(other)[0])
    while run.epoch.waits:
        run.tick(1.0)
    assert run.epoch.audit == audit
    hands_over(run, "".join(node for row in audit.rows for node in run.epoch.row(row)))
    return run


@pytest.mark.parametrize("is_doubted", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_a_row_with_an_audit_keeps_what_would_not_have_been_compared(which: int, is_doubted: bool) -> None:
    """If a value was different before, the row may be wrong in all groups."""
    run = audited_run()
    audit = run.epoch.audit
    assert audit is not None
    row, tree = audit.rows[which], GroupTree(16)
    if is_doubted:
        run.machine._epochs._rules.auditor.doubted = run.epoch.step, audit.group
    before = run.epoch.groups_of(row)
    runs = [groups for of, groups in run.epoch.portions if of == row]
    spans = [tree.span(node) for groups in runs for node in tree.subtrees(groups)]
    lost = {group for span in spans if audit.group in span for group in span}
    assert bool(lost) is (which == 0)
    run.die(run.epoch.row(row)[1])
    kept = [] if is_doubted else [group for group in before if group not in lost]
    assert run.epoch.groups_of(row) == tuple(kept) and run.epoch.audit is None
    waits = {group for of, groups in run.epoch.portions if of == 4 for group in groups}
    given = {group for of in run.epoch.whole_rows for group in run.epoch.groups_of(of)}
    assert waits | given == {*range(16)} - {*kept}


@pytest.mark.parametrize("audit_rate", [0.0, 1.0])
def test_rows_keep_groups_whatever_happens(audit_rate: float) -> None:
    """Nodes die and come back; each commit has each group once, at each stage (`World`)."""
    kept = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        world = World(
            stages=chance.choice((1, 2, 3)),
            total_steps=12,
            groups=8 if audit_rate else 4,
            most_rows=chance.choice((2, 3, 4)),
            follows=True,
            group_seconds=chance.choice((0.0, 3.0)),
            audit_rate=audit_rate,
        )
        for _ in range(world.plan.stages * world.plan.most_rows + chance.choice((0, 1, 2))):
            world.add_node()
        for _ in range(60):
            world.run(chance.randrange(40), chance)
            alive = [node for node in world.nodes if node.alive]
            if chance.random() < 0.25 and len(alive) > 2:
                chance.choice(alive).die()
            for node in world.nodes:
                if not node.alive and node.farewell is None and chance.random() < 0.1:
                    node.start()
            world.tick(chance.choice((0.5, 1.5)))
        assert world.settle().reason == "all steps are done"
        kept += world.kept
    assert kept


def work_is_given(run: Driver) -> None:
    while run.epoch.waits:
        run.tick(1.0)


def test_votes_count_as_long_as_no_groups_move() -> None:
    """All sums are at a node that has voted."""
    run = run_of()
    work_is_given(run)
    hands_over(run, "cd")
    for node in "abefg":
        run.vote(node)
    assert begins(run.die("c")), "its stage learns that it is gone"
    assert run.epoch.votes.keys() == {*"abefg"} and run.epoch.groups_of(1)
    assert of_kind(run.vote("d"), RecordCommit)


def test_votes_of_before_groups_moved_do_not_count() -> None:
    run = run_of()
    work_is_given(run)
    for node in "abefg":
        run.vote(node)
    run.die("c")
    assert not run.epoch.groups_of(1) and not run.epoch.votes
    work_is_given(run)
    assert of_kind(run.all_vote(), RecordCommit)


@pytest.mark.parametrize("voted", ["aeg", "aedg", "ae"])
def test_a_stage_whose_other_nodes_have_all_sums_loses_none(voted: str) -> None:
    """Nothing of it is handed over. The other node of the row has voted, or says that it has computed all."""
    run = run_of()
    work_is_given(run)
    for node in voted:
        run.vote(node)
    groups = run.epoch.groups_of(1)
    if "d" not in voted:
        hands_over(run, "d")
    run.die("c")
    assert run.epoch.groups_of(1) == (groups if "g" in voted else ())
    work_is_given(run)
    assert of_kind(run.all_vote(), RecordCommit)


def test_groups_that_a_row_got_after_a_vote_are_not_computed_yet() -> None:
    """All other nodes of the stage have all sums, but those of other stages wait for the row."""
    run = run_of()
    work_is_given(run)
    for node in "aedg":
        run.vote(node)
    run.die("f")
    work_is_given(run)
    assert run.epoch.groups_of(1) and not run.epoch.votes
    run.die("c")
    assert not run.epoch.groups_of(1)
    work_is_given(run)
    assert of_kind(run.all_vote(), RecordCommit)


@pytest.mark.parametrize("voted", [True, False])
def test_losses_that_nobody_knows_are_computed_again(voted: bool) -> None:
    run = run_of()
    work_is_given(run)
    for node in "bcf" + "d" * voted:
        run.vote(node)
    groups = run.epoch.groups_of(1)
    run.die("d")
    assert run.epoch.groups_of(1) == (groups if voted else ())
    work_is_given(run)
    assert of_kind(run.all_vote(), RecordCommit)


# ---- a loss that is far from those of earlier steps counts against the node that reported it, in any row


ROWS = "abcdef"


def run_of_rows() -> Driver:
    """Three rows of two stages, whose losses of some steps are known."""
    return Driver(stages=2, groups=6, every=50, steps=90, follows=True).started(ROWS, 12)


@pytest.mark.parametrize("loss", [1e30, 1e3])
@pytest.mark.parametrize("liar", ["b", "d", "f"])
def test_who_reported_it_loses_its_stage(liar: str, loss: float) -> None:
    run = run_of_rows()
    assert not of_kind(run.all_vote({liar: loss}), RecordCommit)
    assert {*run.epoch.hosts} >= {*"bdf"} - {liar} and liar not in run.epoch.hosts
    run.restored(12)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit)
    assert [note.about for note in of_kind(actions, Announce)] == [liar]


def test_a_loss_that_is_too_small_counts_against_its_node_too() -> None:
    run = Driver(stages=1, groups=6, every=50, steps=90, follows=True).started("ab", 12)
    run.all_vote({"a": 40.0, "b": 0.0})
    assert run.epoch.hosts == ("b",), "the loss is too large"
    run = Driver(stages=1, groups=6, every=50, steps=90, follows=True).started("ab")
    for _ in range(12):
        run.all_vote({"a": 12.0, "b": 12.0})
        run.all_applied()
    run.all_vote({"a": 2.0, "b": 0.0})
    assert run.epoch.hosts == ("a",)


def test_a_loss_of_a_node_that_is_gone_counts_against_nobody() -> None:
    run = run_of()
    run.steps(9)
    epoch, groups = run.epoch, run.epoch.groups_of(1)
    hands_over(run, "c")
    said = HandedOver(
        epoch=epoch.number,
        step=epoch.step,
        generation=epoch.generation,
        groups=groups,
        group_losses=dict.fromkeys(groups, 1e30),
    )
    run.machine.message("d", said, run.time)
    run.die("d")
    while run.epoch.waits:
        run.tick(1.0)
    assert groups == run.epoch.groups_of(1), "they are kept"
    assert not of_kind(run.all_vote(), RecordCommit)
    assert {*run.epoch.hosts} == {*"abcefg"}, "all who are left compute it again"
    run.restored(run.epoch.step)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit) and not of_kind(actions, Announce)


def once(run: Driver) -> None:
    run.failed(run.epoch.hosts[0], FailureKind.NON_FINITE)


def huge(run: Driver) -> None:
    for node in run.epoch.hosts:
        run.vote(node, norm=1e60 if run.epoch.stage_of(node) == 0 else 1.0)


@pytest.mark.parametrize("lie", [once, huge])
def test_sums_that_another_row_may_have_spoiled_are_no_strike(
    lie: Callable[[Driver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member could send such parts to one node until that is shut out."""
    run, struck = run_of_rows(), list[str]()
    monkeypatch.setattr(run.machine._quarantine, "strike", lambda node, why: struck.append(node))
    first = run.epoch.hosts[0]
    lie(run)
    assert first not in run.epoch.hosts
    run.restored(12)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit) and struck == []
    assert [note.about for note in of_kind(actions, Announce)] == [first], "it loses its stage"
