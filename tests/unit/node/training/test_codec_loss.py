"""Lossy codecs between stages: a short run reaches a loss near that of fp32."""

from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.schedule.placement import split_units
from tests.support.memory_pipeline import codec_boundary, corpus
from tests.support.reference_trainer import ReferenceTrainer

STEPS, LAST = 64, 8
CONFIG = RunConfig(
    run=RunSection(steps=STEPS, seed=11),
    model=ModelSection(layers=3, hidden=48, heads=4, kv_heads=2, ffn=96, vocab=256, sequence=32),
    training=TrainingSection(global_batch=8, microbatch=8, lr=1e-2, warmup_steps=5),
    pipeline=PipelineSection(stages=3, forward_codec="fp32", backward_codec="fp32"),
)


@cache
def losses(forward: str, backward: str) -> list[float]:
    """Of every step, with two boundaries in the model."""
    pipeline = replace(CONFIG.pipeline, forward_codec=forward, backward_codec=backward)
    config = replace(CONFIG, pipeline=pipeline)
    groups = split_units(config.model, pipeline.stages)
    trainer = ReferenceTrainer(config, corpus(config), groups=groups, boundary=codec_boundary(config))
    return [step.loss for step in trainer.train(STEPS)]


@pytest.mark.parametrize(
    ("forward", "backward", "margin"), [("tah", "fixed-8", 0.02), ("trellis-3", "dither-3", 0.05)]
)
def test_a_lossy_codec_reaches_a_loss_near_that_of_fp32(forward: str, backward: str, margin: float) -> None:
    """`margin`: as a part of fp32's mean loss over the last steps."""
    plain, lossy = losses("fp32", "fp32"), losses(forward, backward)
    reached = fmean(plain[-LAST:])
    assert plain[0] > 5.4 and reached < 3.0, "fp32 learns"
    assert lossy != plain, "the codec is lossy"
    assert abs(fmean(lossy[-LAST:]) / reached - 1) < margin
