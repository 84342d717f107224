"""`thinwire set`: settings change between two steps; nodes and the join line stay."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.changes import REQUEST_FILE
from node.coordinator.decisions import record_places, recorded_splits
from node.coordinator.store import Store
from node.telemetry.events import Notice, PlacementMade, RunFinished, RunStarted
from node.tuning.places import Grid, PlacePlan
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run, Still, undisturbed

CONFIG = replace(SMALL, pipeline=replace(SMALL.pipeline, stages=2))
PLACED = replace(CONFIG, pipeline=replace(CONFIG.pipeline, placement="measured"))

pytestmark = pytest.mark.timeout(240)


def test_a_run_goes_on_with_other_settings_and_the_same_nodes(prefork: Prefork, tmp_path: Path) -> None:
    """Windows, blocks and, by a plan on record, places change no bit, so the run ends as an undisturbed one;
    nodes come back without --wait."""
    with Run(tmp_path, PLACED, launch=prefork.popen, still=Still(stage=0, steps=5)) as run:
        first = run.start()
        nodes = run.add_nodes(2)
        still = run.wait_still()
        refused = run.command("set", str(run.run_dir), "model.hidden=64")
        assert refused.wait_exit() == 2
        assert "model.hidden" in refused.stderr
        same = run.command("set", str(run.run_dir), "pipeline.window=auto")
        assert same.wait_exit() == 2
        assert "the run already has pipeline.window=auto" in same.stderr
        before = first.all(PlacementMade)[-1].nodes
        plan = PlacePlan(
            grid=Grid(hosts=before[::-1], split=(4, 1)), now_seconds=2.0, then_seconds=1.0, shown={}
        )
        with Store.open(run.run_dir) as store:
            record_places(store, plan)
        changes = ["pipeline.split=4,1", "pipeline.window=3", "run.snapshot_every=5"]
        taken = run.command("set", str(run.run_dir), *changes, "--json")
        assert taken.wait_exit() == 0
        assert [json.loads(line) for line in taken.lines] == [{"accepted": changes}]
        assert not (run.run_dir / REQUEST_FILE).exists()
        first.wait_event(Notice)
        still.go_on()
        assert first.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0, 0]
        said = [notice.text for notice in first.all(Notice)]
        what = f"the run continues with {', '.join(changes)}"
        assert f"after this step and a snapshot {what}" in said
        assert any(what in line for line in nodes[0].lines)
        assert [started.first_step for started in first.all(RunStarted)] == [0, 6]
        assert [one.nodes for one in first.all(PlacementMade)] == [before, before[::-1]]
        assert len(first.all(RunFinished)) == 1
        assert run.snapshots == [6, 10, 12], "the new schedule holds from then on"
        written = (run.run_dir / "run.toml").read_text()
        assert "window = 3\n" in written and "split = [4, 1]\n" in written
        with Store.open(run.run_dir) as store:
            assert recorded_splits(store).changes == ((0, (3, 2)), (6, (4, 1)))
        assert run.losses == undisturbed(CONFIG).losses
        over = run.command("set", str(run.run_dir), "pipeline.window=4")
        assert over.wait_exit() == 2
        assert "thinwire resume" in over.stderr
        run.assert_quiet()


def test_a_run_decides_its_precision_once_its_machines_are_there(prefork: Prefork, tmp_path: Path) -> None:
    """CPUs have bfloat16: nodes come back to a run that says so and ends as one that said so at first."""
    auto, half = (
        replace(CONFIG, training=replace(CONFIG.training, precision=p)) for p in ("auto", "bfloat16")
    )
    with Run(tmp_path, auto, launch=prefork.popen) as run:
        first = run.start()
        nodes = run.add_nodes(2)
        assert first.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0, 0]
        assert [started.first_step for started in first.all(RunStarted)] == [0, 0]
        assert any("the run computes in bfloat16" in notice.text for notice in first.all(Notice))
        assert 'precision = "bfloat16"\n' in (run.run_dir / "run.toml").read_text()
        assert run.losses == undisturbed(half).losses
        run.assert_quiet()
