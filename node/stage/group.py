"""A stage's model over several devices of one node. Rank 0 leads, the others follow its commands.

Data parallel: each row of T ranks holds the whole stage and computes an equal share of a microbatch's
samples. Tensor parallel: the ranks of a row share the projections of every block and the positions of the
samples; each has a copy of embedding, norms and head. Gradients are summed once per step over the ranks that
hold a parameter, so that all take the same optimizer step. States are complete when they leave or arrive,
whatever T is. Only rank 0 uses the network.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.common.dispatch import in_double
from kernels.fp8.reference import Fp8Gradient
from node.config.schema import RunConfig
from node.model.lora_shapes import trained_specs
from node.model.shard_shapes import check_sizes
from node.model.shards import merge_states, shard_state, sharded_keys
from node.model.units import unit_names
from node.schedule.gradient_groups import group_of
from node.schedule.placement import head_first, slice_ranges
from node.stage.ranks import Command, Op, Ranks, number, value
from node.stage.stage_model import StageModel
from node.stage.state_copy import StateCopy, weights_of
from node.state.serialization import deserialize_unit, serialize_unit
from node.training.local_steps import LocalSteps
from node.training.optimizer import StageOptimizer, StateTensor
from node.tuning.memory_plan import Room
from wire.errors import RunError

_EMBEDDED, _LABELLED, _EVALUATED = 1, 2, 4
"""Flags of a forward: its input is token ids; its output is a loss; no backward follows."""
_AS_THE_RUN_FILE_SAYS = -1
"""The storage number in a build command that means the run file's storage."""


class RankModel:
    """One rank's share of a stage's model, around a local `StageModel`. Every rank runs the same calls."""

    def __init__(self, config: RunConfig, ranks: Ranks, room: Room | None) -> None:
        self.config = config
        self.ranks = ranks
        self.local = StageModel(
            config,
            ranks.device,
            ranks=ranks.count,
            rank=ranks.rank,
            tensor_rank=ranks.tensor_rank,
            room=room,
        )
        samples, self._head_first = config.training.microbatch // ranks.data_parallel, False
        slices = [len(own) // ranks.tensor_rank.count for own in slice_ranges(config)]
        self._tokens = [(samples, positions) for positions in slices]
        """The tokens of each slice of a microbatch."""
        self._hidden = [(*shape, config.model.hidden) for shape in self._tokens]

    def build(self, stage: int, stages: int, storage: int | None, *, is_drawn: bool) -> None:
        self._head_first = head_first(self.config, stages)
        self.ranks.forget_gradients()
        self.local.build(stage, stages, storage, is_drawn=is_drawn)
        self.ranks.watch_gradients(self.local.optimizer)

    def drop(self) -> None:
        self.ranks.forget_gradients()
        self.local.drop()

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        """Load this rank's shard of a whole state."""
        rank = self.ranks.tensor_rank
        self.local.load_unit_state(unit, shard_state(self.config, unit, state, rank.index, rank.count))

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        """The whole state on the leader, gathered from its row; empty on the others."""
        state = self.local.unit_state(unit)
        states = self.ranks.gather_shards(state, sharded_keys(self.config, unit, state))
        return merge_states(self.config, unit, states) if states else {}

    def squared_norms(self) -> dict[str, float]:
        """Squared norms of the complete stage on the leader; empty on the others."""
        optimizer = self.local.optimizer
        ranks = self.ranks.gather_norms(optimizer.parameter_squared_norms())
        return optimizer.sum_squared_norms(ranks) if ranks else {}

    def begin_step(self, loss_weight: float = 1.0) -> None:
        self.ranks.begin_step()
        self.local.begin_step(loss_weight)

    def forward(
        self,
        chunk: int,
        microbatch: int,
        flags: int,
        fed: Tensor | None,
        labels: Tensor | None,
        documents: Tensor | None,
        number: int,
    ) -> Tensor | None:
        """Forward of this rank's tokens. The leader passes all inputs and gets all outputs."""
        tokens = self._tokens[number]
        if flags & _EMBEDDED:
            mine = self.ranks.scatter(fed, tokens, torch.int64)
        else:
            mine = self.ranks.scatter(fed, self._hidden[number], torch.float32)
        wanted = self.ranks.scatter(labels, tokens, torch.int64) if flags & _LABELLED else None
        apart = self._documents(documents, number)
        with torch.set_grad_enabled(not flags & _EVALUATED):
            result = self.local.forward(chunk, microbatch, mine, wanted, apart, number)
        return self.ranks.gather(result.view(1) if flags & _LABELLED else result)

    def _documents(self, whole: Tensor | None, number: int) -> Tensor | None:
        """The document starts in this rank's samples, for all positions up to the slice's end. The leader
        passes those of all samples."""
        config = self.config
        if not config.data.separate_documents:
            return None
        shape = (config.training.microbatch, slice_ranges(config)[number].stop)
        starts = torch.empty(shape, dtype=torch.uint8) if whole is None else whole.to(torch.uint8)
        shared = self.ranks.share(starts.to(self.ranks.device).contiguous()).bool().cpu()
        return shared.chunk(self.ranks.data_parallel)[self.ranks.rank // self.ranks.tensor_rank.count]

    def backward(
        self, chunk: int, microbatch: int, flags: int, gradient: Tensor | None, number: int
    ) -> Tensor | None:
        """Backward of this rank's tokens. The leader passes all gradients and gets those of the input."""
        mine = None
        if not flags & _LABELLED:
            mine = self.ranks.scatter(gradient, self._hidden[number], torch.float32)
        # A chunk's backwards run in the order of microbatches and the reverse order of slices; those of a
        # head alone in the order of slices.
        is_head = self._head_first and flags & _LABELLED
        last = number == (len(self._tokens) - 1 if is_head else 0)
        last = last and group_of(self.config, microbatch) != group_of(self.config, microbatch + 1)
        self.ranks.last_backward(self.local.optimizer, last)
        source = self.local.backward(chunk, microbatch, mine, number)
        return None if flags & _EMBEDDED else self.ranks.gather(_present(source))

    def put_gradients(self, unit: str, values: Mapping[str, Tensor] | None) -> None:
        """Take the leader's gradients of a unit, flat by parameter."""
        specs = trained_specs(self.config.model, self.config.lora, unit)
        shared = {
            spec.name: self.ranks.share(
                torch.empty(spec.elements, device=self.ranks.device)
                if values is None
                else values[spec.name].contiguous()
            )
            for spec in specs
        }
        self.local.put_gradients(unit, shared)

    def put_tied(self, unit: str, gradient: Tensor | None) -> None:
        """Take the leader's gradient of a tied weight."""
        if gradient is None:
            gradient = torch.empty_like(self.local.tied_gradient(unit))
        self.local.put_tied_gradient(unit, self.ranks.share(gradient.contiguous()))


class Follower:
    """A rank above 0. It executes the leader's commands until the stop command."""

    def __init__(self, config: RunConfig, ranks: Ranks, room: Room | None = None) -> None:
        """`room`: the same as the leader's, so that all ranks recompute the same collectives."""
        self._model = RankModel(config, ranks, room)
        self._ranks = ranks
        self._units = unit_names(config.model)

    def serve(self) -> None:
        """Returns at `Op.STOP`. Raises DeviceLostError when another rank has ended."""
        while (command := self._ranks.follow()).op is not Op.STOP:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        model, (a, b, c, d, *_) = self._model, command.numbers
        match command.op:
            case Op.BUILD:
                model.build(a, b, None if c == _AS_THE_RUN_FILE_SAYS else c, is_drawn=bool(d))
            case Op.LOAD:
                model.load_unit_state(self._units[a], deserialize_unit(self._ranks.share_bytes(b)))
            case Op.BEGIN:
                model.begin_step(value(a))
            case Op.FORWARD:
                model.forward(a, b, c, None, None, None, d)
            case Op.BACKWARD:
                model.backward(a, b, c, None, d)
            case Op.FINISH:
                self._ranks.sum_gradients(model.local.optimizer)
            case Op.TAKE:
                self._ranks.sum_gradients(model.local.optimizer)
                model.local.optimizer.zero_grad()
            case Op.PUT:
                model.put_gradients(self._units[a], None)
            case Op.PUT_TIED:
                model.put_tied(self._units[a], None)
            case Op.APPLY:
                model.local.apply(value(a), value(b))
            case Op.NORMS:
                model.squared_norms()
            case Op.STATE:
                model.unit_state(self._units[a])
            case Op.DROP:
                model.drop()


class Leader:
    """Rank 0, with the methods of `StageModel`. Its calls run on the followers too, each with its share."""

    def __init__(self, config: RunConfig, ranks: Ranks, room: Room | None = None) -> None:
        check_sizes(config, ranks.count, ranks.tensor_rank.count)
        self.config = config
        self._model = RankModel(config, ranks, room)
        self._ranks = ranks
        self._units = unit_names(config.model)
        self._flags: dict[int, int] = {}

    @property
    def optimizer(self) -> StageOptimizer:
        return self._model.local.optimizer

    @property
    def local(self) -> LocalSteps:
        """Raises RunError: rounds need a node of one device."""
        raise RunError("local steps ([sync] every) need a node of one device: join with --gpus 1")

    def build(self, stage: int, stages: int, storage: int | None = None, *, is_drawn: bool = True) -> None:
        number = _AS_THE_RUN_FILE_SAYS if storage is None else storage
        self._ranks.lead(Op.BUILD, stage, stages, number, int(is_drawn))
        self._flags.clear()
        self._model.build(stage, stages, storage, is_drawn=is_drawn)

    def drop(self) -> None:
        self._ranks.lead(Op.DROP)
        self._model.drop()

    def adapt(self) -> None:
        """Keep the plan, as always with several devices."""

    def relieve(self) -> bool:
        return False

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        data = serialize_unit(state)
        self._ranks.lead(Op.LOAD, self._units.index(unit), len(data))
        self._ranks.share_bytes(len(data), data)
        self._model.load_unit_state(unit, state)

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        if self._ranks.tensor_rank.count == 1:
            return self._model.local.unit_state(unit)
        self._ranks.lead(Op.STATE, self._units.index(unit))
        return self._model.unit_state(unit)

    @property
    def state_stays(self) -> bool:
        """No: what leads the ranks may not come between the passes of a step."""
        return False

    def copy_state(
        self, extra: Mapping[str, Mapping[str, Tensor]], *, weights_alone: bool = False
    ) -> StateCopy:
        if self._ranks.tensor_rank.count == 1:
            return self._model.local.copy_state(extra, weights_alone=weights_alone)
        units: list[tuple[str, dict[str, StateTensor]]] = []
        for unit in self.optimizer.units:
            # All ranks together gather shards between two steps.
            whole = self.unit_state(unit) | {**extra.get(unit, {})}
            state = {name: StateTensor(tensor, tensor.dtype) for name, tensor in whole.items()}
            units.append((unit, weights_of(state) if weights_alone else state))
        return StateCopy(units)

    def begin_step(self, loss_weight: float = 1.0) -> None:
        self._ranks.lead(Op.BEGIN, number(loss_weight))
        self._model.begin_step(loss_weight)

    def forward(
        self,
        chunk: int,
        microbatch: int,
        fed: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        number: int = 0,
    ) -> Tensor:
        flags = (0 if fed.is_floating_point() else _EMBEDDED) | (0 if labels is None else _LABELLED)
        flags |= 0 if torch.is_grad_enabled() else _EVALUATED
        self._flags[chunk] = flags
        self._ranks.lead(Op.FORWARD, chunk, microbatch, flags, number)
        result = _present(self._model.forward(chunk, microbatch, flags, fed, labels, documents, number))
        # Shares of the loss are always added in the same order.
        return result if labels is None else in_double(result).sum().float().to(result.device)

    def backward(
        self, chunk: int, microbatch: int, gradient: Tensor | None, number: int = 0
    ) -> Tensor | None:
        flags = self._flags[chunk]
        self._ranks.lead(Op.BACKWARD, chunk, microbatch, flags, number)
        return self._model.backward(chunk, microbatch, flags, gradient, number)

    def finish_step(self) -> None:
        self._ranks.lead(Op.FINISH)
        self._ranks.sum_gradients(self.optimizer)

    def take_gradients(self, units: Sequence[str]) -> dict[str, dict[str, Tensor | Fp8Gradient]]:
        # `check_sizes` has refused more than one chunk, so these are all units.
        self._ranks.lead(Op.TAKE)
        self._ranks.sum_gradients(self.optimizer)
        return self._model.local.take_gradients(units)

    def put_gradients(self, unit: str, values: Mapping[str, Tensor]) -> None:
        self._ranks.lead(Op.PUT, self._units.index(unit))
        self._model.put_gradients(unit, values)

    def expert_load(self) -> tuple[float, int]:
        """The load of experts for the samples of the leader's device."""
        return self._model.local.expert_load()

    def squared_norms(self) -> dict[str, float]:
        if self._ranks.tensor_rank.count == 1:
            return self.optimizer.squared_norms()
        self._ranks.lead(Op.NORMS)
        return self._model.squared_norms()

    def apply(self, lr: float, clip_coefficient: float) -> None:
        self._ranks.lead(Op.APPLY, number(lr), number(clip_coefficient))
        self._model.local.apply(lr, clip_coefficient)

    def tied_gradient(self, unit: str) -> Tensor:
        return self._model.local.tied_gradient(unit)

    def put_tied_gradient(self, unit: str, value: Tensor) -> None:
        self._ranks.lead(Op.PUT_TIED, self._units.index(unit))
        self._model.put_tied(unit, value.to(self._ranks.device, torch.float32))

    def any_gradient(self) -> Tensor | None:
        return self._model.local.any_gradient()

    def close(self) -> None:
        """Stop the followers and leave the group."""
        self._ranks.lead(Op.STOP)
        self._ranks.close()

    def abandon(self) -> None:
        """Leave the group without the followers, which no longer answer."""
        self._ranks.abandon()


StageCompute = StageModel | Leader
"""A stage's model on one or several devices."""


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the leader gets gathered tensors, and hidden states have a gradient"
    return tensor
