"""The input of the run's state machine: settings from the run file, and the past from the database."""

import functools
import math
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from node.config.schema import PLANNED, RunConfig
from node.model.units import unit_names, unit_parameters
from node.run_state.codec_control import CodecControl, codec_control, no_codecs
from node.run_state.epoch import Committed, Neighbours, StepPlan
from node.run_state.held_out import HeldOutPass, held_out_passes
from node.run_state.stage_assignment import Remedies, Sharing, StageBytes, sharing, stage_needs
from node.run_state.state_agreement import Moved
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
    """The gradient groups of a step."""
    most_rows: int = 1
    """The most replicas of the pipeline, if there are nodes for them; at most `groups`."""
    min_stages: int
    """With fewer nodes, the run pauses."""
    total_steps: int
    undecided: bool = False
    """Whether a decision depends on the nodes that are present when stages can first be placed, and must be
    made before that (`actions.Decide`)."""
    first_weights: bool = False
    """Whether stages begin with a checkpoint's weights, which nodes may fetch before they have a stage."""
    weights_from: float = math.inf
    """The first step whose snapshot has only weights, as all later ones."""
    rounds_from: int | None = None
    """The first step that is a round of local steps; None if there are none."""
    snapshot_every: int
    """The steps between snapshots; 1 if snapshots are by time."""
    snapshot_seconds: float = 0.0
    """The seconds between snapshots; 0 if they are by steps."""
    valid_every: int = 0
    """The steps between measurements of the held-out loss; 0 for none."""
    held_out: tuple[HeldOutPass, ...] = ()
    """The passes of a measurement."""
    label_weight: float = 1.0
    """The label weight of all held-out samples (`node.model.labels`)."""
    unlabelled: Container[int] = ()
    """Steps without labels that count, as far as known before their votes."""
    microbatch: int = 1
    """The samples in a microbatch."""
    keep_best: bool = True
    silent_seconds: float
    reconnect_seconds: float
    """How long a node whose connection broke may take to return before it counts as dead."""
    regroup_seconds: float
    """How long to wait for a missing node before its stage, or the complete split, is assigned again."""
    follows: bool = False
    """Whether a node with a stage's state needs only gradient sums to follow the run."""
    units: Callable[[int], Sequence[Sequence[str]]]
    """Number of stages -> the layer units of each stage."""
    unit_numbers: UnitNumbers
    neighbours: Neighbours
    stage_bytes: StageBytes
    sharing: Sharing = lambda _: None
    remedies: Remedies = lambda *_: ()
    codecs: Callable[[StepHistory[CodecPlan], int], CodecControl] = no_codecs
    """(recorded plans, the first step never committed) -> the control of the links' codecs."""
    storages: Callable[[StepHistory[StoragePlan], StageBytes], StorageControl] = no_choice
    """(recorded plans, the stages' needs without a choice) -> the control of the stages' storages."""
    audit_rate: float = 0.0
    """The share of steps in which two rows compute the same gradient group."""
    audit_secret: bytes = b""
    """A secret that determines these steps."""
    compares_newcomers: bool = False
    """Whether equal rows compute the same bits, so that a newcomer's can be compared."""
    boundaries: Callable[[int], int] = lambda stages: stages - 1
    """Number of stages -> boundaries between chunks."""
    state_bytes: Callable[[int], Sequence[int]] = lambda stages: (0,) * stages
    """Number of stages -> bytes of weights and optimizer state of each stage."""
    moved: Moved = lambda *_: 0.0
    """How far the optimizer can move weights."""


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
    """The recorded plans of codecs."""
    storages: StepHistory[StoragePlan] = field(default_factory=StepHistory)
    """The recorded plans of storages."""
    splits: StepHistory[tuple[int, ...]] = field(default_factory=StepHistory)
    """The recorded splits."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """The seconds of a block on each node, as earlier steps have shown."""
    moves: int = 0
    """The number of recorded plans of places."""
    scales: LossScales | None = None
    """The loss scales of a run in float16. They change during the run."""
    newest: tuple[PastStep, ...] = ()
    """The newest committed steps, oldest first."""
    later: Mapping[int, PastStep] = field(default_factory=dict)
    """Committed steps after the newest snapshot, which run again; empty if they may differ."""

    @property
    def next_split(self) -> float:
        """The first step whose recorded split is another than the next step's; infinite if there is none."""
        split = self.splits.at(self.newest_snapshot)
        later = (
            first for first, other in self.splits.changes if first > self.newest_snapshot and other != split
        )
        return next(later, math.inf)

    def scale_of(self, step: int) -> LossScale | None:
        """The scale of the loss in a step. All steps before it must be committed."""
        return None if self.scales is None else self.scales.at(step)


RECONNECT_SECONDS = 1.0
MOST_RATES = 2.0
"""In a step, AdamW and Muon move a layer's weights by about the learning rate (root mean square), and
by at most this many times the learning rate."""


def run_plan(config: RunConfig, windows: int, held_out: int = 0, label_weight: float = 1.0) -> RunPlan:
    """
    Args:
        windows: the number of samples in one pass over the text.
        held_out: the number of held-out samples for measuring the loss.
        label_weight: the label weight of these samples.
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
        # The gradient of a weight that two stages share is only complete after an exchange in the run.
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
        moved=functools.partial(most_moved, config),
    )


def step_plan(config: RunConfig) -> StepPlan:
    """Compute the clip coefficient and learning rate of a step from its gradient norm.

    The local steps of a round clip their own gradients. Their changes of the weights are not clipped.
    """
    training = config.training

    def plan(step: int, grad_norm: float) -> tuple[float, float]:
        clip = 1.0 if config.is_round(step) else clip_coefficient(grad_norm, training.clip)
        return clip, learning_rate(step, training, config.run.steps)

    return plan


def most_moved(config: RunConfig, unit: int, first: int, last: int) -> float:
    """As `node.run_state.state_agreement.Moved`."""
    sync = config.sync
    of_round = sync.every * sync.outer_lr / (1 - sync.outer_momentum)
    rates = (
        learning_rate(step, config.training, config.run.steps) * (of_round if config.is_round(step) else 1.0)
        for step in range(first, last)
    )
    parameters = unit_parameters(config.model, unit_names(config.model)[unit])
    return MOST_RATES * math.sqrt(parameters) * sum(rates)


def _unit_numbers(config: RunConfig, stages: int) -> list[frozenset[int]]:
    names = unit_names(config.model)
    return [frozenset(map(names.index, units)) for units in stage_units(config, stages)]


def _neighbours(config: RunConfig, stage: int, stages: int) -> tuple[int, ...]:
    return neighbours(stage, stages, chunks_of(config, stages), config.model.tied)


def as_told(config: RunConfig) -> RunConfig:
    """The config that nodes get. It leaves out this machine's paths and the prompts."""
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
