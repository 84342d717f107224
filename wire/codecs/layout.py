"""Sections of a payload as tensors and arrays."""

import numpy as np
import torch
from numpy.typing import NDArray

from wire.codecs.sections import Sections

_DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "int64": torch.int64}


class Layout(Sections):
    """Where the sections of one payload lie, and what they hold."""

    def views(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The sections as views of `payload`, uint8 `[nbytes]` whose storage offset is a multiple of 16."""
        return [
            payload[start : start + size].view(_DTYPES[dtype]).view(shape)
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
