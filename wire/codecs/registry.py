"""The codec for a name of a run file."""

from functools import lru_cache

import torch

from wire.codecs.aqsgd import AqsgdCodec
from wire.codecs.base import Codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import (
    BF16,
    FP16,
    FP32,
    AqsgdFormat,
    DitherFormat,
    FixedFormat,
    TahFormat,
    TrellisFormat,
    codec_format,
    codec_names,
)
from wire.codecs.raw import HalfCodec, RawCodec
from wire.codecs.tah import TahCodec
from wire.codecs.trellis import DitherCodec, TrellisCodec

__all__ = ["codec", "codec_names"]

_RAW: dict[str, Codec] = {
    FP32.name: RawCodec(FP32, torch.float32),
    BF16.name: RawCodec(BF16, torch.bfloat16),
    FP16.name: HalfCodec(),
}


@lru_cache(maxsize=1024)
def codec(name: str) -> Codec:
    """The codec called `name`; stateless, so all callers share it. `ConfigError` for an unknown name."""
    match codec_format(name):
        case FixedFormat(parameters=parameters):
            return FixedCodec(parameters.bits)
        case TahFormat():
            return TahCodec()
        case DitherFormat(rate=rate):
            return DitherCodec(rate)
        case TrellisFormat(rate=rate):
            return TrellisCodec(rate)
        case AqsgdFormat(parameters=parameters):
            return AqsgdCodec(parameters.bits)
        case other:
            return _RAW[other.name]
