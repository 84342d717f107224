"""Moments of matrices in host memory, streamed through the device in pieces while the optimizer steps.

While one piece is stepped, the next comes in and the last one goes out, so at most three are on the device
(LLMQ, papers/llmq.txt, section 3.1: moments are the first of the state to leave). AdamW and the e4m3 blocks
work element by element and block by block, so pieces of whole blocks give the bits of whole matrices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_of

from kernels.fp8.layout import BLOCK, blocks
from kernels.fp8.reference import POWER_UNIT, AdamWStep, Fp8Gradient, Moment, unpack_gradient
from node.model.host_memory import HostMemory
from node.model.page_locked import STATE_PIECE

PIECE = STATE_PIECE
"""Elements; whole blocks."""
assert PIECE % BLOCK == 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a matrix and its moments, on the device: float32 tensors, or e4m3 `Moment`s."""

    parameter: nn.Parameter
    first: int
    """Its first element in the flat matrix."""
    count: int
    moments: tuple[Tensor, ...]
    """Flat, in the order of `HostMoments.parts`."""

    @property
    def packed(self) -> tuple[Moment, Moment]:
        """The mean and the mean square in e4m3."""
        return Moment(*self.moments[:3]), Moment(*self.moments[3:])


class HostMoments:
    """Two moments a matrix: fp32, or e4m3 codes with a scale and a power a block."""

    def __init__(self, memory: HostMemory, parameters: Sequence[nn.Parameter], *, packed: bool) -> None:
        self._memory = memory
        self._packed = packed
        self._pieces: dict[nn.Parameter, list[tuple[Tensor, ...]]] = {}
        for parameter in parameters:
            counts = [
                min(PIECE, parameter.numel() - first) for first in range(0, max(1, parameter.numel()), PIECE)
            ]
            self._pieces[parameter] = [self._zeros(count) for count in counts]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._pieces

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(part.nbytes for pieces in self._pieces.values() for piece in pieces for part in piece)

    def whole(self, parameter: nn.Parameter) -> list[Tensor]:
        """Copies of a matrix's moments on the host: mean and mean square in fp32 of its shape; or of each
        codes uint8 [n], scales bf16 [blocks] and powers uint8 [blocks]."""
        self._memory.finish()
        parts = [torch.cat(part) for part in zip(*self._pieces[parameter], strict=True)]
        return parts if self._packed else [part.view(parameter.shape) for part in parts]

    def load(self, parameter: nn.Parameter, parts: Sequence[Tensor]) -> None:
        """Replace what `whole` gives by copies of these."""
        self._memory.finish()
        for index, part in enumerate(parts):
            first, flat = 0, part.reshape(-1)
            for piece in self._pieces[parameter]:
                piece[index].copy_(flat[first : first + piece[index].numel()])
                first += piece[index].numel()

    def stream(self) -> Iterator[Piece]:
        """Every piece, in the order of the matrices, for the caller to step; then it goes back."""
        memory, device = self._memory, self._memory.device
        places = [
            (parameter, number * PIECE, host)
            for parameter, pieces in self._pieces.items()
            for number, host in enumerate(pieces)
        ]

        def fetch(index: int) -> tuple[list[Tensor], object]:
            host = places[index][2]
            there = [torch.empty_like(part, device=device) for part in host]
            return there, memory.copy_in(zip(host, there, strict=True))

        coming = fetch(0) if places else None
        leaving: tuple[list[Tensor], object] | None = None
        for index, (parameter, first, host) in enumerate(places):
            assert coming is not None
            there, mark = coming
            coming = fetch(index + 1) if index + 1 < len(places) else None
            memory.wait(mark)
            yield Piece(parameter, first, host[0].numel(), tuple(there))
            sent = memory.copy_out(zip(there, host, strict=True))
            if leaving is not None:
                memory.wait(leaving[1])
            leaving = there, sent
        if leaving is not None:
            memory.wait(leaving[1])

    def _zeros(self, count: int) -> tuple[Tensor, ...]:
        if not self._packed:
            return tuple(self._new(count, torch.float32).zero_() for _ in range(2))
        moments = (self._moment(count) for _ in range(2))
        return tuple(part for moment in moments for part in (moment.codes, moment.scales, moment.powers))

    def _moment(self, count: int) -> Moment:
        """As `Moment.zeros`."""
        return Moment(
            self._new(count, torch.uint8).zero_(),
            self._new(blocks(count), torch.bfloat16).zero_(),
            self._new(blocks(count), torch.uint8).fill_(POWER_UNIT),
        )

    def _new(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._memory.empty(count * dtype.itemsize).view(dtype)


def step_piece(weight: Tensor, gradient: Tensor | Fp8Gradient, piece: Piece, step: AdamWStep) -> None:
    """torch's AdamW on a part of a matrix, in place."""
    values = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient
    mean, square = piece.moments
    adamw_of(
        [weight],
        [values.mul_(step.clip_coefficient)],
        [mean],
        [square],
        [],
        [torch.full((), float(step.step - 1), device=weight.device)],
        amsgrad=False,
        beta1=step.beta1,
        beta2=step.beta2,
        lr=step.lr,
        weight_decay=step.weight_decay,
        eps=step.eps,
        maximize=False,
        fused=weight.is_cuda,
    )
