"""Snapshots in an object store: nodes write and read layers there themselves."""

import asyncio
import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import SnapshotsSection
from node.coordinator.rebuild import newest_record
from node.telemetry.events import SnapshotStored
from node.training.object_store import bring, stored_steps
from node.training.snapshot import list_snapshots, read_manifest
from tests.support.links import eventually
from tests.support.run_harness import SMALL, TINY, Run, Still
from tests.support.s3 import s3_server
from wire.errors import UserError

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=8, snapshot_every=3),
    model=TINY,
    pipeline=replace(SMALL.pipeline, stages=2),
)


def recorded(url: str) -> int:
    """The newest snapshot that the store knows of; 0 before there is one."""
    with contextlib.suppress(UserError):
        return newest_record([url]).manifests[-1].step
    return 0


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_run_that_lost_its_coordinator_and_its_nodes_goes_on_from_the_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(s3_server(monkeypatch)) if kind == "s3" else f"file://{tmp_path}/store"
        config = replace(CONFIG, snapshots=SnapshotsSection(keep=url))
        run = stack.enter_context(Run(tmp_path, config, still=Still(stage=1, steps=5)))
        lost = run.start()
        for _ in range(2):
            run.add_node(options=("--store", url))
        run.wait_still()
        lost.wait_event(SnapshotStored, lambda stored: stored.step == 3)
        ((step, folder),) = stored_steps(run.run_dir).items()
        assert (step, list_snapshots(run.run_dir / "snapshots")) == (3, ()), "nothing at the coordinator"
        assert read_manifest(bring(run.run_dir, 3)).step == 3
        asyncio.run(eventually(lambda: recorded(folder) == 3))
        for process in (lost, *run.nodes):
            process.kill()
        shutil.rmtree(run.run_dir)
        for number in range(2):
            shutil.rmtree(run.state_dir(number))

        recovered = run.command(
            *("recover", "--from", folder, "--run-dir", str(run.run_dir)),
            *(f"data.path={run.text_file}", "coordinator.listen=127.0.0.1:0"),
        )
        assert recovered.wait_exit() == 0, recovered.report()
        assert f"at the snapshot of step 3; its layers are in {folder}" in recovered.lines[0]
        again = run.resume()
        stranger = run.add_node(run.new_token())
        assert stranger.wait_exit() != 0
        assert f"join with --store {url} to let it" in stranger.report()
        for _ in range(2):
            run.add_node(run.new_token(), options=("--store", url))
        assert again.wait_exit() == 0, again.report()
        run.assert_undisturbed()
