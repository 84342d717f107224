"""A stage's model over several devices of one node: rank 0's `StageModel`, which leads, and the others'.

Data parallel: each row of T ranks holds the whole stage and computes an equal share of a microbatch's
samples. Tensor parallel: the ranks of a row share the projections of every block and the positions of the
samples, and hold embedding, norms and head whole. Gradients are summed once a step over the ranks that hold a
parameter, so that all take the same optimizer step. States that leave or come are whole, whatever T is. Only
rank 0 speaks to the network.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from node.config.schema import RunConfig
from node.model.shard_shapes import check_sizes
from node.model.shards import merge_states, shard_state, sharded_keys
from node.model.units import unit_names
from node.parallel.ranks import Command, Op, Ranks, number, value
from node.stage.stage_model import StageModel
from node.training.serialization import deserialize_unit, serialize_unit

_EMBEDDED, _LABELLED = 1, 2
"""Flags of a forward: it is fed token ids; it makes a loss."""


class RankModel(StageModel):
    """One rank's share of a stage's model; every rank, the leader too, runs these."""

    captures = False

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks.device)
        self.ranks = ranks.count
        self.rank = ranks.rank
        self._ranks = ranks
        training, model = config.training, config.model
        self.tensor_rank = ranks.tensor_rank
        samples = training.microbatch // ranks.data_parallel
        positions = model.sequence // ranks.tensor_rank.count
        self._tokens = (samples, positions)
        self._hidden = (samples, positions, model.hidden)

    def build(self, stage: int, stages: int) -> None:
        self._ranks.forget_gradients()
        super().build(stage, stages)
        self._ranks.watch_gradients(self.optimizer)

    def drop(self) -> None:
        self._ranks.forget_gradients()
        super().drop()

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shard of a whole state."""
        place = self.tensor_rank
        super().load_unit_state(unit, shard_state(self.config.model, unit, state, place.index, place.count))

    def run_unit_state(self, unit: str) -> dict[str, Tensor]:
        """The whole state, for the leader; the others give what they hold of it."""
        state = self.optimizer.unit_state(unit)
        states = self._ranks.gather_shards(state, sharded_keys(self.config.model, unit, state))
        return merge_states(self.config.model, unit, states) if states else {}

    def run_squared_norms(self) -> dict[str, float]:
        """Those of the whole stage, for the leader; the others give their shards'."""
        ranks = self._ranks.gather_norms(self.optimizer.parameter_squared_norms())
        return self.optimizer.sum_squared_norms(ranks) if ranks else {}

    def begin_step(self) -> None:
        self._ranks.begin_step()
        super().begin_step()

    def run_forward(
        self, chunk: int, microbatch: int, flags: int, fed: Tensor | None, labels: Tensor | None
    ) -> Tensor | None:
        """Forward of this rank's tokens; the leader gives all, and gets all results."""
        if flags & _EMBEDDED:
            mine = self._ranks.scatter(fed, self._tokens, torch.int64)
        else:
            mine = self._ranks.scatter(fed, self._hidden, torch.float32)
        wanted = self._ranks.scatter(labels, self._tokens, torch.int64) if flags & _LABELLED else None
        result = StageModel.forward(self, chunk, microbatch, mine, wanted)
        return self._ranks.gather(result.view(1) if flags & _LABELLED else result)

    def run_backward(self, chunk: int, microbatch: int, flags: int, gradient: Tensor | None) -> Tensor | None:
        """Backward of this rank's tokens; the leader gives all gradients, and gets those of the input."""
        mine = None
        if not flags & _LABELLED:
            mine = self._ranks.scatter(gradient, self._hidden, torch.float32)
        # Backwards of a chunk come in the order of microbatches.
        self._ranks.last_backward(self.optimizer, microbatch == self.config.microbatches - 1)
        source = StageModel.backward(self, chunk, microbatch, mine)
        return None if flags & _EMBEDDED else self._ranks.gather(_given(source))

    def run_put_tied(self, unit: str, gradient: Tensor | None) -> None:
        """Take the leader's gradient of a tied weight."""
        if gradient is None:
            gradient = torch.empty_like(self.tied_gradient(unit))
        StageModel.put_tied_gradient(self, unit, self._ranks.share(gradient.contiguous()))

    def finish_step(self) -> None:
        self._ranks.sum_gradients()


class Follower(RankModel):
    """What ranks above 0 run: the leader's commands, until it says stop or is gone."""

    def serve(self) -> None:
        """Returns at `Op.STOP`. Raises DeviceLostError when another rank is gone."""
        while (command := self._ranks.follow()).op is not Op.STOP:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        a, b, c, *_ = command.numbers
        match command.op:
            case Op.BUILD:
                self.build(a, b)
            case Op.LOAD:
                state = deserialize_unit(self._ranks.share_bytes(b))
                self.load_unit_state(unit_names(self.config.model)[a], state)
            case Op.BEGIN:
                self.begin_step()
            case Op.FORWARD:
                self.run_forward(a, b, c, None, None)
            case Op.BACKWARD:
                self.run_backward(a, b, c, None)
            case Op.FINISH:
                self.finish_step()
            case Op.PUT_TIED:
                self.run_put_tied(unit_names(self.config.model)[a], None)
            case Op.APPLY:
                self.apply(value(a), value(b))
            case Op.NORMS:
                self.run_squared_norms()
            case Op.STATE:
                self.run_unit_state(unit_names(self.config.model)[a])
            case Op.DROP:
                self.drop()


class Leader(RankModel):
    """Rank 0's: a `StageModel` that has the others do their share of each call."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        check_sizes(config, ranks.count, ranks.tensor_rank.count)
        super().__init__(config, ranks)
        self._flags: dict[int, int] = {}

    def build(self, stage: int, stages: int) -> None:
        self._ranks.lead(Op.BUILD, stage, stages)
        self._flags.clear()
        super().build(stage, stages)

    def drop(self) -> None:
        self._ranks.lead(Op.DROP)
        super().drop()

    def load_unit_state(self, unit: str, state: Mapping[str, Tensor]) -> None:
        data = serialize_unit(state)
        self._ranks.lead(Op.LOAD, unit_names(self.config.model).index(unit), len(data))
        self._ranks.share_bytes(len(data), data)
        super().load_unit_state(unit, state)

    def begin_step(self) -> None:
        self._ranks.lead(Op.BEGIN)
        super().begin_step()

    def forward(self, chunk: int, microbatch: int, fed: Tensor, labels: Tensor | None = None) -> Tensor:
        flags = (0 if fed.is_floating_point() else _EMBEDDED) | (0 if labels is None else _LABELLED)
        self._flags[chunk] = flags
        self._ranks.lead(Op.FORWARD, chunk, microbatch, flags)
        result = _given(self.run_forward(chunk, microbatch, flags, fed, labels))
        # Shares of the loss, always added in the same order.
        return result if labels is None else result.double().sum().float()

    def backward(self, chunk: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        flags = self._flags[chunk]
        self._ranks.lead(Op.BACKWARD, chunk, microbatch, flags)
        return self.run_backward(chunk, microbatch, flags, gradient)

    def finish_step(self) -> None:
        self._ranks.lead(Op.FINISH)
        super().finish_step()

    def put_tied_gradient(self, unit: str, value: Tensor) -> None:
        self._ranks.lead(Op.PUT_TIED, unit_names(self.config.model).index(unit))
        self.run_put_tied(unit, value.to(self.device, torch.float32))

    def unit_state(self, unit: str) -> dict[str, Tensor]:
        if self.tensor_rank.count == 1:
            return super().unit_state(unit)
        self._ranks.lead(Op.STATE, unit_names(self.config.model).index(unit))
        return self.run_unit_state(unit)

    def squared_norms(self) -> dict[str, float]:
        if self.tensor_rank.count == 1:
            return super().squared_norms()
        self._ranks.lead(Op.NORMS)
        return self.run_squared_norms()

    def apply(self, lr: float, clip_coefficient: float) -> None:
        self._ranks.lead(Op.APPLY, number(lr), number(clip_coefficient))
        super().apply(lr, clip_coefficient)

    def close(self) -> None:
        """Let the others go."""
        self._ranks.lead(Op.STOP)
        self._ranks.close()

    def abandon(self) -> None:
        """Let go of them, gone as they are."""
        self._ranks.abandon()


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the leader gets what it gathers, and hidden states have a gradient"
    return tensor
