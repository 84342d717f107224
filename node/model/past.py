"""State that the slices of a microbatch share on their way through a chunk: keys and values, and the head's
gradients.

A slice's queries see the keys of all slices up to its own. So a block keeps each slice's keys and values, in
the form of its stored activations, until the later slices have gone backward. Their gradients are summed in
float32, last slice first. A `Past` belongs to one microbatch in one chunk. It is dropped when the
microbatch's last backward is done, or after a forward pass without backward.

The head needs no other slice. Its gradients are computed with the loss, as in `node.model.head_loss`, and the
gradients of a microbatch are summed in float32, first slice first. So they have the same bits on whichever
stage the head is, and only one copy of the head's gradient is in memory.

The shape legend is that of `node.model.stored_layers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.attention.ops import attention, attention_backward, chunk_backward
from kernels.attention.reach import Reach

Restore = Callable[[], tuple[Tensor, Tensor]]
"""Returns the keys and values [B, K, S, D] of a slice."""


class Past:
    """The shared state of one microbatch in one chunk."""

    def __init__(self, slices: Sequence[range]) -> None:
        """`slices` are the positions of each slice, from `node.model.slices.sample_slices`."""
        self.slices = slices
        self._blocks: dict[nn.Module, _BlockPast] = {}
        self._of_head: list[Tensor] = []
        self.backwards_left = len(slices)
        """The number of slices whose backward has not begun."""

    def of_block(self, block: nn.Module) -> "_BlockPast":
        return self._blocks.setdefault(block, _BlockPast())

    def add_of_head(self, grads: Sequence[Tensor]) -> None:
        """Add a slice's gradients of the head's parameters."""
        if not self._of_head:
            self._of_head = [grad.float() for grad in grads]
        else:
            torch._foreach_add_(self._of_head, [grad.float() for grad in grads])

    def take_of_head(self) -> list[Tensor]:
        """The summed gradients in the backward of the microbatch's last slice; an empty list before that."""
        if self.backwards_left:
            return []
        taken, self._of_head = self._of_head, []
        return taken


@dataclass(frozen=True)
class Slice:
    """One slice on its way through a chunk."""

    past: Past
    number: int
    loss_factor: Tensor | float = 1.0
    """The factor of the mean loss of the slice's tokens."""

    @property
    def first(self) -> int:
        """The position of the slice's first token in its sample."""
        return self.past.slices[self.number].start

    def of_block(self, block: nn.Module) -> "BlockSlice":
        return BlockSlice(self.past.of_block(block), self.number, self.first)


class _BlockPast:
    """The shared state of one microbatch in one block."""

    def __init__(self) -> None:
        self.kept: dict[int, Restore] = {}
        """Returns the kept keys and values, by slice."""
        self.gradients: tuple[Tensor, Tensor] | None = None
        """The gradients of keys and values from the sample's first position on, float32 [B, K, S, D]."""
        self.loads: dict[int, Tensor] = {}
        """The number of tokens that each expert got, int64 [E], by slice."""


@dataclass(frozen=True)
class BlockSlice:
    past: _BlockPast
    number: int
    first: int
    """The position of the slice's first token in its sample."""

    def keep(self, restore: Restore) -> None:
        """Keep the slice's keys and values. A block that runs again in backward calls it again."""
        self.past.kept[self.number] = restore

    def keep_load(self, load_e: Tensor) -> None:
        """Keep the number of the slice's tokens that each expert got, int64 [E]."""
        self.past.loads[self.number] = load_e

    def load(self) -> Tensor:
        """The number of the microbatch's tokens that each expert got, int64 [E]. Call it when all slices have
        gone forward."""
        return torch.stack(list(self.past.loads.values())).sum(0)

    def joined(self, key_bksd: Tensor, value_bksd: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values from the sample's first position on. The arguments are the last of them."""
        if self.number == 0:
            return key_bksd, value_bksd
        earlier = [self.past.kept[number]() for number in range(self.number)]
        keys, values = zip(*earlier, (key_bksd, value_bksd), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def backward(
        self,
        grad_bhsd: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        out_bhsd: Tensor,
        sums: Tensor,
        reach: Reach,
        *,
        fixed_order: bool = True,
        sinks_h: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the slice's queries, keys and values, with the parts that come from later slices.

        Args:
            grad_bhsd: the gradient of attention's result.
            heads: the slice's own queries, keys and values.
            out_bhsd, sums: the results of `kernels.attention.ops.attention`.
            fixed_order: sum in a fixed order in a sample's first slice. Later slices always do.
            sinks_h: the sinks that attention was called with.
        """
        query, key, value = heads
        if self.number == 0:
            through = out_bhsd, sums, reach
            grads = attention_backward(grad_bhsd, *heads, *through, fixed_order=fixed_order, sinks_h=sinks_h)
            later, self.past.gradients = self.past.gradients, None
            assert later is not None, "later slices go backward first"
            of_key, of_value = (
                (sums_bksd[:, :, : key.shape[2]] + own.float()).to(own.dtype)
                for sums_bksd, own in zip(later, grads[1:], strict=True)
            )
            self.past.kept.clear()
            return grads[0], of_key, of_value
        keys, values = self.joined(key, value)
        if self.past.gradients is None:
            of_all = (torch.zeros(part.shape, device=part.device) for part in (keys, values))
            self.past.gradients = next(of_all), next(of_all)
        of_keys, of_values = (part[:, :, : keys.shape[2]] for part in self.past.gradients)
        given = grad_bhsd, query, keys, values, out_bhsd, sums
        of_query = chunk_backward(*given, of_keys, of_values, reach, sinks_h)
        of_key, of_value = (
            part[:, :, self.first :].to(key.dtype, copy=True) for part in (of_keys, of_values)
        )
        del self.past.kept[self.number]
        return of_query, of_key, of_value


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, at: BlockSlice, reach: Reach) -> Tensor:
        own = key.detach(), value.detach()
        at.keep(lambda: own)
        out, sums = attention(query, *at.joined(key, value), reach)
        ctx.at, ctx.reach = at, reach
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        return *ctx.at.backward(grads[0], (query, key, value), out, sums, ctx.reach), None, None


def slice_attention(
    query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor, at: BlockSlice, reach: Reach
) -> Tensor:
    """The attention [B, H, S, D] of a slice to all slices up to its own, for autograd. It keeps the slice's
    keys and values in `at`."""
    args = query_bhsd, key_bksd, value_bksd, at, reach
    return cast(Tensor, _SliceAttention.apply(*args))  # type: ignore[no-untyped-call]


class _SliceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Callable[[Tensor], Tensor], at: Slice, with_grad: bool, *parameters: Tensor
    ) -> Tensor:
        if not with_grad:
            return loss(x) * at.loss_factor
        wanted = [part for part in parameters if part.requires_grad]
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            scaled = loss(leaf) * at.loss_factor
            of_x, *of_head = torch.autograd.grad(scaled, [leaf, *wanted])
        at.past.add_of_head(of_head)
        ctx.at, ctx.of_x = at, of_x
        ctx.dtypes = [part.dtype if part.requires_grad else None for part in parameters]
        return scaled.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, ctx.of_x = ctx.of_x, None
        sums = iter(ctx.at.past.take_of_head())
        of_head = [None if dtype is None else next(sums, None) for dtype in ctx.dtypes]
        cast_to = zip(of_head, ctx.dtypes, strict=True)
        return of_x, None, None, None, *(None if grad is None else grad.to(dtype) for grad, dtype in cast_to)


def slice_loss(
    x_bsc: Tensor, loss: Callable[[Tensor], Tensor], at: Slice, parameters: Sequence[Tensor]
) -> Tensor:
    """A slice's share of the loss: `loss(x_bsc)` times `at.loss_factor`. Backward must start from it with 1.

    Args:
        parameters: the head's parameters, which `loss` uses.
    """
    args = x_bsc, loss, at, torch.is_grad_enabled(), *parameters
    return cast(Tensor, _SliceLoss.apply(*args))  # type: ignore[no-untyped-call]
