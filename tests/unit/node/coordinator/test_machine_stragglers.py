"""Nodes whose process lives and whose stage does not: they say that they live, and nothing else."""

import re
from collections.abc import Sequence

import pytest

from node.coordinator.actions import Action, Released, Send
from node.coordinator.epoch import PLACING_SECONDS, Phase
from node.coordinator.failures import LATE_SECONDS, LATE_TIMES
from tests.support.machine_driver import Driver, aborts, finishes, of_kind, placement_of, sent
from wire.messages import Begin


def wait(run: Driver, seconds: float) -> list[Action]:
    """Let time pass while all go on saying that they live."""
    return [action for _ in range(int(seconds)) for action in run.tick(1.0)]


def windows_of(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    return [message.link_windows for message in sent(actions) if isinstance(message, Begin)]


def test_a_node_that_never_takes_its_place_is_told_to_go_and_a_spare_takes_it() -> None:
    run = Driver(stages=2)
    run.join("abc")
    run.placed("a")
    assert wait(run, PLACING_SECONDS - 1) == []
    actions = wait(run, 2)
    assert "did not take its place within 90 s" in finishes(actions)["b"]
    assert [released.node_id for released in of_kind(actions, Released)] == ["b"]
    assert aborts(actions)
    assert placement_of(actions) == ("a", "c")


def test_who_has_answered_is_not_blamed_however_long_the_others_load() -> None:
    run = Driver(stages=2)
    run.join("ab")
    run.all_placed()
    assert run.epoch.phase is Phase.RESTORING
    assert wait(run, 3 * PLACING_SECONDS) == []
    assert len(windows_of(run.all_ready())) == 2


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.APPLYING])
def test_a_node_that_never_ends_a_step_is_told_to_go_and_a_spare_takes_its_stage(phase: Phase) -> None:
    run = Driver(stages=3, every=2).started("abc", 2)
    run.join("d")
    answer = run.vote if phase is Phase.STEPPING else run.applied
    if phase is Phase.APPLYING:
        run.all_vote()
    wait(run, 20)
    answer("c")
    wait(run, 10)
    answer("a")
    assert wait(run, LATE_SECONDS - 15) == []
    actions = wait(run, 10)
    assert finishes(actions).keys() == {"b"}
    assert re.match(r"it did not end step 3 within 90\d s after another did", finishes(actions)["b"])
    assert [released.node_id for released in of_kind(actions, Released)] == ["b"]
    assert placement_of(actions) == ("a", "d", "c")
    run.restored(2)
    assert wait(run, LATE_SECONDS) == [], "all of it begins anew"


def test_stages_of_a_slow_pipeline_may_answer_long_after_each_other() -> None:
    run = Driver(stages=3).started("abc")
    assert wait(run, 2 * LATE_SECONDS) == [], "nobody has answered, who is to say that somebody is late"
    run.vote("c", loss=1.0)
    assert wait(run, 2 * LATE_TIMES * LATE_SECONDS - 5) == []
    run.vote("b")
    assert finishes(wait(run, 10)).keys() == {"a"}


def test_a_coordinator_that_stood_still_finds_nobody_late() -> None:
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
