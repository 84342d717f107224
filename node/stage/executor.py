"""Runs one stage's steps: its model chunks, its optimizer, the actions of its schedule.

It runs on the compute thread and knows no network: tensors come and go through a `StageIO`. `run_step`
changes nothing durable; gradients accumulate beside the weights until `apply`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from node import faults
from node.config.schema import RunConfig
from node.model.labels import BatchPart, label_weight
from node.model.units import EMBED, HEAD, unit_names
from node.pipeline.gradient_groups import RowShare, group_of
from node.pipeline.routing import StageLayout
from node.pipeline.schedule import Action, Kind, Order
from node.pipeline.turns import Turns
from node.stage.boundary_caches import BoundaryCaches
from node.stage.device_transfer import device_transfer
from node.stage.digests import StepDigests
from node.stage.gradient_sync import GradientSync, KeepSums, SyncIO, SyncPlan
from node.stage.inbox import StepInterrupted
from node.stage.packing_meter import packing_meter
from node.stage.stage_model import StageCompute
from node.stage.stage_plans import StageCodecs, StageStorage
from node.stage.step_order import StepOrder, StepOutcome
from node.stage.step_samples import cut_samples, numbered
from node.stage.tensor_transfer import Incoming, PackedIO, TensorTransfer, example_tensor
from node.telemetry.clock import StageClock, TimeKind
from node.training.optimizer import sum_tied_gradients
from node.training.overflow import Overflow
from node.training.serialization import without_cache
from wire.codecs.base import Codec
from wire.spec import Direction, TensorKey, TensorSpec

UnitState = Mapping[str, Tensor]

LOOK_AHEAD = 2
"""Tensors of this many later actions are unpacked as soon as they arrive."""
_WAITS = {Kind.FORWARD: TimeKind.WAIT_UPSTREAM, Kind.BACKWARD: TimeKind.WAIT_DOWNSTREAM}


class StageIO(PackedIO, SyncIO, Protocol):
    """The compute thread's view of the network."""

    def check(self) -> None:
        """Raise if the step was interrupted."""
        ...


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
        windows: int = 0,
    ) -> None:
        """
        Args:
            model: computes the stage; boundary tensors are on `device`.
            windows: samples of one pass over the text, for a codec with a sample cache.
        """
        self.config = config
        self.device = device
        self.clock = clock
        self.stage = -1
        self.stages = 0
        self.state_step = -1
        self.lineage = 0
        """The epoch whose loaded state the held state grew from; `epoch_task` sets it."""
        self.voted = False
        """Whether the gradients of step `state_step` are complete and wait for the commit."""
        self._share = RowShare(config, 0, (range(config.pipeline.groups),))
        self._order: StepOrder
        self._unit_index = {unit: index for index, unit in enumerate(unit_names(config.model))}
        self.packing = packing_meter(config, device)
        here = clock.switch if device.type == "cpu" and not config.pipeline.remembers else None
        self._transfer = TensorTransfer(device_transfer(device), clock.beside, self.packing, here)
        self._caches = BoundaryCaches(config, windows) if config.pipeline.remembers else None
        self._codecs = StageCodecs(config, self._caches)
        self._newest_step = 0
        """The step that was begun last."""
        self.uncompressed = False
        """Whether every link carries fp32 instead of the run's codecs."""
        self._plans: dict[tuple[bool, bool], SyncPlan] = {}
        """Of this placement: without the run's codecs or with them, of an exact step or of a round."""
        self._boundary = TensorSpec(
            torch.float32, (config.training.microbatch, config.model.sequence, config.model.hidden)
        )
        self._tied = TensorSpec(torch.float32, (config.model.vocab, config.model.hidden))
        self.model = model
        self.storage = StageStorage(config)
        self._sync = GradientSync(device) if config.pipeline.groups > 1 else None
        self._overflow = Overflow()
        self.keep_sums: KeepSums | None = None
        """Gets each step's summed gradients, packed, for nodes that follow the run."""

    def compile_codecs(self) -> None:
        """Compile the codecs in the background so the first step doesn't wait."""
        example = example_tensor(self._boundary, self.device)
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
        """What of a step's samples this stage computes with."""
        wanted = {
            BatchPart.INPUTS: self._place.is_first,
            BatchPart.LABELS: self._place.has_loss,
            BatchPart.DOCUMENTS: self.config.data.separate_documents,
        }
        return tuple(part for part, is_wanted in wanted.items() if is_wanted)

    def place(self, stage: int, stages: int, share: RowShare | None = None) -> int:
        """Take stage `stage` of `stages`; returns the step of the state held for it, or -1.

        `share` says which gradient groups are this row's; all by default.
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
        self._codecs.forget()
        self._plans.clear()
        return self.state_step

    @property
    def widest_window(self) -> int:
        """Extra microbatches in flight on the link that has the most."""
        windows = self._order.windows if self.stages else ()
        return max(windows, default=self.config.pipeline.first_window)

    @property
    def microbatch_numbers(self) -> list[int]:
        """As `StepOrder.numbers`."""
        return self._order.numbers

    def use_windows(self, link_windows: tuple[int, ...], audited: tuple[int, ...] = ()) -> None:
        """As `StepOrder.use`."""
        self._order.use(link_windows, audited)

    def use_codecs(self, activations: tuple[str, ...], gradients: tuple[str, ...]) -> None:
        """Use these codecs, one a boundary, until the next placement; empty uses the run file's.

        Raises ProtocolViolationError for codecs that are none, or that do not fit the placement.
        """
        self._codecs.plan(activations, gradients, self.stages)

    def use_storages(self, names: tuple[str, ...]) -> None:
        """Store activations as the coordinator chose; as `StageStorage.choose`. A state that was built
        otherwise is forgotten."""
        if self.storage.choose(names, self.stage, self.stages):
            self.forget()

    def restore(self, step: int, fetch: Callable[[str], UnitState]) -> None:
        """Go to the state of `step`: keep it, or build it from the seed (step 0) and what `fetch` gives.

        `fetch` gives a unit's state, or its weights at step 0 of a run that starts from a checkpoint.
        """
        if step == self.state_step:
            return
        self.state_step = -1
        self.voted = False
        self.model.build(self.stage, self.stages, self.storage.number)
        for unit in self.units if step > 0 or self.config.model.from_ else ():
            state = without_cache(fetch(unit))
            # A checkpoint has weights alone: the optimizer starts fresh.
            self.model.load_unit_state(unit, state if step > 0 else self.model.unit_state(unit) | state)
        if self._caches is not None:
            boundaries = self._cached_boundaries().items()
            self._caches.restore(step, {j: fetch(unit) if step > 0 else {} for j, unit in boundaries})
        self.state_step = step

    def forget(self) -> None:
        """Hold the state of no step, because the held state cannot be the run's."""
        self.state_step = -1
        self.voted = False

    def copy_state(self) -> dict[str, dict[str, Tensor]]:
        """A copy of every unit's weights and optimizer state, on the CPU."""
        state = {unit: self.model.unit_state(unit) for unit in self.units}
        if self._caches is not None:
            for boundary, unit in self._cached_boundaries().items():
                if unit in state:
                    state[unit] = {**state[unit], **self._caches.state(boundary)}
        return state

    # ---- a step

    def expected_bytes(self, key: TensorKey) -> int | None:
        """The exact packed size of a tensor that this stage may receive, or None if it may not."""
        if key.direction in (Direction.SYNC_SHARE, Direction.SYNC_SUM):
            return None if self.source_row(key) is None else self._sync_plan(key.step).sizes[key.boundary]
        if not self._place.receives(key):
            return None
        tied = key.direction in (Direction.TIED_SHARE, Direction.TIED_SUM)
        return self._codec(key).packed_bytes(self._tied if tied else self._boundary)

    def source_row(self, key: TensorKey) -> int | None:
        """The row that may send this stage such a tensor of gradient groups; None if none may."""
        return None if self._sync is None else self._sync_plan(key.step).source_row(key)

    def run_step(
        self,
        epoch: int,
        step: int,
        io: StageIO,
        samples: Mapping[BatchPart, np.ndarray],
        loss_scale: float = 0.0,
    ) -> StepOutcome:
        """Forward and backward of every microbatch, in the order that `Turns` gives; in a round, local steps.

        With a `loss_scale` above `node.training.loss_scale.LEAST`, gradients that are not finite do not fail
        the step: norms are infinite then.

        `samples`: what the stage `needs`, [global batch, sequence] or of the groups alone that this row
        computes, in ascending order; labels of a run that masks some are all, for their weight.

        Raises NonFiniteError, which names the stage and the tensor, or StepInterrupted.
        """
        self.voted = False
        self._newest_step = step
        labels = samples.get(BatchPart.LABELS)
        scale, self._overflow = loss_scale or 1.0, Overflow(loss_scale)
        self.model.begin_step(scale * (1.0 if labels is None else label_weight(labels)))
        if self._caches is not None:
            self._caches.rollback()
        given = {
            part: numbered(self._cut(part, batch), self.config.microbatches, self.microbatch_numbers)
            for part, batch in samples.items()
        }
        losses: dict[int, list[Tensor]] = {}
        digests = StepDigests(self.config) if self.config.audit.rate > 0.0 and self._share.rows > 1 else None
        self._transfer.digests = digests
        is_round = self.config.is_round(step)
        if self._sync is not None:
            plan = self._sync_plan(step)
            self._sync.begin(plan, epoch, step, io, keep=self.keep_sums, digests=digests)
        try:
            if is_round:
                self._run_round(epoch, step, io, given, losses)
            else:
                self._run_order(self._order.whole(), epoch, step, io, given, losses)
            self._finish_gradients(step)
            if not is_round:
                self._exchange_tied(epoch, step, io)
            self.clock.switch(TimeKind.ENCODE)
            self._transfer.drain()
        except StepInterrupted:
            # If a tensor could not be packed, raise that error.
            self._transfer.drain()
            if self._sync is not None:
                self._sync.drain()
            raise
        except Exception as error:
            # The sync thread may wait for another row.
            io.interrupt(error)
            raise
        finally:
            self._transfer.settle()
            self._transfer.digests = None
            if self._sync is not None:
                self._sync.settle()
            if is_round:
                self.model.local.end()
        self.clock.switch(TimeKind.OPTIMIZER)
        sums = {group: float(torch.stack(shares).double().sum()) / scale for group, shares in losses.items()}
        norms = self._overflow.told(self._norms())
        self.voted = True
        return StepOutcome(
            norms=norms,
            loss=sums.get(0) if self._sync is None else None,
            group_losses={group: loss for group, loss in sums.items() if self._counts(group)},
            digests={} if digests is None else digests.of(sums, self._order.audited),
        )

    def validate(
        self,
        epoch: int,
        number: int,
        microbatches: int,
        io: StageIO,
        samples: Mapping[BatchPart, np.ndarray],
    ) -> float | None:
        """Pass `number` over held-out samples with the held state: forward only. Changes no state.

        `samples` as for `run_step`, with `microbatches` microbatches. Returns the mean loss on the stage with
        the head, in nats a token; labels that do not count have a loss of 0. Raises as `run_step`.
        """
        first, step = self.config.microbatches * (1 + number), self.state_step
        given = {part: dict(enumerate(self._cut(part, batch), first)) for part, batch in samples.items()}
        losses: list[Tensor] = []
        try:
            for action in self._order.held_out(first, microbatches):
                io.check()
                faults.reach(faults.Phase.VALIDATION, stage=self.stage, step=step)
                self.model.begin_step()  # keeps nothing for a backward
                with torch.no_grad():
                    result = self._forward(epoch, step, action, io, given)
                if self._place.global_chunk(action) == self._place.last_chunk:
                    losses.append(result)
            self.model.begin_step()
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
        return float(torch.stack(losses).double().sum()) * self.config.microbatches / microbatches

    def apply(self, lr: float, clip_coefficient: float) -> None:
        """Commit: clip, step the optimizer, drop the gradients. A round steps the outer optimizer."""
        self.clock.switch(TimeKind.OPTIMIZER)
        self.voted = False
        if self.config.is_round(self.state_step):
            self.model.local.apply()
        else:
            self.model.apply(lr, clip_coefficient)
        if self._caches is not None:
            self._caches.commit()
        self.state_step += 1

    # ---- following a run without a part in it

    def sum_bytes(self, unit: str) -> int:
        """Bytes of a unit's packed sum, as `keep_sums` gets it."""
        return self._sync_plan(self.state_step).unit_bytes(unit)

    def put_sums(self, sums: Mapping[str, bytes]) -> Mapping[int, float]:
        """Take the gradients of step `state_step` from what another node's `keep_sums` got, in place of
        `run_step`; `apply` follows. Returns their squared norms by unit index.

        Raises PackedMismatchError or NonFiniteError for bytes that no node keeps.
        """
        assert self._sync is not None, "only a run with gradient groups packs their sums"
        self.voted = False
        self.model.begin_step()
        is_round = self.config.is_round(self.state_step)
        for unit, gradients in self._sync.read(self._sync_plan(self.state_step), sums):
            self._put(unit, gradients, is_round=is_round)
        if self._ties_alone and not is_round:
            self._sum_own_tie()
        self.voted = True
        return self._norms()

    # ---- inside

    def _norms(self) -> dict[int, float]:
        return {self._unit_index[unit]: norm for unit, norm in self.model.squared_norms().items()}

    def _sum_own_tie(self) -> None:
        model = self.model
        total = sum_tied_gradients(model.tied_gradient(HEAD), model.tied_gradient(EMBED))
        model.put_tied_gradient(EMBED, total)
        model.put_tied_gradient(HEAD, total)

    def _run_order(
        self,
        order: Order,
        epoch: int,
        step: int,
        io: StageIO,
        samples: Mapping[BatchPart, Mapping[int, Tensor]],
        losses: dict[int, list[Tensor]],
    ) -> None:
        """Run these actions; `losses` gets the shares of the loss, by group."""
        needed = [self._needed(epoch, step, action) for action in order]
        # With several chunks, tensors do not arrive in the order in which they are needed.
        turns = Turns(order, swap=not self._place.interleaved)
        while turns.left:
            io.check()
            upcoming = [tensor for place in turns.upcoming(1 + LOOK_AHEAD) if (tensor := needed[place])]
            self._transfer.look_ahead(upcoming, self._codec, io)
            action = order[self._begin_turn(turns, order, needed, io)]
            phase = faults.Phase.FORWARD if action.kind is Kind.FORWARD else faults.Phase.BACKWARD
            faults.reach(phase, stage=self.stage, step=step)
            if action.kind is Kind.FORWARD:
                result = self._forward(epoch, step, action, io, samples)
                if self._place.global_chunk(action) == self._place.last_chunk:
                    losses.setdefault(group_of(self.config, action.microbatch), []).append(result)
            else:
                self._backward(epoch, step, action, io)
                if not self.config.is_round(step):
                    self._end_group(step, action)

    def _run_round(
        self,
        epoch: int,
        step: int,
        io: StageIO,
        samples: Mapping[BatchPart, Mapping[int, Tensor]],
        losses: dict[int, list[Tensor]],
    ) -> None:
        """The row's groups, one after another, each from the weights that the round began with."""
        assert self._sync is not None, "a run with local steps has several groups"
        local = self.model.local
        for group in self._share.groups:
            local.begin_group()
            for number, order in enumerate(self._order.parts(group, self.config.sync.every)):
                self._run_order(order, epoch, step, io, samples, losses)
                if self._ties_alone:
                    self._sum_own_tie()
                if number == 0 and group == self._share.groups[0]:
                    faults.spoil(
                        faults.Phase.BACKWARD, self.model.any_gradient(), stage=self.stage, step=step
                    )
                self.clock.switch(TimeKind.OPTIMIZER)
                local.step(step)
                faults.reach(faults.Phase.LOCAL_STEP, stage=self.stage, step=step)
            self.clock.switch(TimeKind.ENCODE)
            self._sync.group_done(group, local.changes())
        local.end()

    def _forward(
        self,
        epoch: int,
        step: int,
        action: Action,
        io: StageIO,
        samples: Mapping[BatchPart, Mapping[int, Tensor]],
    ) -> Tensor:
        """The chunk's output, or the microbatch's share of the loss. `samples`: by microbatch."""
        index = self._place.global_chunk(action)
        own = {part: batches[action.microbatch] for part, batches in samples.items()}
        if index == 0:
            fed = own[BatchPart.INPUTS]
        else:
            key = TensorKey(epoch, step, action.microbatch, index - 1, Direction.ACTIVATION)
            fed = self._receive(key, self._boundary, io, TimeKind.WAIT_UPSTREAM)
        out = TensorKey(epoch, step, action.microbatch, index, Direction.ACTIVATION)
        self.clock.switch(TimeKind.FORWARD, out)
        wanted = own[BatchPart.LABELS] if index == self._place.last_chunk else None
        documents = own.get(BatchPart.DOCUMENTS)
        result = self.model.forward(action.chunk, action.microbatch, fed, wanted, documents)
        if wanted is not None:
            self._computed()
            return result
        faults.spoil(faults.Phase.FORWARD, result, stage=self.stage, step=step)
        self._send(out, result, io)
        return result

    def _backward(self, epoch: int, step: int, action: Action, io: StageIO) -> None:
        index = self._place.global_chunk(action)
        key = TensorKey(epoch, step, action.microbatch, index, Direction.GRADIENT)
        gradient: Tensor | None = None
        if index != self._place.last_chunk:
            gradient = self._receive(key, self._boundary, io, TimeKind.WAIT_DOWNSTREAM)
        self.clock.switch(TimeKind.BACKWARD, key)
        upstream = self.model.backward(action.chunk, action.microbatch, gradient)
        if upstream is not None:
            out = TensorKey(epoch, step, action.microbatch, index - 1, Direction.GRADIENT)
            self._send(out, self._overflow.cleared(upstream), io)
        else:
            self._computed()

    def _sync_plan(self, step: int) -> SyncPlan:
        key = self.uncompressed, self.config.is_round(step)
        if key not in self._plans:
            # Backward completes the last layers' gradients first.
            units = tuple(reversed(self.units))
            self._plans[key] = SyncPlan(self.config, units, self._share, uncompressed=key[0], of_round=key[1])
        return self._plans[key]

    def _end_group(self, step: int, action: Action) -> None:
        """After a backward: if it is the chunk's last of a gradient group, pack its gradients."""
        group = group_of(self.config, action.microbatch)
        # Backwards of a chunk come in the order of microbatches.
        if self._sync is None or group == group_of(self.config, action.microbatch + 1):
            return
        self.clock.switch(TimeKind.ENCODE)
        if action.microbatch == self._share.microbatches[-1]:
            faults.spoil(faults.Phase.BACKWARD, self.model.any_gradient(), stage=self.stage, step=step)
        taken = self.model.take_gradients(self._place.chunk_units(action.chunk))
        self._overflow.clear(taken.values())
        self._sync.group_done(group, taken)

    def _finish_gradients(self, step: int) -> None:
        """Complete the gradients; with several groups, by the sum over all groups."""
        if self._sync is None:
            self.model.finish_step()
            faults.spoil(faults.Phase.BACKWARD, self.model.any_gradient(), stage=self.stage, step=step)
            return
        self.clock.switch(TimeKind.SYNC)
        for index, (unit, gradients) in enumerate(self._sync.finish()):
            if index == 0:
                faults.reach(faults.Phase.SYNC, stage=self.stage, step=step)
            self._put(unit, gradients, is_round=self.config.is_round(step))

    def _put(self, unit: str, sums: dict[str, Tensor], *, is_round: bool) -> None:
        """Take what was summed over all groups."""
        if is_round:
            self.model.local.put(unit, sums)
        else:
            self.model.put_gradients(unit, sums)

    @property
    def _ties_alone(self) -> bool:
        """Whether this stage has both copies of a tied weight that is trained."""
        return self.config.sums_tied_gradients and self._place.is_first and self._place.has_loss

    def _exchange_tied(self, epoch: int, step: int, io: StageIO) -> None:
        """Set both copies of a tied weight to the sum of both gradients, added in a fixed order."""
        place, model = self._place, self.model
        if not (place.exchanges_tie or (self.config.sums_tied_gradients and place.is_first)):
            return
        up = TensorKey(epoch, step, 0, 0, Direction.TIED_SHARE)
        down = TensorKey(epoch, step, 0, 0, Direction.TIED_SUM)
        if place.is_first and place.has_loss:
            self._sum_own_tie()
        elif place.is_first:
            # In the received share's memory: with its packed form, at most two copies of the matrix.
            total = self._receive(up, self._tied, io, TimeKind.WAIT_DOWNSTREAM)
            sum_tied_gradients(total, model.tied_gradient(EMBED))
            self._send(down, self._overflow.cleared(total), io)
            model.put_tied_gradient(EMBED, total)
        elif place.is_last:
            self._send(up, self._overflow.cleared(model.tied_gradient(HEAD)), io)
            model.put_tied_gradient(HEAD, self._receive(down, self._tied, io, TimeKind.WAIT_UPSTREAM))

    def _begin_turn(self, turns: Turns, order: Order, needed: Sequence[Incoming | None], io: StageIO) -> int:
        """The index of the next action; waits until one of the candidates has its tensor."""
        while (place := turns.begin(lambda place: self._transfer.ready(needed[place], io))) is None:
            keys = [tensor.key for choice in turns.choices if (tensor := needed[choice])]
            self.clock.switch(_WAITS[order[turns.choices[0]].kind], keys[0])
            io.wait_any(keys)
        return place

    def _needed(self, epoch: int, step: int, action: Action) -> Incoming | None:
        """The tensor that an action needs."""
        key = self._place.needed(epoch, step, action)
        return None if key is None else Incoming(key, self._boundary)

    def _receive(self, key: TensorKey, spec: TensorSpec, io: StageIO, waiting: TimeKind) -> Tensor:
        if not self._transfer.begun(key):
            self.clock.switch(waiting, key)
            self._transfer.begin(Incoming(key, spec), self._codec(key), io)
        self.clock.switch(TimeKind.DECODE, key)
        return self._transfer.finish(key)

    def _send(self, key: TensorKey, tensor: Tensor, io: StageIO) -> None:
        mark = self._transfer.computed()
        self._transfer.send(key, self._codec(key), tensor, mark, io)
        if mark is not None:
            mark.synchronize()

    def _computed(self) -> None:
        """Wait for the device, so that the clock shows its work and not the launches."""
        if (mark := self._transfer.computed()) is not None:
            mark.synchronize()

    def codec_name(self, direction: Direction) -> str:
        """The codec in use for this kind of tensor."""
        return self._codecs.name(
            direction, self.stage, self.stages, step=self._newest_step, uncompressed=self.uncompressed
        )

    def _codec(self, key: TensorKey) -> Codec:
        return self._codecs.of(key, uncompressed=self.uncompressed)

    def _counts(self, group: int) -> bool:
        """Whether the row's vote has this group's loss."""
        return self._sync is not None and group not in self._order.audited

    def _cut(self, part: BatchPart, batch: np.ndarray) -> tuple[Tensor, ...]:
        return cut_samples(part, batch, self.config.training.microbatch, self.device)

    def _cached_boundaries(self) -> dict[int, str]:
        """By number, the unit before each boundary of this stage; empty if the codec has no sample cache."""
        return {} if self._caches is None else self._place.boundaries
