"""A run whose places are measured: plans are made, carried out, and change no bit that they should not."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.decisions import recorded_places, recorded_splits
from node.coordinator.store import Store
from node.telemetry.events import Notice, PlacementMade, RunStarted
from tests.support.fault_prefork import Prefork
from tests.support.memory_pipeline import reference_run
from tests.support.run_harness import SMALL, TINY, Run, Still, undisturbed

CONFIG = replace(SMALL, pipeline=replace(SMALL.pipeline, stages=2, placement="measured"))
SLOW = replace(CONFIG, model=replace(TINY, layers=5), run=replace(CONFIG.run, steps=200))
"""A run of nodes that compute almost nothing, so that `tests.support.slow_node` is the slow one."""

pytestmark = pytest.mark.timeout(240)


def test_nodes_that_wait_for_others_measure_themselves_and_the_line_between_them(
    prefork: Prefork, tmp_path: Path
) -> None:
    config = replace(CONFIG, pipeline=replace(CONFIG.pipeline, stages=3))
    with Run(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        run.add_nodes(2)
        told = coordinator.wait_event(Notice).text
        assert re.fullmatch(
            r"1 line between nodes measured: \d+ to \d+ Mbit/s; a block takes them [\d.]+ to [\d.]+ ms", told
        )
        node = run.add_node()
        assert coordinator.wait_exit() == 0
        assert node.wait_exit() == 0
        assert run.losses == undisturbed(config).losses


def test_a_node_that_steps_show_to_be_slow_gets_fewer_blocks(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, SLOW, launch=prefork.popen) as run:
        coordinator = run.start()
        run.add_node()
        run.program = ("tests.support.slow_node", "node.cli.main")
        run.add_node()
        moved = coordinator.wait_event(PlacementMade, lambda placed: placed.blocks != (3, 2))
        coordinator.wait_step(moved.resume_step + 3)
        coordinator.interrupt()
        assert coordinator.wait_exit() == 130
        fast, slow = run.node_id(0), run.node_id(1)
        blocks = dict(zip(moved.nodes, moved.blocks, strict=True))
        assert slow is not None and fast is not None and blocks[slow] < blocks[fast]
        with Store.open(run.run_dir) as store:
            assert recorded_splits(store).changes == ((0, (3, 2)), (moved.resume_step, moved.blocks))
            recorded = recorded_places(store)
        assert recorded is not None
        _, plan, count = recorded
        assert count == 1
        assert (plan.grid.hosts, plan.grid.split) == (moved.nodes, moved.blocks)
        assert plan.shown[slow] > plan.shown[fast]
        losses = run.losses
        assert len(losses) >= moved.resume_step + 3
        same, _ = reference_run(SLOW, len(losses))
        assert [losses[step] for step in sorted(losses)] == [step.loss for step in same]


def test_steps_that_run_again_have_the_split_that_they_had(prefork: Prefork, tmp_path: Path) -> None:
    """Links lose bits, so where boundaries are decides the losses. The snapshot of the change is damaged."""
    lossy = replace(CONFIG.pipeline, forward_codec="tah", backward_codec="fixed-8")
    config = replace(
        CONFIG, pipeline=lossy, run=replace(CONFIG.run, steps=9, snapshot_every=4, keep_snapshots=9)
    )
    with Run(tmp_path, config, launch=prefork.popen, still=Still(stage=0, steps=5)) as run:
        first = run.start()
        nodes = run.add_nodes(2)
        still = run.wait_still()
        assert run.command("set", str(run.run_dir), "pipeline.split=4,1").wait_exit() == 0
        first.wait_event(Notice)
        still.go_on()
        assert first.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0, 0]
        losses = run.losses
        assert len(losses) == 9
        first_kept, *damaged = run.snapshots
        # That of step 8 is left out where two are still being uploaded.
        assert first_kept == 4 and {6, 9} <= set(damaged) <= {6, 8, 9}
        for step in damaged:
            for layer in (run.run_dir / "snapshots" / f"step-{step:08}").glob("*.safetensors"):
                layer.write_bytes(b"damaged")
        again = run.resume()
        run.add_nodes(2)
        assert again.wait_exit() == 0
        assert [started.first_step for started in again.all(RunStarted)] == [4, 6]
        assert [placed.blocks for placed in again.all(PlacementMade)] == [(3, 2), (4, 1)]
        assert not any("a different loss" in notice.text for notice in again.all(Notice))
        assert run.losses == losses
