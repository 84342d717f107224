"""Where a snapshot goes, by its size and the lines."""

from dataclasses import replace

import pytest

from node.config.schema import ModelSection, RunConfig, SnapshotsSection
from node.schedule.placement import stage_units
from node.tuning.snapshot_place import (
    COORDINATOR,
    MOST_SECONDS,
    NODES,
    snapshot_bytes,
    snapshot_place,
    stage_state_bytes,
)

CONFIG = RunConfig(model=ModelSection(layers=8))
SLOW = snapshot_bytes(CONFIG) / (2 * MOST_SECONDS)


@pytest.mark.parametrize(
    ("rates", "on_nodes"),
    [((SLOW,) * 4, True), ((4 * SLOW,) * 4, False), ((0.0, 0.0), False), ((SLOW,), False), ((), False)],
)
def test_auto_goes_by_the_time_that_the_coordinators_line_takes(
    rates: tuple[float, ...], on_nodes: bool
) -> None:
    assert (snapshot_place(CONFIG, 100, rates) == NODES) is on_nodes


def test_the_run_files_value_wins() -> None:
    kept = replace(CONFIG, snapshots=SnapshotsSection(keep="nodes"))
    assert snapshot_place(kept, 100, (1e12,)) == NODES
    assert snapshot_place(kept, CONFIG.run.steps, (SLOW,) * 4) == COORDINATOR
    stays = replace(kept, snapshots=SnapshotsSection(keep="nodes", last_here=False))
    assert snapshot_place(stays, CONFIG.run.steps, (SLOW,) * 4) == NODES
    here = replace(CONFIG, snapshots=SnapshotsSection(keep="coordinator"))
    assert snapshot_place(here, 100, (SLOW,) * 4) == COORDINATOR
    exported = replace(CONFIG, training=replace(CONFIG.training, export_every=1))
    assert snapshot_place(exported, 100, (SLOW,) * 4) == COORDINATOR, (
        "exports are written from the coordinator's disk"
    )


def test_the_largest_stage_is_part_of_the_whole() -> None:
    stages = len(stage_units(CONFIG, CONFIG.pipeline.stages))
    assert (
        snapshot_bytes(CONFIG) / stages
        <= max(stage_state_bytes(CONFIG, CONFIG.pipeline.stages))
        < snapshot_bytes(CONFIG)
    )
