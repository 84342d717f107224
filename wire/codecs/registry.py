"""Codecs by the names that run files use."""

from difflib import get_close_matches

import torch

from wire.codecs.base import Codec
from wire.codecs.fixed import MAX_BITS, MIN_BITS, FixedCodec
from wire.codecs.raw import RawCodec
from wire.codecs.tah import TahCodec
from wire.errors import ConfigError

_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RawCodec("fp32", 1, torch.float32),
        RawCodec("bf16", 2, torch.bfloat16),
        RawCodec("fp16", 3, torch.float16),
        *(FixedCodec(bits) for bits in range(MIN_BITS, MAX_BITS + 1)),
        TahCodec(),
    )
}


def codec_names() -> tuple[str, ...]:
    """Every name that `codec` knows."""
    return tuple(_CODECS)


def codec(name: str) -> Codec:
    """The codec of that name, shared by all callers: it has no state. `ConfigError` for another name."""
    try:
        return _CODECS[name]
    except KeyError:
        close = get_close_matches(name, _CODECS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(_CODECS)}"
        raise ConfigError(f"unknown codec {name!r}: {hint}") from None
