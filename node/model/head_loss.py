"""The head's loss, without all logits in memory at once.

The logits of a microbatch are tokens x vocabulary in float32, and their logarithms and gradients take as much
again each: 12 GB at 8,192 tokens with Llama 3's vocabulary. Here tokens pass through the output projection
piece by piece, and the gradients of a piece are computed at once, so its logits can be freed (as in Liger
Kernel's fused linear cross entropy, arXiv 2410.10989). The pieces depend on shapes only and are summed in
order, by the same operations everywhere, so splits, replays and captured passes have the same bits. On a GPU
one kernel reads a piece's rounded logits and overwrites them with their gradients.

Shape legend: T tokens, C hidden, V vocabulary.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.common import dispatch
from kernels.layers.ops import cross_entropy_
from node.model.labels import IGNORED
from node.model.lora import FrozenLinear
from node.model.storage import head_piece
from node.model.tensor_rank import compute_dtype


def head_loss(x_tc: Tensor, output: nn.Module, labels_t: Tensor) -> Tensor:
    """Cross entropy of the output projection's logits: the sum over the labels that count, divided by T.

    Args:
        x_tc: the result of the final norm.
        output: a projection without a bias; trained, or frozen without an adapter.
        labels_t: int64; `IGNORED` marks a label that does not count.

    Returns:
        A float32 scalar, in nats.
    """
    assert isinstance(output, nn.Linear | FrozenLinear) and output.bias is None
    frozen = output if isinstance(output, FrozenLinear) else None
    weight = None if frozen is not None else output.weight
    loss = _HeadLoss.apply(x_tc, weight, frozen, labels_t, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def is_fused(device: torch.device) -> bool:
    """Whether a kernel computes the loss on this device, for a piece of any size."""
    return dispatch.has_kernels(device)


def _gradient_factor(tokens: int, dtype: torch.dtype) -> float:
    """A power of two that scales the gradients of logits while they are in `dtype`.

    They are computed before the loss scale is known. In float16, the gradients of a mean over thousands of
    tokens would underflow to 0. With the factor each is at most 1 / 16, so the sum over a piece's tokens does
    not overflow.
    """
    return 2.0 ** (tokens.bit_length() - 5) if dtype == torch.float16 else 1.0


def _piece(
    rows: Tensor, dense: Tensor, labels: Tensor, tokens: int, factor: float | None
) -> tuple[Tensor, Tensor | None]:
    """A piece's share of the mean over all tokens, computed by the operations of the plain loss. With it the
    gradients of the piece's logits in the dtype of `rows`, times `factor`; None if `factor` is None."""
    logits = F.linear(rows, dense).float()
    with torch.set_grad_enabled(factor is not None):
        logits.requires_grad_(factor is not None)
        part = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / tokens
    if factor is None:
        return part, None
    gradient = torch.autograd.grad(part, logits)[0]
    return part.detach(), (gradient if factor == 1.0 else gradient.mul_(factor)).to(rows.dtype)


def _fused_piece(
    rows: Tensor, dense: Tensor, labels: Tensor, tokens: int, factor: float | None
) -> tuple[Tensor, Tensor | None]:
    """As `_piece`, but the gradients overwrite the logits."""
    logits = F.linear(rows, dense)
    losses = cross_entropy_(logits, labels, IGNORED, None if factor is None else factor / tokens)
    return losses.sum() / tokens, None if factor is None else logits


def _add_product(total: Tensor, grads: Tensor, rows: Tensor) -> None:
    """Add `grads.t() @ rows` to a float32 sum."""
    if grads.dtype == torch.float32:
        total.addmm_(grads.t(), rows)
    elif grads.is_cuda:
        # The product accumulates into the sum, so no result is stored, rounded and read again.
        torch.addmm(total, grads.t(), rows, out_dtype=torch.float32, out=total)
    else:
        total.add_(grads.t() @ rows)


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients in forward. Backward only multiplies them by the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        frozen: FrozenLinear | None,
        labels: Tensor,
        with_grad: bool,
    ) -> Tensor:
        dtype = compute_dtype(x)
        wants_x, wants_weight = (with_grad and wanted for wanted in ctx.needs_input_grad[:2])
        with torch.autocast(x.device.type, enabled=False):
            if frozen is not None:
                dense = frozen.weight.dense(dtype)
            else:
                assert weight is not None
                dense = weight.to(dtype)
            rows = x.to(dtype)
            of_x = torch.empty_like(rows) if wants_x else None
            # Sums are float32, whatever the dtype of a piece's product.
            of_weight = torch.zeros(dense.shape, device=x.device) if wants_weight else None
            total = torch.zeros((), device=x.device)
            fused, tokens = is_fused(x.device), len(labels)
            of_piece = _fused_piece if fused else _piece
            size = head_piece(tokens, len(dense), fused=fused)
            factor = _gradient_factor(tokens, dtype)
            wanted = factor if wants_x or wants_weight else None
            for first in range(0, tokens, size):
                piece = slice(first, first + size)
                part, of_logits = of_piece(rows[piece], dense, labels[piece], tokens, wanted)
                total += part
                if of_logits is None:
                    continue
                if of_x is not None:
                    torch.mm(of_logits, dense, out=of_x[piece])
                if of_weight is not None:
                    _add_product(of_weight, of_logits, rows[piece])
                del of_logits
        # Kept as attributes, because then nothing else holds them and backward may overwrite them.
        ctx.made = (of_x, of_weight)
        ctx.dtypes = (x.dtype, dtype, None if weight is None else weight.dtype)
        ctx.factor = factor
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_x, of_weight), ctx.made = ctx.made, (None, None)
        x_dtype, dtype, weight_dtype = ctx.dtypes
        # Rounded to the product's dtype, as a projection's backward does: captured passes hold weights in it.
        if dtype == torch.float16:
            scale = grads[0] / ctx.factor
            of_x = None if of_x is None else (of_x.float() * scale).to(dtype).to(x_dtype)
            # Values beyond the range of float16 become infinite.
            of_weight = None if of_weight is None else of_weight.mul_(scale).to(dtype).to(weight_dtype)
            return of_x, of_weight, None, None, None
        if of_x is not None:
            of_x = of_x.mul_(grads[0]).to(x_dtype)
        if of_weight is not None:
            of_weight = of_weight.to(dtype).mul_(grads[0]).to(weight_dtype)
        return of_x, of_weight, None, None, None
