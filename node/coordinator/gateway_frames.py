"""The frames on the stream between the coordinator and a gateway of control sessions. Pure.

A frame is a header (length of the rest, kind, number) and its payload. The length is checked before memory is
allocated. The gateway numbers its sessions.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from wire.errors import ProtocolViolationError

HEADER = struct.Struct("<IBI")
MOST_BYTES = 1024 * 1024
"""The most bytes of a payload. The largest message between a node and the coordinator has 260 kB
(`wire.channels`)."""
MOST_TOGETHER = 16_384
"""The most sessions that one frame names."""
_LENGTHS = struct.Struct("<BB")


class Kind(IntEnum):
    """The kind of a frame. The coordinator sends those up to `END`, and a gateway the others."""

    SETUP = 1
    """The gateway's settings, as JSON."""
    ACCEPT = 2
    """The session is open: read its node's messages from now on."""
    SEND = 3
    """A message to a session."""
    SEND_WAITED = 4
    """A message to several sessions, with a number of seconds for each (see `sent_waited`). The frame's
    number is their count."""
    ANSWER = 5
    """A message that may be dropped if many wait."""
    END = 6
    """End the session after sending everything before this frame."""
    READY = 16
    """The gateway accepts connections."""
    OPEN = 17
    """A node with a valid certificate has said hello."""
    SAID = 18
    """A node's message, unchanged."""
    WRONG = 19
    """The node sent something invalid, which the payload describes."""
    CLOSED = 20
    """The session has ended."""
    ALIVE = 21
    """Sent every second. The number is the gateway's count of connections."""


_KINDS = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Opened:
    """The payload of `OPEN`."""

    node_id: str
    """The node's id, from its certificate."""
    host: str
    """The address from which the node dials."""
    hello: bytes
    """The node's first message."""


def frame(kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
    """One frame. Raises ValueError if the payload exceeds the limit of readers."""
    if len(payload) > MOST_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes, more than {MOST_BYTES}")
    return HEADER.pack(len(payload), kind, number) + payload


class FrameReader:
    def __init__(self) -> None:
        self._kept = b""
        """The beginning of an incomplete frame."""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield kind, number and payload of each frame that `data` completes.

        Raises ProtocolViolationError for an unknown kind or a length that is too large."""
        data, at = self._kept + data if self._kept else data, 0
        self._kept = b""
        size = len(data)
        while size - at >= HEADER.size:
            length, kind, number = HEADER.unpack_from(data, at)
            if length > MOST_BYTES or kind not in _KINDS:
                raise ProtocolViolationError(f"no frame has kind {kind} and {length} bytes")
            end = at + HEADER.size + length
            if end > size:
                break
            yield kind, number, data[at + HEADER.size : end]
            at = end
        self._kept = data[at:]


def opened_to_bytes(opened: Opened) -> bytes:
    """The payload of `OPEN`. Raises ValueError if a name has more than 255 bytes."""
    node, host = opened.node_id.encode(), opened.host.encode()
    if max(len(node), len(host)) > 255:
        raise ValueError("a name has at most 255 bytes")
    return _LENGTHS.pack(len(node), len(host)) + node + host + opened.hello


def opened_from_bytes(payload: bytes) -> Opened:
    """The inverse of `opened_to_bytes`. Raises ProtocolViolationError for an invalid payload."""
    try:
        node, host = _LENGTHS.unpack_from(payload)
        at = _LENGTHS.size
        if at + node + host > len(payload):
            raise ValueError("it ends too early")
        return Opened(
            node_id=payload[at : at + node].decode(),
            host=payload[at + node : at + node + host].decode(),
            hello=payload[at + node + host :],
        )
    except (ValueError, struct.error) as error:
        raise ProtocolViolationError(f"a session was opened wrongly: {error}") from None


def sent_waited(numbers: Sequence[int], seconds: Sequence[float], head: bytes, message: bytes) -> bytes:
    """The frame `SEND_WAITED`: each session gets the message, then `head` and its seconds as eight bytes.

    So one number, the last field of the message, can differ from node to node."""
    count = len(numbers)
    each = struct.pack(f"<{count}I{count}d", *numbers, *seconds)
    return frame(Kind.SEND_WAITED, count, each + bytes((len(head),)) + head + message)


def messages_of(count: int, payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the session and message of each entry of a frame `SEND_WAITED`.

    Raises ProtocolViolationError if the payload is too short for this count."""
    start = 12 * count
    if count > MOST_TOGETHER or start >= len(payload):
        raise ProtocolViolationError(f"a frame of {len(payload)} bytes names {count} sessions")
    head_end = start + 1 + payload[start]
    if head_end > len(payload):
        raise ProtocolViolationError(f"a frame of {len(payload)} bytes ends before its message")
    common = payload[head_end:] + payload[start + 1 : head_end]
    for index, number in enumerate(struct.unpack_from(f"<{count}I", payload)):
        at = 4 * count + 8 * index
        yield number, common + payload[at : at + 8]
