"""A chunk's forward and backward of one microbatch at a time, through autograd.

`node.stage.captured_passes` does the same with CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.attention.reach import Documents
from node.model.chunk import Chunk, compute_precision

Call = Callable[[Tensor, Tensor | None, Documents | None], Tensor]
"""Maps a chunk's input to hidden states, or with labels to the mean loss; attention stays in documents."""


class Passes(Protocol):
    """The passes of one chunk. Several microbatches may be between forward and backward."""

    def begin_step(self, loss_weight: float = 1.0) -> None:
        """Drop the microbatches of an unfinished step; weights may have changed. `loss_weight` multiplies
        losses where labels are masked or the loss is scaled."""
        ...

    def weights_changed(self) -> None:
        """Within a step: later passes are of the new weights."""
        ...

    def forward(
        self, microbatch: int, fed: Tensor, labels: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        """As `node.stage.stage_model.StageModel.forward`."""
        ...

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """As `node.stage.stage_model.StageModel.backward`."""
        ...


class _Given(torch.autograd.Function):
    """A scalar whose backward gives `made` this gradient."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return made.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def backward_from(made: Tensor, gradient: Tensor | None) -> None:
    """Backward from a chunk's output with the gradient of its shape, or from a scalar loss with None.

    `torch.autograd.backward(made, gradient)` has the same bits, but imports sympy to compare two shapes: on a
    CPU half a second before the first step ends, and 34 MiB for as long as the process lives.
    """
    if gradient is not None:
        made = _Given.apply(made, gradient)  # type: ignore[no-untyped-call]  # torch's
    torch.autograd.backward(made)


class ChunkCall(nn.Module):
    """A chunk as a `Call`."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, fed: Tensor, labels: Tensor | None, documents: Documents | None) -> Tensor:
        if labels is None:
            made: Tensor = self.chunk(fed, documents)
            return made
        return self.chunk.loss(fed, labels, documents)


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
        self, call: Call, precision: str, device: torch.device, shares: int, *, weighs_loss: bool = False
    ) -> None:
        """
        Args:
            precision: `[training] precision`.
            shares: the loss of a microbatch is divided by this,
            weighs_loss: and multiplied by what `begin_step` is given.
        """
        self._call = call
        self._precision = precision
        self._device = device
        self._shares = shares
        self._in_flight: dict[int, _InFlight] = {}
        # A tensor, so that a CUDA graph reads the present value.
        self._loss_weight = torch.ones((), device=device) if weighs_loss else None

    def begin_step(self, loss_weight: float = 1.0) -> None:
        self._in_flight.clear()
        if self._loss_weight is not None:
            self._loss_weight.fill_(loss_weight)

    def weights_changed(self) -> None:
        pass

    def forward(
        self, microbatch: int, fed: Tensor, labels: Tensor | None, documents: Documents | None = None
    ) -> Tensor:
        source = fed.requires_grad_() if fed.is_floating_point() else None
        result = self.run(fed, labels, documents)
        self._in_flight[microbatch] = _InFlight(source, result)
        return result.detach()

    def run(self, fed: Tensor, labels: Tensor | None, documents: Documents | None) -> Tensor:
        """The chunk's output, or the microbatch's share of the loss, with its graph."""
        with compute_precision(self._precision, self._device):
            made = self._call(fed, labels, documents)
        if labels is None:
            return made
        return (made if self._loss_weight is None else made * self._loss_weight) / self._shares

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        flight = self._in_flight.pop(microbatch)
        backward_from(flight.result, None if gradient is None else gradient.to(flight.result.dtype))
        return None if flight.source is None else flight.source.grad
