"""Formats, with which the coordinator counts bytes without torch, agree with their codecs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import each
from tests.support.examples import examples
from wire.codecs.aqsgd import AqsgdCodec, SampleBatch
from wire.codecs.formats import (
    HEADER_BYTES,
    WIRE_NUMBERS,
    AqsgdFormat,
    TrellisFormat,
    codec_format,
    codec_names,
)
from wire.codecs.registry import codec
from wire.codecs.sample_cache import SampleCache
from wire.codecs.trellis import TrellisCodec
from wire.errors import CodecError, ConfigError
from wire.spec import TensorSpec

NAMES = [*codec_names(), "trellis-2", "trellis-4.41", "trellis-10", "trellis-5.0", "aqsgd-2", "aqsgd-8"]
extents = st.lists(st.integers(1, 2**12), min_size=1, max_size=5).map(tuple)


@settings(max_examples=examples(300))
@given(name=st.sampled_from(NAMES), shape=extents)
def test_a_format_has_its_codecs_name_parameters_and_sizes(name: str, shape: tuple[int, ...]) -> None:
    known, which = codec_format(name), codec(name)
    assert (known.name, known.parameters) == (which.name, which.parameters)
    assert known.packed_bytes(shape) == which.packed_bytes(TensorSpec(torch.bfloat16, shape))


def test_the_first_pass_of_aqsgd() -> None:
    known, shape = codec_format("aqsgd-4"), (3, 5, 70)
    assert isinstance(known, AqsgdFormat)
    batch = SampleBatch(SampleCache(3, shape[1:], since=0), (0, 1, 2), (False,) * 3, 0)
    packed = AqsgdCodec(AqsgdFormat(4)).of(batch).encode(torch.ones(shape))
    # 2100 bytes of bf16, up to the next multiple of 16.
    assert packed.numel() == known.first_pass_bytes(shape) == HEADER_BYTES + 2112


@settings(max_examples=examples(300))
@given(rate=st.floats(1.9, 10.1) | st.sampled_from([float("nan"), float("inf"), 0.0, -4.0]))
def test_a_trellis_format_takes_rates_from_2_to_10_in_thousandths(rate: float) -> None:
    if not (math.isfinite(rate) and 2000 <= round(rate * 1000) <= 10000):
        with pytest.raises(ConfigError, match="trellis-2 to trellis-10"):
            TrellisFormat(rate)
        return
    known = TrellisFormat(rate)
    assert known.parameters.share == round(rate * 1000)
    assert (
        codec_format(known.name).parameters
        == TrellisCodec(TrellisFormat(known.rate)).parameters
        == known.parameters
    )


@each("shape", [(), (0,), (3, 0), (1,) * 6, (2**32,)])
@each("name", [*codec_names(), "aqsgd-4"])
def test_shapes_that_no_header_can_say_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="1 to 5 dimensions"):
        codec_format(name).packed_bytes(shape)
    if shape != (2**32,) and name != "aqsgd-4":
        with pytest.raises(CodecError, match="1 to 5 dimensions"):
            codec(name).encode(torch.zeros(shape))


def test_no_two_codecs_share_a_wire_number() -> None:
    assert len(set(WIRE_NUMBERS)) == len(WIRE_NUMBERS)
    used = {codec_format(name).parameters.codec for name in NAMES}
    assert used == set(WIRE_NUMBERS)
