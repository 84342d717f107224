"""A data-parallel stage on several GPUs of a node, over NCCL, against the same stage on one GPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.stage.processes import DeviceGroup, devices
from node.stage.stage_model import StageModel
from tests.support.device_groups import closed_at_last

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

FIRST = torch.device("cuda", 0)
NEAR = 2e-3
"""Relative tolerance of each loss: splitting matrix products over GPUs changes their rounding."""
CONFIG = RunConfig(
    run=RunSection(steps=10, seed=4),
    model=ModelSection(layers=4, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=256, sequence=128),
    training=TrainingSection(global_batch=16, microbatch=8, lr=1e-3, warmup_steps=0, precision="bfloat16"),
    pipeline=PipelineSection(stages=1),
)
PACKED = replace(
    CONFIG, training=replace(CONFIG.training, gradients="fp8", moments="fp8", weights="bfloat16")
)


def losses(model: StageModel, steps: int) -> list[float]:
    model.build(0, 1)
    found = []
    for step in range(steps):
        model.begin_step()
        total = 0.0
        for microbatch in range(2):
            rows = tokens(step, microbatch)
            total += float(model.forward(0, microbatch, rows[:, :-1], rows[:, 1:]))
            assert model.backward(0, microbatch, None) is None
        model.finish_step()
        model.apply(1e-3, 1.0)
        found.append(total)
    return found


def far(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(loss / other - 1) for loss, other in zip(found, wanted, strict=True))


def tokens(step: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + microbatch)
    return torch.randint(0, 32, (8, 129), generator=generator).to(FIRST)


@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["float32", "fp8"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_do_as_one(
    config: RunConfig, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    expected = losses(StageModel(config, FIRST), 5)
    results = []
    for _ in range(2):
        with closed_at_last(DeviceGroup(devices(FIRST, ranks), threads=1)) as group:
            results.append(losses(group.start(config), 5))
            group.close()
    assert results[0] == results[1], "the same run gives the same bits"
    record_property("largest_relative_difference", far(results[0], expected))
    assert results[0] == pytest.approx(expected, rel=NEAR)
