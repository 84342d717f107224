"""A block's matrix products. Projections with the same input are one product.

Shape legend: T tokens, N outputs, K inputs.

On a GPU in half precision, the weights of projections with one input are multiplied as one matrix if a single
product has too few results to fill the card. The input's gradient is then one product too. No weight is
copied for it if the weights are contiguous in memory, as captured passes lay them. `AddProduct` adds a
weight's gradient to its main gradient: the product itself accumulates in float32, so no separate pass
computes, rounds, reads and adds it.

On a CPU, and in float32, each projection is a product of its own and autograd adds its gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common import dispatch
from kernels.common.matrices import side_by_side, stacked
from kernels.fp8.products import CodedWeight, code_columns, code_rows, product, weight_gradient
from kernels.fp8.rows import Coded
from node.model.tensor_rank import TensorRank

AddProduct = Callable[[Sequence[int], Tensor | Coded, Tensor | Coded], None]
"""Adds `grads.t() @ rows` to the stacked main gradients of the weights with these numbers. The arguments are
grads [T, N] and rows [T, K], or the codes of their columns."""
FILLED = 1 << 25
"""From this number of results on, joining a product with others gains nothing. Measured on an H200
(scripts/results/compute_parts.json): joined, queries, keys and values take 0.88 to 0.97 of the time of three
products. Gate and up take 0.88 at 2,048 outputs for 8,192 tokens, and 1.01 to 1.04 at 8,192 and 14,336."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A projection's weight [outputs, inputs] and bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to compute projections with one input."""

    add: AddProduct | None = None
    """Receives the weights' gradients. None returns them to autograd."""
    coded: CodedWeight | None = None
    """The stacked weights in e4m3, for forward products and those for the input's gradient."""
    codes_gradients: bool = False
    """Compute the products for weights' gradients in e4m3 too. Their errors add up in the weights."""


AS_IT_IS = Way()
"""Computes products in the input's dtype and returns gradients to autograd."""


@dataclass(frozen=True, kw_only=True)
class Projections:
    """Projections with the same input."""

    linears: Sequence[Linear]
    way: Way = AS_IT_IS
    needs_input = True
    """The weights' gradients need the input."""

    def __len__(self) -> int:
        return len(self.linears)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """The outputs [..., N] of each projection; columns of one tensor if they are one product."""
        if self.way.coded is not None:
            outputs, bias = self._coded(x), self._bias(x.dtype)
            widths = [len(linear.weight) for linear in self.linears]
            return list(torch.split(outputs if bias is None else outputs.add_(bias), widths, dim=-1))
        if not self._are_one(x):
            return [
                F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))
                for layer in self.linears
            ]
        whole = F.linear(x, stacked([linear.weight for linear in self.linears], x.dtype), self._bias(x.dtype))
        return list(torch.split(whole, [len(linear.weight) for linear in self.linears], dim=-1))

    def row_parallel(self, x: Tensor, rank: TensorRank) -> Tensor:
        """The output of a single projection, summed as by `node.model.tensor_rank.row_parallel`."""
        if rank.count == 1:
            return self(x)[0]
        (linear,) = self.linears
        partial = F.linear(x, linear.weight.to(x.dtype)) if self.way.coded is None else self._coded(x)
        output = rank.reduce_scatter(partial)
        return output if linear.bias is None else output.add_(linear.bias)

    def _coded(self, x: Tensor) -> Tensor:
        """The outputs of all projections side by side, without biases, by products in e4m3."""
        assert self.way.coded is not None
        rows = code_rows(x.reshape(-1, x.shape[-1]))
        return product(rows, self.way.coded.forward, x.dtype, fast=True).view(*x.shape[:-1], -1)

    def backward(self, grads: Sequence[Tensor]) -> Tensor:
        """The gradient of the input from the gradients of the outputs."""
        first = grads[0]
        if self.way.coded is not None:
            gradient = product(code_rows(side_by_side(grads)), self.way.coded.back, first.dtype)
            return gradient.view(*first.shape[:-1], -1)
        if self._are_one(first):
            gradient = side_by_side(grads) @ stacked([linear.weight for linear in self.linears], first.dtype)
            return gradient.view(*first.shape[:-1], -1)
        of_input = first @ self.linears[0].weight.to(first.dtype)
        flat = of_input.view(-1, of_input.shape[-1])
        for linear, grad in zip(self.linears[1:], grads[1:], strict=True):
            flat.addmm_(grad.reshape(-1, grad.shape[-1]), linear.weight.to(grad.dtype))
        return of_input

    def gradients(
        self, grads: Sequence[Tensor], x: Tensor | None, own: Tensor | None = None
    ) -> list[Tensor | None]:
        """The gradients of weights and biases in turn, in their own dtypes. A weight's gradient is None if it
        was added.

        Args:
            own: the rank's own positions of `grads`, for the bias of a row-parallel projection.
        """
        assert x is not None, "every weight is trained"
        flat = x.reshape(-1, x.shape[-1])
        rows = code_columns(flat) if self.way.codes_gradients else flat
        numbers = range(len(grads))
        of_weights: list[Tensor | None] = []
        for together in [numbers] if self._are_one(x) else [[number] for number in numbers]:
            side = side_by_side([grads[number] for number in together])
            joined = code_columns(side) if self.way.codes_gradients else side
            if self.way.add is not None:
                self.way.add(together, joined, rows)
                of_weights += [None] * len(together)
            else:
                widths = [len(self.linears[number].weight) for number in together]
                of_weights += torch.split(weight_gradient(joined, rows, x.dtype), widths)
        gradients: list[Tensor | None] = []
        for linear, grad, of_weight in zip(self.linears, grads, of_weights, strict=True):
            gradients.append(None if of_weight is None else of_weight.to(linear.weight.dtype))
            if linear.bias is None:
                gradients.append(None)
                continue
            summed = grad if own is None else own
            gradients.append(summed.reshape(-1, summed.shape[-1]).sum(0).to(linear.bias.dtype))
        return gradients

    def _are_one(self, x: Tensor) -> bool:
        """Whether the projections are one product, for this x or for gradients of as many tokens."""
        if len(self.linears) == 1 or x.dtype == torch.float32 or not dispatch.has_kernels(x.device):
            return False
        return x[..., 0].numel() * max(len(linear.weight) for linear in self.linears) <= FILLED

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        assert len(biases) in (0, len(self.linears)), "projections with one input have all a bias or none"
        return torch.cat([bias.to(dtype) for bias in biases]) if biases else None
