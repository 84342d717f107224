"""A chunk's forward and backward passes, one microbatch at a time, through autograd.

`node.stage.captured_passes` does the same with CUDA graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.attention.reach import Documents
from node.model.chunk import Chunk, compute_precision
from node.model.past import Past, Slice

Call = Callable[[Tensor, Tensor | None, Documents | None, Slice | None], Tensor]
"""Maps a chunk's input to hidden states or, with labels, to the mean loss. Attention does not cross
documents. The loss of a slice is its share of the microbatch's loss."""


class Passes(Protocol):
    """The passes of one chunk. Several microbatches may be between forward and backward."""

    def begin_step(self, loss_weight: float = 1.0) -> None:
        """Drop the microbatches of an unfinished step. Weights may have changed. `loss_weight` multiplies
        losses if labels are masked or the loss is scaled."""
        ...

    def weights_changed(self) -> None:
        """The weights have changed within a step: use the new weights from now on."""
        ...

    def forward(
        self,
        microbatch: int,
        fed: Tensor,
        labels: Tensor | None,
        documents: Documents | None = None,
        number: int = 0,
    ) -> Tensor:
        """See `node.stage.stage_model.StageModel.forward`. `number`: the slice."""
        ...

    def backward(self, microbatch: int, gradient: Tensor | None, number: int = 0) -> Tensor | None:
        """See `node.stage.stage_model.StageModel.backward`."""
        ...


class _Given(torch.autograd.Function):
    """A scalar whose backward gives `output` this gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _SliceInput(torch.autograd.Function):
    """The input of a slice. Its gradient is stored in `flight`, so nothing keeps the input."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, fed: Tensor, flight: "_SliceInFlight") -> Tensor:
        ctx.flight = flight
        return fed.view_as(fed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ctx.flight.of_input,) = grads
        return None, None, None


class _SliceOutput(torch.autograd.Function):
    """A scalar whose backward gives the slice's output the gradient that `flight` has at that time."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, flight: "_SliceInFlight") -> Tensor:
        ctx.flight, ctx.dtype = flight, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.flight.of_output = ctx.flight.of_output, None
        return None if gradient is None else gradient.to(ctx.dtype), None


@dataclass(eq=False)
class _SliceInFlight:
    """A slice between its forward and its backward. It holds neither input nor output: for a long sample
    these take more memory than the tensors that blocks keep in few bits."""

    end: Tensor | None = None
    """The scalar from which backward starts."""
    of_input: Tensor | None = None
    of_output: Tensor | None = None


def backward_from(output: Tensor, gradient: Tensor | None) -> None:
    """Run backward from a chunk's output with the gradient of the output, or from a scalar loss with None.

    `torch.autograd.backward(output, gradient)` gives the same bits but imports sympy to compare two shapes.
    On a CPU that takes half a second in the first step, and 34 MiB for the process's lifetime.
    """
    if gradient is not None:
        output = _Given.apply(output, gradient)  # type: ignore[no-untyped-call]  # torch's
    torch.autograd.backward(output)


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


@dataclass(frozen=True)
class _InFlight:
    """A microbatch between its forward and its backward."""

    source: Tensor | None
    """The chunk's input, a leaf whose gradient goes upstream; None for token ids."""
    result: Tensor
    """The chunk's output, or the microbatch's share of the loss."""


class AutogradPasses:
    """`Passes` that run operation by operation."""

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
        self._in_flight: dict[int, _InFlight] = {}
        self._sliced: dict[tuple[int, int], _SliceInFlight] = {}
        """Slices in flight, by microbatch and slice."""
        self._pasts: dict[int, Past] = {}
        """The keys and values of microbatches that are cut into slices."""
        # A tensor, so that a CUDA graph reads its current value.
        self._loss_weight = torch.ones((), device=device) if weighs_loss else None

    def begin_step(self, loss_weight: float = 1.0) -> None:
        self._in_flight.clear()
        self._sliced.clear()
        self._pasts.clear()
        if self._loss_weight is not None:
            self._loss_weight.fill_(loss_weight)

    def weights_changed(self) -> None:
        pass

    def forward(
        self,
        microbatch: int,
        fed: Tensor,
        labels: Tensor | None,
        documents: Documents | None = None,
        number: int = 0,
    ) -> Tensor:
        if self._slices:
            return self._slice_forward(microbatch, fed, labels, documents, number)
        source = fed.requires_grad_() if fed.is_floating_point() else None
        result = self.run(fed, labels, documents)
        if torch.is_grad_enabled():
            self._in_flight[microbatch] = _InFlight(source, result)
        return result.detach()

    def _slice_forward(
        self, microbatch: int, fed: Tensor, labels: Tensor | None, documents: Documents | None, number: int
    ) -> Tensor:
        past = self._pasts.setdefault(microbatch, Past(self._slices))
        # Each token of a microbatch has the same weight.
        share = len(self._slices[number]) / (self._slices[-1].stop * self._shares)
        factor = share if self._loss_weight is None else self._loss_weight * share
        flight = _SliceInFlight()
        if fed.is_floating_point():
            anchor = torch.empty(0, requires_grad=True)
            fed = _SliceInput.apply(anchor, fed, flight)  # type: ignore[no-untyped-call]  # torch's
        result = self.run(fed, labels, documents, Slice(past, number, factor))
        if torch.is_grad_enabled():
            flight.end = _SliceOutput.apply(result, flight) if labels is None else result  # type: ignore[no-untyped-call]
            self._sliced[microbatch, number] = flight
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
        if self._slices:
            return self._slice_backward(microbatch, gradient, number)
        flight = self._in_flight.pop(microbatch)
        backward_from(flight.result, None if gradient is None else gradient.to(flight.result.dtype))
        return None if flight.source is None else flight.source.grad

    def _slice_backward(self, microbatch: int, gradient: Tensor | None, number: int) -> Tensor | None:
        flight, past = self._sliced.pop((microbatch, number)), self._pasts[microbatch]
        past.backwards_left -= 1
        if past.backwards_left == 0:
            del self._pasts[microbatch]
        flight.of_output, end = gradient, flight.end
        assert end is not None
        # The graph holds the flight, which must not hold the graph.
        flight.end = None
        torch.autograd.backward(end)
        return flight.of_input
