"""Packed bytes that are damaged, cut, swapped or forged never crash a decoder or pass for a tensor."""

from functools import cache

import google_crc32c
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import each
from tests.support.examples import examples
from wire.codecs.header import HEADER_BYTES, seal
from wire.codecs.registry import codec, codec_names
from wire.errors import CodecError, NonFiniteError, PackedMismatchError
from wire.spec import TensorSpec

SPEC = TensorSpec(torch.float32, (2, 5, 70))
SOURCE = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(3))

names = st.sampled_from(codec_names())
offsets = st.integers(0, 2**31)


@cache
def intact(name: str) -> torch.Tensor:
    """`SOURCE` by this codec; tests change copies of it."""
    return codec(name).encode(SOURCE)


@settings(max_examples=examples(600))
@given(name=names, changes=st.lists(st.tuples(offsets, st.integers(1, 255)), min_size=1, max_size=8))
def test_changed_bytes_are_refused(name: str, changes: list[tuple[int, int]]) -> None:
    damaged = intact(name).clone()
    for offset, change in changes:
        damaged[offset % damaged.numel()] ^= change
    if torch.equal(damaged, intact(name)):
        return  # two changes of one byte undid each other
    with pytest.raises(PackedMismatchError):
        codec(name).decode(damaged, SPEC)


@settings(max_examples=examples(300))
@given(name=names, keep=offsets, more=st.binary(max_size=80))
def test_other_lengths_are_refused(name: str, keep: int, more: bytes) -> None:
    start = intact(name)[: keep % intact(name).numel()]
    damaged = torch.cat((start, torch.tensor(list(more), dtype=torch.uint8)))
    if torch.equal(damaged, intact(name)):
        return
    with pytest.raises(PackedMismatchError):
        codec(name).decode(damaged, SPEC)


@settings(max_examples=examples(700))
@given(
    name=names,
    start=offsets,
    content=st.one_of(
        st.binary(min_size=1, max_size=40),
        st.tuples(st.sampled_from((b"\x00", b"\xff", b"\x7c", b"\x80")), st.integers(1, 600)).map(
            lambda fill: fill[0] * fill[1]
        ),
    ),
)
def test_forged_bytes_give_a_finite_tensor_or_a_refusal(name: str, start: int, content: bytes) -> None:
    """A peer may send any payload with a right checksum: then values are wrong, but form is not."""
    forged = intact(name).clone()
    start %= forged.numel()
    content = content[: forged.numel() - start]
    forged[start : start + len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    if forged[48:52].tolist() == [0xFF, 0x7F, 0, 0]:
        return  # the mark of a tensor that is not finite: `seal` refuses it
    seal(forged.numpy())
    try:
        decoded = codec(name).decode(forged, SPEC)
    except CodecError:
        return
    assert decoded.shape == SPEC.shape and decoded.dtype == SPEC.dtype and decoded.isfinite().all()


def reseal(packed: torch.Tensor) -> torch.Tensor:
    seal(packed.numpy())
    return packed


@each(
    ("offset", "value", "field"),
    [
        (0, 0, "magic"),
        (4, 9, "version"),
        (5, 4, "codec"),
        (6, 3, "bits"),
        (7, 32, "tile"),
        (8, 1, "dtype"),
        (9, 2, "dimensions"),
        (10, 1, "share"),
        (15, 0, "tau"),
        (19, 1, "constant"),
        (19, 0x80, "a number -0.0"),
        (20, 9, "extent 0"),
        (24, 9, "extent 1"),
        (28, 9, "extent 2"),
        (32, 1, "extent 3"),
        (36, 1, "extent 4"),
        (40, 9, "payload bytes"),
        (51, 0x20, "exponent"),
        (52, 1, "unknown fields"),
        (59, 1, "unknown fields"),
    ],
)
def test_a_wrong_field_is_named_even_with_a_right_checksum(offset: int, value: int, field: str) -> None:
    forged = intact("tah").clone()
    forged[offset] = value
    with pytest.raises(PackedMismatchError, match=field) as caught:
        codec("tah").decode(reseal(forged), SPEC)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("exponent", [-162, 116, 2**31 - 1, -(2**31)])
def test_exponents_that_no_finite_tensor_has_are_refused(exponent: int) -> None:
    forged = intact("fixed-8").clone()
    forged[48:52].view(torch.int32).fill_(exponent)
    with pytest.raises(PackedMismatchError, match="exponent"):
        codec("fixed-8").decode(reseal(forged), SPEC)


@each("half", [float("nan"), float("inf"), float("-inf")])
@each(("name", "offset"), [("tah", 64), ("tah", 112), ("fixed-8", 64)])
def test_scales_and_zero_points_that_are_not_finite_are_refused(name: str, offset: int, half: float) -> None:
    forged = intact(name).clone()
    forged[offset : offset + 2].view(torch.float16).fill_(half)
    with pytest.raises((NonFiniteError, PackedMismatchError), match=r"not finite|below"):
        codec(name).decode(reseal(forged), SPEC)


@pytest.mark.parametrize("name", ["tah", "fixed-8"])
def test_a_scale_of_zero_is_refused(name: str) -> None:
    forged = intact(name).clone()
    forged[64:66] = 0
    with pytest.raises(PackedMismatchError, match="scale of zero"):
        codec(name).decode(reseal(forged), SPEC)


def test_a_negative_scale_of_a_fixed_point_codec_is_refused() -> None:
    forged = intact("fixed-8").clone()
    forged[65] |= 0x80
    with pytest.raises(PackedMismatchError, match="below"):
        codec("fixed-8").decode(reseal(forged), SPEC)


def test_a_bit_map_with_another_count_is_refused() -> None:
    forged = intact("tah").clone()
    forged[64 + 48 + 48] ^= 1
    with pytest.raises(PackedMismatchError, match="bit-map"):
        codec("tah").decode(reseal(forged), SPEC)


def test_the_worst_of_several_tah_faults_is_named() -> None:
    forged = intact("tah").clone()
    forged[64 + 48 + 48] ^= 1
    forged[66:68].view(torch.float16).fill_(-0.0)
    with pytest.raises(PackedMismatchError, match="scale of zero"):
        codec("tah").decode(reseal(forged), SPEC)
    forged[112:114].view(torch.float16).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="not finite"):
        codec("tah").decode(reseal(forged), SPEC)


@each("bits", range(2, 11))
def test_a_code_beyond_the_range_is_refused(bits: int) -> None:
    name = f"fixed-{bits}"
    forged = intact(name).clone()
    for plane in range(bits):
        forged[64 + 48 + plane * 20 * 8] |= 1
    with pytest.raises(PackedMismatchError, match="code beyond"):
        codec(name).decode(reseal(forged), SPEC)


@pytest.mark.parametrize(
    ("name", "width"),
    [("tah", 64), ("tah", 70), ("tah", 127), ("fixed-2", 70), ("fixed-7", 127), ("fixed-10", 64)],
)
def test_every_bit_of_a_payload_counts_or_is_refused(name: str, width: int) -> None:
    """Bits that fill up short tiles, sections and bytes, and pivots of tiles that have none, hide nothing."""
    spec = TensorSpec(torch.float32, (1, 3, width))
    source = torch.randn(spec.shape, generator=torch.Generator().manual_seed(4))
    source[0, 0, 3] = 50.0  # turned by tah; the last row's short tile is turned too
    source[0, 2, -1] = -60.0
    packed = codec(name).encode(source)
    decoded = codec(name).decode(packed, spec)
    for bit in range(8 * HEADER_BYTES, 8 * packed.numel()):
        forged = packed.clone()
        forged[bit // 8] ^= 1 << bit % 8
        try:
            found = codec(name).decode(reseal(forged), spec)
        except CodecError:
            continue
        assert not torch.equal(found, decoded), f"byte {bit // 8 - HEADER_BYTES}, bit {bit % 8}"


@pytest.mark.parametrize("name", ["tah", "fixed-8"])
def test_filling_that_holds_something_is_named(name: str) -> None:
    forged = intact(name).clone()
    forged[64 + 40] = 1  # behind the scales of 20 tiles
    with pytest.raises(PackedMismatchError, match=f"{name} .*padding"):
        codec(name).decode(reseal(forged), SPEC)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_raw_values_that_are_not_finite_are_refused(name: str) -> None:
    forged = intact(name).clone()
    forged[64:68] = 0xFF
    with pytest.raises(NonFiniteError):
        codec(name).decode(reseal(forged), SPEC)


@pytest.mark.parametrize("value", [66048.0, -66048.0, 1e30, torch.inf, torch.nan])
def test_what_no_encoder_makes_of_fp16_is_refused(value: float) -> None:
    """The first is the smallest bf16 beyond what fp16's largest is rounded to."""
    packed = codec("bf16").encode(torch.ones(3, 70, dtype=torch.float16))
    packed[HEADER_BYTES:].view(torch.bfloat16)[77] = value
    seal(packed.numpy())
    with pytest.raises(NonFiniteError):
        codec("bf16").decode(packed, TensorSpec(torch.float16, (3, 70)))


def test_another_spec_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("allocated for bytes that were not checked")

    monkeypatch.setattr(torch, "empty", refuse)
    for spec in (
        TensorSpec(torch.float32, (2**20, 2**10, 2**10)),
        TensorSpec(torch.bfloat16, SPEC.shape),
        TensorSpec(torch.float32, (5, 2, 70)),
        TensorSpec(torch.float32, (10, 70)),
    ):
        with pytest.raises(PackedMismatchError):
            codec("tah").decode(intact("tah"), spec)


@each("sender", codec_names())
@each("receiver", codec_names())
def test_no_codec_reads_anothers_bytes(sender: str, receiver: str) -> None:
    if sender != receiver:
        with pytest.raises(PackedMismatchError):
            codec(receiver).decode(intact(sender), SPEC)


@pytest.mark.parametrize("packed", [torch.zeros(80), torch.zeros(8, 10, dtype=torch.uint8)])
def test_what_is_no_row_of_bytes_is_refused(packed: torch.Tensor) -> None:
    with pytest.raises(PackedMismatchError, match="contiguous uint8"):
        codec("tah").decode(packed, SPEC)


def test_split_packing_gives_the_same_bytes() -> None:
    """What a GPU's owner does: pack, copy, seal; and open, copy, unpack."""
    which = codec("tah")
    packed = which.pack(SOURCE)
    assert packed[60:64].tolist() == [0, 0, 0, 0]
    buffer = bytearray(packed.numpy().tobytes())
    seal(buffer)
    assert bytes(buffer) == intact("tah").numpy().tobytes()
    checksum = google_crc32c.value(bytes(buffer[:60] + buffer[HEADER_BYTES:]))
    assert int.from_bytes(buffer[60:64], "little") == checksum
    for received in (bytes(buffer), buffer, memoryview(buffer)):
        header = which.open(received, SPEC)
        unpacked = which.unpack(torch.frombuffer(buffer, dtype=torch.uint8), SPEC, header)
        assert torch.equal(unpacked, which.decode(intact("tah"), SPEC))
