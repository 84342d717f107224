"""Nodes wait for a stopped run and for a coordinator that has not started yet."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.telemetry.events import JoinLine, NodeJoined, Notice, PlacementMade, RunFinished
from tests.support.fault_prefork import Prefork
from tests.support.ports import free_port
from tests.support.run_harness import SMALL, Run, undisturbed
from tests.support.terminal import assert_never_silent, volunteer

CONFIG = replace(
    SMALL,
    training=replace(SMALL.training, schedule="constant"),
    pipeline=replace(SMALL.pipeline, stages=2),
)

pytestmark = pytest.mark.timeout(240)


def at_fixed_ports() -> str:
    return f"127.0.0.1:{free_port(2)}"


def test_the_journey_of_a_run_from_its_plan_to_an_extension(prefork: Prefork, tmp_path: Path) -> None:
    """Plan, start, join, watch, stop, resume with more steps. Ctrl-C at the coordinator ends no node, nobody
    pastes the join line again, and no terminal is silent for long."""
    config = replace(CONFIG, coordinator=replace(CONFIG.coordinator, listen=at_fixed_ports()))
    endless = replace(config, run=replace(config.run, steps=100_000))
    with Run(tmp_path, endless, launch=prefork.popen) as run:
        planned = run.command("config", "explain", str(run.run_file), "--machine", "cpu,20")
        assert planned.wait_exit() == 0
        assert any(line.startswith("a step takes about ") for line in planned.lines)
        first = run.start()
        terminals = [volunteer(run, prefork.popen, name) for name in ("Ana's 4090", "Ben")]
        first.wait_step(5)
        watched = run.command("status", str(run.run_dir))
        assert watched.wait_exit() == 0
        assert watched.lines[0].endswith("steps") and ": training, " in watched.lines[0]
        for terminal in terminals:
            terminal.wait_line(lambda line: line.startswith("stage ") and line.endswith(" to go"))
        first.interrupt()
        assert first.wait_exit() == 130
        (finished,) = first.all(RunFinished)
        assert finished.resume == f"thinwire resume {run.run_dir}"
        for terminal in terminals:
            terminal.wait_line(lambda line: "10m00s" in line)
        stopped = run.command("status", str(run.run_dir))
        assert stopped.wait_exit() == 0
        assert ": stopped, " in stopped.lines[0] and stopped.lines[-1] == f"continue with: {finished.resume}"

        done = max(run.losses)
        longer = replace(config, run=replace(config.run, steps=done + 20))
        second = run.resume(f"run.steps={longer.run.steps}")
        assert second.wait_exit() == 0
        assert [terminal.wait_exit() for terminal in terminals] == [0, 0]
        (told,) = [notice.text for notice in second.all(Notice) if "steps now" in notice.text]
        assert f"{done + 20} steps" in told and "schedule constant" in told
        assert len(second.all(PlacementMade)[-1].nodes) == 2
        assert second.all(RunFinished)[0].resume == ""
        assert run.losses == undisturbed(longer).losses
        run.assert_quiet()
        assert_never_silent(planned, first, watched, stopped, second, *terminals)


def test_a_finished_run_goes_on_with_more_steps_and_another_text(prefork: Prefork, tmp_path: Path) -> None:
    short = replace(CONFIG, run=replace(CONFIG.run, steps=4))
    with Run(tmp_path, short, launch=prefork.popen) as run:
        assert run.start().wait_event(JoinLine)
        run.add_nodes(2)
        assert run.coordinators[0].wait_exit() == 0
        other = tmp_path / "other.txt"
        other.write_bytes(b"Another text, of other words and of more of them. " * 400)
        refused = run.command("resume", str(run.run_dir), "run.steps=6", f"data.path={other}")
        assert refused.wait_exit() == 2
        assert "--new-text" in refused.stderr
        second = run.resume("run.steps=6", f"data.path={other}", "--new-text")
        run.add_nodes(2)
        assert second.wait_exit() == 0
        assert any("step 5" in n.text and str(other) in n.text for n in second.all(Notice))
        assert sorted(run.losses) == [1, 2, 3, 4, 5, 6]
        third = run.resume()
        assert third.wait_exit() == 0, "the new text is the run's now"
        too_few = run.command("resume", str(run.run_dir), "run.steps=5")
        assert too_few.wait_exit() == 2
        assert "run.steps = 5" in too_few.stderr


def test_the_journey_of_a_volunteer_who_comes_before_the_coordinator(
    prefork: Prefork, tmp_path: Path
) -> None:
    """The terminal counts down, then shows the stage, its state and the page, and says thank you."""
    config = replace(CONFIG, coordinator=replace(CONFIG.coordinator, listen=at_fixed_ports()))
    with Run(tmp_path, config, launch=prefork.popen) as run:
        first = run.start()
        first.wait_event(JoinLine)
        first.kill()
        early = volunteer(run, prefork.popen, "Ana's 4090")
        early.wait_line(
            lambda line: "no coordinator yet" in line and line.endswith(" left, press Ctrl-C to stop")
        )
        second = run.resume()
        second.wait_event(NodeJoined)
        run.add_node()
        assert second.wait_exit() == 0
        assert early.wait_exit() == 0
        run.assert_undisturbed()
        thanks = f"thank you: {config.run.steps} steps"
        for words in ("waiting for a stage", "the run's page: http://", "stage ", thanks):
            assert any(line.startswith(words) or words in line for line in early.lines), words
        assert_never_silent(early)
