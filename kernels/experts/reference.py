"""Mixtures of experts in plain torch: routing, grouping, products per expert, and the sum of their results.

Shape legend: T tokens, E experts, k experts per token, S = T k slots, N outputs, K inputs. Slot t k + j is
the j-th choice of token t. Sorted rows lie expert by expert, and in the order of slots within an expert.

There is one `torch.mm` per expert, so an expert's results do not depend on the tokens of the others. The
functions read an order's offsets, which a GPU would have to wait for; they are meant for the CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.blockfloat import ops as blockfloat


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Slots sorted by expert."""

    slots: Tensor
    """int32 [S]: the slot whose row lies at each place."""
    places: Tensor
    """int32 [T, k]: the place of each slot's row. The inverse of `slots`."""
    offsets: Tensor
    """int32 [E + 1]: where each expert's rows begin, then where the last one's end."""

    @property
    def choices(self) -> int:
        """k."""
        return self.places.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedExperts:
    """Weights of experts that are not trained, each packed like any frozen matrix (`kernels.blockfloat`)."""

    packed: Tensor
    """uint8 [E, bytes]: each row is an expert's `kernels.blockfloat.reference.pack`."""
    outputs: int
    inputs: int
    bits: int

    @classmethod
    def of(cls, weights_enk: Tensor, bits: int, device: torch.device | None = None) -> "PackedExperts":
        """Pack float weights [E, N, K] in 8, 6, 5, 4 or 3 bits.

        Args:
            device: where they are packed, expert by expert, because all of them may not fit there as floats;
                None: where they are.
        """
        packed = torch.stack([blockfloat.store(weight.to(device), bits) for weight in weights_enk])
        return cls(packed=packed, outputs=weights_enk.shape[1], inputs=weights_enk.shape[2], bits=bits)

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        return torch.Size((len(self.packed), self.outputs, self.inputs))

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's weights [N, K] in `dtype`."""
        matrix: Tensor = blockfloat.restore(self.packed[expert], self.shape[1:], self.bits, dtype)
        return matrix


Weights = Tensor | PackedExperts
"""The weights of experts, [E, N, K]."""
Adapter = tuple[Tensor, Tensor]
"""A product of low rank that is added to another: its rows [S, r], and the experts' matrices, [E, N, r] for a
product and [E, r, K] for an input's gradient. Both have the rows' dtype."""


def route(logits_te: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The weights of each token's experts, float32 [T, k], and the experts' indices, int64 [T, k].

    The experts with the largest logits are chosen, in falling order. Ties go to the lower expert.

    Args:
        logits_te: float32 [T, E].
        choices: k, the number of experts per token.
        normalize: True makes the weights the softmax over the k logits, so they sum to 1. Mixtral and
            Qwen3-MoE, which divide the k largest probabilities by their sum, have the same weights. False
            makes them the probabilities themselves, as in OLMoE.
    """
    ordered, experts = logits_te.sort(dim=1, descending=True, stable=True)
    experts = experts[:, :choices].contiguous()
    if normalize:
        return ordered[:, :choices].softmax(1), experts
    return logits_te.softmax(1).gather(1, experts), experts


def route_backward(
    grad_tk: Tensor, logits_te: Tensor, weights_tk: Tensor, experts_tk: Tensor, normalize: bool
) -> Tensor:
    """The gradient of the logits, float32 [T, E], from that of the weights.

    Args:
        weights_tk, experts_tk: The results of `route`.
    """
    weighted = grad_tk * weights_tk
    inner = weighted.sum(1, keepdim=True)
    if normalize:
        gradient = torch.zeros_like(logits_te)
        return gradient.scatter_(1, experts_tk, weighted - weights_tk * inner)
    gradient = logits_te.softmax(1).mul_(-inner)
    # A token's experts differ, so no two values are added to the same place.
    return gradient.scatter_(1, experts_tk, gradient.gather(1, experts_tk) + weighted)


def group(experts_tk: Tensor, experts: int) -> Order:
    """Sort slots by expert, and in the order of slots within an expert.

    Args:
        experts_tk: integers [T, k] below `experts`.
    """
    ordered, slots = experts_tk.reshape(-1).sort(stable=True)
    places = torch.empty_like(slots, dtype=torch.int32)
    places[slots] = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    numbers = torch.arange(experts + 1, device=slots.device)
    offsets = torch.searchsorted(ordered, numbers, out_int32=True)
    return Order(slots=slots.int(), places=places.view(experts_tk.shape), offsets=offsets)


def matmul(
    x: Tensor,
    weights: Weights,
    order: Order,
    bias_en: Tensor | None = None,
    *,
    gathers: bool = False,
    adapter: Adapter | None = None,
) -> Tensor:
    """Each sorted row times its expert's weights, plus the adapter's product and the bias: [S, N] in x's
    dtype.

    Args:
        x: Sorted rows [S, K], or with `gathers` the tokens' rows [T, K].
        weights: Rounded to x's dtype for the product.
    """
    out = x.new_zeros(order.places.numel(), weights.shape[1])
    with torch.autocast(x.device.type, enabled=False):
        for expert, rows in _experts(order):
            product = _rows(x, order, rows, gathers) @ _dense(weights, expert, x.dtype).t()
            if adapter is not None:
                product += adapter[0][rows] @ adapter[1][expert].t()
            out[rows] = product if bias_en is None else product + bias_en[expert].to(x.dtype)
    return out


def input_gradient(
    grad_sn: Tensor,
    weights: Weights,
    order: Order,
    *,
    adapter: Adapter | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """The gradient of the sorted rows, [S, K] in the dtype of `grad_sn`, plus the adapter's.

    Args:
        onto: A gradient of the same rows, to which this one is added in place.
    """
    gradient = grad_sn.new_zeros(len(grad_sn), weights.shape[2]) if onto is None else onto
    with torch.autocast(grad_sn.device.type, enabled=False):
        for expert, rows in _experts(order):
            product = grad_sn[rows] @ _dense(weights, expert, grad_sn.dtype)
            if adapter is not None:
                product += adapter[0][rows] @ adapter[1][expert]
            gradient[rows] += product
    return gradient


def weight_gradient(
    grad_sn: Tensor, x: Tensor, order: Order, dtype: torch.dtype, *, gathers: bool = False
) -> Tensor:
    """The gradient of the weights, [E, N, K] in `dtype`. It is zero for experts without tokens.

    Args:
        x: As `matmul` got it.
    """
    shape = len(order.offsets) - 1, grad_sn.shape[1], x.shape[1]
    gradient = torch.zeros(shape, dtype=dtype, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for expert, rows in _experts(order):
            gradient[expert] = grad_sn[rows].t() @ _rows(x, order, rows, gathers).to(grad_sn.dtype)
    return gradient


def bias_gradient(grad_sn: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    """The gradient of the biases, [E, N] in `dtype`."""
    gradient = torch.zeros(len(order.offsets) - 1, grad_sn.shape[1], dtype=dtype, device=grad_sn.device)
    for expert, rows in _experts(order):
        gradient[expert] = grad_sn[rows].float().sum(0)
    return gradient


def combine(y_sn: Tensor, weights_tk: Tensor | None, order: Order) -> Tensor:
    """The sum of each token's rows times their weights, [T, N] in y's dtype.

    The sum runs from the first choice to the last. Each product and each sum is rounded to float32.

    Args:
        weights_tk: float32 [T, k]. None means ones.
    """
    sums = torch.zeros(len(order.places), y_sn.shape[1], device=y_sn.device)
    for choice in range(order.choices):
        rows = y_sn.index_select(0, order.places[:, choice]).float()
        sums += rows if weights_tk is None else rows.mul_(weights_tk[:, choice, None])
    return sums.to(y_sn.dtype)


def _experts(order: Order) -> Iterator[tuple[int, slice]]:
    """The experts that have tokens, with the slice of their rows."""
    offsets = order.offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(offsets)):
        if last > first:
            yield expert, slice(first, last)


def _rows(x: Tensor, order: Order, rows: slice, gathers: bool) -> Tensor:
    return x.index_select(0, order.slots[rows] // order.choices) if gathers else x[rows]


def _dense(weights: Weights, expert: int, dtype: torch.dtype) -> Tensor:
    if isinstance(weights, PackedExperts):
        return weights.dense(expert, dtype)
    return weights[expert].to(dtype)
