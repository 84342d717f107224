"""Snapshots that stay on the nodes: each layer on two machines, none of it through the coordinator."""

import asyncio
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

from node.config.schema import SnapshotsSection
from node.coordinator.rebuild import newest_record
from node.model.units import unit_names
from node.state.manifest import RECORD_FILE
from node.telemetry.events import PlacementMade, SnapshotStored
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, held
from tests.support.faults import Fault, Kind, Phase
from tests.support.links import eventually
from tests.support.run_harness import SMALL, TINY, Run, Still

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=14, snapshot_every=6),
    model=TINY,
    pipeline=replace(SMALL.pipeline, stages=3),
    snapshots=SnapshotsSection(keep="nodes"),
)
UNITS = unit_names(CONFIG.model)


def copies(run: Run, step: int) -> Counter[str]:
    """How many nodes have each layer of a snapshot on their disks."""
    return Counter(path.stem for path in run.directory.glob(f"node-*/snapshots/{step}/*.layer"))


def recorded(state_dir: Path) -> int:
    """The newest snapshot that a node's disk knows of; 0 before there is one."""
    is_there = (state_dir / "snapshots" / RECORD_FILE).exists()
    return newest_record([state_dir]).manifests[-1].step if is_there else 0


def test_losing_a_machine_with_its_disk_keeps_the_weights(prefork: Prefork, tmp_path: Path) -> None:
    """It held the newest copy of its stage; a newcomer gets the other one from the node that has it."""
    # No node is silent before the copies are there: it would be replaced, and copies made for that one, too.
    hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=11)
    with FaultRun(tmp_path, CONFIG, [hold], launch=prefork.popen) as run:
        with held(run, hold):
            coordinator = run.start()
            run.add_nodes(3)
            placed = coordinator.wait_event(PlacementMade)
            coordinator.wait_event(SnapshotStored, lambda stored: stored.step == 6)
            assert copies(run, 6) == dict.fromkeys(UNITS, 2)
            assert not list((run.run_dir / "snapshots").glob("step-*/*")), "nothing at the coordinator"
            lost = [run.node_id(number) for number in range(3)].index(placed.nodes[1])
            run.nodes[lost].kill()
            shutil.rmtree(run.state_dir(lost))
        run.add_node(run.new_token())
        assert coordinator.wait_exit() == 0
        Run.assert_undisturbed(run)
        assert run.snapshots[-1] == 14


def test_a_run_resumes_from_what_its_nodes_hold_and_a_damaged_copy_is_fetched_again(
    prefork: Prefork, tmp_path: Path
) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=1, steps=5)) as run:
        run.start()
        run.add_nodes(3)
        frozen = run.wait_still()
        run.coordinators[0].interrupt()
        frozen.go_on()
        run.coordinators[0].wait_exit()
        for node in run.nodes:
            node.wait_exit()
        (newest,) = [step for step in run.snapshots if step > 3]
        assert copies(run, newest) == dict.fromkeys(UNITS, 2)
        damaged = sorted(run.directory.glob(f"node-*/snapshots/{newest}/embed.layer"))
        content = damaged[0].read_bytes()
        damaged[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        again = run.resume()
        for number in range(3):
            run.add_node(state_dir=run.state_dir(number))
        assert again.wait_exit() == 0
        run.assert_undisturbed()


def test_a_run_whose_coordinator_lost_its_disk_is_recovered_from_its_nodes(
    prefork: Prefork, tmp_path: Path
) -> None:
    hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=6)
    with FaultRun(tmp_path, CONFIG, [hold], launch=prefork.popen) as run:
        with held(run, hold):
            lost = run.start()
            run.add_nodes(3)
            lost.wait_event(SnapshotStored, lambda stored: stored.step == 6)
            asyncio.run(eventually(lambda: recorded(run.state_dir(0)) == 6))
            for process in (lost, *run.nodes):
                process.kill()
        shutil.rmtree(run.run_dir)
        recovered = run.command(
            *("recover", "--from", str(run.state_dir(0)), "--run-dir", str(run.run_dir)),
            *(f"data.path={run.text_file}", "coordinator.listen=127.0.0.1:0"),
        )
        assert recovered.wait_exit() == 0, recovered.report()
        # On a busy machine a node's copies of the others' layers are complete, too.
        assert "of step 6" in recovered.lines[0]
        again = run.resume()
        for number in range(3):
            run.add_node(state_dir=run.state_dir(number))
        assert again.wait_exit() == 0
        # The record begins at the snapshot: the losses of both coordinators are compared.
        Run.assert_undisturbed(run)
