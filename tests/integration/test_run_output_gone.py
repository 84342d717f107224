"""Whoever reads the coordinator's output dies, a log shipper say: the run goes on to its end."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_harness import SMALL, TINY, Run

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=60),
    model=TINY,
    pipeline=replace(SMALL.pipeline, stages=1),
)

pytestmark = pytest.mark.timeout(240)


def test_a_run_outlives_whoever_reads_its_output(tmp_path: Path) -> None:
    readers: list[subprocess.Popen[bytes]] = []

    def launch(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        if "coordinator" not in command:
            return subprocess.Popen(command, **options)
        ours, theirs = os.pipe()
        coordinator = subprocess.Popen(command, **{**options, "stdout": theirs})
        os.close(theirs)
        reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.PIPE)
        os.close(ours)
        readers.append(reader)
        assert reader.stdout is not None
        coordinator.stdout = os.fdopen(os.dup(reader.stdout.fileno()))
        reader.stdout.close()
        return coordinator

    with Run(tmp_path, CONFIG, launch=launch) as run:
        coordinator = run.start()
        token = coordinator.token
        readers[0].kill()
        readers[0].wait()
        run.add_node(token=token)
        assert coordinator.wait_exit() == 0
        assert "the output cannot be written (Broken pipe); the run goes on without it" in coordinator.stderr
        assert (run.run_dir / "snapshots" / f"step-{CONFIG.run.steps:08}" / "manifest.json").is_file()
