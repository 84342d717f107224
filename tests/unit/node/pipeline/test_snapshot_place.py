"""Where a snapshot goes, by its size and the lines."""

from dataclasses import replace

import pytest

from node.config.schema import ModelSection, RunConfig, SnapshotsSection
from node.pipeline.placement import stage_units
from node.pipeline.snapshot_place import MOST_SECONDS, keeps_on_nodes, snapshot_bytes, stage_state_bytes

CONFIG = RunConfig(model=ModelSection(layers=8))
SLOW = snapshot_bytes(CONFIG) / (2 * MOST_SECONDS)


@pytest.mark.parametrize(
    ("rates", "on_nodes"),
    [((SLOW,) * 4, True), ((4 * SLOW,) * 4, False), ((0.0, 0.0), False), ((SLOW,), False), ((), False)],
)
def test_auto_goes_by_the_time_that_the_coordinators_line_takes(
    rates: tuple[float, ...], on_nodes: bool
) -> None:
    assert keeps_on_nodes(CONFIG, 100, rates) is on_nodes


def test_the_run_files_value_wins() -> None:
    kept = replace(CONFIG, snapshots=SnapshotsSection(keep="nodes"))
    assert keeps_on_nodes(kept, 100, (1e12,)) and not keeps_on_nodes(kept, CONFIG.run.steps, (SLOW,) * 4)
    stays = replace(kept, snapshots=SnapshotsSection(keep="nodes", last_here=False))
    assert keeps_on_nodes(stays, CONFIG.run.steps, (SLOW,) * 4)
    here = replace(CONFIG, snapshots=SnapshotsSection(keep="coordinator"))
    assert not keeps_on_nodes(here, 100, (SLOW,) * 4)
    exported = replace(CONFIG, training=replace(CONFIG.training, export_every=1))
    assert not keeps_on_nodes(exported, 100, (SLOW,) * 4), "exports are written from the coordinator's disk"


def test_the_largest_stage_is_part_of_the_whole() -> None:
    stages = len(stage_units(CONFIG, CONFIG.pipeline.stages))
    assert (
        snapshot_bytes(CONFIG) / stages
        <= max(stage_state_bytes(CONFIG, CONFIG.pipeline.stages))
        < snapshot_bytes(CONFIG)
    )
