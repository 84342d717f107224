"""A full disk pauses a run until there is room or it is ended, with all acknowledged steps intact.

A dead reader does not end it."""

import os
import resource
import shutil
import signal
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from node.coordinator.store import Store
from node.state.snapshot import list_snapshots
from node.telemetry.events import Notice, RunFinished, StepDone
from node.view.checkpoint import read_view
from tests.support.fault_prefork import Forked, Prefork
from tests.support.run_harness import SMALL, TINY, Run, undisturbed

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, snapshot_every=5),
    pipeline=replace(SMALL.pipeline, stages=2),
    coordinator=replace(SMALL.coordinator, regroup_seconds=0.5),
)

ONE_STAGE = replace(
    SMALL,
    run=replace(SMALL.run, steps=60),
    model=TINY,
    pipeline=replace(SMALL.pipeline, stages=1),
)

pytestmark = pytest.mark.timeout(240)


@cache
def has_small_disks() -> bool:
    """Whether this machine allows a private mount of a file system in memory."""
    if shutil.which("unshare") is None:
        return False
    attempt = subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, timeout=30
    )
    return attempt.returncode == 0


def on_small_disk(directory: Path, size: str, aside: Path) -> list[str]:
    """A wrapper that runs a command with `directory` on an empty disk of `size`, which it alone sees.

    What the disk holds at the command's end is copied to where `directory` really is. `aside`: a folder for
    what that needs.
    """
    script = (
        'aside="$2"; mkdir -p "$0" "$aside/small" "$aside/real"; '
        'mount -t tmpfs -o size="$1" none "$aside/small"; '
        'mount --bind "$0" "$aside/real"; mount --bind "$aside/small" "$0"; '
        'shift 2; "$@"; code=$?; cp -a "$0/." "$aside/real/"; exit $code'
    )
    return ["unshare", "-Urm", "sh", "-c", script, str(directory), size, str(aside)]


def check_resumable(run: Run, *, snapshots: list[int]) -> None:
    """Once there is room, the run goes on and ends with an undisturbed run's bits."""
    assert list(list_snapshots(run.run_dir / "snapshots")) == snapshots
    acknowledged = {done.step: done.loss for done in run.coordinators[0].all(StepDone)}
    with Store.open(run.run_dir) as store:
        on_record = {record.step + 1: record.loss for record in store.steps()}
    assert acknowledged.items() <= on_record.items() <= undisturbed(CONFIG).losses.items()
    assert not list((run.run_dir / "snapshots").rglob("*.tmp"))

    again = run.resume()
    run.add_nodes(2)
    assert again.wait_exit() == 0
    run.assert_undisturbed()


@pytest.mark.skipif(not has_small_disks(), reason="mounting needs user namespaces")
def test_no_room_for_a_snapshot(prefork: Prefork, tmp_path: Path) -> None:
    """The second snapshot does not fit beside the first."""
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start(wrapper=on_small_disk(run.run_dir / "snapshots", "1000k", tmp_path))
        nodes = run.add_nodes(2)
        paused = coordinator.wait_event(Notice, lambda told: told.text.startswith("paused: "))
        assert "disk full" in paused.text
        started = read_view(run.run_dir)[0].started
        assert started is not None
        os.kill(started.process_id, signal.SIGINT)  # ends after a snapshot, for which there is no room
        coordinator.wait_event(Notice, lambda told: "press Ctrl-C again" in told.text)
        os.kill(started.process_id, signal.SIGINT)
        coordinator.wait_exit()
        assert [node.wait_exit() for node in nodes] == [1, 1]
        (finished,) = coordinator.all(RunFinished)
        assert finished.resume == f"thinwire resume {run.run_dir}"
        assert coordinator.complaints == []
        check_resumable(run, snapshots=[5])


def test_a_snapshot_file_that_cannot_grow(prefork: Prefork, tmp_path: Path) -> None:
    """A limit on the size of files, as a quota sets it; the database stays below it."""
    big = replace(CONFIG, model=replace(CONFIG.model, vocab=4096))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    with Run(tmp_path, big, launch=prefork.popen) as run:
        coordinator = run.start(prepare=limit)
        nodes = run.add_nodes(2)
        assert coordinator.wait_exit() == 1
        assert [node.wait_exit() for node in nodes] == [1, 1]
        (finished,) = coordinator.all(RunFinished)
        assert finished.failed
        assert "embed.safetensors (File too large)" in finished.reason or (
            "head.safetensors (File too large)" in finished.reason
        )
        assert list(list_snapshots(run.run_dir / "snapshots")) == []
        run.assert_quiet()


@pytest.mark.skipif(not has_small_disks(), reason="mounting needs user namespaces")
def test_too_little_disk_for_a_run_is_reported_before_it_starts(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen) as run:
        coordinator = run.start(wrapper=on_small_disk(run.run_dir, "200k", tmp_path))
        assert coordinator.wait_exit() == 2
        (line,) = coordinator.complaints
        assert "two must fit" in line and "free 1.1" in line


def test_a_run_outlives_the_reader_of_its_output(prefork: Prefork, tmp_path: Path) -> None:
    readers: list[subprocess.Popen[bytes]] = []

    def launch(command: list[str], **options: Any) -> Forked:
        if "coordinator" not in command:
            return prefork.popen(command, **options)
        ours, theirs = os.pipe()
        coordinator = prefork.popen(command, **{**options, "stdout": theirs})
        os.close(theirs)
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.PIPE)
        os.close(ours)
        readers.append(reader)
        assert reader.stdout is not None
        coordinator.stdout = os.fdopen(os.dup(reader.stdout.fileno()))
        reader.stdout.close()
        return coordinator

    with Run(tmp_path, ONE_STAGE, launch=launch) as run:
        coordinator = run.start()
        token = coordinator.token
        readers[0].kill()
        readers[0].wait()
        run.add_node(token=token)
        assert coordinator.wait_exit() == 0
        assert "Broken pipe" in coordinator.stderr
        assert (run.run_dir / "snapshots" / f"step-{ONE_STAGE.run.steps:08}" / "manifest.json").is_file()
