"""Codecs by the names that run files use: the torch that goes with a form of `wire.codecs.forms`."""

from functools import lru_cache

import torch

from wire.codecs.aqsgd import AqsgdCodec
from wire.codecs.base import Codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.forms import BF16, FP16, FP32, AqsgdForm, FixedForm, TahForm, TrellisForm, codec_names, form
from wire.codecs.raw import HalfCodec, RawCodec
from wire.codecs.tah import TahCodec
from wire.codecs.trellis import TrellisCodec

__all__ = ["codec", "codec_names"]

_RAW: dict[str, Codec] = {
    FP32.name: RawCodec(FP32, torch.float32),
    BF16.name: RawCodec(BF16, torch.bfloat16),
    FP16.name: HalfCodec(),
}


@lru_cache(maxsize=1024)
def codec(name: str) -> Codec:
    """The codec of that name, shared by all callers: it has no state. `ConfigError` for another name."""
    match form(name):
        case FixedForm(parameters=parameters):
            return FixedCodec(parameters.bits)
        case TahForm():
            return TahCodec()
        case TrellisForm(rate=rate):
            return TrellisCodec(rate)
        case AqsgdForm(parameters=parameters):
            return AqsgdCodec(parameters.bits)
        case other:
            return _RAW[other.name]
