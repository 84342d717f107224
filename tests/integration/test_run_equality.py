"""Runs of real processes give the unsplit trainer's losses and weights, bit for bit.

The first starts every process for real, as users do.
"""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import RunConfig
from tests.support.fault_prefork import Prefork
from tests.support.process import Launch
from tests.support.run_harness import SMALL, Run

PLAIN = SMALL
RING = replace(
    SMALL,
    model=replace(SMALL.model, tied=True),
    pipeline=replace(SMALL.pipeline, stages=2, chunks=2, window=1),
)


@pytest.mark.timeout(180)
def test_a_ring_of_two_stages_with_two_chunks_and_tied_weights(tmp_path: Path) -> None:
    assert_equal(RING, tmp_path, subprocess.Popen)


@pytest.mark.timeout(180)
def test_four_stages(tmp_path: Path, prefork: Prefork) -> None:
    assert_equal(PLAIN, tmp_path, prefork.popen)


def assert_equal(config: RunConfig, directory: Path, launch: Launch) -> None:
    """A run with this configuration ends as the unsplit model does."""
    with Run(directory, config, launch=launch) as run:
        coordinator = run.start()
        nodes = run.add_nodes(config.pipeline.stages)
        assert coordinator.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0] * len(nodes)
        run.assert_undisturbed()
        assert run.snapshots == [config.run.steps]
