"""Moments of matrices in host memory, streamed through the device in pieces while the optimizer steps.

While one piece is updated, the next is copied in and the previous is copied out, so at most three are on the
device (LLMQ, arXiv 2512.15306, section 3.1, also moves moments out first). Pieces are whole blocks, or whole
matrices if the update rule needs them (`UpdateRule.needs_whole`), so the bits are those of whole matrices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.fp8.layout import BLOCK
from node.config.schema import TrainingSection
from node.model.host_memory import HostMemory
from node.model.optimizers import UpdateRule, form_of
from node.model.page_locked import STATE_PIECE

PIECE = STATE_PIECE
"""The elements of a piece, a multiple of a block."""
assert PIECE % BLOCK == 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a matrix and its moments, on the device."""

    parameter: nn.Parameter
    first: int
    """The index of its first element in the flat matrix."""
    count: int
    moments: tuple[Tensor, ...]
    """The flat moments, in the order of `UpdateRule.keys`."""


class HostMoments:
    """The moments of matrices, in the form that `training.moments` names."""

    def __init__(
        self, memory: HostMemory, rules: Mapping[nn.Parameter, UpdateRule], training: TrainingSection
    ) -> None:
        self._memory = memory
        self._pieces: dict[nn.Parameter, list[tuple[Tensor, ...]]] = {}
        for parameter, rule in rules.items():
            elements = parameter.numel()
            parts = [part for moment in rule.moments for part in form_of(training, moment, is_matrix=True)]
            piece = elements if rule.needs_whole else PIECE
            counts = [min(piece, elements - first) for first in range(0, elements, piece)]
            self._pieces[parameter] = [
                tuple(
                    self._new(part.count(count), getattr(torch, part.dtype)).fill_(part.first)
                    for part in parts
                )
                for count in counts
            ]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._pieces

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(part.nbytes for pieces in self._pieces.values() for piece in pieces for part in piece)

    def whole(self, parameter: nn.Parameter) -> list[Tensor]:
        """Copies of a matrix's moments on the host, flat, in the order of `UpdateRule.keys`."""
        self._memory.finish()
        return [torch.cat(part) for part in zip(*self._pieces[parameter], strict=True)]

    def load(self, parameter: nn.Parameter, parts: Sequence[Tensor]) -> None:
        """Replace a matrix's moments by copies of `parts`, which are ordered as in `whole`."""
        self._memory.finish()
        for index, part in enumerate(parts):
            first, flat = 0, part.reshape(-1)
            for piece in self._pieces[parameter]:
                piece[index].copy_(flat[first : first + piece[index].numel()])
                first += piece[index].numel()

    def stream(self) -> Iterator[Piece]:
        """Every piece, in the order of the matrices. The caller updates it, and then it is copied back."""
        memory, device = self._memory, self._memory.device
        places = [
            (parameter, number * pieces[0][0].numel(), host)
            for parameter, pieces in self._pieces.items()
            for number, host in enumerate(pieces)
        ]

        def fetch(index: int) -> tuple[list[Tensor], object]:
            host = places[index][2]
            on_device = [torch.empty_like(part, device=device) for part in host]
            return on_device, memory.copy_in(zip(host, on_device, strict=True))

        coming = fetch(0) if places else None
        leaving: tuple[list[Tensor], object] | None = None
        for index, (parameter, first, host) in enumerate(places):
            assert coming is not None
            on_device, mark = coming
            coming = fetch(index + 1) if index + 1 < len(places) else None
            memory.wait(mark)
            yield Piece(parameter, first, host[0].numel(), tuple(on_device))
            sent = memory.copy_out(zip(on_device, host, strict=True))
            if leaving is not None:
                memory.wait(leaving[1])
            leaving = on_device, sent
        if leaving is not None:
            memory.wait(leaving[1])

    def _new(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._memory.empty(count * dtype.itemsize).view(dtype)
