"""What went wrong first in a task group, to be raised in the group's place, and to be told to others."""

import os
from typing import TypeVar

from node.telemetry.format import printable
from wire.errors import MemoryExhaustedError, ThinwireError
from wire.messages import LONGEST_REASON

ErrorT = TypeVar("ErrorT", bound=BaseException)


def first_error(errors: BaseExceptionGroup[ErrorT]) -> ErrorT:
    """The first leaf of a group."""
    inner = errors.exceptions[0]
    return first_error(inner) if isinstance(inner, BaseExceptionGroup) else inner


def in_short(error: BaseException) -> str:
    """Why this node ends, for the coordinator: one line of at most `LONGEST_REASON` characters.

    An error that is made for users speaks for itself. Of any other only its kind is told: its text may quote
    what is nobody else's business.
    """
    match error:
        case MemoryExhaustedError():
            text = error.happened
        case ThinwireError():
            text = str(error)
        case OSError(errno=int(number)):
            text = f"its system refused an operation ({os.strerror(number)})"
        case _:
            text = f"a fault in thinwire ({type(error).__name__})"
    text = printable(text)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
