"""Where the sections of a payload lie, each from a multiple of 16 bytes. Torch-free."""

from itertools import pairwise
from math import prod

_ALIGNMENT = 16
_ITEM_BYTES = {"uint8": 1, "float16": 2, "int64": 8}

Section = tuple[str, tuple[int, ...]]
"""The dtype's name and the shape of one section."""


def aligned(size: int) -> int:
    """Bytes up to where the next section starts."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Sections:
    """Where the sections of one payload lie, given in order."""

    def __init__(self, *sections: Section) -> None:
        self._sections = sections
        self._sizes = [prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in sections]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + aligned(size))
        spans = zip(pairwise(self._starts), self._sizes, strict=True)
        self._gaps = [slice(start + size, end) for (start, end), size in spans if start + size < end]

    @property
    def nbytes(self) -> int:
        """Bytes of all sections with the gaps between and behind them."""
        return self._starts[-1]
