"""Sections of a payload, each starting at a multiple of 16 bytes."""

from itertools import pairwise
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16


class Layout:
    """Where the sections of one payload lie. Given as (dtype, shape), in order."""

    def __init__(self, *sections: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._sections = sections
        self._sizes = [prod(shape) * dtype.itemsize for dtype, shape in sections]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        spans = zip(pairwise(self._starts), self._sizes, strict=True)
        self._gaps = [slice(start + size, end) for (start, end), size in spans if start + size < end]

    @property
    def nbytes(self) -> int:
        """Bytes of all sections with the gaps between and behind them."""
        return self._starts[-1]

    def views(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The sections as views of `payload`, uint8 `[nbytes]` whose storage offset is a multiple of 16."""
        return [
            payload[start : start + size].view(dtype).view(shape)
            for (dtype, shape), start, size in zip(self._sections, self._starts, self._sizes, strict=False)
        ]

    def raw(self, payload: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The bytes of the sections, as views of a payload in host memory."""
        return [payload[start : start + size] for start, size in zip(self._starts, self._sizes, strict=False)]

    def gaps_are_clear(self, payload: NDArray[np.uint8]) -> bool:
        """Whether the bytes between sections are as `clear_gaps` leaves them."""
        return not any(payload[gap].any() for gap in self._gaps)

    def clear_gaps(self, payload: torch.Tensor) -> None:
        """Zero the bytes between sections, so that the same tensor always gives the same bytes."""
        for gap in self._gaps:
            payload[gap].zero_()
