"""Messages that hold bytes alone are those of protobuf."""

import hashlib

import pytest
from google.protobuf.message import DecodeError

from wire.data_messages import ArrivingFile, as_bytes, data_message, data_or
from wire.v1.control_pb2 import DataChunk, PutLayerChunk

FIELD = PutLayerChunk.DATA_FIELD_NUMBER
parse = data_or(PutLayerChunk.FromString, FIELD)


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 1 << 20, 1 << 21])
def test_bytes_alone_are_written_as_protobuf_writes_them(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    for message, field in ((PutLayerChunk(data=data), FIELD), (DataChunk(data=data), 1)):
        written = data_message(field, data)
        assert written == as_bytes(written) == as_bytes(message)
    read = parse(data_message(FIELD, data))
    assert isinstance(read, memoryview) and read == data


@pytest.mark.parametrize(
    "message",
    [
        PutLayerChunk(),
        PutLayerChunk(step=3, unit="embed", total_bytes=9, data=b"abc"),
        PutLayerChunk(data=b"abc", weights_at=7),
        PutLayerChunk(unit="embed"),
    ],
)
def test_other_messages_are_read_by_protobuf(message: PutLayerChunk) -> None:
    assert parse(as_bytes(message)) == message


def test_bytes_that_are_no_message_are_refused() -> None:
    whole = data_message(FIELD, bytes(1000))
    for damaged in (whole[:-1], whole + b"\xff", whole[:2]):
        with pytest.raises(DecodeError):
            parse(damaged)


def test_a_file_arrives_in_parts_or_ends_early() -> None:
    data = bytes(range(256)) * 100
    for came in (len(data), 300, 0):
        file = ArrivingFile(len(data))
        file.take(data[: came // 2])
        file.take(memoryview(data)[came // 2 : came])
        assert file.size == came
        assert file.read() == (data[:came], hashlib.sha256(data[:came]).hexdigest())
