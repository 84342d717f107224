"""Gateways: processes that keep the control sessions change no bit of a run, and the run outlives them."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run, Still

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=10),
    pipeline=replace(SMALL.pipeline, stages=2),
    coordinator=replace(SMALL.coordinator, gateways=2),
)


def gateways(coordinator: int) -> list[int]:
    """Process ids of a coordinator's gateways."""
    children = Path(f"/proc/{coordinator}/task/{coordinator}/children").read_text().split()
    return [int(one) for one in children if b"gateway" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.timeout(240)
def test_a_run_outlives_its_gateways_with_the_same_bits(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=1, steps=4)) as run:
        coordinator = run.start()
        nodes = run.add_nodes(2)
        frozen = run.wait_still()
        killed = gateways(coordinator.pid)
        assert len(killed) == 2
        for one in killed:
            os.kill(one, signal.SIGKILL)
        frozen.go_on()
        assert coordinator.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0, 0]
        # Both sessions were in a gateway.
        assert all("connecting again" in node.stderr for node in nodes)
        run.assert_undisturbed()
