"""Finds the codec for a name in a run file."""

from functools import lru_cache
from importlib import import_module

from wire.codecs.base import Codec
from wire.codecs.formats import codec_format, codec_names

__all__ = ["codec", "codec_names"]


@lru_cache(maxsize=1024)
def codec(name: str) -> Codec:
    """The codec called `name`. It is stateless and shared. Raises `ConfigError` for an unknown name."""
    known = codec_format(name)
    module, kind = known.IMPLEMENTATION
    instance = getattr(import_module(f"{__package__}.{module}"), kind)(known)
    assert isinstance(instance, Codec)
    return instance
