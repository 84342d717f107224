"""What the run's state machine starts from: the settings of the run file, and the past from the database."""

import functools
import math
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from node.config.schema import PLANNED, RunConfig
from node.model.units import unit_names
from node.run_state.codec_control import CodecControl, codec_control, no_codecs
from node.run_state.epoch import Committed, Neighbours, StepPlan
from node.run_state.held_out import HeldOutPass, held_out_passes
from node.run_state.stage_assignment import Remedies, Sharing, StageBytes, sharing, stage_needs
from node.run_state.storage_control import StorageControl, no_choice, storage_control
from node.run_state.votes import PastStep, UnitNumbers
from node.schedule.placement import boundaries, chunks_of, head_first, stage_units
from node.schedule.routing import neighbours
from node.state.hub import PREFIX as HUB
from node.state.unit_state import has_weights_alone
from node.telemetry.format import parse_duration
from node.training.loss_scale import LossScale, LossScales
from node.training.schedule import clip_coefficient, learning_rate
from node.tuning.codec_plan import CodecPlan
from node.tuning.decisions import StepHistory
from node.tuning.snapshot_place import stage_state_bytes
from node.tuning.storage_choice import StoragePlan, remedies


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The settings that the state machine needs. Times are in seconds."""

    stages: int
    groups: int = 1
    """Gradient groups of a step."""
    most_rows: int = 1
    """Replicas of the pipeline, if there are nodes for them; at most `groups`."""
    min_stages: int
    """With fewer nodes than this the run pauses."""
    total_steps: int
    undecided: bool = False
    """Something follows from which nodes are there when stages could be placed for the first time, and is
    decided before they are (`actions.Decide`)."""
    first_weights: bool = False
    """Stages begin with weights of a checkpoint, which nodes may fetch before they have a stage."""
    weights_from: float = math.inf
    """Snapshots of this step and of later ones have weights alone."""
    rounds_from: int | None = None
    """The first step that is a round of local steps; None if none is."""
    snapshot_every: int
    """Steps; 1 if snapshots are by time."""
    snapshot_seconds: float = 0.0
    """Seconds between snapshots; 0 if they are by steps."""
    valid_every: int = 0
    """Steps between measurements of the held-out loss; 0 for none."""
    held_out: tuple[HeldOutPass, ...] = ()
    """The passes of a measurement."""
    label_weight: float = 1.0
    """The label weight of all held-out samples (`node.model.labels`)."""
    unlabelled: Container[int] = ()
    """Steps, known before their votes come, none of whose tokens counts as a label."""
    microbatch: int = 1
    """Samples in a microbatch."""
    keep_best: bool = True
    silent_seconds: float
    reconnect_seconds: float
    """How long a node whose connection broke may take to come back before it counts as dead."""
    regroup_seconds: float
    """How long to wait for a missing node before its stage, or the whole split, changes hands."""
    follows: bool = False
    """Whether a node that holds a stage's state needs no more than summed gradients to follow the run."""
    units: Callable[[int], Sequence[Sequence[str]]]
    """Number of stages -> the layer units of each stage."""
    unit_numbers: UnitNumbers
    neighbours: Neighbours
    stage_bytes: StageBytes
    sharing: Sharing = lambda _: None
    remedies: Remedies = lambda *_: ()
    codecs: Callable[[StepHistory[CodecPlan], int], CodecControl] = no_codecs
    """(plans on record, the first step never committed) -> what plans the codecs of links."""
    storages: Callable[[StepHistory[StoragePlan], StageBytes], StorageControl] = no_choice
    """(plans on record, what stages need where nothing is chosen) -> what chooses stages' storages."""
    audit_rate: float = 0.0
    """Share of steps in which a gradient group is computed by two rows."""
    audit_secret: bytes = b""
    """Nobody else knows it: it says which steps these are."""
    compares_newcomers: bool = False
    """Whether like rows compute the same bits, so that a newcomer's can be compared."""
    boundaries: Callable[[int], int] = lambda stages: stages - 1
    """Number of stages -> boundaries between chunks."""
    state_bytes: Callable[[int], Sequence[int]] = lambda stages: (0,) * stages
    """Number of stages -> bytes of weights and optimizer state of each stage."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The run's past, from the database. The defaults are those of a new run."""

    last_epoch: int = 0
    newest_snapshot: int = 0
    committed: Committed | None = None
    hosts: tuple[str, ...] = ()
    """The newest grid, row after row."""
    rows: int = 1
    """The rows of the newest grid."""
    validated: frozenset[int] = frozenset()
    """Steps whose held-out loss is recorded."""
    best: float = math.inf
    """The least of these losses."""
    codecs: StepHistory[CodecPlan] = field(default_factory=StepHistory)
    """The plans of codecs on record."""
    storages: StepHistory[StoragePlan] = field(default_factory=StepHistory)
    """The plans of storages on record."""
    splits: StepHistory[tuple[int, ...]] = field(default_factory=StepHistory)
    """The splits on record."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a block on nodes that earlier steps have shown."""
    moves: int = 0
    """Plans of places on record."""
    scales: LossScales | None = None
    """The scales of the loss, in a run that computes in float16. They change as the run goes on."""
    newest: tuple[PastStep, ...] = ()
    """The newest committed steps, oldest first."""
    later: Mapping[int, PastStep] = field(default_factory=dict)
    """Committed steps after the newest snapshot, which run again; empty where they may differ."""

    def scale_of(self, step: int) -> LossScale | None:
        """The scale of the loss in a step. All steps before it must be committed."""
        return None if self.scales is None else self.scales.at(step)


RECONNECT_SECONDS = 1.0


def run_plan(config: RunConfig, windows: int, held_out: int = 0, label_weight: float = 1.0) -> RunPlan:
    """
    Args:
        windows: samples of one pass over the text.
        held_out: held-out samples to measure the loss on, and
        label_weight: theirs.
    """
    pipeline, settings = config.pipeline, config.coordinator
    every = config.run.snapshot_every
    return RunPlan(
        stages=pipeline.stages,
        groups=pipeline.groups,
        most_rows=pipeline.most_rows,
        total_steps=config.run.steps,
        undecided=config.training.precision == PLANNED,
        first_weights=bool(config.model.from_) and not pipeline.measures_places,
        weights_from=config.run.steps if has_weights_alone(config, config.run.steps) else math.inf,
        rounds_from=config.sync.warmup if config.sync.every > 1 else None,
        snapshot_every=every if isinstance(every, int) else 1,
        snapshot_seconds=0.0 if isinstance(every, int) else parse_duration(every) or 0.0,
        valid_every=config.data.valid_every,
        held_out=held_out_passes(config, held_out),
        label_weight=label_weight,
        microbatch=config.training.microbatch,
        keep_best=config.run.keep_best,
        silent_seconds=settings.silent_seconds,
        reconnect_seconds=RECONNECT_SECONDS,
        regroup_seconds=settings.regroup_seconds,
        min_stages=pipeline.min_stages or pipeline.stages,
        # The gradient of a weight that two stages share is complete in the run alone.
        follows=pipeline.groups > 1
        and (not config.sums_tied_gradients or pipeline.stages == 1 or head_first(config, pipeline.stages)),
        units=functools.cache(functools.partial(stage_units, config)),
        stage_bytes=stage_needs(config, windows),
        sharing=sharing(config),
        remedies=functools.partial(remedies, config, windows=windows),
        unit_numbers=functools.cache(functools.partial(_unit_numbers, config)),
        neighbours=functools.cache(functools.partial(_neighbours, config)),
        codecs=functools.partial(codec_control, config),
        storages=functools.partial(storage_control, config, windows),
        audit_rate=config.audit.rate,
        audit_secret=secrets.token_bytes(32),
        compares_newcomers=config.training.deterministic and config.sync.every == 1,
        boundaries=functools.cache(functools.partial(boundaries, config)),
        state_bytes=functools.cache(functools.partial(stage_state_bytes, config)),
    )


def step_plan(config: RunConfig) -> StepPlan:
    """Gives the clip coefficient and learning rate of a step from its gradient norm.

    The local steps of a round clip their own gradients; how they changed the weights is not clipped.
    """
    training = config.training

    def plan(step: int, grad_norm: float) -> tuple[float, float]:
        clip = 1.0 if config.is_round(step) else clip_coefficient(grad_norm, training.clip)
        return clip, learning_rate(step, training, config.run.steps)

    return plan


def _unit_numbers(config: RunConfig, stages: int) -> list[frozenset[int]]:
    names = unit_names(config.model)
    return [frozenset(map(names.index, units)) for units in stage_units(config, stages)]


def _neighbours(config: RunConfig, stage: int, stages: int) -> tuple[int, ...]:
    return neighbours(stage, stages, chunks_of(config, stages), config.model.tied)


def as_told(config: RunConfig) -> RunConfig:
    """The config that nodes get. Of where files are here, and of its prompts, they need to know nothing."""
    data, model = config.data, config.model
    there = replace(
        data,
        path=Path(data.path).name,
        sources=tuple(Path(source).name for source in data.sources),
        valid=Path(data.valid).name,
        tokenizer=Path(data.tokenizer).name,
        chat_template=Path(data.chat_template).name,
        prompts=(),
    )
    if not model.from_.startswith(HUB):
        model = replace(model, from_=Path(model.from_).name)
    return replace(config, data=there, model=model)
