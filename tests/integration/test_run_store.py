"""Snapshots in an object store: nodes write and read layers there themselves."""

import asyncio
import contextlib
import fcntl
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import SnapshotsSection
from node.coordinator.rebuild import newest_record
from node.state.object_store import bring, stored_steps
from node.state.snapshot import list_snapshots, read_manifest
from node.telemetry.events import SnapshotStored
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small
from tests.support.faults import Fault, Kind, Phase
from tests.support.links import eventually
from tests.support.run_harness import undisturbed
from tests.support.s3 import s3_server
from wire.errors import UserError

pytestmark = pytest.mark.timeout(240)

CONFIG = small(steps=8, snapshot_every=3)
HOLD = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=5)
"""Computes nothing from then on, and saves what it has."""


def recorded(url: str) -> int:
    """The newest snapshot that the store knows of; 0 before there is one."""
    with contextlib.suppress(UserError):
        return newest_record([url]).manifests[-1].step
    return 0


def test_a_run_that_lost_its_coordinator_and_its_nodes_goes_on_from_the_store(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(s3_server(monkeypatch))
        pipeline = replace(CONFIG.pipeline, stages=2)
        config = replace(CONFIG, pipeline=pipeline, snapshots=SnapshotsSection(keep=url))
        run = stack.enter_context(FaultRun(tmp_path, config, [HOLD], launch=prefork.popen))
        gate = stack.enter_context(run.plan.gate(HOLD).open("a"))
        fcntl.flock(gate, fcntl.LOCK_EX)
        lost = run.start()
        for _ in range(2):
            run.add_node(options=("--store", url))
        lost.wait_event(SnapshotStored, lambda stored: stored.step == 3)
        ((step, folder),) = stored_steps(run.run_dir).items()
        assert (step, list_snapshots(run.run_dir / "snapshots")) == (3, ()), "nothing at the coordinator"
        assert read_manifest(bring(run.run_dir, 3)).step == 3
        asyncio.run(eventually(lambda: recorded(folder) == 3))
        for process in (lost, *run.nodes):
            process.kill()
        fcntl.flock(gate, fcntl.LOCK_UN)
        shutil.rmtree(run.run_dir)
        for number in range(2):
            shutil.rmtree(run.state_dir(number))

        recovered = run.command(
            *("recover", "--from", folder, "--run-dir", str(run.run_dir)),
            f"data.path={run.text_file}",
        )
        assert recovered.wait_exit() == 0, recovered.report()
        assert "of step 3" in recovered.lines[0] and str(folder) in recovered.lines[0]
        again = run.resume()
        stranger = run.add_node()
        assert stranger.wait_exit() != 0
        assert f"join with --store {url} to allow it" in stranger.report()
        for _ in range(2):
            run.add_node(run.new_token(), options=("--store", url))
        assert again.wait_exit() == 0, again.report()
        assert run.weights_sha256 == undisturbed(config).weights_sha256
