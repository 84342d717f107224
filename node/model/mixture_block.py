"""The block of mixtures of experts. Shapes are as in `node.model.blocks`."""

from typing import cast

import torch
from torch import Tensor, nn

from node.config.schema import ModelSection
from node.model.families.family import ParameterSpec
from node.model.families.known import MIXTURE
from node.model.families.mixture import ROUTER, SINKS
from node.model.llama_block import LlamaBlock
from node.model.past import BlockSlice
from node.model.routed_half import RoutedParts, routed_half
from node.model.storage import Storage
from node.model.stored_layers import Norm, Norms
from node.model.tensor_rank import TensorRank


class Sinks(nn.Module):
    """One logit per head, which attention's softmax includes besides those of the keys."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class MixtureBlock(LlamaBlock):
    """Llama's attention, then a mixture of experts."""

    family = MIXTURE
    always_packs = True

    def __init__(
        self, model: ModelSection, index: int, tables: object, storage: Storage, rank: TensorRank
    ) -> None:
        super().__init__(model, index, tables, storage, rank)
        self._model = model
        self.share = 1.0
        """The microbatch's share of the step's loss, a factor of the block's own loss terms."""
        self.load: Tensor | None = None
        """The number of tokens that each expert got, int64 [E]; None before the first forward."""

    def _layer(self, model: ModelSection, spec: ParameterSpec, *, bias: bool) -> nn.Module:
        if spec.layer == SINKS:
            return Sinks(*spec.shard_shape(self.rank.count))
        return super()._layer(model, spec, bias=bias)

    def sinks_h(self) -> Tensor | None:
        return cast(Tensor, getattr(self, SINKS).weight) if hasattr(self, SINKS) else None

    def _feed_forward_half(self, x_bsc: Tensor, at: BlockSlice | None = None) -> Tensor:
        model = self._model
        if self.load is None:
            self.load = torch.zeros(model.experts, dtype=torch.int64, device=x_bsc.device)
        # Each of several ranks computes the mean loss of its own positions.
        share = self.share * self.rank.count
        parts = RoutedParts(
            storage=self.storage,
            rank=self.rank,
            experts=model.experts,
            choices=model.experts_per_token,
            normalize=model.normalized_routing,
            limit=model.swiglu_limit,
            tokens=len(x_bsc) * model.sequence,
            balance=model.balance_loss * share,
            z=model.z_loss * share,
            at=at,
        )
        (router,) = self._projections((ROUTER,))
        projections = self._projections((*self.family.ffn_inputs, self.family.ffn_output))
        load = self.load if torch.is_grad_enabled() else torch.zeros_like(self.load)
        return routed_half(x_bsc, parts, Norms(first=Norm.of(self.ffn_norm)), router, projections, load)
