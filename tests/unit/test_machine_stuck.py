"""Nodes whose process lives and whose stage does not: they say that they live, and nothing else."""

from collections.abc import Sequence

from node.coordinator.actions import Action, Released, Send
from node.coordinator.epoch import Phase
from node.coordinator.epoch_series import PLACING_SECONDS
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
    assert run.epoch.seats == ("a", "b")
    assert len(run.epoch.planned_windows) == 0
