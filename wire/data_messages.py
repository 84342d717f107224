"""Messages of the bulk calls to the coordinator, without protobuf's copies of the bytes in them.

A layer's file passes in parts of 1 MiB. protobuf copies each twice to read it, and twice to write it; so a
message that holds bytes in one field and nothing else is read and written here.
"""

import hashlib
import io
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

Parsed = TypeVar("Parsed", bound=Message)

_BYTES = 2
"""protobuf's number for a field that has a length."""
_MOST_LENGTH = 5
"""The most bytes that a length takes, for messages of less than 32 GiB."""


def data_message(field: int, data: bytes | memoryview) -> bytes:
    """The message with these bytes in the field of this number, which is below 16."""
    return b"".join((_head(field, len(data)), data))


def data_or(parse: Callable[[bytes], Parsed], field: int) -> Callable[[bytes], Parsed | memoryview]:
    """A reader of messages. For a message with only this field it returns the field's bytes, not copied."""

    def read(message: bytes) -> Parsed | memoryview:
        for start in range(2, 2 + _MOST_LENGTH):
            if message[:start] == _head(field, max(0, len(message) - start)):
                return memoryview(message)[start:]
        return parse(message)

    return read


def as_bytes(message: Message | bytes) -> bytes:
    """Serialize a message, unless it is bytes already."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _head(field: int, length: int) -> bytes:
    """The tag and the length before a field's bytes."""
    head = bytearray([field << 3 | _BYTES])
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head)


class ArrivingFile:
    """A file whose parts arrive in order, with its SHA-256 so far. Each part is copied once."""

    def __init__(self, size: int) -> None:
        """`size`: the most bytes that arrive. Memory is used as they arrive, and does not move."""
        self.size = 0
        """The bytes that have arrived."""
        self._whole, self._sum = io.BytesIO(bytes(size)), hashlib.sha256()

    def take(self, data: bytes | memoryview) -> None:
        self.size += self._whole.write(data)
        self._sum.update(data)

    def read(self) -> tuple[bytes, str]:
        """All that has arrived, and its SHA-256 in hex."""
        self._whole.truncate()
        return self._whole.getvalue(), self._sum.hexdigest()
