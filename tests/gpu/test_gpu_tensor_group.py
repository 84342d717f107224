"""A stage with tensor parallelism on GPUs of a node, over NCCL, against the same stage on one GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from node.config.schema import RunConfig, StorageSection
from node.stage.processes import DeviceGroup, devices
from node.stage.stage_model import StageModel
from tests.gpu.test_gpu_group import CONFIG, FIRST, NEAR, PACKED, far, losses
from tests.support.device_groups import closed_at_last

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

GPT2 = replace(CONFIG, model=replace(CONFIG.model, family="gpt2"))
STORED = replace(PACKED, storage=StorageSection(preset="agoq"))


@pytest.mark.parametrize("config", [CONFIG, GPT2, PACKED, STORED], ids=["llama", "gpt2", "fp8", "stored"])
@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), (4, 2), (4, 4)], ids=["2", "2 x 2", "4"])
def test_gpus_that_share_blocks_do_as_one(
    config: RunConfig, ranks: int, tensor_parallel: int, record_property: Callable[[str, object], None]
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    if tensor_parallel == 4:
        # A rank's share of a row is whole blocks of 128, for moments in e4m3.
        config = replace(config, model=replace(config.model, hidden=512))
    expected = losses(StageModel(config, FIRST), 5)
    results = []
    for _ in range(2):
        group = DeviceGroup(devices(FIRST, ranks), threads=1, tensor_parallel=tensor_parallel)
        with closed_at_last(group):
            leader = group.start(config)
            results.append((losses(leader, 5), leader.unit_state("block.0001")))
            group.close()
    (first, state), (second, again) = results
    assert first == second, "the same run gives the same bits"
    assert all(torch.equal(state[name], again[name]) for name in state)
    record_property("largest_relative_difference", far(first, expected))
    assert first == pytest.approx(expected, rel=NEAR)
    alone = StageModel(config, FIRST)
    alone.build(0, 1)
    alone.load_unit_state("block.0001", state)
    restored = alone.unit_state("block.0001")
    assert all(torch.equal(restored[name], state[name]) for name in state)
