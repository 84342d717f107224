"""What the state machine of a run takes from its run file."""

import functools

from node.config.schema import RunConfig
from node.coordinator.epoch import StepPlan
from node.coordinator.plan import RunPlan
from node.coordinator.seating import sharing, stage_needs
from node.pipeline.placement import stage_units
from node.training.schedule import clip_coefficient, learning_rate

RECONNECT_SECONDS = 1.0


def run_plan(config: RunConfig, windows: int) -> RunPlan:
    """
    Args:
        windows: samples of one pass over the text.
    """
    pipeline, settings = config.pipeline, config.coordinator
    return RunPlan(
        stages=pipeline.stages,
        total_steps=config.run.steps,
        snapshot_every=config.run.snapshot_every,
        silent_seconds=settings.silent_seconds,
        reconnect_seconds=RECONNECT_SECONDS,
        regroup_seconds=settings.regroup_seconds,
        min_stages=pipeline.min_stages or pipeline.stages,
        units=functools.partial(stage_units, config),
        stage_bytes=stage_needs(config, windows),
        sharing=sharing(config),
    )


def step_plan(config: RunConfig) -> StepPlan:
    """From a step and the norm of its gradients to its clip coefficient and learning rate."""
    training = config.training

    def plan(step: int, grad_norm: float) -> tuple[float, float]:
        clip = clip_coefficient(grad_norm, training.clip)
        return clip, learning_rate(step, training, config.run.steps)

    return plan
