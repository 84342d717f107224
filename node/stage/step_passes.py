"""The passes of one step on one stage. Runs the schedule's actions, and receives and sends their tensors.

`node.stage.executor` creates one object for each step. It runs on the compute thread and exchanges tensors
through a `LinksIO`. It changes nothing durable: gradients accumulate beside the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.common.dispatch import in_double
from node.config.schema import RunConfig
from node.model.labels import BatchPart
from node.model.units import EMBED, HEAD
from node.schedule.gradient_groups import group_of
from node.schedule.placement import boundary_shapes, slice_ranges
from node.schedule.routing import StageLayout
from node.schedule.schedule import Action, Kind, Order
from node.schedule.turns import Turns
from node.stage.give_way import GiveWay
from node.stage.gradient_sync import GradientSync
from node.stage.group import StageCompute
from node.stage.inbox import LinksIO, RegroupedError, StepChange
from node.stage.step_order import StepOrder
from node.stage.tensor_transfer import Incoming, TensorTransfer
from node.telemetry import points
from node.telemetry.clock import StageClock, TimeKind
from node.training.group_sums import Gradient
from node.training.optimizer import sum_tied_gradients
from node.training.overflow import Overflow
from wire.codecs.base import Codec
from wire.codecs.host_copies import Mark
from wire.messages import HandedOver
from wire.spec import Direction, TensorKey, TensorSpec

LOOK_AHEAD = 2
"""How many later actions' tensors are unpacked as soon as they arrive."""
_WAITS = {Kind.FORWARD: TimeKind.WAIT_UPSTREAM, Kind.BACKWARD: TimeKind.WAIT_DOWNSTREAM}


def boundary_specs(config: RunConfig) -> tuple[TensorSpec, ...]:
    """The spec of the tensors between two chunks, for a microbatch or for each of its slices."""
    return tuple(TensorSpec(torch.float32, shape) for shape in boundary_shapes(config))


def tied_spec(config: RunConfig) -> TensorSpec:
    """The spec of the gradient of a tied weight."""
    return TensorSpec(torch.float32, (config.model.vocab, config.model.hidden))


def sum_own_tie(model: StageCompute) -> None:
    """Set both copies of a tied weight's gradient, which are on this stage, to their sum."""
    total = sum_tied_gradients(model.tied_gradient(HEAD), model.tied_gradient(EMBED))
    model.put_tied_gradient(EMBED, total)
    model.put_tied_gradient(HEAD, total)


def put_group_sums(model: StageCompute, unit: str, sums: dict[str, Tensor], *, of_round: bool) -> None:
    """Store the sum over all gradient groups: gradients or, in a round, changes of the weights."""
    if of_round:
        model.local.put(unit, sums)
    else:
        model.put_gradients(unit, sums)


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """What a stage computes steps with. It is the same for all steps of a placement."""

    config: RunConfig
    layout: StageLayout
    order: StepOrder
    model: StageCompute
    clock: StageClock
    transfer: TensorTransfer
    codec: Callable[[TensorKey], Codec]
    sync: GradientSync | None
    """None without gradient groups."""
    cut: Callable[[BatchPart, np.ndarray], Sequence[Tensor]]
    """Splits samples into microbatches."""
    give_way: GiveWay | None = None
    """Pauses between microbatches while other programs use the GPU."""


@dataclass(frozen=True, kw_only=True)
class BegunStep:
    """A step that has begun, or a measurement over held-out samples."""

    epoch: int
    step: int
    io: LinksIO
    samples: Mapping[BatchPart, Mapping[int, Tensor]]
    overflow: Overflow
    loss_weight: float = 1.0
    """The weight for `StageModel.begin_step`."""
    scale: float = 1.0


class StepPasses:
    """The passes of one step, or of one measurement over held-out samples."""

    def __init__(self, parts: StageParts, begun: BegunStep, share: StepChange) -> None:
        """
        Args:
            parts: if they have a `sync`, it must begin the step before `complete`.
            share: the work of this row and of the others, without samples.
        """
        self._config, self._layout, self._order = parts.config, parts.layout, parts.order
        self._model, self._clock, self._transfer = parts.model, parts.clock, parts.transfer
        self._codec, self._sync = parts.codec, parts.sync
        self._cut, self._give_way = parts.cut, parts.give_way
        self.begun = begun
        self._io = begun.io
        self.share = share
        """The newest share."""
        self.losses: dict[int, list[Tensor]] = {}
        """The microbatches' shares of the loss by group, on the stage with the head."""
        self._boundaries, self._tied = boundary_specs(parts.config), tied_spec(parts.config)
        self._slices = slice_ranges(parts.config)
        self._is_round = parts.config.is_round(begun.step)
        self._running: Mark | None = None
        """The mark after the newest action, if the device may still be computing it; None if each action ends
        when it returns."""
        self._given = {part: dict(batches) for part, batches in begun.samples.items()}
        self._waiting = [*share.work.groups, *parts.order.audited]
        """Groups that have not begun."""
        self._known = set(self._waiting)
        """Groups that have begun or are waiting."""
        self._final_losses: dict[int, float] = {}
        """The shares of groups that are done, for hand-overs."""
        self._computes = False
        """Whether passes are running, so that some groups may be incomplete."""
        self._has_sums = False
        """Whether the model has gradient sums already."""

    def complete(self) -> None:
        """Run forward and backward of every microbatch that the row has to compute, in a round as local
        steps; then sum over all groups. This includes work that the row gets meanwhile."""
        while True:
            try:
                self._compute()
                self._finish()
            except RegroupedError:
                assert self._sync is not None, "only a run with gradient groups has rows"
                self._sync.drain()  # all waits end until the change is taken
                if (change := self._io.take_change()) is not None:
                    self.regroup(change)
            else:
                return

    def regroup(self, change: StepChange) -> None:
        """The step's groups were redistributed: this row gets more than before, or has lost those that it
        had."""
        assert self._sync is not None, "only a run with gradient groups has rows"
        self.share = replace(change, samples={})
        more = [group for group in change.work.groups if group not in self._known]
        for part, batches in change.samples.items():
            for group, batch in batches.items():
                numbers = self._order.numbers_of([group])
                self._given.setdefault(part, {}).update(zip(numbers, self._cut(part, batch), strict=True))
        if change.has_lost:
            self._drop()
        hands_over = change.hand_over is not None
        self._sync.use(change.work, change.generation, keep=change.keep, hands_over=hands_over)
        if more and self._has_sums:
            # Further passes add to gradients, which start at 0.
            self._model.begin_step(self.begun.loss_weight)
            self._has_sums = False
            self._sync.again()
        self._waiting += more
        self._known.update(more)

    def _drop(self) -> None:
        """The row has lost a node, and can never complete its incomplete groups: drop them."""
        self._waiting.clear()
        self._end_action()
        if self._computes:
            self._computes = False
            self._transfer.settle()
            if self._is_round:
                self._model.local.end()
            self._model.begin_step(self.begun.loss_weight)

    def _compute(self) -> None:
        while self._waiting:
            self._computes = True
            if self._is_round:
                self._run_round()
            else:
                groups, self._waiting = self._waiting, []
                self._run_order(self._order.of(groups), groups)
            self._computes = False

    def _finish(self) -> None:
        """Complete the gradients: sum over all groups, and over both copies of a tied weight."""
        if self._sync is None:
            self._model.finish_step()
            self._computed(points.Phase.BACKWARD, self._model.any_gradient())
        else:
            self._clock.switch(TimeKind.SYNC)
            for index, (unit, gradients) in enumerate(self._sync.finish()):
                if index == 0:
                    points.reach(points.Phase.SYNC, stage=self._layout.stage, step=self.begun.step)
                put_group_sums(self._model, unit, gradients, of_round=self._is_round)
                self._has_sums = True
        if not self._is_round:
            self._exchange_tied()

    def held_out(self, first: int, microbatches: int) -> list[Tensor]:
        """Run forwards of microbatches from number `first`; their losses on the stage with the head."""
        losses: list[Tensor] = []
        self._model.begin_step()
        for action in self._order.held_out(first, microbatches):
            self._io.check()
            points.reach(points.Phase.VALIDATION, stage=self._layout.stage, step=self.begun.step)
            with torch.no_grad():
                result = self._forward(action)
            self._end_action()
            if self._has_loss(action):
                losses.append(result)
        self._model.begin_step()
        return losses

    # ---- actions

    def _run_order(self, order: Order, groups: Sequence[int] = ()) -> None:
        """`groups`: the gradient groups of `order`. More may be added while it runs."""
        extends = bool(groups) and not self._layout.interleaved
        needed = [self._needed(action) for action in order]
        # With several chunks, tensors do not arrive in the order in which they are needed.
        turns = Turns(order, swap=not self._layout.interleaved)
        while turns.left:
            self._io.check()
            if extends and (change := self._io.take_change()) is not None:
                self.regroup(change)
                if change.has_lost:
                    raise RegroupedError("the row has lost a node")
                # Additional groups begin before the pipeline is empty.
                groups, self._waiting = (*groups, *self._waiting), []
                order = self._order.of(groups)
                needed = [self._needed(action) for action in order]
                turns = turns.extended(order)
            upcoming = [tensor for place in turns.upcoming(1 + LOOK_AHEAD) if (tensor := needed[place])]
            self._transfer.look_ahead(upcoming, self._codec, self._io)
            # While the device computes, submit the next action too, if it is the order's next: another might
            # have to give way to arriving tensors.
            if self._give_way is not None or not self._transfer.unpacked(needed[turns.choices[0]]):
                self._end_action()
            if self._give_way is not None:
                # The pause counts as work: to the run this node is slow.
                is_forward = order[turns.choices[0]].kind is Kind.FORWARD
                self._clock.switch(TimeKind.FORWARD if is_forward else TimeKind.BACKWARD)
                self._give_way.pause(self._io.check)
            if (place := self._begin_turn(turns, order, needed, extends)) is None:
                continue
            action = order[place]
            phase = points.Phase.FORWARD if action.kind is Kind.FORWARD else points.Phase.BACKWARD
            points.reach(phase, stage=self._layout.stage, step=self.begun.step)
            if action.kind is Kind.FORWARD:
                result = self._forward(action)
                if self._has_loss(action):
                    self.losses.setdefault(group_of(self._config, action.microbatch), []).append(result)
            else:
                self._backward(action)
                if not self._is_round:
                    self._end_group(action)
        self._end_action()

    def _run_round(self) -> None:
        """Run the row's groups one after another, each from the round's initial weights."""
        assert self._sync is not None, "a run with local steps has several groups"
        local = self._model.local
        while self._waiting:
            group = self._waiting.pop(0)
            local.begin_group()
            for number, order in enumerate(self._order.parts(group, self._config.sync.every)):
                self._run_order(order)
                if self._layout.sums_tie_alone:
                    sum_own_tie(self._model)
                if number == 0 and group == self.share.work.groups[0]:
                    self._computed(points.Phase.BACKWARD, self._model.any_gradient())
                self._clock.switch(TimeKind.OPTIMIZER)
                local.step(self.begun.step)
                points.reach(points.Phase.LOCAL_STEP, stage=self._layout.stage, step=self.begun.step)
            self._clock.switch(TimeKind.ENCODE)
            self._group_done(group, local.changes())
        local.end()

    def _begin_turn(
        self, turns: Turns, order: Order, needed: Sequence[Incoming | None], extends: bool
    ) -> int | None:
        """The index of the next action. Waits until one of the candidates has its tensor. None if the row
        gets more groups meanwhile, and the order `extends`: their forwards need not wait for gradients."""
        while (place := turns.begin(lambda place: self._transfer.ready(needed[place], self._io))) is None:
            if extends and self._io.has_change:
                return None
            keys = [tensor.key for choice in turns.choices if (tensor := needed[choice])]
            self._clock.switch(_WAITS[order[turns.choices[0]].kind], keys[0])
            self._io.wait_any(keys, or_change=extends)
        return place

    def _forward(self, action: Action) -> Tensor:
        """The chunk's output, or the microbatch's share of the loss."""
        index, number = self._layout.global_chunk(action), self._layout.number(action)
        own = {part: batches[action.microbatch] for part, batches in self._given.items()}
        positions = self._slices[action.slice]
        tokens = slice(positions.start, positions.stop)
        if index == 0:
            fed = own[BatchPart.INPUTS][:, tokens]
        else:
            key = self._key(number, index - 1, Direction.ACTIVATION)
            fed = self._receive(key, self._boundaries[action.slice], TimeKind.WAIT_UPSTREAM)
        out = self._key(number, index, Direction.ACTIVATION)
        self._switch(TimeKind.FORWARD, out)
        wanted = own[BatchPart.LABELS][:, tokens] if self._has_loss(action) else None
        documents = own.get(BatchPart.DOCUMENTS)
        if documents is not None:
            documents = documents[:, : positions.stop]
        result = self._model.forward(action.chunk, action.microbatch, fed, wanted, documents, action.slice)
        if wanted is not None:
            self._begun(self._transfer.computed(), TimeKind.FORWARD, out)
            return result
        self._computed(points.Phase.FORWARD, result)
        self._begun(self._send(out, result), TimeKind.FORWARD, out)
        return result

    def _backward(self, action: Action) -> None:
        index, number = self._layout.global_chunk(action), self._layout.number(action)
        key = self._key(number, index, Direction.GRADIENT)
        gradient: Tensor | None = None
        if not self._has_loss(action):
            gradient = self._receive(key, self._boundaries[action.slice], TimeKind.WAIT_DOWNSTREAM)
        self._switch(TimeKind.BACKWARD, key)
        upstream = self._model.backward(action.chunk, action.microbatch, gradient, action.slice)
        if upstream is not None:
            out = self._key(number, index - 1, Direction.GRADIENT)
            mark = self._send(out, self.begun.overflow.cleared(upstream))
        else:
            mark = self._transfer.computed()
        self._begun(mark, TimeKind.BACKWARD, key)

    def _begun(self, mark: Mark | None, kind: TimeKind, key: TensorKey) -> None:
        """The device has been given an action, up to `mark`. The action before it ends first; then time
        counts as this one's. So the clock counts the device's work and not the launches."""
        if self._running is not None:
            self._running.synchronize()
            self._clock.switch(kind, key)
        self._running = mark

    def _end_action(self) -> None:
        """Wait until the device has computed all actions so far."""
        if self._running is not None:
            self._running.synchronize()
            self._running = None

    def _switch(self, kind: TimeKind, key: TensorKey) -> None:
        """Count time as `kind`, unless the device is still computing an action."""
        if self._running is None:
            self._clock.switch(kind, key)

    def _end_group(self, action: Action) -> None:
        """After a chunk's last backward of a gradient group, pack the group's gradients."""
        group = group_of(self._config, action.microbatch)
        if not self._layout.ends_microbatch(action):
            return
        # A chunk's backwards run in the order of microbatches.
        if self._sync is None or group == group_of(self._config, action.microbatch + 1):
            return
        self._end_action()
        self._clock.switch(TimeKind.ENCODE)
        if not self._waiting and group == self.share.work.groups[-1]:
            self._computed(points.Phase.BACKWARD, self._model.any_gradient())
            # Other stages wait for the last gradient but none waits for the sums, so these are packed later.
            self._transfer.drain()
        taken = self._model.take_gradients(self._layout.chunk_units(action.chunk))
        self.begun.overflow.clear(taken.values())
        self._group_done(group, taken)

    def _group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        assert self._sync is not None, "only a run with gradient groups has several"
        if self.share.work.others and group in self.losses:
            # The device is idle, and the group's sums may arrive elsewhere at any time from now on.
            self._final_losses[group] = self.loss_of(group)
        self._sync.group_done(group, gradients)

    def loss_of(self, group: int) -> float:
        """A group's share of the loss."""
        return float(in_double(torch.stack(self.losses[group])).sum()) / self.begun.scale

    def handed_over(self, generation: int, groups: Sequence[int]) -> None:
        """All that this node has computed of these groups has arrived at other rows. Called on any thread."""
        losses = {group: self._final_losses[group] for group in groups if group in self._final_losses}
        if (hand_over := self.share.hand_over) is not None and all(map(math.isfinite, losses.values())):
            hand_over(
                HandedOver(
                    epoch=self.begun.epoch,
                    step=self.begun.step,
                    generation=generation,
                    groups=tuple(groups),
                    group_losses=losses,
                )
            )

    def passed_on(self, generation: int, groups: Sequence[int]) -> None:
        """What rows without a node of this stage had handed over of these groups has arrived at other rows.
        Called on any thread."""
        if (hand_over := self.share.hand_over) is not None:
            hand_over(
                HandedOver(
                    epoch=self.begun.epoch,
                    step=self.begun.step,
                    generation=generation,
                    passed_on=tuple(groups),
                )
            )

    def _exchange_tied(self) -> None:
        """Set both copies of a tied weight's gradient to their sum, added in a fixed order."""
        layout, model = self._layout, self._model
        up = self._key(0, 0, Direction.TIED_SHARE)
        down = self._key(0, 0, Direction.TIED_SUM)
        if layout.sums_tie_alone:
            sum_own_tie(model)
        elif layout.exchanges_tie and layout.is_first:
            # Use the received share's memory: with its packed form, the matrix then has at most two copies.
            total = self._receive(up, self._tied, TimeKind.WAIT_DOWNSTREAM)
            sum_tied_gradients(total, model.tied_gradient(EMBED))
            self._send(down, self.begun.overflow.cleared(total))
            model.put_tied_gradient(EMBED, total)
        elif layout.exchanges_tie and layout.is_last:
            self._send(up, self.begun.overflow.cleared(model.tied_gradient(HEAD)))
            model.put_tied_gradient(HEAD, self._receive(down, self._tied, TimeKind.WAIT_UPSTREAM))

    # ---- tensors

    def _key(self, number: int, boundary: int, direction: Direction) -> TensorKey:
        return TensorKey(self.begun.epoch, self.begun.step, number, boundary, direction)

    def _needed(self, action: Action) -> Incoming | None:
        """The tensor that an action needs, if any."""
        key = self._layout.needed(self.begun.epoch, self.begun.step, action)
        return None if key is None else Incoming(key, self._boundaries[action.slice])

    def _has_loss(self, action: Action) -> bool:
        return self._layout.global_chunk(action) == self._layout.last_chunk

    def _receive(self, key: TensorKey, spec: TensorSpec, waiting: TimeKind) -> Tensor:
        if not self._transfer.begun(key):
            self._clock.switch(waiting, key)
        self._transfer.begin(Incoming(key, spec), self._codec(key), self._io)
        self._switch(TimeKind.DECODE, key)
        return self._transfer.finish(key)

    def _send(self, key: TensorKey, tensor: Tensor) -> Mark | None:
        """Send a tensor. Returns the mark after the work that computes it."""
        mark = self._transfer.computed()
        self._transfer.send(key, self._codec(key), tensor, mark, self._io)
        return mark

    def _computed(self, phase: points.Phase, tensor: Tensor | None) -> None:
        stage = self._layout.stage
        points.reach(phase, at=points.At.TENSOR, stage=stage, step=self.begun.step, tensor=tensor)
