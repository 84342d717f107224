"""Codecs by the names that run files use. `trellis-R` stands for one codec for every rate R.

`aqsgd-b` packs nothing by itself: `wire.codecs.aqsgd` makes a codec of it for each tensor.
"""

from difflib import get_close_matches
from functools import lru_cache

import torch

from wire.codecs import aqsgd
from wire.codecs.base import Codec
from wire.codecs.fixed import MAX_BITS, MIN_BITS, FixedCodec
from wire.codecs.raw import HalfCodec, RawCodec
from wire.codecs.tah import TahCodec
from wire.codecs.trellis import PREFIX, RANGE, TrellisCodec, named
from wire.errors import ConfigError

_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RawCodec("fp32", 1, torch.float32),
        RawCodec("bf16", 2, torch.bfloat16),
        HalfCodec(),
        *(FixedCodec(bits) for bits in range(MIN_BITS, MAX_BITS + 1)),
        TahCodec(),
        # One of many rates, for those who go through all codecs.
        TrellisCodec(4.0),
    )
}

_FIXED_NAMES = [name for name in _CODECS if not name.startswith(PREFIX)]
_AQSGD_RANGE = f"{aqsgd.PREFIX}{aqsgd.MIN_BITS} to {aqsgd.PREFIX}{aqsgd.MAX_BITS}"


def codec_names() -> tuple[str, ...]:
    """Every name that `codec` knows but for those with a memory, and one rate of those with a rate."""
    return tuple(_CODECS)


@lru_cache(maxsize=1024)
def codec(name: str) -> Codec:
    """The codec of that name, shared by all callers: it has no state. `ConfigError` for another name."""
    found = _CODECS.get(name) or named(name) or aqsgd.named(name)
    if found is not None:
        return found
    if name.startswith(PREFIX):
        raise ConfigError(f"unknown codec {name!r}: {RANGE} are, with at most three decimals")
    if name.startswith(aqsgd.PREFIX):
        raise ConfigError(f"unknown codec {name!r}: {_AQSGD_RANGE} are")
    close = get_close_matches(name, _CODECS, n=1)
    known = f"{', '.join(_FIXED_NAMES)}, {_AQSGD_RANGE} or {RANGE}"
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {known}"
    raise ConfigError(f"unknown codec {name!r}: {hint}")
