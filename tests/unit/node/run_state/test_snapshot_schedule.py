"""When a snapshot is due: by steps, or by time."""

import pytest

from node.run_file.loader import default_config, from_json, to_json
from node.run_state.run_plan import run_plan
from node.run_state.snapshot_schedule import SnapshotSchedule
from wire.errors import ConfigError


def test_by_time_a_step_that_ends_later_than_that_has_one() -> None:
    schedule = SnapshotSchedule(every=1, newest=0, seconds=600.0)
    taken = []
    for step in range(1, 100):
        now = 41.0 * step
        if schedule.wanted(step, now):
            taken.append(step)
            schedule.ask(step, {}, {}, await_it=False, now=now)
            schedule.stored(step)
    assert taken == [16, 31, 46, 61, 76, 91], "each 15 steps of 41 s, the first counted from the first step"


def test_a_snapshot_requested_meanwhile_counts() -> None:
    schedule = SnapshotSchedule(every=1, newest=0, seconds=10.0)
    assert not schedule.wanted(1, 0.0)
    schedule.request()
    assert schedule.wanted(2, 6.0)
    schedule.ask(2, {}, {}, await_it=False, now=6.0)
    schedule.stored(2)
    assert not schedule.wanted(3, 12.0)
    assert schedule.wanted(4, 16.0)


def test_a_new_best_is_saved_where_lines_have_the_time() -> None:
    def took(step: int, at: float, seconds: float) -> SnapshotSchedule:
        schedule.ask(step, {"a": ("embed",)}, {"a": 1}, await_it=False, now=at)
        schedule.layer_received(step, "embed", at + seconds)
        schedule.stored(step)
        return schedule

    schedule = SnapshotSchedule(every=100, newest=0)
    assert schedule.saves_best(10, 0.0), "nothing is known of the lines"
    assert took(10, 0.0, seconds=4.0).saves_best(20, 5.0)
    assert not took(100, 100.0, seconds=60.0).saves_best(110, 690.0)
    assert schedule.saves_best(120, 700.0), "ten times as long has passed"
    assert not schedule.is_measured(100) and not took(200, 700.0, 60.0).is_measured(200)
    assert not schedule.saves_best(210, 800.0)
    schedule.ask(250, {}, {}, await_it=False, now=850.0, within=True)
    schedule.stored(250)
    assert not schedule.is_measured(250), "the step after it computes already"
    assert took(300, 900.0, 60.0).is_measured(300), "the best may be that one"
    assert not took(400, 1000.0, 60.0).is_measured(400)
    # One that is on its way for long says that lines are slow, before any is complete.
    schedule = SnapshotSchedule(every=100, newest=0)
    schedule.ask(10, {"a": ("embed",)}, {"a": 1}, await_it=False, now=0.0)
    assert schedule.saves_best(20, 5.0) and not schedule.saves_best(20, 6.0)


@pytest.mark.parametrize(
    ("given", "seconds"), [("10 min", 600.0), ("90s", 90.0), ("1.5h", 5400.0), ("2d", 172_800.0)]
)
def test_a_run_file_may_give_a_time(given: str, seconds: float) -> None:
    config = default_config([f"run.snapshot_every={given}"])
    assert config.run.snapshot_every == given
    assert from_json(to_json(config)) == config
    plan = run_plan(config, 100)
    assert (plan.snapshot_every, plan.snapshot_seconds) == (1, seconds)


def test_steps_stay_steps() -> None:
    plan = run_plan(default_config(["run.snapshot_every=7"]), 100)
    assert (plan.snapshot_every, plan.snapshot_seconds) == (7, 0.0)


@pytest.mark.parametrize("given", ["soon", "0.5s", "10 parsecs", "[1]"])
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.snapshot_every must be"):
        default_config([f"run.snapshot_every={given}"])
