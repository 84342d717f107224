"""What the coordinator and a gateway of control sessions write to each other: frames on a stream. Pure.

A frame is a header (length of the rest, kind, number) and its payload. A length is checked before anything
is stored for it. The gateway numbers its sessions.
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
"""Sessions that one frame names."""
_LENGTHS = struct.Struct("<BB")


class Kind(IntEnum):
    """What a frame is. The coordinator sends those up to `END`, and a gateway the others."""

    SETUP = 1
    """JSON: what the gateway serves with."""
    ACCEPT = 2
    """The session is open: what its node says is read from now on."""
    SEND = 3
    """A message to a session."""
    SEND_WAITED = 4
    """A message to several sessions, with a number of seconds for each (see `sent_waited`). The number of the
    frame counts them."""
    ANSWER = 5
    """A message that may be left out if many wait."""
    END = 6
    """The session ends once everything before it has been sent."""
    READY = 16
    """The gateway takes connections."""
    OPEN = 17
    """A node with a valid certificate has said hello."""
    SAID = 18
    """A message of a node, as it came."""
    WRONG = 19
    """The node sent what no correct node sends; the payload says what."""
    CLOSED = 20
    """The session is over."""
    ALIVE = 21
    """Comes every second; the number is the gateway's connections."""


_KINDS = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Opened:
    """The payload of `OPEN`."""

    node_id: str
    """The node's id, by its certificate."""
    host: str
    """The address from which it dials."""
    hello: bytes
    """The node's first message."""


def frame(kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
    """One frame. Raises ValueError if the payload is larger than any reader takes."""
    if len(payload) > MOST_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes, more than {MOST_BYTES}")
    return HEADER.pack(len(payload), kind, number) + payload


class FrameReader:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._kept = b""
        """The beginning of a frame that is not complete."""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Kind, number and payload of each frame that `data` completes.

        Raises ProtocolViolationError for a length that is too large and for an unknown kind."""
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
    """Raises ProtocolViolationError if it is none."""
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
    """The frame `SEND_WAITED`: to each session the message, then `head` and its seconds as eight bytes.

    That is how a number of a message, which is last in it, differs from node to node."""
    count = len(numbers)
    each = struct.pack(f"<{count}I{count}d", *numbers, *seconds)
    return frame(Kind.SEND_WAITED, count, each + bytes((len(head),)) + head + message)


def messages_of(count: int, payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Session and message of each that a frame `SEND_WAITED` names.

    Raises ProtocolViolationError if the payload is too short for so many."""
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
