"""Codecs by the names that run files use. `trellis-R` stands for one codec for every rate R."""

from difflib import get_close_matches
from functools import lru_cache

import torch

from wire.codecs.base import Codec
from wire.codecs.fixed import MAX_BITS, MIN_BITS, FixedCodec
from wire.codecs.raw import RawCodec
from wire.codecs.tah import TahCodec
from wire.codecs.trellis import PREFIX, RANGE, TrellisCodec, named
from wire.errors import ConfigError

_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RawCodec("fp32", 1, torch.float32),
        RawCodec("bf16", 2, torch.bfloat16),
        RawCodec("fp16", 3, torch.float16),
        *(FixedCodec(bits) for bits in range(MIN_BITS, MAX_BITS + 1)),
        TahCodec(),
        # One of many rates, for those who go through all codecs.
        TrellisCodec(4.0),
    )
}

_FIXED_NAMES = [name for name in _CODECS if not name.startswith(PREFIX)]


def codec_names() -> tuple[str, ...]:
    """Every name that `codec` knows, and one rate of those with a rate."""
    return tuple(_CODECS)


@lru_cache(maxsize=1024)
def codec(name: str) -> Codec:
    """The codec of that name, shared by all callers: it has no state. `ConfigError` for another name."""
    found = _CODECS.get(name) or named(name)
    if found is not None:
        return found
    if name.startswith(PREFIX):
        raise ConfigError(f"unknown codec {name!r}: {RANGE} are, with at most three decimals")
    close = get_close_matches(name, _CODECS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(_FIXED_NAMES)} or {RANGE}"
    raise ConfigError(f"unknown codec {name!r}: {hint}")
