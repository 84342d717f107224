"""The frame of the bulk stream: a 64-byte header and a part of one tensor.

A tensor is cut into pieces of 256 KiB minus 64 bytes; the last may be shorter. A frame carries one piece, or
on a fast line several consecutive pieces, to reduce the overhead per frame.

    offset  size  field
         0     2  magic, "TW"
         2     1  frame version
         3     1  direction
         4     8  run tag: the first 8 bytes of SHA-256 of the run id
        12     8  link session
        20     8  sequence: the number of its first piece, from 0 in each direction of a session
        28    16  epoch, step, microbatch, boundary
        44     4  length of the whole tensor
        48     4  offset of this payload in it
        52     4  length of this payload
        56     4  reserved, zero
        60     4  CRC32C of the 60 bytes above and the payload

Numbers are little-endian. A tensor's pieces have consecutive sequence numbers, so any frame shows where its
tensor starts and ends in the stream.
"""

import struct
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import google_crc32c
import numpy as np

from wire.errors import LinkError, ProtocolViolationError
from wire.spec import ON_LINKS, Direction, TensorKey

FRAME_BYTES = 256 * 1024
HEADER_BYTES = 64
PAYLOAD_BYTES = FRAME_BYTES - HEADER_BYTES
"""The most payload bytes in a piece."""
MOST_PIECES = 16
"""The most pieces in a frame. They make 4 MiB, for lines of more than 4 Gbit/s."""
MOST_FRAME_BYTES = HEADER_BYTES + MOST_PIECES * PAYLOAD_BYTES
FRAME_SECONDS = 0.008
"""The time that a frame should take on the line at most, because later data waits for it."""
MAX_TENSOR_BYTES = 2**32 - 1

_MAGIC = b"TW"
_VERSION = 1
_FIELDS = struct.Struct("<2sBBQQQIIIIIII4x")
_CRC = struct.Struct("<I")
_SEQUENCE = struct.Struct("<Q")
_DIRECTION_AT = 3
_SEQUENCE_AT = 20
assert _FIELDS.size + _CRC.size == HEADER_BYTES


class DamagedFrameError(LinkError):
    """The checksum does not match, so nothing in the frame can be trusted.

    `sequence` is the number in the header, which may be wrong; None if the frame is too short.
    """

    def __init__(self, message: str, sequence: int | None) -> None:
        super().__init__(message)
        self.sequence = sequence


@dataclass(frozen=True, slots=True)
class Frame:
    """One or more pieces of a tensor. `payload` starts at `offset` of the tensor's `total` bytes.

    It may be a view of the sender's tensor or of the received message, without a copy.
    """

    session: int
    sequence: int
    key: TensorKey
    total: int
    offset: int
    payload: bytes | memoryview


def pieces_at(rate: float, payload_bytes: int = PAYLOAD_BYTES) -> int:
    """The pieces per frame for a line that carries `rate` bytes per second; 0 if the rate is unknown."""
    return max(1, min(MOST_PIECES, int(FRAME_SECONDS * rate / payload_bytes)))


def run_tag(run_id: str) -> int:
    """The run's id as frames carry it."""
    return int.from_bytes(sha256(run_id.encode()).digest()[:8], "little")


def pack_frame(frame: Frame, tag: int) -> bytes:
    """The frame's bytes. Raises `LinkError` if a number does not fit its field."""
    key = frame.key
    try:
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            key.direction,
            tag,
            frame.session,
            frame.sequence,
            key.epoch,
            key.step,
            key.microbatch,
            key.boundary,
            frame.total,
            frame.offset,
            len(frame.payload),
        )
    except struct.error as error:
        raise LinkError(f"cannot pack a frame of {key}: a number does not fit its field ({error})") from error
    crc = _checksum(fields, frame.payload)
    return b"".join((fields, _CRC.pack(crc), frame.payload))


def parse_frame(data: bytes, tag: int) -> Frame:
    """Make all checks that a single frame allows. The frame's payload is a view of `data`.

    Raises:
        DamagedFrameError: the frame is too short, or its checksum differs.
        ProtocolViolationError: the frame is intact, but no correct peer of this run sends it.
    """
    if len(data) > MOST_FRAME_BYTES:
        raise ProtocolViolationError(f"a frame of {len(data)} bytes arrived; the limit is {MOST_FRAME_BYTES}")
    if len(data) < HEADER_BYTES:
        sequence = _SEQUENCE.unpack_from(data, _SEQUENCE_AT)[0] if len(data) >= _SEQUENCE_AT + 8 else None
        raise DamagedFrameError(f"a frame of {len(data)} bytes is shorter than its header", sequence)
    fields, payload = data[: _FIELDS.size], memoryview(data)[HEADER_BYTES:]
    (crc,) = _CRC.unpack_from(data, _FIELDS.size)
    if _checksum(fields, payload) != crc:
        sequence = _SEQUENCE.unpack_from(data, _SEQUENCE_AT)[0]
        raise DamagedFrameError(
            f"the checksum of a frame differs (its header has number {sequence})", sequence
        )
    magic, version, direction, run, session, sequence, *place, total, offset, length = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolViolationError(
            f"a frame starts with {magic!r}, version {version}; expected {_MAGIC!r}, version {_VERSION}: "
            "install the same thinwire on both nodes"
        )
    if run != tag:
        raise ProtocolViolationError(f"a frame of another run arrived (tag {run:016x}, expected {tag:016x})")
    if direction not in ON_LINKS or data[56:60] != bytes(4):
        raise ProtocolViolationError(f"frame {sequence} has an unknown direction or reserved bits set")
    if length != len(payload) or not 0 < length <= total or offset > total - length:
        raise ProtocolViolationError(
            f"frame {sequence} declares {length} bytes at {offset} of {total} but has {len(payload)}"
        )
    epoch, step, microbatch, boundary = place
    key = TensorKey(epoch, step, microbatch, boundary, Direction(direction))
    return Frame(session, sequence, key, total, offset, payload)


def _checksum(fields: bytes, payload: bytes | memoryview) -> int:
    # The library accepts only bytes and arrays.
    return int(google_crc32c.extend(google_crc32c.value(fields), np.frombuffer(payload, dtype=np.uint8)))


class FramePlace(NamedTuple):
    """Where a frame belongs, from its header. Unverified until a received frame is parsed."""

    sequence: int
    key: TensorKey | None
    """None for an unknown direction."""
    offset: int
    is_last: bool
    """Whether it ends the tensor."""


def frame_place(data: bytes) -> FramePlace:
    """The place of a frame of at least `HEADER_BYTES`. This checks nothing, so it is cheap."""
    *_, direction, _, _, sequence, epoch, step, microbatch, boundary, total, offset, length = (
        _FIELDS.unpack_from(data)
    )
    known = direction in ON_LINKS
    key = TensorKey(epoch, step, microbatch, boundary, Direction(direction)) if known else None
    return FramePlace(sequence, key, offset, offset + length == total)


def frame_direction(data: bytes) -> Direction:
    return Direction(data[_DIRECTION_AT])
