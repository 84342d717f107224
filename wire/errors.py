"""Every error a user can meet, as one tree.

    ThinwireError                    one line for the user; exit code 1
    ├── UserError                    what the user gave is wrong; exit code 2
    │   ├── ConfigError              a run file: unknown key, bad value, impossible split
    │   ├── TokenError               a join token that cannot be read or names another run
    │   └── DataError                text that is missing, empty or unreadable
    ├── Refused                      the other side said no, with its reason (carries a `RefusalCode`)
    ├── CodecError                   a tensor cannot be packed or unpacked
    │   ├── NonFiniteError           it holds infinities or NaNs
    │   └── PackedMismatchError      packed bytes are not what was negotiated
    │       └── MemoryMismatchError  both ends of a boundary remember different activations
    ├── LinkError                    a connection to a neighbour or the coordinator
    │   ├── ProtocolViolationError   the peer sent what it must never send
    │   ├── NotYetError              the coordinator is there, and still reads what it goes on from
    │   └── LinkLostError            gone, and not back within the time allowed
    └── RunError                     the run cannot go on; its newest snapshot is intact
        └── DeviceLostError          one of this node's devices is gone, and the node with it
            └── MemoryExhaustedError its memory did not suffice for the stage that it was given

Messages name what was wrong, what was expected and what to do, in one line.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


class ThinwireError(Exception):
    """Base of all errors that are shown to a user as one line."""

    exit_code = 1


class UserError(ThinwireError):
    """What the user gave cannot be used."""

    exit_code = 2


class ConfigError(UserError):
    """A run file has an unknown key, a bad value or an impossible combination."""


class TokenError(UserError):
    """A join token cannot be read or does not fit."""


class DataError(UserError):
    """Training text is missing, empty or unreadable."""


class RefusalCode(StrEnum):
    """Why the coordinator or a neighbour refused. The wire carries the value."""

    TOKEN_UNKNOWN = "token-unknown"
    TOKEN_EXPIRED = "token-expired"
    TOKEN_USED_UP = "token-used-up"
    TOKEN_REVOKED = "token-revoked"
    WRONG_RUN = "wrong-run"
    VERSION_MISMATCH = "version-mismatch"
    BAD_REQUEST = "bad-request"
    UNREACHABLE = "unreachable"
    EVICTED = "evicted"
    NOT_A_MEMBER = "not-a-member"
    NOT_A_NEIGHBOUR = "not-a-neighbour"
    STALE_EPOCH = "stale-epoch"


class Refused(ThinwireError):
    """The other side said no."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CodecError(ThinwireError):
    """A tensor cannot be packed or unpacked."""


class NonFiniteError(CodecError):
    """A tensor holds infinities or NaNs; it is refused at the encoder and at the decoder."""


class PackedMismatchError(CodecError):
    """Packed bytes differ from what was negotiated: codec, parameters, dtype, shape, length or checksum."""


class MemoryMismatchError(PackedMismatchError):
    """A tensor is packed against other activations than those that this end remembers."""


class LinkError(ThinwireError):
    """Something is wrong on a connection."""


class ProtocolViolationError(LinkError):
    """The peer sent what no correct peer sends."""


class NotYetError(LinkError):
    """The coordinator is there, and still reads what it goes on from: it will answer."""


class LinkLostError(LinkError):
    """The connection is gone and did not come back within the time allowed."""


class RunError(ThinwireError):
    """The run cannot go on. Its newest snapshot is intact."""


class DeviceLostError(RunError):
    """One of this node's devices is gone. The node ends with it; the run goes on with another."""


class MemoryExhaustedError(DeviceLostError):
    """A device's memory did not suffice. The node ends: in another epoch it would not suffice either."""

    def __init__(self, message: str, *, need: int = 0, happened: str = "") -> None:
        """
        Args:
            need: bytes that the stage was estimated to need on each device; 0 if there was no stage.
            happened: the message without what its reader can do about it.
        """
        super().__init__(message)
        self.need = need
        self.happened = happened or message


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'X'?`, or all known names."""
    known = list(known)
    match = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"


def first_error(errors: BaseExceptionGroup[ErrorT]) -> ErrorT:
    """The first leaf of a group."""
    inner = errors.exceptions[0]
    return first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
