"""What the run's state machine starts from: settings of the run file, and the past from the database."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.config.schema import RunConfig
from node.coordinator.epoch import Committed, StepPlan
from node.coordinator.stage_assignment import Sharing, StageBytes, sharing, stage_needs
from node.pipeline.placement import stage_units
from node.training.schedule import clip_coefficient, learning_rate


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The settings that the state machine needs. Times in seconds."""

    stages: int
    min_stages: int
    """With fewer nodes than this the run pauses."""
    total_steps: int
    snapshot_every: int
    silent_seconds: float
    reconnect_seconds: float
    """How long a node whose connection broke may take to come back before it counts as dead."""
    regroup_seconds: float
    """How long to wait for a missing node before its stage, or the whole split, changes hands."""
    units: Callable[[int], Sequence[Sequence[str]]]
    """Number of stages -> the layer units of each stage."""
    stage_bytes: StageBytes
    sharing: Sharing = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Past:
    """The run's past, from the database; the defaults are a new run's."""

    last_epoch: int = 0
    newest_snapshot: int = 0
    committed: Committed | None = None
    hosts: tuple[str, ...] = ()


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
    """Gives the clip coefficient and learning rate of a step from its gradient norm."""
    training = config.training

    def plan(step: int, grad_norm: float) -> tuple[float, float]:
        clip = clip_coefficient(grad_norm, training.clip)
        return clip, learning_rate(step, training, config.run.steps)

    return plan
