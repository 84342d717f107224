"""Every error a user can meet, as one tree.

    ThinwireError                    one line for the user; exit code 1
    ├── UserError                    invalid input from the user; exit code 2
    │   ├── ConfigError              a run file: unknown key, bad value, impossible split
    │   ├── TokenError               a join token that cannot be read or names another run
    │   └── DataError                text that is missing, empty or unreadable
    ├── Refused                      the other side refused and gave a reason (a `RefusalCode`)
    ├── CodecError                   a tensor cannot be packed or unpacked
    │   ├── NonFiniteError           it holds infinities or NaNs
    │   └── PackedMismatchError      packed bytes are not what was negotiated
    │       └── CacheMismatchError   the ends of a boundary hold different sample caches
    ├── LinkError                    a connection to a neighbour or the coordinator
    │   ├── ProtocolViolationError   the peer sent something invalid
    │   ├── NotYetError              the coordinator answers, but is still loading the run it resumes
    │   └── LinkLostError            the connection is gone and did not come back in time
    └── RunError                     the run cannot continue; its newest snapshot is intact
        └── DeviceLostError          one of this node's devices failed; the node ends
            └── MemoryExhaustedError a device ran out of memory for its stage

Messages say what was wrong, what was expected and what to do, in one line.
"""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from enum import StrEnum
from typing import TypeVar

_FOLDERS = re.compile(r"(?<![^\s\"'(=])/(?:[^\s/:\"']+/)+(?=[^\s/])")
ErrorT = TypeVar("ErrorT", bound=BaseException)


MOST_SHOWN, MOST_LINE = 100, 6000
"""The most characters of a quoted value, and of an error. Files hold values of any size."""


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """`text`, or its beginning and end if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most - most // 3]}... ({len(text):,} characters) ...{text[-(most // 3) :]}"


_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except line feeds and tabs, and characters that change the direction of text."""


def escaped(text: str) -> str:
    """`text` made safe for a terminal, because text from strangers may contain control sequences."""
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class ThinwireError(Exception):
    """Base of all errors that are shown to a user as one line."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message, MOST_LINE))


class UserError(ThinwireError):
    """Input from the user cannot be used."""

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
    """The other side refused."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class CodecError(ThinwireError):
    """A tensor cannot be packed or unpacked."""


class NonFiniteError(CodecError):
    """A tensor holds infinities or NaNs; it is refused at the encoder and at the decoder."""

    row = 0
    """The row that is not finite, if several tensors were packed together."""


class PackedMismatchError(CodecError):
    """Packed bytes differ from what was negotiated: codec, parameters, dtype, shape, length or checksum."""


class CacheMismatchError(PackedMismatchError):
    """A tensor was packed against other activations than this end's sample cache holds."""


class LinkError(ThinwireError):
    """Something is wrong on a connection."""


class ProtocolViolationError(LinkError):
    """The peer sent something that no correct peer sends."""


class WrongLayerError(ProtocolViolationError):
    """A layer of a snapshot is not the one that was agreed on."""

    def __init__(self, node_id: str, step: int, unit: str) -> None:
        super().__init__(f"layer {unit} of step {step} is not the one that its holders agreed on")
        self.node_id, self.step, self.unit = node_id, step, unit


class NotYetError(LinkError):
    """The coordinator answers, but it is still loading the run that it resumes: try again."""


class LinkLostError(LinkError):
    """The connection is gone and did not come back in time."""


class LinkClosedError(LinkError):
    """This process closed the link: the epoch is over, or the seat at its other end has another node."""


class RunError(ThinwireError):
    """The run cannot continue. Its newest snapshot is intact."""


class DiskFullError(RunError):
    """The coordinator's disk is full. The run pauses until there is room."""


class DeviceLostError(RunError):
    """One of this node's devices failed. The node ends; the run continues on another."""


class MemoryExhaustedError(DeviceLostError):
    """A device ran out of memory. The node ends, because the next epoch would fail the same way."""

    def __init__(self, message: str, *, need: int = 0, happened: str = "") -> None:
        """
        Args:
            need: bytes the stage was estimated to need on each device; 0 if there was no stage.
            happened: the message without the advice.
        """
        super().__init__(message)
        self.need = need
        self.happened = happened or message


def without_folders(text: str) -> str:
    """A message for another machine, in which each absolute path is reduced to its last name."""
    return _FOLDERS.sub("", text)


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Known names that an unknown one may mean, the likeliest first. Case is ignored."""
    if len(name) > MOST_SHOWN:
        return []
    plain = {item.lower(): item for item in known}
    return [plain[match] for match in get_close_matches(name.lower(), plain, cutoff=0.5)]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; did you mean 'X'?`, or all known names."""
    known = list(known)
    match = close_to(name, known)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, and of its groups; any other error itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def first_error(errors: BaseExceptionGroup[ErrorT]) -> ErrorT:
    inner = errors.exceptions[0]
    return first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner
