"""A chunk's forward and backward passes, one microbatch at a time, through autograd.

`node.stage.captured_passes` does the same with CUDA graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.attention.reach import Documents
from node.model.chunk import Chunk, compute_precision
from node.model.past import Past, Slice

Call = Callable[[Tensor, Tensor | None, Documents | None, Slice | None], Tensor]
"""Maps a chunk's input to hidden states or, with labels, to the mean loss. Attention does not cross
documents. The loss of a slice is its share of the microbatch's loss."""


class _Input(torch.autograd.Function):
    """A chunk's input. Its gradient is stored in `gradients`, so nothing keeps the input."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, fed: Tensor, gradients: "_Gradients") -> Tensor:
        ctx.gradients = gradients
        return fed.view_as(fed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.gradients.of_input = grads[0].contiguous()
        return None, None, None


class _Output(torch.autograd.Function):
    """A scalar whose backward gives the output the gradient that `gradients` has at that time.

    `torch.autograd.backward(output, gradient)` gives the same bits but imports sympy to compare two shapes.
    On a CPU that takes half a second in the first step, and 34 MiB for the process's lifetime.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: "_Gradients") -> Tensor:
        ctx.gradients, ctx.dtype = gradients, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.gradients.of_output = ctx.gradients.of_output, None
        return None if gradient is None else gradient.to(ctx.dtype), None


@dataclass(eq=False)
class _Gradients:
    """The gradients of a microbatch's, or a slice's, input and output. The graph holds them, and neither the
    input nor the output: for a long sample these take more memory than what blocks keep in few bits."""

    of_input: Tensor | None = None
    of_output: Tensor | None = None


class ChunkCall(nn.Module):
    """A chunk as a `Call`."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(
        self, fed: Tensor, labels: Tensor | None, documents: Documents | None, place: Slice | None = None
    ) -> Tensor:
        if labels is None:
            output: Tensor = self.chunk(fed, documents, place)
            return output
        return self.chunk.loss(fed, labels, documents, place)


class AutogradPasses:
    """The passes of one chunk, operation by operation. Several microbatches may be between forward and
    backward."""

    def __init__(
        self,
        call: Call,
        precision: str,
        device: torch.device,
        shares: int,
        *,
        weighs_loss: bool = False,
        slices: Sequence[range] = (),
    ) -> None:
        """
        Args:
            precision: `[training] precision`.
            shares: divides a microbatch's loss.
            weighs_loss: whether `begin_step`'s weight multiplies it.
            slices: the positions of each slice of a microbatch, if it is cut into slices.
        """
        self._call = call
        self._precision = precision
        self._device = device
        self._shares = shares
        self._slices = slices if len(slices) > 1 else ()
        self._in_flight: dict[tuple[int, int], tuple[Tensor, _Gradients]] = {}
        """The scalar from which backward starts, and the gradients, by microbatch and slice."""
        self._pasts: dict[int, Past] = {}
        """The keys and values of microbatches that are cut into slices."""
        # A tensor, so that a CUDA graph reads its current value.
        self._loss_weight = torch.ones((), device=device) if weighs_loss else None

    def begin_step(self, loss_weight: float = 1.0) -> None:
        """Drop the microbatches of an unfinished step. Weights may have changed. `loss_weight` multiplies
        losses if labels are masked or the loss is scaled."""
        self._in_flight.clear()
        self._pasts.clear()
        if self._loss_weight is not None:
            self._loss_weight.fill_(loss_weight)

    def weights_changed(self) -> None:
        """The weights have changed within a step: use the new weights from now on."""

    def forward(
        self,
        microbatch: int,
        fed: Tensor,
        labels: Tensor | None,
        documents: Documents | None = None,
        number: int = 0,
    ) -> Tensor:
        """See `node.stage.stage_model.StageModel.forward`. `number`: the slice."""
        place = None
        if self._slices:
            # Each token of a microbatch has the same weight.
            share = len(self._slices[number]) / (self._slices[-1].stop * self._shares)
            factor = share if self._loss_weight is None else self._loss_weight * share
            place = Slice(self._pasts.setdefault(microbatch, Past(self._slices)), number, factor)
        gradients = _Gradients()
        if fed.is_floating_point():
            anchor = torch.empty(0, requires_grad=True)
            fed = _Input.apply(anchor, fed, gradients)  # type: ignore[no-untyped-call]  # torch's
        result = self.run(fed, labels, documents, place)
        if torch.is_grad_enabled():
            end = _Output.apply(result, gradients) if labels is None else result  # type: ignore[no-untyped-call]
            self._in_flight[microbatch, number] = end, gradients
        elif number == len(self._slices) - 1:
            # Without a backward, later slices only needed the keys and values.
            del self._pasts[microbatch]
        return result.detach()

    def run(
        self, fed: Tensor, labels: Tensor | None, documents: Documents | None, place: Slice | None = None
    ) -> Tensor:
        """The chunk's output, or the microbatch's share of the loss, with its graph."""
        with compute_precision(self._precision, self._device):
            output = self._call(fed, labels, documents, place)
        if labels is None or place is not None:
            return output
        return (output if self._loss_weight is None else output * self._loss_weight) / self._shares

    def backward(self, microbatch: int, gradient: Tensor | None, number: int = 0) -> Tensor | None:
        """See `node.stage.stage_model.StageModel.backward`."""
        end, gradients = self._in_flight.pop((microbatch, number))
        if self._slices:
            past = self._pasts[microbatch]
            past.backwards_left -= 1
            if past.backwards_left == 0:
                del self._pasts[microbatch]
        gradients.of_output = gradient
        torch.autograd.backward(end)
        return gradients.of_input
