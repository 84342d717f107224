"""torch's checks of the custom operators of `tah` and `fixed-b` on any device: fakes, schemas, aliasing."""

import torch

from kernels.fixed import ops as fixed_ops
from kernels.tah import ops as tah_ops
from wire.codecs import tah
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat
from wire.codecs.registry import codec


def check_operators(name: str, x: torch.Tensor) -> None:
    """Check encoder and decoder of `name` ("tah" or "fixed-b") with the sections of `x`, of three dimensions.

    Raises torch.testing._internal.optests.OpCheckError.
    """
    layout = (
        tah._layout(tuple(x.shape))
        if name == "tah"
        else FixedCodec(FixedFormat(int(name[6:])))._layout(tuple(x.shape))
    )
    exponent = torch.zeros(1, dtype=torch.int32, device=x.device)
    sections = [section.clone() for section in layout.views(codec(name).encode(x)[64:])]
    if name == "tah":
        # Sections in buffers of their own, of whole words.
        for index in (2, 3):
            size = sections[index].numel()
            padded = torch.zeros(-(-size // 16) * 16, dtype=torch.uint8, device=x.device)
            padded[:size] = sections[index]
            sections[index] = padded[:size]
        samples, tiles = tah.samples_and_tiles(tuple(x.shape))
        split = samples, tah.four_bit_tiles(tiles)
        torch.library.opcheck(tah_ops.encode, (x, *sections, exponent, *split, tah.TAU))
        torch.library.opcheck(tah_ops.decode, (*sections, torch.empty_like(x), exponent, *split))
    else:
        torch.library.opcheck(fixed_ops.encode, (x, *sections, exponent, 1.0))
        torch.library.opcheck(fixed_ops.decode, (*sections, torch.empty_like(x), exponent, 1.0))
