"""Nodes die, leave, freeze and come back: losses and weights stay an undisturbed run's, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.schedule.placement import head_first
from node.telemetry.events import NodeLeft, PlacementMade, StepAborted
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small
from tests.support.faults import Fault, Kind, Phase
from tests.support.run_harness import SMALL, Run, Still

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, snapshot_every=4),
    pipeline=replace(SMALL.pipeline, stages=3, window=1),
)

pytestmark = pytest.mark.timeout(240)


def test_a_killed_node_started_again_goes_on(tmp_path: Path) -> None:
    """kill -9 of the last stage; the same machine joins again with the same token. Nothing is forked."""
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=2))
    with Run(tmp_path, config, still=Still(stage=1, steps=6)) as run:
        coordinator = run.start()
        nodes = run.add_nodes(2)
        victim = run.wait_still()
        number = nodes.index(victim)
        victim.kill()
        again = run.add_node(state_dir=run.state_dir(number))
        assert coordinator.wait_exit() == 0
        assert again.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [-9 if node is victim else 0 for node in nodes]
        assert coordinator.all(StepAborted)
        assert {placed.nodes[1] for placed in coordinator.all(PlacementMade)} == {run.node_id(number)}
        run.assert_undisturbed()


def test_a_replacement_from_elsewhere_takes_a_dead_nodes_stage(prefork: Prefork, tmp_path: Path) -> None:
    """kill -9 of the last stage; a machine that was never there joins with a token made meanwhile."""
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=2, steps=5)) as run:
        coordinator = run.start()
        run.add_nodes(3)
        run.wait_still().kill()
        create = run.command("token", "create", str(run.run_dir))
        assert create.wait_exit() == 0
        token = create.lines[0].removeprefix("thinwire join ")
        replacement = run.add_node(token)
        assert coordinator.wait_exit() == 0
        assert replacement.wait_exit() == 0
        first, *_, last = coordinator.all(PlacementMade)
        assert last.nodes == (*first.nodes[:2], run.node_id(3))
        assert [left.node_id for left in coordinator.all(NodeLeft)][:1] == [first.nodes[2]]
        run.assert_undisturbed()


def test_a_node_that_leaves_loses_nothing(prefork: Prefork, tmp_path: Path) -> None:
    """Ctrl-C: the step ends, a snapshot of it is taken, exit code 130; a replacement goes on from there."""
    config = replace(CONFIG, run=replace(CONFIG.run, snapshot_every=100))
    with Run(tmp_path, config, launch=prefork.popen, still=Still(stage=1, steps=5)) as run:
        coordinator = run.start()
        run.add_nodes(3)
        still = run.wait_still()
        leaving = run.node_at(0)
        leaving.interrupt()
        still.go_on()
        assert leaving.wait_exit() == 130
        assert '{"event": "node", "text": "you have left the run"}' in leaving.lines
        left = coordinator.wait_event(NodeLeft)
        assert left.reason == "it left"
        (snapshot,) = run.snapshots
        assert snapshot == max(run.losses), "nothing after the snapshot was lost"

        create = run.command("token", "create", str(run.run_dir))
        assert create.wait_exit() == 0
        run.add_node(create.lines[0].removeprefix("thinwire join "))
        assert coordinator.wait_exit() == 0
        assert [placed.resume_step for placed in coordinator.all(PlacementMade)] == [0, snapshot]
        run.assert_undisturbed()


def test_a_node_that_waits_for_a_stage_leaves_at_once(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start()
        node = run.add_node()
        node.wait_line(lambda line: "waiting for a stage" in line)
        node.interrupt()
        assert node.wait_exit(20) == 130
        coordinator.interrupt()
        assert coordinator.wait_exit(20) == 130
        assert run.losses == {}
        run.assert_quiet()


def test_a_frozen_node_is_dropped_and_may_come_back(prefork: Prefork, tmp_path: Path) -> None:
    """Nothing dies: one stage says nothing for longer than `silent_seconds`, then wakes in a later epoch."""
    coordinator_section = replace(CONFIG.coordinator, heartbeat_seconds=0.5, silent_seconds=4.0)
    config = replace(CONFIG, coordinator=coordinator_section)
    with Run(tmp_path, config, launch=prefork.popen, still=Still(stage=1, steps=6)) as run:
        coordinator = run.start()
        nodes = run.add_nodes(3)
        frozen = run.wait_still()
        left = coordinator.wait_event(NodeLeft)
        assert left.node_id == run.node_id(nodes.index(frozen))
        assert left.reason == "it has been silent for more than 4 s"
        frozen.go_on()
        assert coordinator.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0, 0, 0]
        assert len(coordinator.all(PlacementMade)) >= 2
        run.assert_undisturbed()


@pytest.mark.parametrize(("phase", "stage"), [(Phase.BACKWARD, 0), (Phase.FORWARD, 2)])
def test_a_tied_model_with_its_head_on_the_first_stage_survives_a_death(
    phase: Phase, stage: int, prefork: Prefork, tmp_path: Path
) -> None:
    """By codecs, with a held-out loss; the choice is on record, so that a replay has the same bits."""
    config = small(codecs=("tah", "fixed-8"))
    config = replace(
        config,
        model=replace(config.model, tied=True),
        pipeline=replace(config.pipeline, head="first", window="auto"),
        data=replace(config.data, valid_every=3, valid_samples=8),
    )
    assert head_first(config, 3)
    with FaultRun(
        tmp_path, config, [Fault(kind=Kind.KILL, phase=phase, stage=stage, step=3)], launch=prefork.popen
    ) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed()
        assert 'head = "first"' in (run.run_dir / "run.toml").read_text(encoding="utf-8")


def test_samples_in_slices_survive_a_death_in_the_middle_of_one(prefork: Prefork, tmp_path: Path) -> None:
    """A node dies in a backward, with keys, values and gradients of half a sample; the run goes on with two
    stages, and measures a held-out loss."""
    config = small(min_stages=2)
    config = replace(
        config,
        training=replace(config.training, global_batch=4),
        pipeline=replace(config.pipeline, sequence_chunks=3, window="auto"),
        data=replace(config.data, valid_every=3, valid_samples=4),
    )
    with FaultRun(
        tmp_path,
        config,
        [Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=1, step=3)],
        launch=prefork.popen,
    ) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed(restart=False)
