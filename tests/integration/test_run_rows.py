"""Runs with gradient groups in real processes: the same losses and weights, whoever dies."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.faults import Fault, Kind, Phase
from node.telemetry.events import PlacementMade
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small

CONFIG = replace(
    small(steps=10, snapshot_every=5),
    pipeline=replace(small().pipeline, stages=2, groups=4, sync_codec="fixed-8", window=0, replicas="auto"),
)
ALONE = ((0, 1, 2, 3),)

pytestmark = pytest.mark.timeout(240)


def test_one_row_with_groups_survives_a_death(prefork: Prefork, tmp_path: Path) -> None:
    kill = Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=1, step=3)
    with FaultRun(tmp_path, CONFIG, [kill], launch=prefork.popen) as run:
        run.start()
        run.add_nodes(2)
        run.assert_ends_undisturbed()
        assert {placed.groups for placed in run.all(PlacementMade)} == {ALONE}
