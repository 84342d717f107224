"""GPT-2's block; shapes as in `node.model.blocks`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from node.model.blocks import Block
from node.model.families.known import GPT2
from node.model.stored_layers import Heads


class Gpt2Block(Block):
    """LayerNorm, multi-head attention (K = H), LayerNorm, tanh GELU; biases throughout."""

    family = GPT2

    def split_by(self, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0) -> Heads:
        (joined,) = projected
        heads_bsnhd = torch.unflatten(joined, -1, (3, -1, self.width))
        query_bhsd, key_bhsd, value_bhsd = heads_bsnhd.permute(2, 0, 3, 1, 4).unbind(0)
        return query_bhsd, key_bhsd, value_bhsd

    def join(
        self, heads: Heads, projected: Sequence[Tensor], norms: Sequence[Tensor], first: int = 0
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return (torch.stack([part.transpose(1, 2) for part in heads], dim=2).flatten(2),), ()

    def activation(self, *wide_bsf: Tensor) -> Tensor:
        (up_bsf,) = wide_bsf
        return F.gelu(up_bsf, approximate="tanh")
