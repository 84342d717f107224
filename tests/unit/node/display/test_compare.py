"""Two runs side by side: what differs, at equal steps and at equal times."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.cli.main import main
from node.config.schema import PipelineSection, RunConfig
from node.coordinator.store import Store
from node.display.compare import comparison_lines
from node.run_file.loader import to_json
from node.telemetry import events
from node.telemetry.history import Entry, HistoryWriter
from node.view.compare import POINTS, RunRecord, compare, record
from tests.support.run_events import costs, done, opening, started, step


def run(
    name: str,
    losses: Sequence[float],
    seconds: float = 1.0,
    config: dict[str, dict[str, object]] | None = None,
) -> RunRecord:
    told: list[events.Event] = [started()]
    for number, loss in enumerate(losses, start=1):
        told += [costs(number, seconds=seconds), _done(number, loss, seconds)]
    return record(name, config or {}, [Entry(at=0.0, event=event) for event in told])


def _done(number: int, loss: float, seconds: float) -> events.StepDone:
    return events.StepDone(**{**vars(done(number)), "loss": loss, "seconds": seconds})


def test_losses_at_equal_steps_and_at_equal_times() -> None:
    slow = run("slow", [5.0, 4.0, 3.0, 2.0], seconds=2.0)
    quick = run("quick", [5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5], seconds=1.0)
    both = compare(slow, quick)
    assert both.loss_at_step == ((1, 5.0, 5.0), (2, 4.0, 4.5), (3, 3.0, 4.0), (4, 2.0, 3.5))
    assert both.loss_at_seconds[0] == (2.0, 5.0, 4.5)
    assert both.loss_at_seconds[-1] == (8.0, 2.0, 1.5)
    assert both.tokens_per_second == (2048.0, 4096.0)
    assert both.steps == (4, 8) and both.seconds == (8.0, 8.0)
    assert both.bits["activation"][0] == pytest.approx(6.26, rel=1e-4)
    assert sum(share or 0 for share, _ in both.shares.values()) == pytest.approx(1.0)


def test_rows_are_named_with_their_groups() -> None:
    one = run("one", [1.0])
    place = events.PlacementMade(
        epoch=2, nodes=tuple("abcdef"), resume_step=1, groups=((2,), (0, 1), (3,)), blocks=(1, 1)
    )
    rows = record("rows", {}, [Entry(at=0.0, event=event) for event in (started(), place)])
    both = compare(one, rows)
    assert both.groups == ((), ((2,), (0, 1), (3,)))
    (line,) = [line for line in comparison_lines(both) if "groups of rows" in line]
    assert line.split() == ["groups", "of", "rows", "0", "2,", "0-1,", "3"]
    assert not any("groups of rows" in line for line in comparison_lines(compare(one, one)))


def test_differences_between_run_files() -> None:
    first = run("a", [1.0], config={"pipeline": {"window": 0, "stages": 4}, "run": {"name": "a"}})
    second = run(
        "b", [1.0], config={"pipeline": {"window": 2, "stages": 4, "new": True}, "run": {"name": "a"}}
    )
    both = compare(first, second)
    assert both.config == {"pipeline.window": (0, 2), "pipeline.new": (None, True)}
    assert any("pipeline.window" in line and "0" in line for line in comparison_lines(both))


def test_a_step_that_ran_again_counts_as_it_went_last_and_its_time_twice() -> None:
    told = [started(), _done(1, 5.0, 1.0), _done(2, 4.0, 1.0), _done(2, 3.0, 1.0)]
    one = record("a", {}, [Entry(at=0.0, event=event) for event in told])
    assert (one.steps, one.losses, one.elapsed) == ((1, 2), (5.0, 3.0), (1.0, 3.0))


def test_runs_without_steps_have_nothing_to_compare() -> None:
    both = compare(run("a", []), run("b", [1.0, 2.0]))
    assert both.loss_at_step == both.loss_at_seconds == ()
    assert both.tokens_per_second[0] is None
    assert comparison_lines(both)


@given(
    st.lists(st.floats(0, 10), max_size=30),
    st.lists(st.floats(0, 10), max_size=30),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
)
def test_any_two_runs_can_be_compared(
    first: list[float], second: list[float], slow: float, quick: float
) -> None:
    both = compare(run("a", first, slow), run("b", second, quick))
    common = min(len(first), len(second))
    assert len(both.loss_at_step) == min(POINTS, common)
    if common:
        assert both.loss_at_step[-1] == (common, first[common - 1], second[common - 1])
    for at, a, b in both.loss_at_seconds:
        assert a == first[min(len(first), int(at / slow + 1e-6)) - 1]
        assert b == second[min(len(second), int(at / quick + 1e-6)) - 1]
    swapped = compare(run("b", second, quick), run("a", first, slow))
    assert [(at, b, a) for at, a, b in swapped.loss_at_step] == list(both.loss_at_step)
    json.dumps(both.to_fields(), allow_nan=False)
    assert comparison_lines(both)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, window in (("one", 0), ("two", 3)):
        directory = tmp_path / name
        config = RunConfig(pipeline=PipelineSection(window=window))
        Store.create(directory, run_id="r", config_json=to_json(config), pin=b"", now=0.0).close()
        writer = HistoryWriter(print)
        writer(started(directory))
        for event in (*opening()[1:], *step(1), *step(2)):
            writer(event)
        writer.close()
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["names"] == ["one", "two"] and both["config"] == {"pipeline.window": [0, 3]}
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "pipeline.window" in capsys.readouterr().out
    (tmp_path / "back").symlink_to("back")
    for wrong in ("none", "back", "back/run"):
        assert main(["compare", str(tmp_path / "one"), str(tmp_path / wrong)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    # Runs of a service all live in a directory called `run`.
    for name in ("one", "two"):
        (tmp_path / f"at-{name}").mkdir()
        (tmp_path / name).rename(tmp_path / f"at-{name}" / "run")
    assert (
        main(["compare", str(tmp_path / "at-one" / "run"), str(tmp_path / "at-two" / "run"), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["names"] == ["at-one/run", "at-two/run"]
