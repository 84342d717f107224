"""Runs one stage: takes its placement, holds its state, computes its votes, and applies commits.

It runs on the compute thread. The passes of a step are in `node.stage.step_passes`. `run_step` changes
nothing durable: gradients accumulate beside the weights until `apply`.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.common.dispatch import in_double
from node.config.schema import RunConfig
from node.model.labels import BatchPart, label_weight
from node.model.units import unit_names
from node.schedule.gradient_groups import RowShare, StepWork
from node.schedule.routing import StageLayout
from node.stage.boundary_caches import BoundaryCaches
from node.stage.device_transfer import device_transfer
from node.stage.digests import StepDigests
from node.stage.give_way import GiveWay
from node.stage.gradient_sync import GradientSync, SyncPlan
from node.stage.group import StageCompute
from node.stage.inbox import LinksIO, StepChange, StepInterrupted
from node.stage.packing_meter import packing_meter
from node.stage.stage_plans import StageCodecs, StageStorage
from node.stage.state_copy import StateCopy
from node.stage.step_order import StepOrder
from node.stage.step_passes import (
    BegunStep,
    StageParts,
    StepPasses,
    boundary_specs,
    put_group_sums,
    sum_own_tie,
    tied_spec,
)
from node.stage.sums_kept import KeepSums
from node.stage.tensor_transfer import TensorTransfer, example_tensor
from node.state.serialization import cache_of, without_cache
from node.state.unit_state import has_weights_alone, has_weights_first
from node.telemetry.clock import StageClock, TimeKind
from node.training.overflow import Overflow
from node.tuning.memory_plan import Room
from wire.codecs.base import Codec
from wire.errors import ProtocolViolationError
from wire.messages import HandedOver, Vote
from wire.spec import Direction, TensorKey

Value = TypeVar("Value")

UnitState = Mapping[str, Tensor]


class StageExecutor:
    """One stage of a pipeline; `place` says which."""

    _place: StageLayout

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        clock: StageClock,
        model: StageCompute,
        *,
        room: Room | None = None,
    ) -> None:
        """
        Args:
            model: computes the stage; boundary tensors are on `device`.
            room: the memory that this node plans its stage for, and the samples of one pass over the text.
        """
        self.config = config
        self.device = device
        self.clock = clock
        self.room = room or Room()
        self.stage = -1
        self.stages = 0
        self.state_step = -1
        self.lineage = 0
        """The epoch whose loaded state the current state grew from. `epoch_task` sets it."""
        self.voted = False
        """Whether the gradients of step `state_step` are complete and the commit is missing."""
        self._restored: dict[str, UnitState] = {}
        """During a restore, the sample caches of the units that were loaded last."""
        self._share = RowShare(config, 0, (range(config.pipeline.groups),))
        self._order: StepOrder
        self._unit_index = {unit: index for index, unit in enumerate(unit_names(config.model))}
        self.packing = packing_meter(config, device)
        on_cpu, remembers = device.type == "cpu", config.pipeline.remembers
        self._transfer = TensorTransfer(
            device_transfer(device),
            clock.beside,
            self.packing,
            clock.switch if on_cpu and not remembers else None,
            unpacks_beside=not on_cpu and not remembers,
            in_order=remembers,
        )
        self._caches = BoundaryCaches(config, self.room.windows) if remembers else None
        self._codecs = StageCodecs(config, self._caches)
        self._newest_step = 0
        """The step that was begun last."""
        self.give_way: GiveWay | None = None
        """Set by the node if its owner also uses the GPU."""
        self.wants_digests = False
        """Whether the next step's digests are compared although the run has no audits."""
        self.uncompressed = False
        """Whether every link uses fp32 instead of the run's codecs."""
        self._plans: dict[tuple[bool, bool], SyncPlan] = {}
        """The plans of this placement, by whether the run's codecs are used and whether the step is a
        round."""
        self._boundaries, self._tied = boundary_specs(config), tied_spec(config)
        self.model = model
        self.storage = StageStorage(config)
        self._sync = GradientSync(device) if config.pipeline.groups > 1 else None
        self._digests: StepDigests | None = None
        self._running: StepPasses | None = None
        """The passes of the newest step until its commit; None if the step failed."""
        self._overflow = Overflow()
        self.expert_load = (0.0, 0)
        """The load of the experts after the newest step (`StageModel.expert_load`)."""
        self.keep_sums: KeepSums | None = None
        """Receives each step's packed gradient sums, for nodes that follow the run."""
        self.hand_over: Callable[[HandedOver], None] | None = None
        """Called on any thread with groups of the next step that have arrived at other rows. None if the step
        begins without hand-overs."""

    def compile_codecs(self) -> None:
        """Compile the codecs in the background so the first step doesn't wait."""
        example = example_tensor(self._boundaries[0], self.device)
        self._transfer.compile_codecs(self._codecs.all, example, self._codecs.to_time)

    # ---- placement and state

    @property
    def units(self) -> tuple[str, ...]:
        """Layer units of this stage, in model order within each chunk."""
        return self._place.units

    @property
    def sources(self) -> tuple[str, ...]:
        """The units whose snapshots `restore` reads: its own, and those that hold its boundaries' caches."""
        return tuple(dict.fromkeys((*self.units, *self._cached_boundaries().values())))

    @property
    def needs(self) -> tuple[BatchPart, ...]:
        """The parts of a step's samples that this stage needs."""
        wanted = {
            BatchPart.INPUTS: self._place.is_first,
            BatchPart.LABELS: self._place.has_loss,
            BatchPart.DOCUMENTS: self.config.data.separate_documents,
        }
        return tuple(part for part, is_wanted in wanted.items() if is_wanted)

    def place(self, stage: int, stages: int, share: RowShare | None = None) -> int:
        """Take stage `stage` of `stages`. Returns the step of the state already held for it, or -1.

        `share`: this row's gradient groups; all by default.
        """
        config = self.config
        self._share = share or RowShare(config, 0, (range(config.pipeline.groups),))
        if (stage, stages) != (self.stage, self.stages):
            self._place = StageLayout(config, stage, stages)
            self.stage, self.stages = stage, stages
            self.model.drop()
            self.state_step = -1
            self.voted = False
        self._order = StepOrder(config, self._place, self._share)
        self._forget_step()
        self._codecs.forget()
        self._plans.clear()
        return self.state_step

    @property
    def widest_window(self) -> int:
        """The largest window of extra microbatches in flight among the links."""
        windows = self._order.windows if self.stages else ()
        return max(windows, default=self.config.pipeline.first_window)

    @property
    def microbatch_numbers(self) -> list[int]:
        """See `StepOrder.numbers`."""
        return self._order.numbers

    def use_windows(
        self,
        link_windows: tuple[int, ...],
        audited: tuple[int, ...] = (),
        groups: tuple[int, ...] | None = None,
    ) -> None:
        """See `StepOrder.use`."""
        self._order.use(link_windows, audited, groups)

    def use_codecs(self, activations: tuple[str, ...], gradients: tuple[str, ...]) -> None:
        """Use these codecs, one for each boundary, until the next placement. Empty: use the run file's.

        Raises ProtocolViolationError for unknown codecs, or if they do not fit the placement.
        """
        self._codecs.plan(activations, gradients, self.stages)

    def use_storages(self, names: tuple[str, ...]) -> bool:
        """Store activations as the coordinator chose (`StageStorage.choose`). Returns whether a state that
        was built for another storage was dropped."""
        if is_other := self.storage.choose(names, self.stage, self.stages):
            self.forget()
        return is_other

    def restore(self, step: int, fetch: Callable[[str], UnitState]) -> None:
        """Set the state to that of `step`: keep it, or build it from the seed (step 0) and from `fetch`.

        `fetch` returns a unit's state, or its weights at step 0 of a run that starts from a checkpoint.
        """
        if step == self.state_step:
            return
        self.begin_restore()
        for unit in self.sources if step > 0 or self.config.model.from_ else ():
            self.restore_unit(unit, fetch(unit))
        self.end_restore(step)

    def begin_restore(self, *, is_drawn: bool = True) -> None:
        """Build the stage from the seed. Call `restore_unit` for all `sources` next, then `end_restore`.

        `is_drawn`: False if every weight is loaded afterwards, so that none need be drawn.
        """
        self.state_step = -1
        self.voted = False
        self._restored.clear()
        self.model.build(self.stage, self.stages, self.storage.number, is_drawn=is_drawn)

    def restore_unit(self, unit: str, state: UnitState) -> None:
        """Load a unit's state, or only its weights with a fresh optimizer."""
        if unit in self.units:
            self.model.load_unit_state(unit, without_cache(state))
        self._restored[unit] = cache_of(state)

    def end_restore(self, step: int) -> None:
        """All units are loaded: the state is now that of `step`."""
        if self._caches is not None:
            boundaries = self._cached_boundaries().items()
            self._caches.restore(step, {j: self._restored.get(unit, {}) for j, unit in boundaries})
        self._restored.clear()
        self.state_step = step

    def forget(self) -> None:
        """Hold the state of no step, because the held state cannot be the run's state."""
        self.state_step = -1
        self.voted = False

    @property
    def copies_within_step(self) -> bool:
        """Whether `copy_state` may be called on any thread while the passes of a step run."""
        return self._caches is None and self.model.state_stays

    def copy_state(self) -> StateCopy:
        """A copy of every unit's state for a snapshot. It is read until the state changes."""
        caches = self._caches
        boundaries = self._cached_boundaries().items()
        of_caches = {} if caches is None else {unit: caches.state(boundary) for boundary, unit in boundaries}
        alone = has_weights_alone(self.config, self.state_step)
        copy = self.model.copy_state(of_caches, weights_alone=alone)
        copy.weights_first = has_weights_first(self.config, self.state_step)
        return copy

    # ---- a step

    def expected_bytes(self, key: TensorKey) -> int | None:
        """The exact packed size of a tensor that this stage may receive, or None if it may not."""
        if key.direction in (Direction.SYNC_SHARE, Direction.SYNC_SUM):
            return None if self._sync is None else self._sync_plan(key.step).bytes_between_rows(key)
        if not self._place.receives(key):
            return None
        tied = key.direction in (Direction.TIED_SHARE, Direction.TIED_SUM)
        boundary = self._boundaries[key.microbatch % len(self._boundaries)]
        return self._codec(key).packed_bytes(self._tied if tied else boundary)

    def comes(self, row: int, key: TensorKey, work: StepWork) -> bool:
        """See `SyncPlan.comes`, of an expected tensor."""
        return self._sync_plan(key.step).comes(row, key, work)

    def run_step(
        self,
        epoch: int,
        step: int,
        io: LinksIO,
        samples: Mapping[BatchPart, np.ndarray],
        loss_scale: float = 0.0,
        change: StepChange | None = None,
    ) -> Vote:
        """Run forward and backward of every microbatch in the order of `StepOrder`, in a round after local
        steps. Returns the stage's vote.

        With a `loss_scale` above `node.training.loss_scale.LEAST`, non-finite gradients do not fail the step:
        their norms are infinite.

        `samples`: the parts in `needs`, [global batch, sequence], or only those of the groups that this row
            computes, in ascending order. Labels are always complete if the run masks some, for their weight.
            `change`: a distribution of the work that differs from the placement.

        Raises NonFiniteError, which names the stage and the tensor, or StepInterrupted.
        """
        self.voted = False
        self._newest_step = step
        labels = samples.get(BatchPart.LABELS)
        scale, self._overflow = loss_scale or 1.0, Overflow(loss_scale)
        weight = scale * (1.0 if labels is None else label_weight(labels))
        self.model.begin_step(weight)
        if self._caches is not None:
            self._caches.rollback()
        given: dict[BatchPart, Mapping[int, Tensor]] = {}
        for part, batch in samples.items():
            parts = self._cut(part, batch)
            is_whole = len(parts) == self.config.microbatches
            own = range(len(parts)) if is_whole else sorted(self.microbatch_numbers)
            given[part] = dict(zip(own, parts, strict=False))
        compared = self.config.audit.rate > 0.0 or self.wants_digests or bool(self._order.audited)
        self._digests = StepDigests(self.config) if compared and self._share.rows > 1 else None
        share = StepChange(
            generation=0 if change is None else change.generation,
            work=self._share.whole if change is None else change.work,
            audited=self._order.audited,
            hand_over=self.hand_over,
        )
        begun = BegunStep(
            epoch=epoch,
            step=step,
            io=io,
            samples=given,
            overflow=self._overflow,
            loss_weight=weight,
            scale=scale,
        )
        passes = StepPasses(self._parts, begun, share)
        if self._sync is not None:
            self._sync.begin(
                self._sync_plan(step),
                epoch,
                step,
                io,
                work=share.work,
                keep=self.keep_sums,
                digests=self._digests,
                told=(passes.handed_over, passes.passed_on),
                hands_over=self.hand_over is not None,
                generation=share.generation,
            )
        self._running = passes
        return self.vote()

    def vote(self, change: StepChange | None = None) -> Vote:
        """The vote on the running step. With a `change`, the new vote on a step that was already voted for,
        with redistributed work. Raises as `run_step`."""
        passes = self._running
        if passes is None:
            raise ProtocolViolationError("the coordinator redistributes work of a step that does not run")
        self.voted = False
        digests, begun, is_done = self._digests, passes.begun, False
        self._transfer.digests, self._running = digests, None
        try:
            if change is not None:
                passes.regroup(change)
            passes.complete()
            self.clock.switch(TimeKind.ENCODE)
            self._transfer.drain()
            is_done = True
        except StepInterrupted:
            # If a tensor could not be packed, raise that error.
            self._transfer.drain()
            if self._sync is not None:
                self._sync.drain()
            raise
        except Exception as error:
            # The sync thread may be waiting for another row.
            begun.io.interrupt(error)
            raise
        finally:
            self._transfer.settle()
            self._transfer.digests = None
            if self._sync is not None:
                self._sync.settle(forget=not is_done)
            if self.config.is_round(begun.step):
                self.model.local.end()
        self._running = passes
        self.clock.switch(TimeKind.OPTIMIZER)
        sums = {group: passes.loss_of(group) for group in passes.losses}
        counted = passes.share.work.groups
        norms = self._overflow.told(self._norms())
        self.expert_load = self.model.expert_load()
        self.voted = True
        return Vote(
            epoch=begun.epoch,
            step=begun.step,
            norms=norms,
            loss=sums.get(0) if self._sync is None else None,
            group_losses=(
                {} if self._sync is None else {group: sums[group] for group in counted if group in sums}
            ),
            digests={} if digests is None else digests.of(counted, sums, passes.share.audited),
            generation=passes.share.generation,
            sums={} if self._sync is None else self._by_index(self._sync.digests_of_sums()),
        )

    def validate(
        self,
        epoch: int,
        number: int,
        microbatches: int,
        io: LinksIO,
        samples: Mapping[BatchPart, np.ndarray],
    ) -> float | None:
        """Pass `number` over held-out samples with the current state, forward only. Changes no state.

        `samples`: as for `run_step`, for `microbatches` microbatches. Returns the mean loss in nats per token
            on the stage with the head; masked labels have a loss of 0. Raises as `run_step`.
        """
        first, step = self.config.microbatches * (1 + number), self.state_step
        given = {part: dict(enumerate(self._cut(part, batch), first)) for part, batch in samples.items()}
        begun = BegunStep(epoch=epoch, step=step, io=io, samples=given, overflow=self._overflow)
        share = StepChange(generation=0, work=self._share.whole)
        try:
            losses = StepPasses(self._parts, begun, share).held_out(first, microbatches)
            self.clock.switch(TimeKind.ENCODE)
            self._transfer.drain()
        except StepInterrupted:
            self._transfer.drain()
            raise
        finally:
            self._transfer.settle()
        self.clock.switch(TimeKind.OPTIMIZER)
        if not losses:
            return None
        return float(in_double(torch.stack(losses)).sum()) * self.config.microbatches / microbatches

    def apply(self, lr: float, clip_coefficient: float) -> None:
        """Commit the step: clip, step the optimizer, drop the gradients. Rounds step the outer one, too."""
        self.clock.switch(TimeKind.OPTIMIZER)
        self.voted = False
        self._forget_step()
        if self.config.is_round(self.state_step):
            self.model.local.apply(self.state_step)
        else:
            self.model.apply(lr, clip_coefficient)
        if self._caches is not None:
            self._caches.commit()
        self.state_step += 1

    # ---- following a run without a part in it

    def sum_bytes(self, unit: str) -> int:
        """The bytes of a unit's packed sum, as `keep_sums` receives it."""
        return self._sync_plan(self.state_step).unit_bytes(unit)

    def put_sums(self, sums: Mapping[str, bytes]) -> Mapping[int, float]:
        """Replace `run_step` for step `state_step`: take the gradients that another node's `keep_sums`
        received. Call `apply` next. Returns their squared norms by unit index.

        Raises PackedMismatchError or NonFiniteError for invalid bytes.
        """
        assert self._sync is not None, "only a run with gradient groups packs sums"
        self.voted = False
        self._forget_step()
        self.model.begin_step()
        is_round = self.config.is_round(self.state_step)
        for unit, gradients in self._sync.read(self._sync_plan(self.state_step), sums):
            put_group_sums(self.model, unit, gradients, of_round=is_round)
        if self._place.sums_tie_alone and not is_round:
            sum_own_tie(self.model)
        self.voted = True
        return self._norms()

    # ---- inside

    def _forget_step(self) -> None:
        """Drop what the newest step kept in case rows get other work."""
        self._running = None
        if self._sync is not None:
            self._sync.settle(forget=True)

    def _norms(self) -> dict[int, float]:
        return self._by_index(self.model.squared_norms())

    def _by_index(self, values: Mapping[str, Value]) -> dict[int, Value]:
        return {self._unit_index[unit]: value for unit, value in values.items()}

    @property
    def _parts(self) -> StageParts:
        return StageParts(
            config=self.config,
            layout=self._place,
            order=self._order,
            model=self.model,
            clock=self.clock,
            transfer=self._transfer,
            codec=self._codec,
            sync=self._sync,
            cut=self._cut,
            give_way=self.give_way,
        )

    def _sync_plan(self, step: int) -> SyncPlan:
        key = self.uncompressed, self.config.is_round(step)
        if key not in self._plans:
            # Backward completes the last layers' gradients first.
            units = tuple(reversed(self.units))
            self._plans[key] = SyncPlan(self.config, units, self._share, uncompressed=key[0], of_round=key[1])
        return self._plans[key]

    def codec_name(self, direction: Direction) -> str:
        """The codec in use for this kind of tensor."""
        return self._codecs.name(
            direction, self.stage, self.stages, step=self._newest_step, uncompressed=self.uncompressed
        )

    def _codec(self, key: TensorKey) -> Codec:
        return self._codecs.of(key, uncompressed=self.uncompressed)

    def _cut(self, part: BatchPart, batch: np.ndarray) -> tuple[Tensor, ...]:
        """Split a part of the samples, [n, sequence], into microbatches on the stage's device."""
        whole = torch.from_numpy(batch)
        if part is not BatchPart.DOCUMENTS:  # documents are processed on the CPU
            whole = whole.to(self.device)
        return torch.split(whole, self.config.training.microbatch)

    def _cached_boundaries(self) -> dict[int, str]:
        """The unit before each boundary of this stage, by the boundary's number. Empty for codecs without a
        sample cache."""
        return {} if self._caches is None else self._place.boundaries
