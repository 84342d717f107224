"""Tensors for the compiled loops of codecs, and buffers around which nothing may be written."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_INTEGERS = {4: torch.int32, 2: torch.int16}
_GUARD = 1000


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Finite numbers of any exponent."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(integer := _INTEGERS[dtype.itemsize])
    x = torch.randint(info.min, info.max + 1, shape, dtype=torch.int64, generator=generator)
    return x.to(integer).view(dtype).nan_to_num(1.0, 2.0, 3.0)


def filled(dtype: torch.dtype, filling: int, *shape: int) -> torch.Tensor:
    """Memory of which every byte is `filling`."""
    return torch.full((*shape, dtype.itemsize), filling, dtype=torch.uint8).view(dtype).view(shape)


def check_decode(
    packed: Sequence[torch.Tensor], expected: torch.Tensor, decode: Callable[[torch.Tensor], object]
) -> None:
    """`decode` gives the expected values whatever its buffer held, and writes nothing outside of it."""
    elements = expected.numel()
    before = [part.clone() for part in packed]
    for filling in (0xFF, 0x55):
        memory = filled(expected.dtype, filling, elements + 2 * _GUARD)
        out = memory[_GUARD : _GUARD + elements].view(expected.shape)
        decode(out)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        for guard in (memory[:_GUARD], memory[-_GUARD:]):
            assert bool((guard.view(torch.uint8) == filling).all())
    for part, copy in zip(packed, before, strict=True):
        assert torch.equal(part.view(torch.uint8), copy.view(torch.uint8))


def as_arrays(sections: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Sections as arrays, those of fp16 as int16, as a codec's layout gives them to the loops."""
    return [(part.view(torch.int16) if part.dtype == torch.float16 else part).numpy() for part in sections]
