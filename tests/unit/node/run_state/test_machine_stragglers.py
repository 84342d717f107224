"""Nodes whose process lives and whose stage does not: they say that they live, and nothing else."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from node.run_state.actions import Action, Announce, Released, Send
from node.run_state.epoch import PLACING_SECONDS, PREPARING_SECONDS, Phase
from node.run_state.failures import FIRST_PATIENCE, LATE_SECONDS, MAX_STRIKES, STEP_PATIENCE
from node.run_state.grid import LEAST_STEPS
from tests.support.machine_driver import (
    Driver,
    aborts,
    begins,
    finishes,
    of_kind,
    placement_of,
    stop_of,
    units_of,
)
from wire.messages import AwaitedSums, Placed


def wait(run: Driver, seconds: float) -> list[Action]:
    """Let time pass while all go on saying that they live."""
    return [action for _ in range(int(seconds)) for action in run.tick(1.0)]


def windows_of(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    return [begin.link_windows for begin in begins(actions)]


def test_a_node_that_never_takes_its_stage_is_replaced_by_a_spare() -> None:
    run = Driver(stages=2)
    run.join("abc")
    run.placed("a")
    assert wait(run, PLACING_SECONDS - 1) == []
    actions = wait(run, 2)
    assert f"within {PLACING_SECONDS:g} s" in finishes(actions)["b"]
    assert [released.node_id for released in of_kind(actions, Released)] == ["b"]
    assert aborts(actions)
    assert placement_of(actions) == ("a", "c")


def test_a_node_that_says_that_it_prepares_has_longer_to_take_its_stage() -> None:
    run = Driver(stages=2)
    run.join("abc")
    run.placed("a")
    for _ in range(int(PREPARING_SECONDS)):
        run.machine.heard("b", run.time, "", preparing=True)
        assert run.tick(1.0) == []
    run.machine.heard("b", run.time, "", preparing=True)
    actions = run.tick(1.0)
    assert f"within {PREPARING_SECONDS:g} s" in finishes(actions)["b"]
    assert placement_of(actions) == ("a", "c")


def test_a_node_that_had_a_place_does_not_prepare_for_the_next() -> None:
    run = Driver(stages=2).started("ab")
    run.join("c")
    run.failed("b")
    run.placed("a", 0)
    for _ in range(int(PLACING_SECONDS)):
        run.machine.heard("b", run.time, "", preparing=True)
        run.tick(1.0)
    run.machine.heard("b", run.time, "", preparing=True)
    assert "b" in finishes(run.tick(1.0))


@pytest.mark.parametrize("holds", [True, False])
def test_only_who_has_to_fetch_its_state_has_time_for_its_bytes(holds: bool) -> None:
    run = Driver(stages=2, every=2)
    run.plan = replace(run.plan, state_bytes=lambda stages: (10**9,) * stages)
    run.restart()
    run.started("ab", 2)
    run.join("c")
    run.failed("b")
    for node in "ab":
        run.placed(node, 2, lineage=1 if holds else 99)
    run.ready("a")
    assert ("b" in finishes(wait(run, FIRST_PATIENCE + 15))) is holds


@pytest.mark.parametrize("until", [20.0, PLACING_SECONDS + 50])
def test_a_node_that_has_prepared_has_the_usual_time_from_then_on(until: float) -> None:
    run = Driver(stages=2)
    run.join("abc")
    run.placed("a")
    for _ in range(int(until)):
        run.machine.heard("b", run.time, "", preparing=True)
        assert run.tick(1.0) == []
    assert wait(run, PLACING_SECONDS - 1) == []
    assert f"within {PLACING_SECONDS:g} s" in finishes(wait(run, 2))["b"]


def test_a_node_that_answered_is_not_blamed_while_others_load() -> None:
    run = Driver(stages=2)
    run.join("ab")
    run.all_placed()
    assert run.epoch.phase is Phase.RESTORING
    assert wait(run, 3 * PLACING_SECONDS) == []
    assert len(windows_of(run.all_ready())) == 2


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.APPLYING])
def test_a_node_that_never_ends_a_step_is_replaced_by_a_spare(phase: Phase) -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.join("d")
    answer = run.vote if phase is Phase.STEPPING else run.applied
    if phase is Phase.APPLYING:
        run.machine.save()  # with a snapshot to take, the next step waits for all
        run.all_vote()
    wait(run, 2)
    answer("c")
    wait(run, 2)
    answer("a")
    (note,) = of_kind(wait(run, STEP_PATIENCE - 5), Announce)
    assert note.text == "step 3 waits for node b (stage 1): 11 s beyond what is usual"
    actions = wait(run, 10)
    assert finishes(actions).keys() == {"b"}
    assert re.match(r"it did not end step 3 within 3\d s after all others did", finishes(actions)["b"])
    assert [released.node_id for released in of_kind(actions, Released)] == ["b"]
    assert placement_of(actions) == ("a", "d", "c")
    run.restored(2)
    assert wait(run, LATE_SECONDS) == [], "nobody has answered in the new epoch"


def test_stages_of_a_slow_pipeline_can_answer_far_apart() -> None:
    run = Driver(stages=3).started("abc")
    assert wait(run, 2 * FIRST_PATIENCE) == [], "nobody has answered, who is to say that somebody is late"
    run.vote("c", loss=1.0)
    assert finishes(wait(run, LATE_SECONDS - 5)) == {}, "one of two may wait for the other"
    run.vote("b")
    assert finishes(wait(run, 2 * FIRST_PATIENCE)) == {}, "others took as long"
    assert finishes(wait(run, 4 * LATE_SECONDS)).keys() == {"a"}


def test_all_late_nodes_are_restarted() -> None:
    run = Driver(stages=3).started("abc")
    run.vote("c", loss=1.0)
    assert finishes(wait(run, LATE_SECONDS + 5)).keys() == {"a", "b"}


def says(run: Driver, seconds: int, **kinds: str) -> list[Action]:
    """Let time pass while nodes tell what they spend it on; as "sync 1 sum", of which row they await sums."""
    actions: list[Action] = []
    for _ in range(seconds):
        for node, said in kinds.items():
            kind, *sums = said.split(" ")
            awaited = AwaitedSums(int(sums[0]), sums[1] == "sum") if sums else None
            run.machine.heard(node, run.time, kind.replace("_", "-"), awaited=awaited)
        actions += run.tick(1.0)
    return actions


def measured(run: Driver) -> Driver:
    """One more step, whose length is measured."""
    wait(run, 1)
    run.all_vote()
    wait(run, 1)
    run.all_applied()
    return run


def test_an_idle_node_is_replaced_even_if_nobody_can_answer() -> None:
    run = Driver(stages=4, every=2).started("abcd", 2)
    run.hello("x")
    (note,) = of_kind(says(run, 15, a="wait_downstream", b="wait_coordinator", c="wait_upstream"), Announce)
    assert note.text == "step 3 waits for node b (stage 1): 11 s beyond what is usual"
    waiting = {"a": "wait_downstream", "c": "wait_upstream", "d": "wait_upstream"}
    assert finishes(says(run, 14, b="wait_coordinator", **waiting)) == {}
    actions = says(run, 4, b="wait_coordinator", **waiting)
    assert finishes(actions) == {"b": "it did nothing in step 3, which waits for it: start it again"}
    assert placement_of(actions) == ("a", "x", "c", "d")


def test_a_node_whose_row_got_its_groups_late_has_the_usual_time_from_then_on() -> None:
    """Two rows have lost a node, and one of them is whole again long after the step began."""
    run = Driver(stages=2, groups=12, every=50, steps=200, follows=True).started("abcdef", 1)
    for _ in range(LEAST_STEPS):
        run.machine.row_speeds(dict.fromkeys("abcdef", 6.0), 24.0, run.time)
    run.die("a")
    epoch, working = run.epoch, dict(e="forward", f="forward")
    assert finishes(says(run, 100, b="wait_coordinator", **working)) == {}
    run.die("d")
    run.machine.message("c", Placed(epoch=epoch.number, held_step=1, voted=False, lineage=1), run.time)
    run.ready("c")
    waiting = {"b": "wait_upstream", "c": "wait_coordinator", **working}
    assert epoch.groups_of(0) and finishes(says(run, int(STEP_PATIENCE) - 5, **waiting)) == {}
    assert finishes(says(run, 2 * int(STEP_PATIENCE), **waiting)).keys() == {"c"}


def test_a_node_whose_vote_a_death_made_void_is_not_late() -> None:
    """It has done its work, long ago, and only votes again."""
    nodes = "abcdefghij"
    run = measured(Driver(stages=2, groups=10, every=50, steps=200, follows=True).started(nodes, 1))
    for node in "abcdef":
        run.vote(node)
    working, done = dict(g="forward", h="forward"), dict.fromkeys("abcdef", "wait_votes")
    assert finishes(says(run, int(STEP_PATIENCE), **working, **done)) == {}
    run.die("j")
    assert [*map(run.epoch.given_at, "ace")] == [run.time, run.time, 0.0], "row 2 has got no more"
    run.vote("a")
    assert finishes(says(run, int(STEP_PATIENCE) - 5, **working, **done)) == {}


def test_votes_that_a_death_made_void_say_nothing_of_who_is_late() -> None:
    run = measured(Driver(stages=2, groups=6, every=50, steps=200, follows=True).started("abcdef", 1))
    for node in "abcd":
        run.vote(node)
    assert finishes(wait(run, LATE_SECONDS // 3)) == finishes(run.die("f")) == {}
    run.vote("b")
    assert finishes(wait(run, LATE_SECONDS - 5)) == {}, "the first answer since then"
    assert finishes(wait(run, 30)).keys() >= {"a", "c", "d"}


def test_a_node_that_reports_progress_gets_more_time_but_not_unlimited() -> None:
    run = measured(Driver(stages=3, every=2).started("abc", 1))
    run.hello("x")
    kinds = {"a": "wait_downstream", "b": "backward", "c": "wait_upstream"}
    assert finishes(says(run, int(2 * STEP_PATIENCE) - 1, **kinds)) == {}
    assert finishes(says(run, 6, **kinds)).keys() == {"b"}


def test_one_of_two_nodes_that_wait_for_each_other_gives_up_its_stage() -> None:
    run = measured(Driver(stages=3, every=2).started("abc", 1))
    run.hello("x")
    kinds = {"a": "wait_downstream", "b": "wait_upstream", "c": "wait_upstream"}
    actions = says(run, int(2 * STEP_PATIENCE) + 6, **kinds)
    assert finishes(actions) == {}
    assert "x" in placement_of(actions) and "c" in placement_of(actions)
    (note,) = of_kind(actions, Announce)
    assert "it and stage 1 say that each waits for the other: a spare takes stage" in note.text


@pytest.mark.parametrize(
    ("rows", "kind", "gives_up"),
    [
        (1, "wait_downstream", "b"),
        (2, "wait_downstream", "b"),
        (2, "sync", "c"),
        (3, "sync", "a"),
        (3, "sync 1 share", "c"),
        (3, "sync 2 sum", "e"),
    ],
)
def test_who_waits_for_a_node_that_has_voted_is_not_shut_out_for_it(
    rows: int, kind: str, gives_up: str
) -> None:
    """A node can vote and keep what a neighbour needs. Of gradients from several rows only the one that waits
    can say whose is missing."""
    run = Driver(stages=2, groups=rows, every=1, steps=40, follows=rows > 1).started("abcdef"[: 2 * rows], 4)
    run.join("xy" if rows == 1 else "")
    measured(run)
    for node in run.epoch.hosts:
        if node != "a":
            run.vote(node)
    epoch = run.epoch
    assert finishes(says(run, int(STEP_PATIENCE) - 2, a=kind)) == {}
    assert finishes(says(run, 5, a=kind)) == {}
    assert run.epoch is not epoch and not run.epoch.has(gives_up)
    kept = {"a", "b", "c", "e"} & {*epoch.hosts} - {gives_up}
    assert all(map(run.epoch.has, kept))


@pytest.mark.parametrize(
    ("says_c", "says_a", "says_e", "pair"),
    [
        ("sync 0 sum", "sync 1 sum", "sync 1 sum", "c"),
        ("sync 2 share", "sync 1 share", "sync 0 sum", "c"),
        ("sync 0 share", "sync 1 sum", "sync 1 sum", "ca"),
        ("sync 2 sum", "sync 1 share", "sync 0 sum", "c"),
        ("sync", "sync 1 share", "sync 0 sum", "c"),
        ("sync 7 sum", "sync 1 share", "sync 0 sum", "c"),
        ("voted", "sync 1 sum", "sync 1 sum", "c"),
        ("voted", "sync 1 share", "sync 0 sum", "ca"),
    ],
)
def test_a_node_that_keeps_sums_of_gradients_holds_up_a_step_for_a_minute(
    says_c: str, says_a: str, says_e: str, pair: str
) -> None:
    """c keeps what a, or a and e need, and says what it likes. Where it contradicts several, it gives up its
    stage, else one of two."""
    run = measured(Driver(stages=2, groups=6, every=100, steps=200, follows=True).started("abcdef", 1))
    for node in "bdfc" if says_c == "voted" else "bdf":
        run.vote(node)
    told = {"a": says_a, "e": says_e, **({} if says_c == "voted" else {"c": says_c})}
    epoch = run.epoch
    says(run, int(2 * STEP_PATIENCE) - 5, **told)
    assert run.epoch is epoch and len(epoch.hosts) == 6
    actions = says(run, 15, **told)
    gone = {*"abcdef"} - {*run.epoch.hosts}
    assert gone in [{node} for node in pair]
    assert finishes(actions).keys() <= {"c"}


def test_rows_of_one_stage_do_not_wait_without_end_for_one_that_says_it_computes() -> None:
    run = measured(Driver(stages=1, groups=6, every=100, steps=200, follows=True).started("abc", 1))
    told = {"a": "sync 1 share", "b": "backward", "c": "sync 0 sum"}
    assert finishes(says(run, int(2 * STEP_PATIENCE) - 5, **told)) == {}
    assert finishes(says(run, 15, **told)).keys() == {"b"}


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.VALIDATING])
def test_stages_that_wait_for_one_that_has_answered_are_not_put_out(phase: Phase) -> None:
    run = measured(Driver(stages=3, every=100, steps=3).started("abc", 1)).into(phase)
    run.join("x")
    answer = run.vote if phase is Phase.STEPPING else run.validated
    answer("c")
    seconds = int(2 * (STEP_PATIENCE if phase is Phase.STEPPING else FIRST_PATIENCE)) + 20
    actions = says(run, seconds, a="wait_downstream", b="wait_downstream")
    assert finishes(actions) == {}
    assert not run.epoch.has("c") and run.epoch.has("b")


def test_without_another_node_who_waits_for_one_that_has_voted_is_to_start_again() -> None:
    run = measured(Driver(stages=2, every=2).started("ab", 1))
    run.vote("b")
    assert finishes(says(run, int(STEP_PATIENCE) + 5, a="wait_downstream")).keys() == {"a"}


def test_who_says_that_it_waits_for_an_empty_seat_is_to_start_again() -> None:
    run = measured(Driver(stages=2, groups=6, every=100, steps=200, follows=True).started("abcdef", 1))
    run.die("c")
    for node in "abef":
        run.vote(node)
    assert finishes(says(run, int(STEP_PATIENCE) + 5, d="wait_upstream")).keys() == {"d"}
    assert run.epoch.hosts == ("a", "b", "e", "f")


def test_only_an_idle_node_is_called_stuck_in_a_step_of_unknown_length() -> None:
    run = Driver(stages=3).started("abc")
    kinds = {"a": "wait_downstream", "b": "forward", "c": "wait_upstream"}
    assert finishes(says(run, int(LATE_SECONDS), **kinds)) == {}
    kinds["b"] = "wait_coordinator"
    assert finishes(says(run, 2, **kinds)).keys() == {"b"}


@pytest.mark.parametrize("kind", ["", "wait_upstream", "sync"])
def test_the_only_node_of_a_run_is_replaced_if_it_does_nothing(kind: str) -> None:
    run = Driver(stages=1).started("a", 1)
    assert finishes(says(run, int(FIRST_PATIENCE), a=kind)) == {}, "nobody else could take the stage"
    run.hello("x")
    actions = says(run, 2, a=kind)
    assert finishes(actions).keys() == {"a"}
    assert placement_of(actions) == ("x",)


def test_the_only_node_of_a_run_that_never_loads_its_state_is_replaced() -> None:
    run = Driver(stages=1)
    run.join("ax")
    run.all_placed()
    assert finishes(wait(run, LATE_SECONDS - 2)) == {}
    assert placement_of(wait(run, 20)) == ("x",)


def test_the_only_row_that_measures_the_held_out_loss_is_not_waited_for_without_end() -> None:
    run = Driver(stages=1, groups=2, follows=True).started("ab", 1).validating(2)
    run.step()
    assert (run.epoch.phase, run.epoch.asked) == (Phase.VALIDATING, ("a",))
    assert finishes(says(run, int(FIRST_PATIENCE), a="forward")) == {}
    assert finishes(says(run, 2, a="")).keys() == {"a"}
    assert run.epoch.asked == ("b",)


def test_a_node_that_never_loads_its_state_is_replaced() -> None:
    run = Driver(stages=2, every=2).started("ab", 2)
    run.hello("x")
    run.failed("a")
    run.all_placed(2)
    run.ready("a")
    actions = wait(run, FIRST_PATIENCE + 2)
    assert finishes(actions).keys() == {"b"}
    assert placement_of(actions) == ("a", "x")


def test_a_node_that_is_late_again_and_again_is_shut_out() -> None:
    run = Driver(stages=2, every=1, steps=40).started("ab", 2)
    shut_out = []
    for _ in range(MAX_STRIKES):
        run.vote("a")
        actions = wait(run, FIRST_PATIENCE + 2)
        shut_out = [note.text for note in of_kind(actions, Announce) if "shut out" in note.text]
        run.hello("b", again=True)
        if run.machine.epoch is not None:
            run.restored(2)
    assert run.machine.quarantined.keys() == {"b"}
    assert shut_out[0].startswith("node b is shut out: it did not end step 3 within")


# ---- snapshots


def test_a_node_that_does_not_hand_in_its_layers_is_replaced() -> None:
    run = Driver(stages=2, every=2, steps=4).started("ab", 3)
    run.hello("x")
    run.all_vote()
    run.all_applied()
    for node in "ab":
        run.holds(node)
    for unit in units_of(2)[0]:
        run.machine.layer_received(4, unit, run.time)
    actions = wait(run, 65)
    waits, replaced = (note.text for note in of_kind(actions, Announce))
    assert "step 4 waits for node b" in waits and "node b is replaced" in replaced
    assert placement_of(actions) == ("a", "x")
    run.restored()
    assert run.epoch.step == 2, "the spare begins with what is on disk, and comes to the same"
    run.steps(2, store=False)
    assert stop_of(run.stored(4)).reason == "all steps are done"


@pytest.mark.parametrize("seconds", [26, 29, 32])
def test_a_node_may_be_late_with_its_layers_and_its_vote_at_once(seconds: int) -> None:
    """With 29 s, both deadlines are over in the same moment."""
    run = measured(Driver(stages=2, groups=6, every=2, steps=200, follows=True).started("abcdef", 1))
    for node in "abcef":
        run.holds(node)
    for unit in units_of(2)[0]:
        run.machine.layer_received(run.epoch.step, unit, run.time)
    for node in "ab":
        run.vote(node)
    says(run, seconds, c="wait_downstream", d="wait_upstream", e="forward", f="wait_upstream")
    for node in "cef":
        run.vote(node)
    actions = says(run, int(STEP_PATIENCE) + 2, d="wait_upstream")
    assert (finishes(actions).keys() == {"d"}) is (seconds >= 29)
    assert len(run.epoch.hosts) == 5 and {*run.epoch.hosts} >= {*"abef"}


def test_a_run_that_is_to_end_says_what_is_missing() -> None:
    run = Driver(stages=2, every=2, steps=9).started("ab", 3)
    run.stop()
    run.all_vote()
    run.all_applied()
    run.holds("a")
    for unit in units_of(2)[0]:
        run.machine.layer_received(4, unit, run.time)
    end = stop_of(wait(run, 65))
    assert end.reason == "asked to stop; node b did not hand in its layers; the snapshot of step 2 is intact"


def test_a_suspended_coordinator_calls_nobody_late() -> None:
    run = Driver(stages=3).started("abc")
    run.vote("c", loss=1.0)
    wait(run, LATE_SECONDS - 10)
    for node in "abc":
        run.machine.heard(node, run.time + 600)
    run.time += 600
    assert run.machine.tick(run.time, unseen=600) == []
    run.all_vote()
    assert len(run.all_applied()) > 0


def test_a_plan_for_the_links_holds_from_the_next_step_on_and_for_all_stages() -> None:
    run = Driver(stages=3).started("abc")
    assert set(windows_of(run.steps(1))) == {()}
    run.machine.plan_windows(run.epoch.number, (2, 1))
    # One that asks again in the step that runs hears what the others heard.
    assert windows_of([Send(node_id="a", message=m) for m in run.epoch.outstanding("a")]) == [()]
    assert windows_of(run.steps(1)) == [(2, 1)] * 3


def test_a_plan_outlives_its_epoch_but_not_its_number_of_stages() -> None:
    run = Driver(stages=3, min_stages=2).started("abc")
    run.machine.plan_windows(run.epoch.number, (2, 1))
    run.machine.plan_windows(run.epoch.number - 1, (3, 3))
    assert run.epoch.planned_windows == (2, 1)
    run.die("c")
    wait(run, 30)
    assert run.epoch.hosts == ("a", "b")
    assert len(run.epoch.planned_windows) == 0
