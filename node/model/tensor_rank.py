"""A block's tensor-parallel rank, one of T, and the two collectives between the ranks' shards.

Tensor parallelism cuts a block's projections: those into attention and the feed-forward by outputs (column
parallel), those out of them by inputs (row parallel; Shoeybi et al. 2019, arXiv 1909.08053, section 3).
Sequence parallelism cuts everything between them: each rank holds S / T positions of the residual stream and
computes their norms (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

Shape legend: B batch, S sequence, C hidden, T ranks.
"""

from typing import Any, cast

import torch
from torch import Tensor


class TensorRank:
    """The only rank of a whole block. Its collectives return their argument."""

    index = 0
    count = 1

    def gather(self, x_bsc: Tensor) -> Tensor:
        """The positions [B, S, C] of all ranks, in rank order, from this rank's [B, S / T, C]."""
        return x_bsc

    def reduce_scatter(self, partial_bsc: Tensor) -> Tensor:
        """This rank's positions [B, S / T, C] of the sum of all ranks' [B, S, C].

        With several ranks the sum is computed in float32, in rank order, and returned in float32.
        """
        return partial_bsc


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x: autocast's dtype, or x's own without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def gather(x_bsc: Tensor, rank: TensorRank) -> Tensor:
    """`TensorRank.gather` for autograd, in the dtype of the projections that follow."""
    if rank.count == 1:
        return x_bsc
    gathered = _Gather.apply(x_bsc.to(compute_dtype(x_bsc)), rank)  # type: ignore[no-untyped-call]
    return cast(Tensor, gathered)


def row_parallel(partial_bsc: Tensor, bias: Tensor | None, rank: TensorRank) -> Tensor:
    """This rank's [B, S / T, C] of the sum of all ranks' products [B, S, C], for autograd.

    The bias is the same on every rank and is added once, to the sum.
    """
    output = cast(Tensor, _ReduceScatter.apply(partial_bsc, rank))  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: TensorRank) -> Tensor:
        ctx.rank = rank
        return rank.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return ctx.rank.reduce_scatter(grad).to(grad.dtype), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, rank: TensorRank) -> Tensor:
        ctx.rank, ctx.dtype = rank, partial.dtype
        return rank.reduce_scatter(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return ctx.rank.gather(grad.to(ctx.dtype)), None
