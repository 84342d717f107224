"""Frames: what is packed comes back, and nothing else is ever taken for a frame."""

import random
import struct
from hashlib import sha256

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import LinkError, ProtocolViolationError
from wire.frames import (
    FRAME_BYTES,
    HEADER_BYTES,
    MOST_FRAME_BYTES,
    MOST_PIECES,
    PAYLOAD_BYTES,
    DamagedFrameError,
    Frame,
    frame_direction,
    pack_frame,
    parse_frame,
    pieces_at,
    run_tag,
)
from wire.spec import ON_LINKS, Direction, TensorKey

TAG = run_tag("test-run")
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    key = TensorKey(draw(U32), draw(U32), draw(U32), draw(U32), draw(st.sampled_from(sorted(ON_LINKS))))
    payload = draw(st.binary(min_size=1, max_size=300))
    total = draw(st.integers(len(payload), 2**32 - 1))
    offset = draw(st.integers(0, total - len(payload)))
    return Frame(draw(U64), draw(U64), key, total, offset, payload)


def a_frame(payload: bytes = b"payload", total: int = 100, offset: int = 10) -> Frame:
    return Frame(7, 42, TensorKey(1, 2, 3, 4, Direction.GRADIENT), total, offset, payload)


def forge(at: int, field: str, value: int | bytes) -> bytes:
    """A frame with one header field replaced and a checksum that fits."""
    data = bytearray(pack_frame(a_frame(), TAG))
    struct.pack_into(field, data, at, value)
    crc = google_crc32c.value(bytes(data[:60] + data[64:]))
    struct.pack_into("<I", data, 60, crc)
    return bytes(data)


@given(frames())
def test_round_trip(frame: Frame) -> None:
    data = pack_frame(frame, TAG)
    assert len(data) == HEADER_BYTES + len(frame.payload)
    assert parse_frame(data, TAG) == frame
    assert frame_direction(data) == frame.key.direction


def test_header_layout_is_fixed() -> None:
    """The bytes that another implementation would have to write."""
    data = pack_frame(a_frame(b"\xaa\xbb"), TAG)
    assert data[:4] == b"TW\x01\x01"
    assert data[4:12] == sha256(b"test-run").digest()[:8]
    assert data[12:60] == struct.pack("<QQIIIIIII4x", 7, 42, 1, 2, 3, 4, 100, 10, 2)
    assert data[60:64] == struct.pack("<I", google_crc32c.value(data[:60] + b"\xaa\xbb"))
    assert data[64:] == b"\xaa\xbb"


def test_a_frame_of_one_piece_is_256_kib_and_of_the_most_4_mib() -> None:
    for pieces, size in ((1, FRAME_BYTES), (MOST_PIECES, MOST_FRAME_BYTES)):
        payload = bytes(pieces * PAYLOAD_BYTES)
        data = pack_frame(a_frame(payload, len(payload), 0), TAG)
        assert len(data) == size
        assert len(parse_frame(data, TAG).payload) == len(payload)
    assert (FRAME_BYTES, MOST_FRAME_BYTES) == (2**18, 2**22 - (MOST_PIECES - 1) * HEADER_BYTES)
    with pytest.raises(ProtocolViolationError, match=f"{MOST_FRAME_BYTES + 1} bytes"):
        parse_frame(data + b"x", TAG)


def test_a_frame_takes_a_slow_line_no_longer_than_a_piece_and_fills_a_fast_one() -> None:
    mbit = 1e6 / 8
    assert [pieces_at(rate * mbit) for rate in (0, 10, 100, 1000, 2500, 10_000, 1e6)] == [
        *(1, 1, 1, 3, 9, 16, 16)
    ]


@pytest.mark.parametrize("direction", Direction)
def test_a_tensor_is_named_in_words(direction: Direction) -> None:
    words = str(TensorKey(1, 2, 3, 4, direction))
    assert words.endswith("of step 3, microbatch 3, boundary 4")
    assert not set("_=()") & set(words)


def test_numbers_that_do_not_fit_are_refused() -> None:
    key = TensorKey(2**32, 0, 0, 0, Direction.ACTIVATION)
    with pytest.raises(LinkError, match="does not fit"):
        pack_frame(Frame(0, 0, key, 1, 0, b"x"), TAG)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (forge(0, "2s", b"XX"), "starts with b'XX'"),
        (forge(2, "B", 9), "version 9"),
        (forge(3, "B", max(Direction) + 1), "unknown direction"),
        (forge(4, "<Q", 1), "another run"),
        (forge(56, "<I", 1), "reserved"),
        (forge(44, "<I", 16), "7 bytes at 10 of 16"),
        (forge(44, "<I", 0), "of 0"),
        (forge(48, "<I", 2**32 - 1), "4294967295"),
        (forge(52, "<I", 6), "6 bytes at 10 of 100 but has 7"),
    ],
)
def test_intact_nonsense_is_a_violation(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolViolationError, match=message):
        parse_frame(data, TAG)


def test_empty_payload_is_a_violation() -> None:
    with pytest.raises(ProtocolViolationError):
        parse_frame(pack_frame(a_frame(b""), TAG), TAG)


def test_damage_reports_the_sequence_as_a_guess() -> None:
    data = bytearray(pack_frame(a_frame(), TAG))
    data[-1] ^= 1
    with pytest.raises(DamagedFrameError) as damaged:
        parse_frame(bytes(data), TAG)
    assert damaged.value.sequence == 42
    with pytest.raises(DamagedFrameError) as short:
        parse_frame(bytes(data[:10]), TAG)
    assert short.value.sequence is None


def test_twenty_thousand_mutations_never_pass() -> None:
    """Flipped, cut, grown and spliced frames are refused with one of two errors, never accepted."""
    rng = random.Random(1)
    originals = [pack_frame(a_frame(rng.randbytes(rng.randrange(1, 90)), 200), TAG) for _ in range(50)]
    outcomes = {DamagedFrameError: 0, ProtocolViolationError: 0}
    for _ in range(24_000):
        data = bytearray(rng.choice(originals))
        match rng.randrange(4):
            case 0:
                for _ in range(rng.randrange(1, 4)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += rng.randbytes(rng.randrange(1, 20))
            case _:
                at = rng.randrange(len(data))
                data[at : at + 8] = rng.randbytes(8)
        if bytes(data) in originals:
            continue
        with pytest.raises((DamagedFrameError, ProtocolViolationError)) as refusal:
            parse_frame(bytes(data), TAG)
        outcomes[refusal.type] += 1
    assert outcomes[DamagedFrameError] > 20_000
    assert outcomes[ProtocolViolationError] == 0  # CRC32C finds every one of these
