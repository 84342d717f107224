"""Runs with gradient groups, and gradients of these."""

from collections.abc import Mapping

import torch
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.schedule.gradient_groups import model_pieces

Gradients = Mapping[str, Mapping[str, Tensor]]
"""Flat, by layer unit and parameter."""


def configured(codec: str, groups: int = 4) -> RunConfig:
    return RunConfig(
        model=ModelSection(layers=2, hidden=192, heads=4, kv_heads=2, ffn=320, vocab=500, sequence=16),
        training=TrainingSection(global_batch=2 * groups, microbatch=1),
        pipeline=PipelineSection(groups=groups, sync_codec=codec),
    )


def gradients(config: RunConfig, group: int) -> Gradients:
    generator = torch.Generator().manual_seed(group)
    found: dict[str, dict[str, Tensor]] = {}
    for unit, pieces in model_pieces(config).items():
        ends = {name: end for piece in pieces for name, _, end in piece.parts}
        found[unit] = {
            name: torch.randn(end, generator=generator) * 10.0 ** (-index % 7 - 3)
            for index, (name, end) in enumerate(ends.items())
        }
    return found
