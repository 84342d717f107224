"""What the run's state machine starts from: settings of the run file, and the past from the database."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.config.schema import RunConfig
from node.coordinator.epoch import Committed, Neighbours, StepPlan
from node.coordinator.stage_assignment import Sharing, StageBytes, sharing, stage_needs
from node.coordinator.votes import UnitNumbers
from node.model.lora_shapes import trained_specs
from node.model.units import state_bytes, unit_names
from node.pipeline.placement import chunks_of, stage_units
from node.pipeline.routing import neighbours
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
    unit_numbers: UnitNumbers
    neighbours: Neighbours
    stage_bytes: StageBytes
    sharing: Sharing = lambda _: None
    state_bytes: Callable[[int], Sequence[int]] = lambda stages: (0,) * stages
    """Number of stages -> bytes of weights and optimizer state of each stage."""


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
        unit_numbers=functools.cache(functools.partial(_unit_numbers, config)),
        neighbours=functools.partial(_neighbours, config),
        state_bytes=functools.partial(stage_state_bytes, config),
    )


def step_plan(config: RunConfig) -> StepPlan:
    """Gives the clip coefficient and learning rate of a step from its gradient norm."""
    training = config.training

    def plan(step: int, grad_norm: float) -> tuple[float, float]:
        clip = clip_coefficient(grad_norm, training.clip)
        return clip, learning_rate(step, training, config.run.steps)

    return plan


def stage_state_bytes(config: RunConfig, stages: int) -> list[int]:
    """Bytes of weights and optimizer state of each stage, first stage first."""
    model, lora, moments = config.model, config.lora, config.training.moments
    return [
        sum(state_bytes(trained_specs(model, lora, unit), moments) for unit in units)
        for units in stage_units(config, stages)
    ]


def _unit_numbers(config: RunConfig, stages: int) -> list[frozenset[int]]:
    names = unit_names(config.model)
    return [frozenset(map(names.index, units)) for units in stage_units(config, stages)]


def _neighbours(config: RunConfig, stage: int, stages: int) -> tuple[int, ...]:
    return neighbours(stage, stages, chunks_of(config, stages), config.model.tied)
