"""How many gateways a run has."""

from typing import Literal

import pytest

from node.config.schema import CoordinatorSection, PipelineSection, RunConfig
from node.coordinator.gateways import gateway_count


@pytest.mark.parametrize(
    ("setting", "stages", "rows", "cores", "count"),
    [
        ("auto", 32, 4, 64, 0),
        ("auto", 43, 3, 64, 3),
        ("auto", 250, 4, 64, 16),
        ("auto", 250, 4, 16, 8),
        ("auto", 250, 4, 1, 0),
        (2, 4, 1, 2, 2),
        (0, 250, 4, 64, 0),
    ],
)
def test_gateways_grow_with_nodes_and_cores(
    setting: int | Literal["auto"], stages: int, rows: int, cores: int, count: int
) -> None:
    config = RunConfig(
        pipeline=PipelineSection(stages=stages, groups=rows), coordinator=CoordinatorSection(gateways=setting)
    )
    assert gateway_count(config, cores) == count
