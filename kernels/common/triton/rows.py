"""How a tensor's rows lie in memory, as the Triton kernels address them."""

import torch

from kernels.common.tiles import TILE, tiles_per_row


class Rows:
    """`[..., C]` as rows of C contiguous elements `stride` apart; a copy only where no such view exists."""

    __slots__ = ("data", "flat", "pairs", "per_row", "stride", "tiles", "width")

    def __init__(self, x: torch.Tensor) -> None:
        self.width = x.shape[-1]
        self.per_row = tiles_per_row(self.width)
        try:
            data = x.view(-1, self.width)
        except RuntimeError:
            data = x.contiguous().view(-1, self.width)
        if data.stride(1) != 1 and self.width > 1:
            data = data.contiguous()
        self.data = data
        self.stride = data.stride(0) if data.shape[0] > 1 else self.width
        self.tiles = data.shape[0] * self.per_row
        # Tile t starts at element 64 t.
        self.flat = self.width % TILE == 0 and self.stride == self.width
        # Two elements may be read as one aligned word.
        self.pairs = self.flat and data.dtype == torch.bfloat16 and data.data_ptr() % 16 == 0
